// Steps of sums of products.
#pragma once

#include <algorithm>

#include <omp.h>

#include "lanes.h"

#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

constexpr int TILE = 16;  // outputs that are made together
constexpr int64_t LINE = 64;

// Steps of an inner product: `size` inputs, a vector of T; `spread`: a unit of four bytes, in every lane.
template <class T>
struct Step;
template <>
struct Step<float> {
    typedef Floats Vector, Sum;
    static constexpr int64_t size = 16, unit = 1;
    static Vector read(const float* p) { return load(p); }
    static Vector spread(const float* p) { return Floats{} + *p; }
    static Floats add(Floats sum, Vector w, Vector x) { return sum + w * x; }
};
template <>
struct Step<bf16> {
    typedef Floats Sum;
    static constexpr int64_t size = 32, unit = 2;
    static int32_t pair(const bf16* p) {
        int32_t out;
        memcpy(&out, p, 4);
        return out;
    }
#if defined(__AVX512BF16__)
    typedef __m512i Vector;
    static Vector read(const bf16* p) { return _mm512_loadu_si512(p); }
    static Vector spread(const bf16* p) { return _mm512_set1_epi32(pair(p)); }
    static Floats add(Floats sum, Vector w, Vector x) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
    }
#else
    typedef Ints Vector;
    typedef Ints Loose __attribute__((aligned(2)));
    static Vector read(const bf16* p) { return *reinterpret_cast<const Loose*>(p); }
    static Vector spread(const bf16* p) { return Ints{} + pair(p); }
    static Floats add(Floats sum, Vector w, Vector x) {
        Ints high = Ints{} + int32_t(0xffff0000u);
        return sum + (Floats)(w << 16) * (Floats)(x << 16) + (Floats)(w & high) * (Floats)(x & high);
    }
#endif
};
template <>
struct Step<int8_t> {  // weights are larger by 128, so that they are not below 0
    typedef Ints Sum;
    static constexpr int64_t size = 64, unit = 4;
#if defined(__AVX512VNNI__)
    typedef __m512i Vector;
    static Vector read(const int8_t* p) { return _mm512_loadu_si512(p); }
    static Vector spread(const int8_t* p) { return _mm512_set1_epi32(four(p)); }
    static Ints add(Ints sum, Vector w, Vector x) { return (Ints)_mm512_dpbusd_epi32((__m512i)sum, w, x); }
#else
    typedef Ints Vector;
    typedef Ints Loose __attribute__((aligned(1)));
    static Vector read(const int8_t* p) { return *reinterpret_cast<const Loose*>(p); }
    static Vector spread(const int8_t* p) { return Ints{} + four(p); }
    static Ints add(Ints sum, Vector w, Vector x) {
        for (int at = 0; at < 32; at += 8) sum += ((w >> at) & 255) * ((x << (24 - at)) >> 24);
        return sum;
    }
#endif
    static int32_t four(const int8_t* p) {
        int32_t out;
        memcpy(&out, p, 4);
        return out;
    }
};

template <class T>
using Sum = typename Step<T>::Sum;
