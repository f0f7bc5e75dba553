// Sums of products, for every number of rows and tiles, and weights laid out for them.
//
// A unit is four bytes: one float of a row, two bf16, or four bytes. Laid out, sixteen outputs lie side by side, one unit of their
// input each, so one vector of a weight meets one unit of x in all lanes, and an output is one sum in the order of its inputs. Tiles
// of sixteen outputs lie vector beside vector: products go through memory in one stream. A weight as it lies is laid out on the
// stack, a part at a time.

#include <type_traits>
#include <utility>

#include "coded.h"

namespace {

#if defined(__AVX512F__)
constexpr int MOST = 8;  // rows at once: with SIDE vectors as many sums as registers hold
#else
constexpr int MOST = 2;
#endif
constexpr int64_t BLOCK = 256;  // units that are laid out at a time, whole steps of codes
constexpr int64_t AHEAD = 8192;  // bytes: a thread that asks much further ahead reads what belongs to the next one at its end

// Weights of C tiles that are read on and on, a step at a time: UNITS units of input, SIZE bytes.
template <class T, int C>
struct Laid {
    typedef T Number;
    static constexpr int TILES = C, UNITS = 1;
    static constexpr int64_t SIZE = C * LINE;
    static constexpr int FEWEST = 6;  // from so many rows on, what follows is asked for
    const T* at;

    __attribute__((always_inline)) void read(typename Step<T>::Vector (&out)[UNITS][C]) {
        UNROLLED
        for (int c = 0; c < C; c++) out[0][c] = Step<T>::read(at + c * Step<T>::size);
        at += C * Step<T>::size;
    }
};

// Adds products of R rows with the tiles to sums; asks for LINES lines of memory from `ahead` on in every step.
template <int R, int LINES, class Weights>
void add(Weights w, int64_t inputs, const typename Weights::Number* x, int64_t stride, const char* ahead,
         Sum<typename Weights::Number>* sums) {
    typedef typename Weights::Number T;
    typedef Step<T> S;
    constexpr int C = Weights::TILES, U = Weights::UNITS;
    Sum<T> sum[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = sums[r * C + c];
    int64_t k = 0;
    do {  // tested at its end, sums stay in registers
        typename S::Vector weights[U][C];
        w.read(weights);
        for (int i = 0; i < LINES; i++) __builtin_prefetch(ahead + i * LINE, 0, 2);
        UNROLLED
        for (int u = 0; u < U; u++, k += S::unit) {
            UNROLLED
            for (int r = 0; r < R; r++) {
                const typename S::Vector at = S::spread(x + r * stride + k);
                UNROLLED
                for (int c = 0; c < C; c++) sum[r][c] = S::add(sum[r][c], weights[u][c], at);
            }
        }
        ahead += std::min(LINES * LINE, Weights::SIZE);  // lines that a step only touches are asked for twice
    } while (k < inputs);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r * C + c] = sum[r][c];
}

template <int LINES, int R = MOST, class Weights, class T, class Sums>
void add_rows(Weights w, int64_t inputs, const T* x, int64_t stride, int64_t rows, const char* ahead, Sums* sums) {
    if constexpr (R > 1)
        if (rows < R) return add_rows<LINES, R - 1>(w, inputs, x, stride, rows, ahead, sums);
    add<R, LINES>(w, inputs, x, stride, ahead, sums);
}

// All rows, some at a time. While several are multiplied, weights that follow in memory are asked for; while more are than fit at
// once, those of the next piece, in even shares.
template <class Weights, class T, class Sums>
void add_tiles(Weights w, int64_t inputs, const T* x, int64_t stride, int64_t rows, bool is_in_memory, Sums* sums) {
    constexpr int LINES = int((Weights::SIZE + LINE - 1) / LINE);  // of a step
    const int64_t chunks = (rows + MOST - 1) / MOST, size = inputs / (Weights::UNITS * Step<T>::unit) * Weights::SIZE;
    const char* at = reinterpret_cast<const char*>(w.at);
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t left = chunks - chunk, some = (rows + left - 1) / left;
        const char* part = at + size + chunk * size / chunks;
        if (!is_in_memory || (chunks == 1 && some < Weights::FEWEST)) add_rows<0>(w, inputs, x, stride, some, part, sums);
        else if (chunks == 1) add_rows<LINES>(w, inputs, x, stride, some, at + AHEAD, sums);
        else if (chunks == 2) add_rows<(LINES + 1) / 2>(w, inputs, x, stride, some, part, sums);
        else add_rows<(LINES + 2) / 3>(w, inputs, x, stride, some, part, sums);
        rows -= some, x += some * stride, sums += some * Weights::TILES;
    }
}

// Does work with a number of tiles that the compiler knows.
template <class Work>
void with_tiles(int64_t beside, Work work) {
    if (beside == 1) work(std::integral_constant<int, 1>{});
    else if (beside == 2) work(std::integral_constant<int, 2>{});
    else work(std::integral_constant<int, SIDE>{});
}

template <class T>
void add_piece(const T* w, int64_t beside, int64_t inputs, const T* x, int64_t stride, int64_t rows, bool is_in_memory, Sum<T>* sums) {
    with_tiles(beside, [&](auto tiles) { add_tiles(Laid<T, tiles>{w}, inputs, x, stride, rows, is_in_memory, sums); });
}

void add_coded(const Linear& m, int64_t piece, int64_t beside, int64_t inputs, const bf16* x, int64_t rows, Floats* sums) {
#if defined(CODES)
    const auto* at = static_cast<const uint8_t*>(m.weight) + coded_size(piece * SIDE, inputs);
    with_tiles(beside, [&](auto tiles) { add_tiles(Coded<tiles>(at, m.codes[piece]), inputs, x, inputs, rows, true, sums); });
#endif
}

