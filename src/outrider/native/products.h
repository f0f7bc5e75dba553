// Products of rows with a weight, laid out for them or as it lies in memory, and with the same bits.
//
// Every output is one sum along the input, in one order whatever the number of rows: its bits depend on its own row alone.
//
// K inputs of a product; T is bf16 or float.
#pragma once

#include "rounded.h"

constexpr int SIDE = 3;              // tiles of outputs that are made together, a piece
constexpr int64_t MOST_ROWS = 64;    // whose sums are held at once

struct Codes;

struct Linear {  // weight [outs, K] of T, bias [outs] or null
    const void* weight;
    const float* bias;
    int64_t outs, laid;  // `laid`: whether the weight went through `lay_out`
    const float* scales;  // [outs] of a weight in bytes, which is laid out; else null
    const Codes* codes;   // [pieces] of a weight of bf16 in codes, which is laid out; else null

    // The last tile of a size that is no multiple ends where the weight ends.
    int64_t tiles() const { return (outs + TILE - 1) / TILE; }
    int64_t pieces() const { return (tiles() + SIDE - 1) / SIDE; }
    int64_t beside(int64_t piece) const { return std::min<int64_t>(SIDE, tiles() - piece * SIDE); }
    int64_t output(int64_t tile) const { return std::max<int64_t>(0, std::min(tile * TILE, outs - TILE)); }
    int64_t some() const { return std::min<int64_t>(TILE, outs); }  // outputs of a tile that exist
    Floats shift(int64_t first) const { return bias ? load_some(bias + first, some()) : Floats{}; }
};

// Sums [rows, tiles] of a piece of the outputs of up to MOST_ROWS rows.
template <class T>
void piece_sums(const Linear& m, int64_t piece, int64_t inputs, const T* x, int64_t rows, Sum<T>* sums);

// Lays out a weight of at least one tile, with rows of so many bytes, whole units; every thread of a team does its share.
void lay_out(const Linear& m, int64_t stride, void* out);

// A piece of the outputs of all rows: `emit` gets sixteen from an output on.
template <class T, class Emit>
inline void product_piece(const Linear& m, int64_t piece, int64_t inputs, const T* x, int64_t rows, Emit emit) {
    Floats sums[MOST_ROWS * SIDE];
    const int64_t beside = m.beside(piece);
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        const int64_t some = std::min(MOST_ROWS, rows - first);
        piece_sums(m, piece, inputs, x + first * inputs, some, sums);
        for (int64_t row = 0; row < some; row++)
            for (int64_t c = 0; c < beside; c++) emit(first + row, m.output(piece * SIDE + c), sums[row * beside + c]);
    }
}

template <class Emit>
inline void product_piece(const Linear& m, int64_t piece, int64_t inputs, const Rounded* x, int64_t rows, Emit emit) {
    Ints sums[MOST_ROWS * SIDE];
    const int64_t beside = m.beside(piece);
    piece_sums(m, piece, inputs, x->bytes, rows, sums);
    for (int64_t c = 0; c < beside; c++) {
        const int64_t o = m.output(piece * SIDE + c);
        const Floats scales = load(m.scales + o);
        for (int64_t row = 0; row < rows; row++)
            emit(row, o, __builtin_convertvector(sums[row * beside + c] - x->shifts[row], Floats) * (scales * x->scales[row]));
    }
}

// Rows as a weight takes them: `work` gets all as they are, or some at a time rounded to bytes; and which they are.
template <class T, class Work>
inline void as_taken(const Linear& m, int64_t inputs, const T* x, int64_t rows, Work work) {
    if (!m.scales) return work(x, 0, rows);
    Rounded rounded;
    rounded.inputs = inputs;
    for (int64_t first = 0, some; first < rows; first += some) {
        some = std::min(rows - first, Rounded::most(inputs));
        for (int64_t row = 0; row < some; row++) rounded.round(x + (first + row) * inputs, row);
        work(const_cast<const Rounded*>(&rounded), first, some);
    }
}

// The share of a thread in `count` pieces.
template <class Work>
inline void shared(int64_t count, Work work) {
    int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
    for (int64_t i = count * id / team; i < count * (id + 1) / team; i++) work(i);
}

template <class T, class Out>
void product(const Linear& m, int64_t inputs, const T* x, int64_t rows, Out* out, int64_t stride) {
    as_taken(m, inputs, x, rows, [&](const auto* taken, int64_t first, int64_t count) {
        shared(m.pieces(), [&](int64_t piece) {
            product_piece(m, piece, inputs, taken, count, [&](int64_t row, int64_t o, Floats found) {
                store_some(out + (first + row) * stride + o, found + m.shift(o), m.some());
            });
        });
    });
}
