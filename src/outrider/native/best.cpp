// The highest numbers of a few rows, and log probabilities of the best.

#include "rows.h"

namespace {

// The highest number and the first place where it is; NaN where there is one.
struct Highest {
    int64_t place;
    float value;

    void join(int64_t at, float found) {
        if (value != value || !(found > value || (found == value && at < place) || found != found)) return;
        place = at, value = found;
    }
};

template <class T>
Highest highest_of(const T* x, int64_t begin, int64_t end) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, where = Ints{} + int32_t(begin), odd = {};
    Floats most = Floats{} - INFINITY;
    int64_t i = begin;
    for (lanes += int32_t(begin); i + LANES <= end; i += LANES, lanes += LANES) {
        const Floats some = load(x + i);
        where = some > most ? lanes : where;
        most = some > most ? some : most;
        odd |= some != some;
    }
    Highest all = {begin, -INFINITY};
    for (int lane = 0; lane < LANES; lane++) all.join(where[lane], odd[lane] ? NAN : most[lane]);
    for (; i < end; i++) all.join(i, value(x[i]));
    return all;
}

// Every thread looks at the columns that it has in its cache where it multiplied for them.
template <class T>
void highest_of_rows(const T* x, int64_t rows, int64_t width, int64_t* places, float* values, int64_t threads) {
    for (int64_t row = 0; row < rows; row++) places[row] = 0, values[row] = -INFINITY;
#pragma omp parallel num_threads(int(threads))
    {
        const int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
        for (int64_t row = 0; row < rows; row++) {
            const Highest part = highest_of(x + row * width, width * id / team, width * (id + 1) / team);
#pragma omp critical
            {
                Highest all = {places[row], values[row]};
                all.join(part.place, part.value);
                places[row] = all.place, values[row] = all.value;
            }
        }
    }
}

// Sums of exponentials relative to the highest; NaN and infinity go their way.
template <class T>
float log_of_sum(const T* x, int64_t width, float highest) {
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) sums += exponential(load(x + i) - highest);
    float sum = total(sums);
    for (; i < width; i++) sum += std::exp(value(x[i]) - highest);
    return highest + std::log(sum);
}

// The `count` best of a row, best first and the first place of equal ones, and their log probabilities; places are -1 where there
// are no more above minus infinity.
template <class T>
void best_of(const T* x, int64_t width, int64_t count, int64_t* places, float* logs) {
    const Ints start = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float last = INFINITY, all = 0.0f;
    int64_t after = -1;  // where the last one was
    for (int64_t n = 0; n < count; n++) {
        Ints lanes = start, where = Ints{} - 1;
        Floats most = Floats{} - INFINITY;
        int64_t i = 0, place = -1;
        for (; i + LANES <= width; i += LANES, lanes += LANES) {
            const Floats some = load(x + i);
            const Ints better = (some > most) & ((some < last) | ((some == last) & (lanes > int32_t(after))));
            where = better ? lanes : where, most = better ? some : most;
        }
        float found = -INFINITY;
        auto take = [&](int64_t at, float one) {
            if (at < 0 || one < found || !(one > -INFINITY) || !(one < last || (one == last && at > after))) return;
            if (one > found || at < place) place = at, found = one;
        };
        for (int lane = 0; lane < LANES; lane++) take(where[lane], most[lane]);
        for (; i < width; i++) take(i, value(x[i]));
        if (n == 0) all = log_of_sum(x, width, found);
        places[n] = place, logs[n] = found - all;
        last = found, after = place;
        if (place < 0) last = -INFINITY;
    }
}

}  // namespace

extern "C" {

// Of each row of x [M, V], rows `stride` numbers apart, the places [M, count] of its best numbers and their log probabilities.
void outrider_best(int64_t bytes, const void* x, int64_t rows, int64_t stride, int64_t width, int64_t count, int64_t* places,
                   float* logs) {
    for (int64_t row = 0; row < rows; row++, places += count, logs += count)
        if (bytes == 2) best_of(static_cast<const bf16*>(x) + row * stride, width, count, places, logs);
        else best_of(static_cast<const float*>(x) + row * stride, width, count, places, logs);
}

// The highest number of each row of x [M, V] and where it is, the first place of several; NaN where there is one.
void outrider_highest(int64_t bytes, const void* x, int64_t rows, int64_t width, int64_t* places, float* values, int64_t threads) {
    if (bytes == 2) highest_of_rows(static_cast<const bf16*>(x), rows, width, places, values, threads);
    else highest_of_rows(static_cast<const float*>(x), rows, width, places, values, threads);
}
}
