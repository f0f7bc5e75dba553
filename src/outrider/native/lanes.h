// Vectors of sixteen floats, and numbers of half the width in memory.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef float Unaligned __attribute__((vector_size(64), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Shorts __attribute__((vector_size(32), aligned(2)));
typedef int8_t Chars __attribute__((vector_size(16), aligned(1)));

struct bf16 {
    uint16_t bits;
};

inline Floats load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
inline Floats load(const bf16* p) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Shorts*>(p), Ints) << 16);
}
inline void store(float* p, Floats x) { *reinterpret_cast<Unaligned*>(p) = x; }
inline Ints rounded(Floats x) {  // to bits of bf16, to nearest, ties to even; NaN stays NaN
    Ints bits = (Ints)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 & 0xffff;
    return x == x ? up : (Ints{} + 0x7fc0);
}
inline void store(bf16* p, Floats x) { *reinterpret_cast<Shorts*>(p) = __builtin_convertvector(rounded(x), Shorts); }
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
