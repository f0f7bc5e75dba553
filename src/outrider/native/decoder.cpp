// A decoder's pass over a few nodes in one call.
//
// A token has the same bits alone, in a chain, on a branch of a tree and beside other texts.
//
// Shapes: B rows, N nodes, M = B * N, D width, H query heads, G key-value heads, R = H / G, E head size, S slots, C slots there
// is room for, F inner width, P places. T is the type of weights, streams, keys and values: bf16 or float.

#include "attention.h"

namespace {

struct Layer {
    const float *before_mixer, *after_mixer, *before_ffn, *after_ffn, *query_norm, *key_norm;  // null where there is none
    Linear query, key, value, mixed, gate, up, down;
    float scale;
    int64_t kind;  // which rotations and which slots
};

struct Model {
    int64_t bytes, layers, width, heads, groups, size, inner, activation;
    float epsilon;
    const Layer* layer;
    const float* norm;
    Linear unembed;
};

struct Pass {
    int64_t batch, nodes, slots, room, start, threads, taps;
    int64_t wanted;                   // the first node whose outputs of the last layer are wanted; of several rows all or none are
    void* stream;                     // [M, D] of T: embeddings; overwritten
    const float *const *cos, *const *sin;  // by kind [P, E]; sines of the first half negated
    const int64_t* places;            // [M]: the row of those that a node takes
    const uint8_t* const* seen;       // by kind [M, S]
    void *const *keys, *const *values;  // by layer [B, G, C, E] of T, as `attention.h` holds them; nodes go to slots from `start` on
    const void* beside;               // [M, D] of T: joins the stream with the first layer's attention; null if nothing does
    const int64_t* tapped;            // layers whose outputs are wanted
    void *features, *hidden, *logits;  // [M, taps * D], behind the last norm [M, D], [M, V], of T; null where not wanted
};

enum { SILU, GELU_TANH };

inline Floats activated(Floats x, int64_t kind) {
    if (kind == SILU) return silu(x);
    Floats inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x - x / (exponential(2.0f * inner) + 1.0f);
}

template <class T>
class Run {
  public:
    Run(const Model& model, const Pass& pass, Workspace& space)
        : m(model), p(pass), rows(pass.batch * pass.nodes), query_width(m.heads * m.size), key_width(m.groups * m.size),
          qkv_width(query_width + 2 * key_width), stream(static_cast<T*>(pass.stream)), attention(begun(space), space) {
        normal = space.take<T>(widest()), inner = space.take<T>(rows * m.inner);
        qkv = space.take<float>(rows * qkv_width), change = space.take<float>(rows * m.width);
    }

    void operator()() {
#pragma omp parallel num_threads(int(p.threads))
        {
            attention.see(p.seen);
            for (int64_t l = 0; l < m.layers; l++) layer(l);
            last();
        }
    }

  private:
    const Model& m;
    const Pass& p;
    const int64_t rows, query_width, key_width, qkv_width;
    T *stream, *normal, *inner;  // [M, D], [M, max(D, H * E)], [M, F]
    float *qkv, *change;         // [M, (H + 2 * G) * E], [M, D]
    Attention<T> attention;

    int64_t widest() const { return rows * std::max(m.width, query_width); }

    // Begins with memory for all of it.
    typename Attention<T>::Sizes begun(Workspace& space) const {
        int64_t kinds = 1;
        for (int64_t l = 0; l < m.layers; l++) kinds = std::max(kinds, m.layer[l].kind + 1);
        const typename Attention<T>::Sizes sizes{p.batch, p.nodes, p.slots, p.room, m.heads, m.groups, m.size, kinds, p.threads};
        space.begin(space.padded<T>(widest()) + space.padded<T>(rows * m.inner) + space.padded<float>(rows * qkv_width) +
                    space.padded<float>(rows * m.width) + Attention<T>::padded(sizes));
        return sizes;
    }

