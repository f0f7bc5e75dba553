// Products of rows with a weight that was laid out for them, or as it lies in memory.
//
// Every output is one sum along the input, in one order whatever the number of rows: its bits depend on its own row alone.
//
// K inputs of a product; T is bf16 or float.
#pragma once

#include "laid.h"

// Asks for the weights of the next tile while those of this one are used: evenly, so that memory never rests.
struct Ahead {
    const char* at;
    int64_t step;  // bytes

    template <int LINES>
    void next() {
        for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * LINE, 0, 2);
        at += LINES > 2 ? LINES * LINE : step;
    }
};

// W rows of a weight times X rows of the input: out[j * W + i].
template <class T, int W, int X, int LINES>
inline void tile(const T* w, int64_t inputs, const T* const* x, float* out, Ahead& ahead) {
    typedef Step<T> S;
    Floats sum[TILE] = {};
    int64_t k = 0;
    for (; k + S::size <= inputs; k += S::size) {
        typename S::Vector at[X];
        for (int j = 0; j < X; j++) at[j] = S::read(x[j] + k);
        ahead.template next<LINES>();
        for (int i = 0; i < W; i++) {
            const T* row = w + i * inputs + k;
            typename S::Vector weights = S::read(row);
            for (int j = 0; j < X; j++) sum[j * W + i] = S::add(sum[j * W + i], weights, at[j]);
        }
    }
    if (k < inputs) {
        T rest[S::size];
        auto padded = [&](const T* from) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, from + k, (inputs - k) * sizeof(T));
            return S::read(rest);
        };
        for (int i = 0; i < W; i++) {
            typename S::Vector weights = padded(w + i * inputs);
            for (int j = 0; j < X; j++) sum[j * W + i] = S::add(sum[j * W + i], weights, padded(x[j]));
        }
    }
    store(out, sums(sum));
}

// `TILE` outputs of X rows of the input, of which only `rows` exist, W outputs at a time; `emit` gets all of a row's at once.
template <class T, int W, int X, int LINES, class Emit>
inline void tiles(const T* w, int64_t inputs, const T* x, int64_t first, int rows, Ahead& ahead, Emit emit) {
    const T* at[X];
    for (int j = 0; j < X; j++) at[j] = x + (first + std::min(j, rows - 1)) * inputs;
    alignas(64) float some[TILE], all[X][TILE];
    for (int i = 0; i < TILE; i += W) {
        tile<T, W, X, LINES>(w + i * inputs, inputs, at, some, ahead);
        for (int j = 0; j < X; j++) memcpy(all[j] + i, some + j * W, W * sizeof(float));
    }
    for (int j = 0; j < rows; j++) emit(first + j, load(all[j]));
}

template <class T, class Emit>
inline void product_tile(const T* w, int64_t inputs, const T* x, int64_t rows, Emit emit) {
    const int64_t chunks = std::max<int64_t>(1, (rows + 7) / 8);
    Ahead ahead = {reinterpret_cast<const char*>(w + TILE * inputs), 2 * LINE / chunks};
    for (int64_t first = 0; first < rows; first += 8) {
        int left = int(std::min<int64_t>(8, rows - first));
        if (chunks > 1) tiles<T, 2, 8, 1>(w, inputs, x, first, left, ahead, emit);
        else if (left > 4) tiles<T, 2, 8, 2>(w, inputs, x, first, left, ahead, emit);
        else if (left > 2) tiles<T, 4, 4, 4>(w, inputs, x, first, left, ahead, emit);
        else if (left == 2) tiles<T, 8, 2, 8>(w, inputs, x, first, left, ahead, emit);
        else tiles<T, 16, 1, 16>(w, inputs, x, first, left, ahead, emit);
    }
}

struct Linear {  // weight [outs, K] of T, bias [outs] or null
    const void* weight;
    const float* bias;
    int64_t outs, laid;  // `laid`: whether the weight went through `lay_out`

    Floats shift(int64_t first) const { return bias ? load(bias + first) : Floats{}; }
    // Pieces of one or some tiles are made one after another; the last tile of a size that is no multiple ends where the weight ends.
    int64_t tiles() const { return (outs + TILE - 1) / TILE; }
    int64_t beside() const { return laid ? SIDE : 1; }
    int64_t pieces() const { return (tiles() + beside() - 1) / beside(); }
    int64_t output(int64_t tile) const { return std::min(tile * TILE, outs - TILE); }
};

// A piece of the outputs of all rows: `emit` gets sixteen from an output on.
template <class T, class Emit>
inline void product_piece(const Linear& m, int64_t piece, int64_t inputs, const T* x, int64_t rows, Emit emit) {
    const T* weight = static_cast<const T*>(m.weight);
    const int64_t first = piece * m.beside();
    if (!m.laid) {
        const int64_t o = m.output(piece);
        return product_tile<T>(weight + o * inputs, inputs, x, rows, [&](int64_t row, Floats found) { emit(row, o, found); });
    }
    laid_piece<T>(weight + first * TILE * inputs, std::min(m.beside(), m.tiles() - first), inputs, x, rows,
                  [&](int64_t row, int64_t tile, Floats found) { emit(row, m.output(first + tile), found); });
}

// The share of a thread in `count` pieces.
template <class Work>
inline void shared(int64_t count, Work work) {
    int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
    for (int64_t i = count * id / team; i < count * (id + 1) / team; i++) work(i);
}

template <class T, class Out>
void product(const Linear& m, int64_t inputs, const T* x, int64_t rows, Out* out, int64_t stride) {
    const T* weight = static_cast<const T*>(m.weight);
    if (m.outs < TILE) {
#pragma omp for nowait
        for (int64_t row = 0; row < rows; row++) {
            const T* at[1] = {x + row * inputs};
            alignas(64) float found[TILE];
            Ahead none = {};
            for (int64_t o = 0; o < m.outs; o++) {
                tile<T, 1, 1, 0>(weight + o * inputs, inputs, at, found, none);
                set(out + row * stride + o, found[0] + (m.bias ? m.bias[o] : 0));
            }
        }
        return;
    }
    shared(m.pieces(), [&](int64_t piece) {
        product_piece<T>(m, piece, inputs, x, rows,
                         [&](int64_t row, int64_t o, Floats found) { store(out + row * stride + o, found + m.shift(o)); });
    });
}
