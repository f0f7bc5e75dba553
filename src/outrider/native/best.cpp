// The highest numbers of a few rows, with or without noise, log probabilities of the best, and what noise is made of.

#include "highest.h"
#include "rows.h"

namespace {

// Every thread looks at the columns that it has in its cache where it multiplied for them.
template <class Of>
void highest_of_rows(Of of, int64_t rows, int64_t width, int64_t* places, float* values, int64_t threads) {
    for (int64_t row = 0; row < rows; row++) places[row] = 0, values[row] = -INFINITY;
#pragma omp parallel num_threads(int(threads))
    {
        const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t row = 0; row < rows; row++) {
            const Highest part = highest_of(of(row), width * id / team, width * (id + 1) / team);
#pragma omp critical
            {
                Highest all = {places[row], values[row]};
                all.join(part.place, part.value);
                places[row] = all.place, values[row] = all.value;
            }
        }
    }
}

template <class T>
void highest_of_all(const T* x, int64_t rows, int64_t width, float temperature, const float* noise, int64_t* places, float* values,
                    int64_t threads) {
    if (noise)
        highest_of_rows([&](int64_t row) { return Noisy<T>{x + row * width, temperature, noise}; }, rows, width, places, values, threads);
    else
        highest_of_rows([&](int64_t row) { return Plain<T>{x + row * width}; }, rows, width, places, values, threads);
}

template <class Scores>
struct Scaled {
    Scores scores;
    float by;
    Floats some(int64_t i) const { return scores.some(i) * by; }
    float one(int64_t i) const { return scores.one(i) * by; }
};

// The log of the sum of exponentials.
template <class Scores>
float log_of_sum(Scores scores, int64_t width) {
    const float highest = highest_of(scores, 0, width).value;
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sums += exponential(scores.some(i) - highest);
    float sum = total(sums);
    for (; i < width; i++) sum += std::exp(scores.one(i) - highest);
    return highest + std::log(sum);
}

// The `count` places of a row with the best scores, best first and the first of equal ones, and the logs of the softmax of all scores
// times `sure`; places are -1 where there are no more above minus infinity.
template <class Scores>
void best_of(Scores scores, float sure, int64_t width, int64_t count, int64_t* places, float* logs) {
    const Ints start = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const float all = log_of_sum(Scaled<Scores>{scores, sure}, width);
    float last = INFINITY;
    int64_t after = -1;  // where the last one was
    for (int64_t n = 0; n < count; n++) {
        Ints lanes = start, where = Ints{} - 1;
        Floats most = Floats{} - INFINITY;
        int64_t i = 0, place = -1;
        for (; i + LANES <= width; i += LANES, lanes += LANES) {
            const Floats some = scores.some(i);
            const Ints better = (some > most) & ((some < last) | ((some == last) & (lanes > int32_t(after))));
            where = better ? lanes : where, most = better ? some : most;
        }
        float found = -INFINITY;
        auto take = [&](int64_t at, float one) {
            if (at < 0 || one < found || !(one > -INFINITY) || !(one < last || (one == last && at > after))) return;
            if (one > found || at < place) place = at, found = one;
        };
        for (int lane = 0; lane < LANES; lane++) take(where[lane], most[lane]);
        for (; i < width; i++) take(i, scores.one(i));
        places[n] = place, logs[n] = place < 0 ? -INFINITY : scores.one(place) * sure - all;
        last = place < 0 ? -INFINITY : found, after = place;
    }
}

template <class T>
void best_of_all(const T* x, int64_t rows, int64_t stride, int64_t width, int64_t count, float temperature, float sure,
                 const float* noise, int64_t* places, float* logs) {
    for (int64_t row = 0; row < rows; row++, x += stride, places += count, logs += count)
        if (noise) best_of(Noisy<T>{x, temperature, noise}, sure, width, count, places, logs);
        else best_of(Plain<T>{x}, 1.0f, width, count, places, logs);
}

}  // namespace

extern "C" {

// Of each row of x [M, V], rows `stride` numbers apart, the places [M, count] of its best numbers and the logs of their softmax. With
// noise, numbers are divided by the temperature and have the noise [V] on top, or that at the ids [V], and the softmax is that of so
// much of them as `sure` says.
int outrider_best(int64_t bytes, const void* x, int64_t rows, int64_t stride, int64_t width, int64_t count, float temperature,
                  float sure, const float* noise, const int64_t* ids, int64_t* places, float* logs) {
    return in_workspace([&](Workspace& space) {
        if (noise && ids) {
            space.begin(space.padded<float>(width));
            float* own = space.take<float>(width);
            for (int64_t i = 0; i < width; i++) own[i] = noise[ids[i]];
            noise = own;
        }
        if (bytes == 2) best_of_all(static_cast<const bf16*>(x), rows, stride, width, count, temperature, sure, noise, places, logs);
        else best_of_all(static_cast<const float*>(x), rows, stride, width, count, temperature, sure, noise, places, logs);
    });
}

// The highest number of each row of x [M, V] and where it is, the first place of several; NaN where there is one. With noise [V],
// of numbers that are divided by the temperature and have it added.
void outrider_highest(int64_t bytes, const void* x, int64_t rows, int64_t width, float temperature, const float* noise, int64_t* places,
                      float* values, int64_t threads) {
    if (bytes == 2) highest_of_all(static_cast<const bf16*>(x), rows, width, temperature, noise, places, values, threads);
    else highest_of_all(static_cast<const float*>(x), rows, width, temperature, noise, places, values, threads);
}

// Numbers from -1 to below 0 by a hash of the state and their place, as `noise.py` has them.
void outrider_hashed(uint64_t state, int64_t size, float* out) {
    for (int64_t i = 0; i < size; i++) {
        uint64_t x = state + uint64_t(i) * 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        const float u = (float(uint32_t(x >> 32)) + 0.5f) * 0x1p-32f;
        out[i] = -(u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f);
    }
}
}