    // Nodes whose outputs are not wanted end in the last layer with their keys and values.
    void layer(int64_t l) {
        const Layer& layer = m.layer[l];
        const int64_t from = l == m.layers - 1 ? p.wanted : 0, first = from * p.batch, heads = m.heads + m.groups;
        join(0, l ? m.layer[l - 1].after_ffn : nullptr, l - 1, l > 0, layer.before_mixer, normal);
        product(layer.query, m.width, normal + first * m.width, rows - first, qkv + first * qkv_width, qkv_width);
        product(layer.key, m.width, normal, rows, qkv + query_width, qkv_width);
        product(layer.value, m.width, normal, rows, qkv + query_width + key_width, qkv_width);
#pragma omp barrier
        each(rows * heads, [&](int64_t i) {
            if (i / heads >= first || i % heads >= m.heads) remember(layer, l, i / heads, i % heads);
        });
        attention(layer.kind, from, static_cast<const T*>(p.keys[l]), static_cast<const T*>(p.values[l]), layer.scale, normal);
        product(layer.mixed, query_width, normal + first * query_width, rows - first, change + first * m.width, m.width);
#pragma omp barrier
        if (p.beside && l == 0) each(rows - first, [&](int64_t row) { join_beside((first + row) * m.width); });
        join(first, layer.after_mixer, -1, true, layer.before_ffn, normal);
        feed_forward(layer, first);
        product(layer.down, m.inner, inner + first * m.inner, rows - first, change + first * m.width, m.width);
#pragma omp barrier
    }

    void last() {
        T* hidden = p.hidden ? static_cast<T*>(p.hidden) : normal;
        join(p.wanted * p.batch, m.layer[m.layers - 1].after_ffn, m.layers - 1, true, m.norm, hidden);
        if (p.logits) product(m.unembed, m.width, hidden, rows, static_cast<T*>(p.logits), m.unembed.outs);
    }

    // The change joins the stream of the rows from `first` on, which then is the output of layer `from`, if of any, and is normed for what
    // comes next.
    void join(int64_t first, const float* after, int64_t from, bool changed, const float* weight, T* out) {
        each(rows - first, [&](int64_t i) {
            const int64_t row = first + i;
            T* x = stream + row * m.width;
            float* by = change + row * m.width;
            if (changed && after) normed(by, after, m.epsilon, m.width, by);
            int64_t at = 0;
            for (; changed && at + LANES <= m.width; at += LANES) store(x + at, load(x + at) + load(by + at));
            for (; changed && at < m.width; at++) set(x + at, value(x[at]) + by[at]);
            for (int64_t t = 0; from >= 0 && t < p.taps; t++)
                if (p.tapped[t] == from)
                    memcpy(static_cast<T*>(p.features) + (row * p.taps + t) * m.width, x, m.width * sizeof(T));
            normed(x, weight, m.epsilon, m.width, out + row * m.width);
        });
    }

    void join_beside(int64_t first) {
        const T* beside = static_cast<const T*>(p.beside) + first;
        for (int64_t i = 0; i < m.width; i++) change[first + i] += value(beside[i]);
    }

    // A head of a node, normed and rotated.
    void rotated(const float* x, const float* norm, int64_t kind, int64_t row, float* out) {
        const int64_t size = m.size, half = size / 2;
        const float *cos = p.cos[kind] + p.places[row] * size, *sin = p.sin[kind] + p.places[row] * size;
        float held[MOST_SIZE];
        if (norm) normed(x, norm, m.epsilon, size, held), x = held;
        for (int64_t e = 0; e < half; e++) out[e] = x[e] * cos[e] + x[e + half] * sin[e];
        for (int64_t e = half; e < size; e++) out[e] = x[e] * cos[e] + x[e - half] * sin[e];
    }

    void rounded_to(const float* x, T* out) {
        for (int64_t e = 0; e < m.size; e += LANES) {
            const int64_t some = std::min<int64_t>(LANES, m.size - e);
            store_some(out + e, load_some(x + e, some), some);
        }
    }

