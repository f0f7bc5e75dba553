// Rows rounded to bytes, for weights in bytes: sums of their products are whole numbers, and exact.
//
// A row is its bytes times a scale of its own, as every output of such a weight is. Drafters live with the error; nothing else is
// rounded.
#pragma once

#include "steps.h"

struct Rounded {
    static constexpr int64_t ROOM = 1 << 18;  // bytes of rows that are rounded at once

    int64_t inputs;
    float scales[64];
    int32_t shifts[64];  // weights are larger by 128: so much larger are sums
    alignas(64) int8_t bytes[ROOM];

    static int64_t most(int64_t inputs) { return std::min<int64_t>(64, ROOM / inputs); }  // rows

    template <class T>
    void round(const T* x, int64_t row) {
        int8_t* out = bytes + row * inputs;
        Floats most = {};
        for (int64_t i = 0; i < inputs; i += LANES) {
            const Floats some = load_some(x + i, inputs - i), size = some < 0.0f ? -some : some;
            most = size > most ? size : most;
        }
        float top = 0.0f;
        for (int lane = 0; lane < LANES; lane++) top = std::max(top, most[lane]);
        const float by = top > 0.0f ? 127.0f / top : 0.0f;
        Ints sum = {};
        for (int64_t i = 0; i < inputs; i += LANES) {
            const int64_t some = std::min<int64_t>(LANES, inputs - i);
            const Ints near = (Ints)(load_some(x + i, some) * by + NEAREST) - (Ints)(Floats{} + NEAREST);
            const Chars all = __builtin_convertvector(near, Chars);
            memcpy(out + i, &all, some);
            sum += near;
        }
        int32_t whole = 0;
        for (int lane = 0; lane < LANES; lane++) whole += sum[lane];
        scales[row] = top / 127.0f, shifts[row] = 128 * whole;
    }

  private:
    static constexpr float NEAREST = 12582912.0f;  // floats from here on are whole numbers
};
