// A Mamba-2 mixer over the nodes of trees in one call.
//
// Nodes leave factors behind: what they convolve, write and step by. What a node reads of its ancestors is summed over theirs,
// what it reads of the text before them is a product with the committed state.
//
// Shapes: B rows, N new nodes, M pending nodes, R = B * N, D width, H heads, P head size, I = H * P, S state size, K taps,
// C = I + 2 * S convolved channels. T is the type of weights, inputs and outputs: bf16 or float.

#include "rows.h"

namespace {

struct Mixer {
    int64_t bytes, width, heads, size, state, taps;
    float epsilon;
    Linear in, out;  // [I + C + H, D]: gate, channels, steps; [D, I]
    const float *convolution, *shift;  // [K, C], [C]
    const float *step, *rate, *skip;   // [H]: added to raw steps, decay rates below 0, of what goes past the state
    const float* norm;                 // [I]
};

struct Nodes {
    int64_t batch, start, end, room, threads;  // new nodes are `start` to `end`; buffers have room for so many
    const void* x;                             // [R, D] of T
    const int64_t* slots;                      // [R, K]: what a node convolves, among all rows of `inputs`
    const uint8_t* seen;                       // [R, M]: its ancestors, and itself
    const float* states;                       // [B, I, S]
    float *inputs, *xs, *keys;                 // [B, K - 1 + room, C], [B, room, I], [B, room, S]
    float *steps, *logs;                       // [B, H, room]
    void* out;                                 // [R, D] of T
};

template <class T>
class Run {
  public:
    Run(const Mixer& mixer, const Nodes& nodes, Workspace& space)
        : m(mixer), p(nodes), count(p.end - p.start), rows(p.batch * count), inner(m.heads * m.size),
          channels(inner + 2 * m.state), across(inner + channels + m.heads) {
        space.begin(space.padded<float>(rows * across) + space.padded<float>(rows * m.state) +
                    space.padded<float>(rows * inner) + space.padded<float>(rows * p.end) + space.padded<T>(rows * inner));
        projected = space.take<float>(rows * across), reads = space.take<float>(rows * m.state);
        mixed = space.take<float>(rows * inner), matches = space.take<float>(rows * p.end);
        normal = space.take<T>(rows * inner);
    }

    void operator()() {
#pragma omp parallel num_threads(int(p.threads))
        {
            product(m.in, m.width, static_cast<const T*>(p.x), rows, projected, across);
#pragma omp barrier
            each(rows, [&](int64_t row) { take_in(row / count, row); });
            each(rows, [&](int64_t row) { convolve(row / count, row); });
            for (int64_t b = 0; b < p.batch; b++) {
                const float* read = reads + b * count * m.state;
                product(Linear{p.states + b * inner * m.state, nullptr, inner, 0}, m.state, read, count,
                        mixed + b * count * inner, inner);
                product(Linear{p.keys + b * p.room * m.state, nullptr, p.end, 0}, m.state, read, count,
                        matches + b * count * p.end, p.end);
            }
#pragma omp barrier
            each(rows * m.heads, [&](int64_t i) { recur(i / m.heads / count, i / m.heads, i % m.heads); });
            each(rows, [&](int64_t row) {
                normed(mixed + row * inner, m.norm, m.epsilon, inner, normal + row * inner);
            });
            product(m.out, inner, normal, rows, static_cast<T*>(p.out), m.width);
        }
    }

  private:
    const Mixer& m;
    const Nodes& p;
    const int64_t count, rows, inner, channels, across;
    float *projected, *reads, *mixed, *matches;  // [R, I + C + H], [R, S], [R, I], [R, M]
    T* normal;                                   // [R, I]

    int64_t node(int64_t row) const { return p.start + row % count; }

    void take_in(int64_t b, int64_t row) {
        const float *found = projected + row * across + inner, *raw = found + channels;
        memcpy(p.inputs + (b * (m.taps - 1 + p.room) + m.taps - 1 + node(row)) * channels, found, channels * sizeof(float));
        for (int64_t h = 0; h < m.heads; h++) {
            const float x = raw[h] + m.step[h];
            p.steps[(b * m.heads + h) * p.room + node(row)] = x > 20.0f ? x : std::log1p(std::exp(x));
        }
    }

    void convolve(int64_t b, int64_t row) {
        convolve_some(row, 0, inner, p.xs + (b * p.room + node(row)) * inner);
        convolve_some(row, inner, m.state, p.keys + (b * p.room + node(row)) * m.state);
        convolve_some(row, inner + m.state, m.state, reads + row * m.state);
        for (int64_t h = 0; h < m.heads; h++) {
            const float* steps = p.steps + (b * m.heads + h) * p.room;
            float sum = 0;
            for (int64_t a = 0; a < p.end; a++)
                if (p.seen[row * p.end + a]) sum += steps[a];
            p.logs[(b * m.heads + h) * p.room + node(row)] = sum * m.rate[h];
        }
    }

    void convolve_some(int64_t row, int64_t first, int64_t width, float* out) {
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t c = first + i, some = width - i;
            Floats sum = load_some(m.shift + c, some);
            for (int64_t k = 0; k < m.taps; k++)
                sum += load_some(m.convolution + k * channels + c, some) *
                       load_some(p.inputs + p.slots[row * m.taps + k] * channels + c, some);
            store_some(out + i, silu(sum), some);
        }
    }

    // A head of a node: what the committed state holds becomes the gated output.
    void recur(int64_t b, int64_t row, int64_t h) {
        const float *steps = p.steps + (b * m.heads + h) * p.room, *logs = p.logs + (b * m.heads + h) * p.room;
        const float *x = p.xs + b * p.room * inner + h * m.size, *gate = projected + row * across + h * m.size;
        const float own = logs[node(row)], kept = std::exp(own);
        float* out = mixed + row * inner + h * m.size;
        for (int64_t i = 0; i < m.size; i += LANES) {
            const int64_t some = m.size - i;
            Floats sum = load_some(out + i, some) * kept + load_some(x + node(row) * inner + i, some) * m.skip[h];
            for (int64_t a = 0; a < p.end; a++) {
                if (!p.seen[row * p.end + a]) continue;
                const float weight = std::exp(own - logs[a]) * matches[row * p.end + a] * steps[a];
                sum += load_some(x + a * inner + i, some) * weight;
            }
            store_some(out + i, sum * silu(load_some(gate + i, some)), some);
        }
    }
};

}  // namespace

extern "C" {

// 0, or 1 where there is no memory.
int outrider_mixer(const Mixer* mixer, const Nodes* nodes) {
    return in_workspace([&](Workspace& space) {
        if (mixer->bytes == 2) Run<bf16>(*mixer, *nodes, space)();
        else Run<float>(*mixer, *nodes, space)();
    });
}
}
