// Products, norms and the highest numbers of a few rows, one call each, and weights laid out for products.

#include "rows.h"

namespace {

constexpr int64_t WORTH_A_TEAM = 1 << 16;  // products of two numbers

template <class T>
void products_of(const Linear* m, int64_t count, int64_t inputs, const void* x, int64_t rows, void* out, int64_t stride,
                 int64_t threads) {
#pragma omp parallel num_threads(inputs * stride * rows < WORTH_A_TEAM ? 1 : int(threads))
    for (int64_t i = 0, first = 0; i < count; first += m[i++].outs)
        product(m[i], inputs, static_cast<const T*>(x), rows, static_cast<T*>(out) + first, stride);
}

template <class T>
void norms_of(const float* weight, float epsilon, int64_t width, const void* x, int64_t rows, void* out) {
    for (int64_t at = 0; at < rows * width; at += width)
        normed(static_cast<const T*>(x) + at, weight, epsilon, width, static_cast<T*>(out) + at);
}

template <class T>
void highest_of(const T* x, int64_t width, int64_t* token, float* highest) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, where = lanes, odd = {};
    Floats most = Floats{} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES, lanes += LANES) {
        const Floats some = load(x + i);
        where = some > most ? lanes : where;
        most = some > most ? some : most;
        odd |= some != some;
    }
    *token = width, *highest = -INFINITY;
    auto take = [&](int64_t at, float found) {
        if (found > *highest || (found == *highest && at < *token)) *token = at, *highest = found;
    };
    bool is_odd = false;
    for (int lane = 0; lane < LANES; lane++) take(where[lane], most[lane]), is_odd |= odd[lane] != 0;
    for (; i < width; i++) take(i, value(x[i])), is_odd |= value(x[i]) != value(x[i]);
    if (is_odd) *token = 0, *highest = NAN;
}

}  // namespace

extern "C" {

// Products of x [M, K] with `count` weights [outs, K], side by side in rows of `stride` numbers, all of two or four bytes a number.
void outrider_product(int64_t bytes, const Linear* m, int64_t count, int64_t inputs, const void* x, int64_t rows, void* out,
                      int64_t stride, int64_t threads) {
    if (bytes == 2) products_of<bf16>(m, count, inputs, x, rows, out, stride, threads);
    else products_of<float>(m, count, inputs, x, rows, out, stride, threads);
}

// Whether products of bytes are faster than those of two.
int outrider_multiplies_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

// A weight [outs, K] with at least sixteen outputs and inputs of whole four bytes, laid out for products: as many numbers and the last
// tile's overlap.
void outrider_lay_out(int64_t bytes, const void* weight, int64_t outs, int64_t inputs, void* out, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    lay_out(Linear{weight, nullptr, outs, 0}, inputs * bytes, out);
}

// out = x / rms(x) * weight, of rows [M, D] of two or four bytes a number.
void outrider_norm(int64_t bytes, const float* weight, float epsilon, int64_t width, const void* x, int64_t rows, void* out) {
    if (bytes == 2) norms_of<bf16>(weight, epsilon, width, x, rows, out);
    else norms_of<float>(weight, epsilon, width, x, rows, out);
}

// The highest number of each row of x [M, V] and where it is, the first place of several; NaN where there is one.
void outrider_highest(int64_t bytes, const void* x, int64_t rows, int64_t width, int64_t* tokens, float* highest) {
    for (int64_t row = 0; row < rows; row++)
        if (bytes == 2) highest_of(static_cast<const bf16*>(x) + row * width, width, tokens + row, highest + row);
        else highest_of(static_cast<const float*>(x) + row * width, width, tokens + row, highest + row);
}
}
