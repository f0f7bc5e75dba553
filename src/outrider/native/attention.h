// Attention of a few nodes to the slots that each of them sees, and where keys and values are held.
//
// A lane is a query head of a node. Lanes of a key-value head are computed some at a time: scores first, then weights, then the
// weighted sum of values. A thread does all three for its lanes, and waits for nobody.
//
// Keys of sixteen slots lie side by side, unit by unit: a vector holds a unit of all of them, so scores cost what lanes there are.
// Values lie slot after slot.
//
// A score is a sum in the order of units, and a value in the order of slots, where a slot that is not seen adds exactly nothing. The
// sum of weights is made of whole numbers, the same in any order. So a token has the same bits wherever its text lies.
//
// Shapes: B rows, N nodes, M = B * N, H query heads, G key-value heads, R = H / G, E head size, S slots, C slots there is room for (whole
// blocks), J blocks of sixteen slots. T is the type of queries, keys and values: bf16 or float.
#pragma once

#include <utility>

#include "rows.h"

typedef int64_t Longs __attribute__((vector_size(64)));

#if defined(__AVX512F__)
constexpr int MOST_LANES = 12;  // at once: with two vectors as many sums as registers hold
#else
constexpr int MOST_LANES = 2;
#endif
constexpr int64_t MOST_SIZE = 256;

// A key of a slot: its units lie `Step<T>::size` numbers apart.
template <class T>
inline T* key_at(T* keys, int64_t slot, int64_t size) {
    return keys + slot / LANES * LANES * size + slot % LANES * Step<T>::unit;
}

// Numbers that go through together, as two vectors in an order of their own.
template <class T>
struct Pair;
template <>
struct Pair<float> {
    static constexpr int64_t count = 2 * LANES;
    Floats one, two;
    explicit Pair(const float* p) : one(load(p)), two(load(p + LANES)) {}
    static void put(float* p, Floats one, Floats two) { store(p, one), store(p + LANES, two); }
};
template <>
struct Pair<bf16> {  // every other number in one vector, those between in the other
    static constexpr int64_t count = 2 * LANES;
    typedef Ints Loose __attribute__((aligned(2)));
    Floats one, two;
    explicit Pair(const bf16* p) {
        const Ints both = *reinterpret_cast<const Loose*>(p);
        one = (Floats)(both << 16), two = (Floats)(both & int32_t(0xffff0000u));
    }
    static void put(bf16* p, Floats one, Floats two) { *reinterpret_cast<Loose*>(p) = rounded(one) | rounded(two) << 16; }
};

// Does work with a number, of N or fewer, that the compiler knows.
template <int N, class Work>
inline void with_number(int64_t number, Work work) {
    if constexpr (N > 1)
        if (number < N) return with_number<N - 1>(number, work);
    work(std::integral_constant<int, N>{});
}

template <class T>
class Attention {
  public:
    struct Sizes {
        int64_t batch, nodes, slots, room, heads, groups, size, kinds, threads;
        int64_t repeat() const { return heads / groups; }
        int64_t lanes() const { return repeat() * nodes; }  // of a key-value head
        int64_t blocks() const { return (slots + LANES - 1) / LANES; }
        int64_t queries() const { return batch * nodes * heads * size; }
        int64_t seen() const { return kinds * batch * nodes * blocks(); }
        int64_t scores() const { return std::min<int64_t>(MOST_LANES, lanes()) * blocks(); }  // of a thread
    };
    static int64_t padded(const Sizes& n) {
        return Workspace::padded<T>(n.queries()) + Workspace::padded<uint16_t>(n.seen()) +
               Workspace::padded<Floats>(n.threads * n.scores()) + Workspace::padded<uint16_t>(n.threads * n.blocks());
    }
    Attention(const Sizes& sizes, Workspace& space)
        : n(sizes), queries(space.take<T>(n.queries())), seen(space.take<uint16_t>(n.seen())),
          scores(space.take<Floats>(n.threads * n.scores())), anyone(space.take<uint16_t>(n.threads * n.blocks())) {}

    T* query(int64_t row, int64_t head) { return queries + (row * n.heads + head) * n.size; }

