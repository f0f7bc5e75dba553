// Products and norms of a few rows, one call each, and weights laid out for products.

#include "coded.h"
#include "rows.h"

namespace {

constexpr int64_t WORTH_A_TEAM = 1 << 16;  // products of two numbers
constexpr int64_t BLOCK = 256;             // rows that are joined at a time

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

// Rows of numbers, normed by parts, side by side, and multiplied.
struct Joined {
    int64_t bytes, parts, width;
    float epsilon;
    const float* const* norms;  // [parts] of [D]
    Linear linear;              // [outs, parts * D]
};

template <class T>
void joined(const Joined& m, const void* const* rows, int64_t count, T* out, int64_t threads, Workspace& space) {
    const int64_t inputs = m.parts * m.width, most = std::min(count, BLOCK);
    space.begin(space.padded<T>(most * inputs));
    T* normal = space.take<T>(most * inputs);
#pragma omp parallel num_threads(int(threads))
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t some = std::min(BLOCK, count - first);
        each(some * m.parts, [&](int64_t i) {
            const T* part = static_cast<const T*>(rows[first * m.parts + i]);
            normed(part, m.norms[i % m.parts], m.epsilon, m.width, normal + i * m.width);
        });
        product(m.linear, inputs, normal, some, out + first * m.linear.outs, m.linear.outs);
#pragma omp barrier
    }
}

}  // namespace

extern "C" {

// out [M, outs] of rows [M, parts] of numbers each; 0, or 1 where there is no memory.
int outrider_joined(const Joined* m, const void* const* rows, int64_t count, void* out, int64_t threads) {
    return in_workspace([&](Workspace& space) {
        if (m->bytes == 2) joined(*m, rows, count, static_cast<bf16*>(out), threads, space);
        else joined(*m, rows, count, static_cast<float*>(out), threads, space);
    });
}

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

// Whether products of weights in codes can be made.
int outrider_reads_codes() {
#if defined(CODES)
    return 1;
#else
    return 0;
#endif
}

// Chooses the codes of every piece of a weight [outs, K] of bf16, K a multiple of four; patches have no place yet.
void outrider_choose_codes(const void* weight, int64_t outs, int64_t inputs, Codes* codes, int64_t threads) {
#if defined(CODES)
    const Linear m = {weight, nullptr, outs, 0};
#pragma omp parallel num_threads(int(threads))
    shared(m.pieces(), [&](int64_t piece) { choose_codes(m, piece, inputs, codes[piece]); });
#endif
}

// A weight [outs, K] with at least sixteen outputs and inputs of whole four bytes, laid out for products: as many numbers and the last
// tile's overlap. With `codes` of its pieces, else null, in these.
void outrider_lay_out(int64_t bytes, const void* weight, int64_t outs, int64_t inputs, void* out, const Codes* codes, int64_t threads) {
#pragma omp parallel num_threads(int(threads))
    lay_out(Linear{weight, nullptr, outs, 0, nullptr, codes}, inputs * bytes, out);
}

// out = x / rms(x) * weight, of rows [M, D] of two or four bytes a number.
void outrider_norm(int64_t bytes, const float* weight, float epsilon, int64_t width, const void* x, int64_t rows, void* out) {
    if (bytes == 2) norms_of<bf16>(weight, epsilon, width, x, rows, out);
    else norms_of<float>(weight, epsilon, width, x, rows, out);
}
}
