// Sums of laid out products, for every number of rows and tiles; and laying out itself.

#include "laid.h"

namespace {

// Sums of R rows with C tiles; asks for LINES lines from `ahead` on in every step.
template <class T, int R, int C, int LINES>
void sums_of(const T* w, int64_t inputs, const T* x, const char* ahead, Floats* out) {
    typedef Step<T> S;
    Floats sum[R][C] = {};
    int64_t k = 0;
    do {  // tested at its end, sums stay in registers
        typename S::Vector weights[C];
        for (int c = 0; c < C; c++) weights[c] = S::read(w + c * S::size);
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + i * LINE, 0, 2);
        for (int r = 0; r < R; r++) {
            const typename S::Vector at = S::spread(x + r * inputs + k);
            for (int c = 0; c < C; c++) sum[r][c] = S::add(sum[r][c], weights[c], at);
        }
        w += C * S::size, ahead += LINES * LINE, k += 4 / sizeof(T);
    } while (k < inputs);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) out[r * C + c] = sum[r][c];
}

template <class T, int C, int LINES, int R = MOST_LAID>
void rows_of(const T* w, int64_t inputs, const T* x, int64_t rows, const char* ahead, Floats* out) {
    if constexpr (R > 1)
        if (rows < R) return rows_of<T, C, LINES, R - 1>(w, inputs, x, rows, ahead, out);
    sums_of<T, R, C, LINES>(w, inputs, x, ahead, out);
}

template <class T, int C>
void tiles_of(const T* w, int64_t inputs, const T* x, int64_t rows, int64_t lines, const char* ahead, Floats* out) {
    if (lines == 0) rows_of<T, C, 0>(w, inputs, x, rows, ahead, out);
    else if (lines == 1) rows_of<T, C, 1>(w, inputs, x, rows, ahead, out);
    else rows_of<T, C, 2>(w, inputs, x, rows, ahead, out);
}

}  // namespace

template <class T>
void laid_sums(const T* w, int64_t beside, int64_t inputs, const T* x, int64_t rows, int64_t lines, const char* ahead, Floats* out) {
    if (beside == 1) tiles_of<T, 1>(w, inputs, x, rows, lines, ahead, out);
    else if (beside == 2) tiles_of<T, 2>(w, inputs, x, rows, lines, ahead, out);
    else tiles_of<T, SIDE>(w, inputs, x, rows, lines, ahead, out);
}
template void laid_sums(const float*, int64_t, int64_t, const float*, int64_t, int64_t, const char*, Floats*);
template void laid_sums(const bf16*, int64_t, int64_t, const bf16*, int64_t, int64_t, const char*, Floats*);

// Threads of a team each lay out their share; `units`: four bytes of input.
void lay_out(const char* weight, int64_t outs, int64_t units, int32_t* out) {
    const int64_t tiles = (outs + TILE - 1) / TILE;
#pragma omp for
    for (int64_t t = 0; t < tiles; t++) {
        const int64_t first = t / SIDE * SIDE, beside = std::min<int64_t>(SIDE, tiles - first);
        const char* rows = weight + std::min(t * TILE, outs - TILE) * units * 4;
        int32_t* to = out + (first * units + t - first) * TILE;
        for (int64_t u = 0; u < units; u++)
            for (int64_t i = 0; i < TILE; i++) memcpy(to + u * beside * TILE + i, rows + (i * units + u) * 4, 4);
    }
}
