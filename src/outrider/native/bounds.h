// Upper bounds of sums of products, from rows and weights in bytes: half as much is read, and half as much multiplied.
//
// Let w be the weight of an output and s n the same in bytes (n whole numbers, s a scale), x a row and t m the same in bytes. Then
//
//     w.x - s n.t m = (w - s n).x + s n.(x - t m)   <=   |w - s n| |x| + |s n| |x - t m|        (Cauchy-Schwarz, twice)
//
// and n.m is a whole number, and exact. What is left is rounding. A term of the kernels' own sum w.x is rounded K + 2 times at most, by
// 2^-23 of what it has come to each time, in any order and on any CPU: together by less than d |w| |x|, with d = (K + 8) 2^-21, which is
// four times as much, and |w| <= |w - s n| + |s n|. The same d has room for what rounding does to bounds, a few times 2^-24 of
// |s n| |t m| or of a norm, with |t m| <= |x| + |x - t m|, and K times that where squares are summed. So
//
//     sum <= s t n.m + |w - s n| X + |s n| Y + TINY    with  X = (1 + d) |x|,  Y = (1 + d) (|x - t m| + 2 d |x|)
//
// TINY is more than is lost where a CPU takes the smallest numbers for 0: 2^-126 of every number, times K and norms of up to LARGEST.
// Norms are held larger by FLOOR and TINY for the same reason. Rows beyond LARGEST, or with what is no number, have no bounds but
// infinity.
//
// A few inputs of a row are often ten times as large as the others. On one scale with them the others would have few bits. So scales
// are smaller, and what a byte has no room for goes through the product again, as inputs of their own.
#pragma once

#include "rows.h"

constexpr float LARGEST = 0x1p40f, TINY = 0x1p-60f, FLOOR = 0x1p-50f, NEAREST = 12582912.0f;
constexpr float STEP = 0.8f, LEAST_SCALE = 1e-30f;
constexpr int64_t AGAIN_SHARE = 64, MOST_AGAIN = 64;  // one of so many inputs may go through again, and no more than these
constexpr int64_t COLUMNS = SIDE * TILE;              // of a piece

struct Screen {
    int64_t bytes, inputs;
    Linear exact, coarse;         // [V, K] of T, and in bytes
    const float *errors, *sizes;  // [V]: |w - s n|, |s n|, not below what they are

    float rounding() const { return float(inputs + 8) * 0x1p-21f; }
};

struct Again {
    int64_t unit;
    int8_t bytes[4];
};

// A row in bytes.
struct Row {
    float scale, size, error;  // t, X, Y
    int32_t shift;             // weights are larger by 128: so much larger are sums
    int64_t count;
    Again again[MOST_AGAIN];
};

inline Floats size_of(Floats x) { return x < 0.0f ? -x : x; }

inline int64_t sum_of(Ints x) {
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}

// How many inputs go through again with a scale: this many or fewer.
template <class T>
int64_t beyond(const T* x, int64_t inputs, float scale) {
    const float by = 1.0f / (127.0f * scale);
    Ints sum = {};
    for (int64_t i = 0; i < inputs; i += LANES) sum += __builtin_convertvector(size_of(load_some(x + i, inputs - i)) * by, Ints);
    return sum_of(sum);
}