    // What the nodes see: by kind bool [M, S]. Every thread of a team does its share.
    void see(const uint8_t* const* sees) {
        const int64_t rows = n.batch * n.nodes, blocks = n.blocks();
        each(n.kinds * rows, [&](int64_t i) {
            const uint8_t* of_node = sees[i / rows] + i % rows * n.slots;
            for (int64_t j = 0; j < blocks; j++) {
                uint16_t bits = 0;
                for (int64_t s = j * LANES; s < std::min((j + 1) * LANES, n.slots); s++) bits |= (of_node[s] != 0) << s % LANES;
                seen[i * blocks + j] = bits;
            }
        });
    }

    // What all lanes of the nodes from `from` on attend to [M, H * E], from keys and values [B, G, C, E]. Every thread of a team does its
    // share.
    void operator()(int64_t kind, int64_t from, const T* keys, const T* values, float scale, T* out) {
        const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
        const int64_t left_out = n.repeat() * from, lanes = n.lanes() - left_out, all = n.batch * n.groups * lanes;
        for (int64_t at = all * id / team, end = all * (id + 1) / team, some; at < end; at += some) {
            const int64_t group = at / lanes, left = std::min(end, (group + 1) * lanes) - at, first = left_out + at % lanes;
            const int64_t parts = (left + MOST_LANES - 1) / MOST_LANES, held = group * n.room * n.size;
            some = (left + parts - 1) / parts;
            with_number<MOST_LANES>(some, [&](auto count) {
                attend<count>(kind, group / n.groups, group % n.groups, first, keys + held, values + held, scale, out);
            });
        }
#pragma omp barrier
    }

  private:
    static constexpr int64_t UNIT = Step<T>::unit, AHEAD = 2, ROWS_AHEAD = 32;  // blocks of keys and rows of values asked for ahead
    const Sizes n;
    T* queries;          // [M, H, E]
    uint16_t* seen;      // [kinds, M, J]
    Floats* scores;      // [threads, J, lanes]
    uint16_t* anyone;    // [threads, J]

    template <int COUNT>
    void attend(int64_t kind, int64_t b, int64_t g, int64_t first, const T* keys, const T* values, float scale, T* out) {
        const int64_t repeat = n.repeat(), blocks = n.blocks(), mine = omp_get_thread_num();
        alignas(64) T asked[MOST_SIZE * COUNT];  // units of all lanes side by side
        const uint16_t* sees[COUNT];
        T* outs[COUNT];
        for (int i = 0; i < COUNT; i++) {
            const int64_t row = b * n.nodes + (first + i) / repeat, head = g * repeat + (first + i) % repeat;
            for (int64_t e = 0; e < n.size; e += UNIT) memcpy(asked + e * COUNT + i * UNIT, query(row, head) + e, UNIT * sizeof(T));
            sees[i] = seen + (kind * n.batch * n.nodes + row) * blocks;
            outs[i] = out + (row * n.heads + head) * n.size;
        }
        Floats* x = scores + mine * n.scores();
        uint16_t* any = anyone + mine * blocks;
        score<COUNT>(asked, keys, scale, sees, x, any);
        float shares[COUNT];
        for (int i = 0; i < COUNT; i++) shares[i] = weigh(x + i, COUNT);
        for (int64_t e = 0; e < n.size; e += Pair<T>::count)
            if (e + Pair<T>::count <= n.size)
                mix<COUNT>(values + e, e == 0, x, any, shares, [](const T* p) { return Pair<T>(p); },
                           [&](int i, Floats one, Floats two) { Pair<T>::put(outs[i] + e, one, two); });
            else
                mix_part<COUNT>(values + e, n.size - e, e == 0, x, any, shares, [&](int i) { return outs[i] + e; });
    }

