// Weights of bf16 in twelve bits a number, exactly.
//
// The upper byte of a number is its sign and most of its exponent, and sixteen such bytes are nearly all that a piece of a weight
// holds: they become codes of four bits. Numbers with another one are patched. The lower byte stays as it is. So a quarter less is
// read where memory decides, and what is multiplied are the same numbers.
//
// A step is four inputs of sixteen outputs: 32 bytes of codes, two a byte, and 64 lower bytes. Of every sixteen numbers the first
// eight belong to the first two inputs, so that taking lower and upper bytes in turns gives two vectors as laid out in bf16.
#pragma once

#include "products.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define CODES
#endif

constexpr int CODE_COUNT = 16, STEP_NUMBERS = 64;
constexpr int64_t STEP_BYTES = 96;

struct Patch {
    uint32_t step;  // of all steps of a piece, tile after tile
    uint8_t place, upper;
};

struct Codes {  // of a piece
    uint8_t upper[CODE_COUNT];
    Patch* patches;  // in order, and one behind them that is of no step
    int64_t count;   // of patches
};
static_assert(sizeof(Patch) == 8 && sizeof(Codes) == 32, "codes.py makes room for them");

// Bytes of so many tiles.
inline int64_t coded_size(int64_t tiles, int64_t inputs) { return tiles * inputs / 4 * STEP_BYTES; }

#if defined(CODES)

// Chooses the codes of a piece of a weight as it lies, and counts its patches.
inline void choose_codes(const Linear& m, int64_t piece, int64_t inputs, Codes& codes) {
    int64_t counts[256], left = 0;
    uint32_t turns[4][256] = {};  // counted in turns: the same byte comes often, and one after the other would wait
    for (int64_t c = 0; c < m.beside(piece); c++) {
        const uint16_t* numbers = static_cast<const uint16_t*>(m.weight) + m.output(piece * SIDE + c) * inputs;
        for (int64_t i = 0; i < TILE * inputs; i += 4)
            for (int64_t j = 0; j < 4; j++) turns[j][numbers[i + j] >> 8]++;
        left += TILE * inputs;
    }
    for (int i = 0; i < 256; i++) counts[i] = int64_t(turns[0][i]) + turns[1][i] + turns[2][i] + turns[3][i];
    for (uint8_t& upper : codes.upper) {
        int64_t* most = std::max_element(counts, counts + 256);
        upper = uint8_t(most - counts), left -= *most, *most = 0;
    }
    codes.count = left;
}

// Writes steps of a piece, as many tiles side by side. Whoever changes a weight meanwhile gets wrong numbers, and no more patches
// than there is room for.
class CodeWriter {
  public:
    CodeWriter(const Codes& codes, int64_t tiles, uint8_t* to)
        : codes(codes), patch(codes.patches), end(codes.patches + codes.count), tiles(tiles), out(to) {}

    // Numbers laid out in bf16: two vectors a tile and step.
    void write(const uint16_t* numbers, int64_t steps) {
        for (int64_t i = 0; i < steps; i++, numbers += STEP_NUMBERS * tiles)
            for (int64_t c = 0; c < tiles; c++)
                write_step(_mm512_loadu_si512(numbers + STEP_NUMBERS / 2 * c),
                           _mm512_loadu_si512(numbers + STEP_NUMBERS / 2 * (c + tiles)));
    }

  private:
    const Codes& codes;
    Patch *patch, *const end;
    const int64_t tiles;
    uint8_t* out;
    uint32_t step = 0;

    void write_step(__m512i first, __m512i second) {
        const __m512i lower = _mm512_set1_epi16(255);
        const __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, lower), _mm512_and_si512(second, lower));
        const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
        __m512i found = _mm512_setzero_si512();
        uint64_t known = 0;
        for (int i = 0; i < CODE_COUNT; i++) {
            const uint64_t same = _mm512_cmpeq_epi8_mask(high, _mm512_set1_epi8(char(codes.upper[i]))) & ~known;
            found = _mm512_mask_set1_epi8(found, same, char(i)), known |= same;
        }
        const __m512i pairs = _mm512_or_si512(_mm512_and_si512(found, lower), _mm512_srli_epi16(found, 4));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi16_epi8(pairs));
        _mm512_storeu_si512(out + 32, low);
        if (~known) patch_others(~known, high);
        out += STEP_BYTES, step++;
    }

    void patch_others(uint64_t places, __m512i high) {
        uint8_t upper[STEP_NUMBERS];
        _mm512_storeu_si512(upper, high);
        for (; places && patch < end; places &= places - 1) {
            const int place = __builtin_ctzll(places);
            *patch++ = {step, uint8_t(place), upper[place]};
        }
    }
};

// What codes stand for, read on and on.
template <int C>
class Coded {
  public:
    typedef bf16 Number;
    static constexpr int TILES = C, UNITS = 2;
    static constexpr int64_t SIZE = C * STEP_BYTES;
    static constexpr int FEWEST = 4;
    const uint8_t* at;

    Coded(const uint8_t* at, const Codes& codes)
        : at(at), patch(codes.patches), next(patch->step),
          upper(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes.upper)))) {}

    __attribute__((always_inline)) void read(__m512i (&out)[UNITS][C]) {
        UNROLLED
        for (int c = 0; c < C; c++, at += STEP_BYTES, step++) {
            const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
            const __m512i four = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), _mm512_set1_epi8(15));
            const __m512i low = _mm512_loadu_si512(at + 32);
            __m512i high = _mm512_shuffle_epi8(upper, four);
            if (__builtin_expect(step == next, 0)) {
                const Patched done = patched(high, step, patch);
                high = done.high, patch = done.next, next = patch->step;
            }
            out[0][c] = _mm512_unpacklo_epi8(low, high), out[1][c] = _mm512_unpackhi_epi8(low, high);
        }
    }

  private:
    const Patch* patch;
    uint32_t next, step = 0;
    const __m512i upper;

    struct Patched {
        __m512i high;
        const Patch* next;
    };
    __attribute__((noinline, cold)) static Patched patched(__m512i high, uint32_t step, const Patch* next) {
        for (; next->step == step; next++) high = _mm512_mask_set1_epi8(high, 1ull << next->place, char(next->upper));
        return {high, next};
    }
};

#endif
