// A decoder's pass over a few nodes in one call.
//
// Attention goes through slots in order, and a slot that a node does not see adds exactly nothing. So a token has the same bits
// alone, in a chain, on a branch of a tree and beside other texts.
//
// Shapes: B rows, N nodes, M = B * N, D width, H query heads, G key-value heads, R = H / G, E head size, S slots, C slots there
// is room for, F inner width, P places. T is the type of weights, streams, keys and values: bf16 or float.

#include "rows.h"

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
    void* stream;                     // [M, D] of T: embeddings; overwritten
    const float *const *cos, *const *sin;  // by kind [P, E]; sines of the first half negated
    const int64_t* places;            // [M]: the row of those that a node takes
    const uint8_t* const* seen;       // by kind [M, S]
    void *const *keys, *const *values;  // by layer [B, G, C, E] of T; nodes are written from slot `start` on
    const void* beside;               // [M, D] of T: joins the stream with the first layer's attention; null if nothing does
    const int64_t* tapped;            // layers whose outputs are wanted
    void *features, *hidden, *logits;  // [M, taps * D], behind the last norm [M, D], [M, V], of T; null where not wanted
};

enum { SILU, GELU_TANH };
constexpr int64_t MOST_SIZE = 256, SLOTS = 64;

inline Floats activated(Floats x, int64_t kind) {
    if (kind == SILU) return silu(x);
    Floats inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return x - x / (exponential(2.0f * inner) + 1.0f);
}

template <class T>
class Run {
  public:
    Run(const Model& model, const Pass& pass, Workspace& space)
        : m(model), p(pass), rows(pass.batch * pass.nodes), repeat(model.heads / model.groups),
          lanes_of_group(repeat * pass.nodes), tiles((lanes_of_group + LANES - 1) / LANES), query_width(m.heads * m.size),
          key_width(m.groups * m.size), qkv_width(query_width + 2 * key_width), kinds(1), stream(static_cast<T*>(pass.stream)) {
        for (int64_t l = 0; l < m.layers; l++) kinds = std::max(kinds, m.layer[l].kind + 1);
        const int64_t widest = rows * std::max(m.width, query_width), visible = kinds * p.batch * tiles * p.slots;
        const int64_t all = p.batch * m.groups * tiles;
        space.begin(space.padded<T>(widest) + space.padded<T>(rows * m.inner) + space.padded<float>(rows * qkv_width) +
                    space.padded<float>(rows * m.width) + space.padded<Floats>(all * (p.slots + units() + 1)) +
                    space.padded<uint16_t>(visible));
        normal = space.take<T>(widest), inner = space.take<T>(rows * m.inner);
        qkv = space.take<float>(rows * qkv_width), change = space.take<float>(rows * m.width);
        scores = space.take<Floats>(all * p.slots), queries = space.take<Ints>(all * units());
        shares = space.take<Floats>(all), seen = space.take<uint16_t>(visible);
    }

    void operator()() {
#pragma omp parallel num_threads(int(p.threads))
        {
            see();
            for (int64_t l = 0; l < m.layers; l++) layer(l);
            last();
        }
    }

  private:
    const Model& m;
    const Pass& p;
    const int64_t rows, repeat, lanes_of_group, tiles, query_width, key_width, qkv_width;
    int64_t kinds;
    T *stream, *normal, *inner;  // [M, D], [M, max(D, H * E)], [M, F]
    float *qkv, *change;         // [M, (H + 2 * G) * E], [M, D]
    Floats *scores, *shares;     // [tiles of all groups, S], [tiles of all groups]
    Ints* queries;               // [tiles of all groups, four bytes of E]
    uint16_t* seen;              // [kinds, B, tiles, S]: which lanes of a tile see a slot

    void see() {
        each(kinds * p.batch * tiles, [&](int64_t i) {
            int64_t tile = i % tiles, b = i / tiles % p.batch, kind = i / tiles / p.batch;
            uint16_t* bits = seen + i * p.slots;
            std::fill(bits, bits + p.slots, 0);
            for (int64_t lane = 0; lane < LANES; lane++) {
                const uint8_t* sees = p.seen[kind] + (b * p.nodes + node(tile * LANES + lane)) * p.slots;
                for (int64_t s = 0; s < p.slots; s++) bits[s] |= uint16_t(sees[s] != 0) << lane;
            }
        });
    }

    // The node of a lane of a group; lanes that are left over repeat the last one.
    int64_t node(int64_t lane) const { return std::min(lane, lanes_of_group - 1) / repeat; }

    void layer(int64_t l) {
        const Layer& layer = m.layer[l];
        join(l ? m.layer[l - 1].after_ffn : nullptr, l - 1, l > 0, layer.before_mixer, normal);
        product(layer.query, m.width, normal, rows, qkv, qkv_width);
        product(layer.key, m.width, normal, rows, qkv + query_width, qkv_width);
        product(layer.value, m.width, normal, rows, qkv + query_width + key_width, qkv_width);
#pragma omp barrier
        each(p.batch * m.groups, [&](int64_t i) { remember(layer, l, i / m.groups, i % m.groups); });
        attend(layer, l);
        product(layer.mixed, query_width, normal, rows, change, m.width);
#pragma omp barrier
        if (p.beside && l == 0) each(rows, [&](int64_t row) { join_beside(row * m.width); });
        join(layer.after_mixer, -1, true, layer.before_ffn, normal);
        feed_forward(layer);
        product(layer.down, m.inner, inner, rows, change, m.width);
#pragma omp barrier
    }