    template <int COUNT>
    void score(const T* asked, const T* keys, float scale, const uint16_t* const* sees, Floats* x, uint16_t* any) {
        typedef Step<T> S;
        const Ints lanes = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        const int64_t blocks = n.blocks(), block = LANES * n.size;
        for (int64_t j = 0; j < blocks; j++, keys += block, x += COUNT) {
            any[j] = 0;
            for (int i = 0; i < COUNT; i++) any[j] |= sees[i][j];
            Floats dot[COUNT] = {};
            const T* ask = asked;
            for (const T *key = keys, *end = any[j] ? keys + block : keys; key < end; key += S::size, ask += COUNT * UNIT) {
                const typename S::Vector all = S::read(key);
                __builtin_prefetch(key + AHEAD * block, 0, 2);
                UNROLLED
                for (int i = 0; i < COUNT; i++) dot[i] = S::add(dot[i], all, S::spread(ask + i * UNIT));
            }
            for (int i = 0; i < COUNT; i++) {
                x[i] = dot[i] * scale;
                if (sees[i][j] != 0xffff) x[i] = ((Ints{} + sees[i][j]) & lanes) != 0 ? x[i] : Floats{} - INFINITY;
            }
        }
    }

    // Scores of a lane, `step` vectors apart, become weights; what sums of values are to be multiplied with.
    float weigh(Floats* x, int64_t step) {
        constexpr int SOME = 4;
        constexpr float ONE = 1 << 28;  // so that as many fit into 31 bits
        const int64_t end = n.blocks() * step;
        Floats most = Floats{} - INFINITY;
        for (int64_t j = 0; j < end; j += step) most = x[j] > most ? x[j] : most;
        float top = -INFINITY;
        for (int i = 0; i < LANES; i++) top = std::max(top, most[i]);
        if (top == -INFINITY) top = 0.0f;
        Longs sum = {};
        for (int64_t j = 0; j < end;) {
            Ints part = {};
            for (const int64_t some = std::min(end, j + SOME * step); j < some; j += step) {
                x[j] = exponential(x[j] - top);
                part += __builtin_convertvector(x[j] * ONE, Ints);
            }
            sum += __builtin_convertvector(__builtin_shufflevector(part, part, 0, 1, 2, 3, 4, 5, 6, 7), Longs);
            sum += __builtin_convertvector(__builtin_shufflevector(part, part, 8, 9, 10, 11, 12, 13, 14, 15), Longs);
        }
        int64_t all = 0;
        for (int i = 0; i < 8; i++) all += sum[i];
        return all > 0 ? ONE / float(all) : 1.0f;
    }

    // Two vectors of the values of all slots that any of the lanes sees; `asks`: whether rows that follow are asked for.
    template <int COUNT, class Read, class Put>
    void mix(const T* values, bool asks, const Floats* x, const uint16_t* any, const float* shares, Read read, Put put) {
        const int64_t lines = asks ? (n.size * int64_t(sizeof(T)) + LINE - 1) / LINE : 0;
        Floats sum[2][COUNT] = {};
        for (int64_t j = 0; j < n.blocks(); j++, x += COUNT, values += LANES * n.size) {
            if (!any[j]) continue;
            const float* weights = reinterpret_cast<const float*>(x);
            const T* at = values;
            for (int s = 0; s < LANES; s++, at += n.size) {
                if (!(any[j] >> s & 1)) continue;
                for (int64_t line = 0; line < lines; line++)
                    __builtin_prefetch(reinterpret_cast<const char*>(at + ROWS_AHEAD * n.size) + line * LINE, 0, 2);
                const auto pair = read(at);
                UNROLLED
                for (int i = 0; i < COUNT; i++) {
                    const float weight = weights[i * LANES + s];
                    sum[0][i] += pair.one * weight, sum[1][i] += pair.two * weight;
                }
            }
        }
        for (int i = 0; i < COUNT; i++) put(i, sum[0][i] * shares[i], sum[1][i] * shares[i]);
    }

    // The same for fewer numbers.
    template <int COUNT, class Out>
    void mix_part(const T* values, int64_t some, bool asks, const Floats* x, const uint16_t* any, const float* shares, Out out) {
        mix<COUNT>(
            values, asks, x, any, shares,
            [&](const T* p) {
                T held[Pair<T>::count] = {};
                memcpy(held, p, some * sizeof(T));
                return Pair<T>(held);
            },
            [&](int i, Floats one, Floats two) {
                T held[Pair<T>::count];
                Pair<T>::put(held, one, two);
                memcpy(out(i), held, some * sizeof(T));
            });
    }
};