    // A node's query of a head, or the key and value of one behind those.
    void remember(const Layer& layer, int64_t l, int64_t row, int64_t head) {
        float turned[MOST_SIZE];
        const float* x = qkv + row * qkv_width + head * m.size;
        if (head < m.heads) {
            rotated(x, layer.query_norm, layer.kind, row, turned);
            return rounded_to(turned, attention.query(row, head));
        }
        const int64_t begin = (row / p.nodes * m.groups + head - m.heads) * p.room * m.size, slot = p.start + row % p.nodes;
        T key[MOST_SIZE], *to = key_at(static_cast<T*>(p.keys[l]) + begin, slot, m.size);
        rotated(x, layer.key_norm, layer.kind, row, turned);
        rounded_to(turned, key);
        for (int64_t e = 0; e < m.size; e += Step<T>::unit) memcpy(to + e * LANES, key + e, Step<T>::unit * sizeof(T));
        rounded_to(x + key_width, static_cast<T*>(p.values[l]) + begin + slot * m.size);
    }

    void feed_forward(const Layer& layer, int64_t first) {
        as_taken(layer.gate, m.width, normal + first * m.width, rows - first, [&](const auto* x, int64_t start, int64_t count) {
            shared(layer.gate.pieces(), [&](int64_t piece) { gated(layer, piece, x, inner + (first + start) * m.inner, count); });
        });
#pragma omp barrier
    }

    // A piece of the inner activations of some rows.
    template <class Taken>
    void gated(const Layer& layer, int64_t piece, const Taken* x, T* out, int64_t count) {
        alignas(64) float gate[MOST_ROWS][SIDE * TILE];
        const int64_t start = layer.gate.output(piece * SIDE);
        for (int64_t first = 0, some; first < count; first += some, x = behind(x, some)) {
            some = std::min(MOST_ROWS, count - first);
            product_piece(layer.gate, piece, m.width, x, some, [&](int64_t row, int64_t o, Floats found) {
                store(gate[row] + o - start, activated(found + layer.gate.shift(o), m.activation));
            });
            product_piece(layer.up, piece, m.width, x, some, [&](int64_t row, int64_t o, Floats found) {
                store(out + (first + row) * m.inner + o, load(gate[row] + o - start) * (found + layer.up.shift(o)));
            });
        }
    }

    const T* behind(const T* x, int64_t count) const { return x + count * m.width; }
    const Rounded* behind(const Rounded* x, int64_t) const { return x; }  // which are no more than MOST_ROWS
};

}  // namespace

extern "C" {

// 0, or 1 where there is no memory.
int outrider_pass(const Model* model, const Pass* pass) {
    return in_workspace([&](Workspace& space) {
        if (model->bytes == 2) Run<bf16>(*model, *pass, space)();
        else Run<float>(*model, *pass, space)();
    });
}

// Keys and values of some slots of every layer, in rising order, to consecutive slots from `target` on: of `groups` heads from `begin`
// on, of so many bytes each.
void outrider_move(int64_t layers, void* const* keys, void* const* values, int64_t begin, int64_t groups, int64_t room, int64_t bytes,
                   const int64_t* slots, int64_t count, int64_t target) {
    for (int64_t i = 0; i < layers * groups; i++) {
        const int64_t first = (begin + i % groups) * room * bytes;
        char* value = static_cast<char*>(values[i / groups]) + first;
        auto* key = reinterpret_cast<float*>(static_cast<char*>(keys[i / groups]) + first);
        for (int64_t at = 0; at < count; at++) {
            memmove(value + (target + at) * bytes, value + slots[at] * bytes, bytes);
            const float* from = key_at(key, slots[at], bytes / 4);
            float* to = key_at(key, target + at, bytes / 4);
            for (int64_t unit = 0; unit < bytes / 4 * LANES; unit += LANES) memcpy(to + unit, from + unit, 4);
        }
    }
}
}
