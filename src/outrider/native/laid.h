// Products with weights that were laid out once: as fast as memory for one row, as fast as the CPU multiplies for many.
//
// Sixteen outputs lie side by side, four bytes of their input each, so one vector of a weight meets one piece of x in all lanes, and
// an output is one sum in the order of its inputs. Tiles of sixteen outputs lie vector beside vector, SIDE of them: products go
// through memory in one stream.
#pragma once

#include "steps.h"

constexpr int SIDE = 3;
#if defined(__AVX512F__)
constexpr int MOST_LAID = 8;  // rows at once: with SIDE vectors as many sums as registers hold
#else
constexpr int MOST_LAID = 2;
#endif

// Lays out a weight [outs, inputs], with `units` of four bytes in a row; every thread of a team does its share.
void lay_out(const char* weight, int64_t outs, int64_t units, int32_t* out);

// Sums [rows, tiles] of up to MOST_LAID rows with tiles `beside` each other. In each of the steps of four bytes some lines of memory
// are asked for, none to two, from `ahead` on.
template <class T>
void laid_sums(const T* w, int64_t beside, int64_t inputs, const T* x, int64_t rows, int64_t lines, const char* ahead, Floats* out);

// Tiles beside each other, times all rows. While many rows are multiplied the weights that follow are asked for.
template <class T, class Emit>
inline void laid_piece(const T* w, int64_t beside, int64_t inputs, const T* x, int64_t rows, Emit emit) {
    Floats found[MOST_LAID * SIDE];
    const int64_t chunks = (rows + MOST_LAID - 1) / MOST_LAID, lines = chunks > 2 ? 1 : 2 * (chunks - 1);
    const int64_t size = beside * TILE * inputs * int64_t(sizeof(T));
    const char* ahead = reinterpret_cast<const char*>(w) + size;
    for (int64_t chunk = 0, first = 0; chunk < chunks; chunk++) {
        const int64_t left = chunks - chunk, some = (rows - first + left - 1) / left;
        laid_sums(w, beside, inputs, x + first * inputs, some, lines, ahead + chunk * size / chunks, found);
        for (int64_t r = 0; r < some; r++)
            for (int64_t c = 0; c < beside; c++) emit(first + r, c, found[r * beside + c]);
        first += some;
    }
}
