// Vectors of sixteen floats, and numbers of half the width in memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));

struct bf16 {
    uint16_t bits;
};

inline Floats load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline Floats load(const bf16* p) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Ints) << 16);
}
inline void store(float* p, Floats x) { *reinterpret_cast<Unaligned*>(p) = x; }
inline void store(bf16* p, Floats x) {  // to nearest, ties to even; NaN stays NaN
    Ints bits = (Ints)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    up = x == x ? up : (Ints{} + 0x7fc0);
    *reinterpret_cast<Shorts*>(p) = __builtin_convertvector(up, Shorts);
}
template <class T>
inline Floats load_some(const T* p, int64_t count) {  // lanes that are not there are 0
    if (count >= LANES) return load(p);
    T all[LANES] = {};
    memcpy(all, p, count * sizeof(T));
    return load(all);
}
template <class T>
inline void store_some(T* p, Floats x, int64_t count) {
    if (count >= LANES) return store(p, x);
    T all[LANES];
    store(all, x);
    memcpy(p, all, count * sizeof(T));
}
inline float value(float x) { return x; }
inline float value(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline void set(float* p, float x) { *p = x; }
inline void set(bf16* p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    p->bits = x == x ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
}

template <int... I>
inline Floats shuffled(Floats a, Floats b) { return __builtin_shufflevector(a, b, I...); }

// Lane i of the result is the sum of a[i]'s lanes. All sums pair lanes alike, so their bits do not depend on i.
inline Floats sums(const Floats* a) {
    Floats b[8], c[4], d[2];
    for (int i = 0; i < 8; i++)
        b[i] = shuffled<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a[i], a[i + 8]) +
               shuffled<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a[i], a[i + 8]);
    for (int i = 0; i < 4; i++)
        c[i] = shuffled<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(b[i], b[i + 4]) +
               shuffled<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(b[i], b[i + 4]);
    for (int i = 0; i < 2; i++)
        d[i] = shuffled<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(c[i], c[i + 2]) +
               shuffled<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(c[i], c[i + 2]);
    Floats e = shuffled<0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29>(d[0], d[1]) +
               shuffled<2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31>(d[0], d[1]);
    return shuffled<0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15>(e, e);
}

inline float total(Floats x) {
    float out = 0;
    for (int i = 0; i < LANES; i++) out += x[i];
    return out;
}

inline Floats exponential(Floats x) {  // Cephes' polynomial; below -87 exactly 0
    Floats scaled = x * 1.44269504088896341f, shifted = scaled + 12582912.0f, n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < -87.0f ? Floats{} : p * (Floats)power;
}

inline Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }
