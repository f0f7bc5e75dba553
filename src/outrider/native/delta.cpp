// A gated-delta mixer over the nodes of trees in one call, committed paths that were deferred included.
//
// What a node writes depends on what its ancestors wrote: u = beta (v - S^T k), where S is the state before it. So nodes go in
// order, parents first, and each reads the committed state and the factors of its ancestors.
//
// Shapes: B rows, N new nodes, M pending nodes, R = B * N, D width, J key heads, H value heads, K key size, V value size, W taps,
// C = 2 * J * K + H * V convolved channels, P nodes of a committed path. T is the type of weights, inputs and outputs.

#include "rows.h"

namespace {

struct Delta {
    int64_t bytes, width, key_heads, heads, key, value, taps;
    float epsilon, scale;                        // of the norm of outputs; of beta
    Linear queries, keys, values, betas, steps, gate, out;  // of `gate` there are no outputs where there is none
    const float *convolution, *shift;            // [W, C], [C] or null
    const float *step, *rate;                    // [H]: added to raw steps, decay rates below 0
    const float* norm;                           // [V]
};

struct Nodes {
    int64_t batch, start, end, room, slots, held, threads;  // new nodes are `start` to `end`; of factors there is room for so many
    const void* x;                                    // [R, D] of T
    const int64_t* window;                            // [R, W]: what a node convolves, among all rows of `inputs`
    const uint8_t* seen;                              // [B, M, M]: ancestors of a pending node, and itself
    float* states;                                    // [B, H, K, V]
    void* inputs;                                     // [B, slots, C] of T: `held` of the committed window, then those of nodes
    float *keys, *writes, *logs;                      // [B, room, J, K], [B, room, H, V], [B, room, H]
    const int64_t *due, *path;                        // [B]: lengths of committed paths that are to be applied, [B, room]: their nodes
    void* out;                                        // [R, D] of T
};

constexpr float TINY = 1e-6f;  // added to squared lengths

inline float dot(const float* a, const float* b, int64_t size) {
    Floats sum = {};
    for (int64_t i = 0; i < size; i += LANES) sum += load_some(a + i, size - i) * load_some(b + i, size - i);
    return total(sum);
}

// out += factor * x
inline void add(float* out, const float* x, float factor, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES)
        store_some(out + i, load_some(out + i, size - i) + load_some(x + i, size - i) * factor, size - i);
}

template <class T>
class Run {
  public:
    Run(const Delta& mixer, const Nodes& nodes, Workspace& space)
        : m(mixer), p(nodes), count(p.end - p.start), rows(p.batch * count), wide(m.heads * m.value), narrow(m.key_heads * m.key),
          channels(2 * narrow + wide), across(channels + 2 * m.heads + m.gate.outs) {
        space.begin(space.padded<float>(rows * across) + space.padded<float>(rows * narrow) + 2 * space.padded<float>(rows * wide) +
                    space.padded<double>(p.batch * m.heads * p.end) + space.padded<T>(rows * wide));
        projected = space.take<float>(rows * across), reads = space.take<float>(rows * narrow);
        values = space.take<float>(rows * wide), mixed = space.take<float>(rows * wide);
        decays = space.take<double>(p.batch * m.heads * p.end), normal = space.take<T>(rows * wide);
    }

    void operator()() {
#pragma omp parallel num_threads(int(p.threads))
        {
            each(p.batch * m.heads, [&](int64_t i) { settle(i / m.heads, i % m.heads); });
            each(p.batch, [&](int64_t b) { settle_window(b); });
            const T* x = static_cast<const T*>(p.x);
            int64_t first = 0;
            for (const Linear* part : {&m.queries, &m.keys, &m.values, &m.betas, &m.steps, &m.gate}) {
                if (part->outs) product(*part, m.width, x, rows, projected + first, across);
                first += part->outs;
            }
#pragma omp barrier
            each(rows, [&](int64_t row) { take_in(row / count, row); });
            each(rows, [&](int64_t row) { convolve(row / count, row); });
            each(p.batch * m.heads, [&](int64_t i) { recur(i / m.heads, i % m.heads); });
            each(rows * m.heads, [&](int64_t i) { finish(i / m.heads, i % m.heads); });
            product(m.out, wide, normal, rows, static_cast<T*>(p.out), m.width);
        }
    }

  private:
    const Delta& m;
    const Nodes& p;
    const int64_t count, rows, wide, narrow, channels, across;
    float *projected, *reads, *values, *mixed;  // [R, C + 2 * H + gate], [R, J, K], [R, H, V], [R, H, V]
    double* decays;                             // [B, H, M]: log decay since the committed state
    T* normal;                                  // [R, H * V]

    int64_t node(int64_t row) const { return p.start + row % count; }
    float* state(int64_t b, int64_t h) const { return p.states + (b * m.heads + h) * m.key * m.value; }
    float* key(int64_t b, int64_t n, int64_t h) const {
        return p.keys + ((b * p.room + n) * m.key_heads + h / (m.heads / m.key_heads)) * m.key;
    }
    float* written(int64_t b, int64_t n, int64_t h) const { return p.writes + ((b * p.room + n) * m.heads + h) * m.value; }
    float& log(int64_t b, int64_t n, int64_t h) const { return p.logs[(b * p.room + n) * m.heads + h]; }
    T* input(int64_t b, int64_t slot) const { return static_cast<T*>(p.inputs) + (b * p.slots + slot) * channels; }

