// Products and norms of a few rows, one call each, and weights laid out for products.

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

}  // namespace

extern "C" {

// Products of x [M, K] with `count` weights [outs, K], side by side in rows of `stride` numbers, all of two or four bytes a number.
void outrider_product(int64_t bytes, const Linear* m, int64_t count, int64_t inputs, const void* x, int64_t rows, void* out,
                      int64_t stride, int64_t threads) {
    if (bytes == 2) products_of<bf16>(m, count, inputs, x, rows, out, stride, threads);
    else products_of<float>(m, count, inputs, x, rows, out, stride, threads);
}

// A weight [outs, K] with at least sixteen outputs and inputs of whole four bytes, laid out for products: as many numbers and the last
// tile's overlap.
void outrider_lay_out(int64_t bytes, const void* weight, int64_t outs, int64_t inputs, void* out, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    lay_out(static_cast<const char*>(weight), outs, inputs * bytes / 4, static_cast<int32_t*>(out));
}

// out = x / rms(x) * weight, of rows [M, D] of two or four bytes a number.
void outrider_norm(int64_t bytes, const float* weight, float epsilon, int64_t width, const void* x, int64_t rows, void* out) {
    if (bytes == 2) norms_of<bf16>(weight, epsilon, width, x, rows, out);
    else norms_of<float>(weight, epsilon, width, x, rows, out);
}
}