template <class T>
void round_row(const Screen& m, const T* x, int8_t* bytes, Row& row) {
    const int64_t inputs = m.inputs, most = std::min(inputs / AGAIN_SHARE, MOST_AGAIN);
    const float d = m.rounding();
    Floats tops = {}, squares = {}, apart = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        const Floats some = load_some(x + i, inputs - i), size = size_of(some);
        tops = size > tops ? size : tops, squares += some * some;
    }
    float top = 0.0f;
    for (int lane = 0; lane < LANES; lane++) top = std::max(top, tops[lane]);
    const float size = std::sqrt(total(squares));
    row.scale = 0.0f, row.shift = 0, row.count = 0;
    if (!(size <= LARGEST)) {
        row.size = row.error = INFINITY;
        std::fill(bytes, bytes + inputs, 0);
        return;
    }
    if (top / 127.0f > LEAST_SCALE) {
        row.scale = top / 127.0f;
        for (float next = row.scale * STEP; beyond(x, inputs, next) <= most; next *= STEP) row.scale = next;
    }
    const float by = row.scale > 0.0f ? 1.0f / row.scale : 0.0f;
    Ints sum = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        const int64_t some = std::min<int64_t>(LANES, inputs - i);
        const Floats wide = load_some(x + i, some);
        const Ints near = (Ints)(wide * by + NEAREST) - (Ints)(Floats{} + NEAREST);
        const Floats off = wide - __builtin_convertvector(near, Floats) * row.scale;
        const Ints above = near > 127 ? Ints{} + 127 : near, held = above < -127 ? Ints{} - 127 : above;
        const Chars all = __builtin_convertvector(held, Chars);
        memcpy(bytes + i, &all, some);
        sum += near, apart += off * off;
        for (int lane = 0; lane < some; lane++)
            for (int32_t rest = near[lane] - held[lane]; rest;) {
                const int32_t part = std::max(-127, std::min(127, rest));
                Again& again = row.again[row.count++];
                again.unit = (i + lane) / 4;
                std::fill(again.bytes, again.bytes + 4, 0);
                again.bytes[(i + lane) % 4] = int8_t(part);
                rest -= part;
            }
    }
    row.shift = int32_t(128 * sum_of(sum));
    row.size = (1.0f + d) * size + FLOOR;
    row.error = (1.0f + d) * (std::sqrt(total(apart)) + 2.0f * d * size) + FLOOR;
}

template <int C>
void add_again(const int8_t* w, const Row& row, Ints* sums) {
    typedef Step<int8_t> S;
    for (int64_t i = 0; i < row.count; i++) {
        const int8_t* at = w + row.again[i].unit * C * S::size;
        const auto part = S::spread(row.again[i].bytes);
        for (int c = 0; c < C; c++) sums[c] = S::add(sums[c], S::read(at + c * S::size), part);
    }
}

inline float most_of(Floats x) {
    const auto fold = [&](Floats y) { x = x > y ? x : y; };
    fold(shuffled<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(x, x));
    fold(shuffled<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(x, x));
    fold(shuffled<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(x, x));
    return std::max(x[0], x[1]);
}

// Rows in bytes, and the bounds of sums.
template <class T>
class Bounds {
  public:
    Bounds(const Screen& screen, const T* x, int64_t rows, Workspace& space)
        : m(screen), x(x), rows(rows), bytes(space.take<int8_t>(rows * m.inputs)), row(space.take<Row>(rows)) {}
    static int64_t padded(const Screen& m, int64_t rows) {
        return Workspace::padded<int8_t>(rows * m.inputs) + Workspace::padded<Row>(rows);
    }

    // `emit` gets a row, a piece and the bounds of its tiles; every thread of a team does its share.
    template <class Emit>
    void operator()(Emit emit) {
        each(rows, [&](int64_t r) { round_row(m, x + r * m.inputs, bytes + r * m.inputs, row[r]); });
        for (int64_t first = 0; first < rows; first += MOST_ROWS)
            shared(m.coarse.pieces(), [&](int64_t piece) { of_piece(piece, first, std::min(MOST_ROWS, rows - first), emit); });
    }

  private:
    const Screen& m;
    const T* x;
    const int64_t rows;
    int8_t* bytes;
    Row* row;

    template <class Emit>
    void of_piece(int64_t piece, int64_t first, int64_t some, Emit emit) {
        Ints sums[MOST_ROWS * SIDE];
        const Linear& coarse = m.coarse;
        const int64_t beside = coarse.beside(piece);
        const int8_t* w = static_cast<const int8_t*>(coarse.weight) + piece * COLUMNS * m.inputs;
        piece_sums(coarse, piece, m.inputs, bytes + first * m.inputs, some, sums);
        for (int64_t r = 0; r < some; r++) {
            const Row& of = row[first + r];
            Ints* own = sums + r * beside;
            if (beside == 1) add_again<1>(w, of, own);
            else if (beside == 2) add_again<2>(w, of, own);
            else add_again<SIDE>(w, of, own);
            Floats bounds[SIDE];
            for (int64_t c = 0; c < beside; c++) {
                const int64_t o = coarse.output(piece * SIDE + c);
                const Floats near = __builtin_convertvector(own[c] - of.shift, Floats) * (load(coarse.scales + o) * of.scale);
                bounds[c] = near + (load(m.errors + o) * of.size + (load(m.sizes + o) * of.error + TINY));
            }
            emit(first + r, piece, bounds, beside);
        }
    }
};