// Exchanges blocks of D lanes between vectors that lie D apart.
template <int D, int... L>
inline void exchange(Floats* a, std::integer_sequence<int, L...>) {
    for (int i = 0; i < TILE; i++) {
        if (i & D) continue;
        const Floats low = a[i], high = a[i + D];
        a[i] = shuffled<(L & D ? L - D + TILE : L)...>(low, high);
        a[i + D] = shuffled<(L & D ? L + TILE : L + D)...>(low, high);
    }
}

// Sixteen vectors, of which the first comes to hold the first numbers of all.
inline void transpose(Floats* a) {
    const auto lanes = std::make_integer_sequence<int, TILE>{};
    exchange<8>(a, lanes), exchange<4>(a, lanes), exchange<2>(a, lanes), exchange<1>(a, lanes);
}

// A tile: some bytes of its rows, of which `count` exist, unit by unit to vectors `beside` apart. Asks for what lies `ahead` bytes behind.
void turn(const char* rows, int64_t stride, int64_t count, int64_t bytes, int64_t ahead, int64_t beside, char* out) {
    for (int64_t at = 0; at < bytes; at += LINE) {
        const int64_t some = std::min(LINE, bytes - at);
        Floats lines[TILE];
        for (int i = 0; i < TILE; i++) {
            const char* line = rows + std::min<int64_t>(i, count - 1) * stride + at;
            __builtin_prefetch(line + ahead, 0, 2);
            if (some == LINE) memcpy(&lines[i], line, LINE);
            else lines[i] = Floats{}, memcpy(&lines[i], line, some);
        }
        transpose(lines);
        for (int64_t u = 0; u * 4 < some; u++) memcpy(out + (at / 4 + u) * beside * LINE, &lines[u], LINE);
    }
}

template <class T>
void add_lying(const Linear& m, int64_t first, int64_t beside, int64_t inputs, const T* x, int64_t rows, Floats* sums) {
    constexpr int64_t unit = Step<T>::unit, size = sizeof(T);
    alignas(64) char turned[BLOCK * SIDE * LINE];
    const int64_t stride = inputs * size;
    for (int64_t k = 0, some; k < inputs; k += some) {
        const int64_t whole = std::min(BLOCK * unit, (inputs - k) / unit * unit);
        some = whole ? whole : inputs - k;
        for (int64_t c = 0; c < beside; c++)
            turn(static_cast<const char*>(m.weight) + m.output(first + c) * stride + k * size, stride, m.some(), some * size,
                 SIDE * TILE * stride, beside, turned + c * LINE);
        const T* w = reinterpret_cast<const T*>(turned);
        if (whole) {
            add_piece(w, beside, whole, x + k, inputs, rows, false, sums);
        } else {  // half a unit
            T last[MOST_ROWS * unit] = {};
            for (int64_t row = 0; row < rows; row++) last[row * unit] = x[row * inputs + k];
            add_piece(w, beside, unit, last, unit, rows, false, sums);
        }
    }
}

// A piece of bf16 in codes, laid out a part at a time.
void lay_out_coded(const Linear& m, int64_t piece, int64_t beside, int64_t stride, uint8_t* out) {
#if defined(CODES)
    alignas(64) char turned[BLOCK * SIDE * LINE];
    CodeWriter writer(m.codes[piece], beside, out);
    for (int64_t at = 0; at < stride; at += BLOCK * 4) {
        const int64_t some = std::min(BLOCK * 4, stride - at);
        for (int64_t c = 0; c < beside; c++)
            turn(static_cast<const char*>(m.weight) + m.output(piece * SIDE + c) * stride + at, stride, TILE, some, 0, beside,
                 turned + c * LINE);
        writer.write(reinterpret_cast<const uint16_t*>(turned), some / 8);
    }
#endif
}

}  // namespace

template <class T>
void piece_sums(const Linear& m, int64_t piece, int64_t inputs, const T* x, int64_t rows, Sum<T>* sums) {
    const int64_t first = piece * SIDE, beside = m.beside(piece);
    std::fill(sums, sums + rows * beside, Sum<T>{});
    if constexpr (sizeof(T) > 1)
        if (!m.laid) return add_lying(m, first, beside, inputs, x, rows, sums);
    if constexpr (std::is_same_v<T, bf16>)
        if (m.codes) return add_coded(m, piece, beside, inputs, x, rows, sums);
    add_piece(static_cast<const T*>(m.weight) + first * TILE * inputs, beside, inputs, x, inputs, rows, true, sums);
}
template void piece_sums(const Linear&, int64_t, int64_t, const float*, int64_t, Floats*);
template void piece_sums(const Linear&, int64_t, int64_t, const bf16*, int64_t, Floats*);
template void piece_sums(const Linear&, int64_t, int64_t, const int8_t*, int64_t, Ints*);

void lay_out(const Linear& m, int64_t stride, void* out) {
    shared(m.pieces(), [&](int64_t piece) {
        const int64_t beside = m.beside(piece);
        if (m.codes) return lay_out_coded(m, piece, beside, stride, static_cast<uint8_t*>(out) + coded_size(piece * SIDE, stride / 2));
        for (int64_t c = 0; c < beside; c++)
            turn(static_cast<const char*>(m.weight) + m.output(piece * SIDE + c) * stride, stride, TILE, stride, 0, beside,
                 static_cast<char*>(out) + piece * SIDE * TILE * stride + c * LINE);
    });
}