    // The committed path joins a head's state.
    void settle(int64_t b, int64_t h) {
        float* s = state(b, h);
        for (int64_t i = 0; i < p.due[b]; i++) {
            const int64_t n = p.path[b * p.room + i];
            const float kept = std::exp(log(b, n, h)), *k = key(b, n, h), *u = written(b, n, h);
            for (int64_t e = 0; e < m.key; e++)
                for (int64_t v = 0; v < m.value; v += LANES) {
                    const int64_t some = m.value - v;
                    float* at = s + e * m.value + v;
                    store_some(at, load_some(at, some) * kept + load_some(u + v, some) * k[e], some);
                }
        }
    }

    void settle_window(int64_t b) {
        for (int64_t i = 0; i < p.due[b]; i++) {
            memmove(input(b, 0), input(b, 1), (p.held - 1) * channels * sizeof(T));
            memcpy(input(b, p.held - 1), input(b, p.held + p.path[b * p.room + i]), channels * sizeof(T));
        }
    }

    void take_in(int64_t b, int64_t row) {
        const float *found = projected + row * across, *raw = found + channels + m.heads;
        T* out = input(b, p.held + node(row));
        for (int64_t c = 0; c < channels; c += LANES) store_some(out + c, load_some(found + c, channels - c), channels - c);
        for (int64_t h = 0; h < m.heads; h++) {
            const float x = raw[h] + m.step[h];
            log(b, node(row), h) = m.rate[h] * (x > 20.0f ? x : std::log1p(std::exp(x)));
        }
    }

    void convolve(int64_t b, int64_t row) {
        float *q = reads + row * narrow, *k = p.keys + (b * p.room + node(row)) * narrow;
        convolve_some(row, 0, narrow, q);
        convolve_some(row, narrow, narrow, k);
        convolve_some(row, 2 * narrow, wide, values + row * wide);
        for (int64_t j = 0; j < narrow; j += m.key) {
            unit(q + j, 1.0f / std::sqrt(float(m.key)));
            unit(k + j, 1.0f);
        }
    }

    void unit(float* x, float length) {
        const float factor = length / std::sqrt(dot(x, x, m.key) + TINY);
        for (int64_t e = 0; e < m.key; e++) x[e] *= factor;
    }

    void convolve_some(int64_t row, int64_t first, int64_t width, float* out) {
        const T* inputs = static_cast<const T*>(p.inputs);
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t c = first + i, some = width - i;
            Floats sum = m.shift ? load_some(m.shift + c, some) : Floats{};
            for (int64_t w = 0; w < m.taps; w++)
                sum += load_some(m.convolution + w * channels + c, some) *
                       load_some(inputs + p.window[row * m.taps + w] * channels + c, some);
            store_some(out + i, silu(sum), some);
        }
    }

    // A head of all new nodes of a row, parents first.
    void recur(int64_t b, int64_t h) {
        const float* s = state(b, h);
        double* since = decays + (b * m.heads + h) * p.end;
        for (int64_t n = 0; n < p.end; n++) {
            const uint8_t* seen = p.seen + (b * p.end + n) * p.end;
            since[n] = 0;
            for (int64_t a = 0; a <= n; a++)
                if (seen[a]) since[n] += log(b, a, h);
        }
        for (int64_t n = p.start; n < p.end; n++) {
            const int64_t row = b * count + n - p.start;
            const uint8_t* seen = p.seen + (b * p.end + n) * p.end;
            const float *k = key(b, n, h), *q = reads + row * narrow + (k - p.keys - (b * p.room + n) * narrow);
            const float kept = std::exp(float(since[n])), *v = values + row * wide + h * m.value;
            float *u = written(b, n, h), *o = mixed + row * wide + h * m.value;
            for (int64_t i = 0; i < m.value; i += LANES) {
                const int64_t some = m.value - i;
                Floats known = {}, read = {};
                for (int64_t e = 0; e < m.key; e++) {
                    const Floats held = load_some(s + e * m.value + i, some);
                    known += held * k[e], read += held * q[e];
                }
                store_some(u + i, known * kept, some);
                store_some(o + i, read * kept, some);
            }
            for (int64_t a = 0; a < n; a++) {
                if (!seen[a]) continue;
                const float between = std::exp(float(since[n] - since[a])), *from = written(b, a, h), *by = key(b, a, h);
                add(u, from, between * dot(k, by, m.key), m.value);
                add(o, from, between * dot(q, by, m.key), m.value);
            }
            const float beta = m.scale / (1.0f + std::exp(-projected[row * across + channels + h]));
            for (int64_t i = 0; i < m.value; i++) u[i] = beta * (v[i] - u[i]);
            add(o, u, dot(q, k, m.key), m.value);
        }
    }

    // A head of a node, normed and gated.
    void finish(int64_t row, int64_t h) {
        float* o = mixed + row * wide + h * m.value;
        const float* gate = projected + row * across + channels + 2 * m.heads + h * m.value;
        normed(o, m.norm, m.epsilon, m.value, o);
        for (int64_t i = 0; i < m.value; i += LANES) {
            const int64_t some = m.value - i;
            Floats x = load_some(o + i, some);
            if (m.gate.outs) x *= silu(load_some(gate + i, some));
            store_some(normal + row * wide + h * m.value + i, x, some);
        }
    }
};

}  // namespace

extern "C" {

// 0, or 1 where there is no memory.
int outrider_delta(const Delta* mixer, const Nodes* nodes) {
    return in_workspace([&](Workspace& space) {
        if (mixer->bytes == 2) Run<bf16>(*mixer, *nodes, space)();
        else Run<float>(*mixer, *nodes, space)();
    });
}
}