    void last() {
        T* hidden = p.hidden ? static_cast<T*>(p.hidden) : normal;
        join(m.layer[m.layers - 1].after_ffn, m.layers - 1, true, m.norm, hidden);
        if (p.logits) product(m.unembed, m.width, hidden, rows, static_cast<T*>(p.logits), m.unembed.outs);
    }

    // The change joins the stream, which then is the output of layer `from`, if of any, and is normed for what comes next.
    void join(const float* after, int64_t from, bool changed, const float* weight, T* out) {
        each(rows, [&](int64_t row) {
            T* x = stream + row * m.width;
            float* by = change + row * m.width;
            if (changed && after) normed(by, after, m.epsilon, m.width, by);
            int64_t i = 0;
            for (; changed && i + LANES <= m.width; i += LANES) store(x + i, load(x + i) + load(by + i));
            for (; changed && i < m.width; i++) set(x + i, value(x[i]) + by[i]);
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

    void rounded(const float* x, T* out) {
        for (int64_t e = 0; e < m.size; e += LANES) {
            const int64_t some = std::min<int64_t>(LANES, m.size - e);
            store_some(out + e, load_some(x + e, some), some);
        }
    }

    void remember(const Layer& layer, int64_t l, int64_t b, int64_t g) {
        float turned[MOST_SIZE];
        for (int64_t n = 0; n < p.nodes; n++) {
            int64_t row = b * p.nodes + n, at = ((b * m.groups + g) * p.room + p.start + n) * m.size;
            const float *key = qkv + row * qkv_width + query_width + g * m.size, *value = key + key_width;
            rotated(key, layer.key_norm, layer.kind, row, turned);
            rounded(turned, static_cast<T*>(p.keys[l]) + at);
            rounded(value, static_cast<T*>(p.values[l]) + at);
        }
    }

    // A tile is up to `LANES` heads of nodes side by side, all of one key-value head.
    struct Tile {
        int64_t number, b, g, first, count;  // `first` and `count`: its lanes among those of the group
    };
    Tile tile_of(int64_t number) const {
        const int64_t first = number % tiles * LANES;
        return {number, number / tiles / m.groups, number / tiles % m.groups, first, std::min<int64_t>(LANES, lanes_of_group - first)};
    }
    const uint16_t* seen_by(const Layer& layer, const Tile& t) const {
        return seen + ((layer.kind * p.batch + t.b) * tiles + t.number % tiles) * p.slots;
    }
    template <class Held>
    const T* held(Held all, int64_t l, const Tile& t) const {
        return static_cast<const T*>(all[l]) + (t.b * m.groups + t.g) * p.room * m.size;
    }

    void attend(const Layer& layer, int64_t l) {
        const int64_t count = p.batch * m.groups * tiles, parts = (p.slots + SLOTS - 1) / SLOTS;
        const int64_t most = std::min<int64_t>(LANES, lanes_of_group), some = most > 4 ? 8 : 4, groups = (most + some - 1) / some;
        const int64_t chunks = (m.size + 2 * LANES - 1) / (2 * LANES);
        each(count, [&](int64_t i) { ask(layer, tile_of(i)); });
        each(count * parts, [&](int64_t i) { score(layer, l, tile_of(i / parts), i % parts * SLOTS); });
        each(count, [&](int64_t i) { weigh(layer, tile_of(i)); });
        each(count * groups * chunks, [&](int64_t i) {
            const Tile t = tile_of(i / chunks / groups);
            const int64_t lane = i / chunks % groups * some, e = i % chunks * 2 * LANES;
            if (lane >= t.count) return;
            if (some == 8) mix<8>(layer, l, t, lane, e);
            else mix<4>(layer, l, t, lane, e);
        });
    }

    // Queries of a tile, four bytes of every lane side by side.
    void ask(const Layer& layer, const Tile& t) {
        float turned[MOST_SIZE];
        T part[MOST_SIZE];
        int32_t parts[MOST_SIZE];
        Ints* query = queries + t.number * units();
        std::fill(query, query + units(), Ints{});
        for (int64_t lane = 0; lane < t.count; lane++) {
            int64_t at = t.first + lane, row = t.b * p.nodes + at / repeat;
            rotated(qkv + row * qkv_width + (t.g * repeat + at % repeat) * m.size, layer.query_norm, layer.kind, row, turned);
            rounded(turned, part);
            memcpy(parts, part, m.size * sizeof(T));
            for (int64_t u = 0; u < units(); u++) query[u][lane] = parts[u];
        }
    }

    int64_t units() const { return m.size * int64_t(sizeof(T)) / 4; }

    void score(const Layer& layer, int64_t l, const Tile& t, int64_t first) {
        constexpr int64_t MANY = 8;
        const T* keys = held(p.keys, l, t);
        int64_t s = first, end = std::min(first + SLOTS, p.slots);
        for (; s + MANY <= end; s += MANY) score_some<MANY>(layer, t, keys, s);
        for (; s < end; s++) score_some<1>(layer, t, keys, s);
    }

    template <int COUNT>
    void score_some(const Layer& layer, const Tile& t, const T* keys, int64_t s) {
        typedef Step<T> S;
        const Ints* query = queries + t.number * units();
        Floats dot[COUNT] = {};
        for (int64_t at = 0; at < COUNT * m.size * int64_t(sizeof(T)); at += LINE)
            __builtin_prefetch(reinterpret_cast<const char*>(keys + (s + 2 * COUNT) * m.size) + at);
        for (int64_t u = 0; u < units(); u++) {
            typename S::Vector asked = (typename S::Vector)query[u];
            for (int j = 0; j < COUNT; j++)
                dot[j] = S::add(dot[j], S::spread(keys + (s + j) * m.size + u * 4 / sizeof(T)), asked);
        }
        const Ints lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        const uint16_t* bits = seen_by(layer, t) + s;
        for (int j = 0; j < COUNT; j++) {
            Floats x = dot[j] * layer.scale;
            if (bits[j] != 0xffff) x = ((Ints{} + bits[j]) & lanes) != 0 ? x : Floats{} - INFINITY;
            scores[t.number * p.slots + s + j] = x;
        }
    }

    // Scores become weights; `shares`: what their sums are to be multiplied with.
    void weigh(const Layer& layer, const Tile& t) {
        Floats* x = scores + t.number * p.slots;
        Floats most = Floats{} - INFINITY, sum = {};
        const uint16_t* bits = seen_by(layer, t);
        for (int64_t s = 0; s < p.slots; s++) most = x[s] > most ? x[s] : most;
        most = most == -INFINITY ? Floats{} : most;
        for (int64_t s = 0; s < p.slots; s++)
            if (bits[s]) sum += x[s] = exponential(x[s] - most);
        shares[t.number] = 1.0f / (sum > 0.0f ? sum : Floats{} + 1.0f);
    }

    // Two vectors of the values of all slots, for SOME lanes. A lane that is left over goes where the last one goes after it.
    template <int SOME>
    void mix(const Layer& layer, int64_t l, const Tile& t, int64_t lane, int64_t e) {
        const T* values = held(p.values, l, t) + e;
        const int64_t one = std::min<int64_t>(LANES, m.size - e), two = std::min<int64_t>(LANES, m.size - e - one);
        Floats sum[2][SOME] = {};
        if (two == LANES)
            mix_slots<SOME>(layer, t, lane, values, sum, [&](const T* p) { return load(p); }, [&](const T* p) { return load(p + LANES); });
        else
            mix_slots<SOME>(layer, t, lane, values, sum, [&](const T* p) { return load_some(p, one); },
                      [&](const T* p) { return load_some(p + one, two); });
        for (int i = SOME - 1; i >= 0; i--) {
            const int64_t at = t.first + std::min<int64_t>(lane + i, t.count - 1);
            T* out = normal + (t.b * p.nodes + at / repeat) * query_width + (t.g * repeat + at % repeat) * m.size + e;
            const float share = shares[t.number][lane + i];
            store_some(out, sum[0][i] * share, one);
            store_some(out + one, sum[1][i] * share, two);
        }
    }

    template <int SOME, class First, class Second>
    void mix_slots(const Layer& layer, const Tile& t, int64_t lane, const T* values, Floats (*sum)[SOME], First first, Second second) {
        const uint16_t* bits = seen_by(layer, t);
        const Floats* weights = scores + t.number * p.slots;
        for (int64_t s = 0; s < p.slots; s++, values += m.size) {
            if (!bits[s]) continue;
            __builtin_prefetch(values + 16 * m.size);
            const Floats x = first(values), y = second(values);
            const float* weight = reinterpret_cast<const float*>(weights + s) + lane;
            for (int i = 0; i < SOME; i++) sum[0][i] += x * weight[i], sum[1][i] += y * weight[i];
        }
    }

    void feed_forward(const Layer& layer) {
        as_taken(layer.gate, m.width, normal, rows, [&](const auto* x, int64_t start, int64_t count) {
            shared(layer.gate.pieces(), [&](int64_t piece) { gated(layer, piece, x, inner + start * m.inner, count); });
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

// Keys and values of some slots of every layer, in rising order, to consecutive slots from `target` on: of `groups` heads from `begin` on.
void outrider_move(int64_t layers, void* const* keys, void* const* values, int64_t begin, int64_t groups, int64_t room, int64_t size,
                   const int64_t* slots, int64_t count, int64_t target) {
    for (int64_t i = 0; i < 2 * layers * groups; i++) {
        char* held = static_cast<char*>((i % 2 ? values : keys)[i / 2 / groups]) + (begin + i / 2 % groups) * room * size;
        for (int64_t at = 0; at < count; at++) memmove(held + (target + at) * size, held + slots[at] * size, size);
    }
}
}
