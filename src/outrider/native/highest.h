// The highest score of a row and where it is, with or without noise.
#pragma once

#include <cmath>

#include "lanes.h"

// The highest number and the first place where it is; NaN where there is one.
struct Highest {
    int64_t place;
    float value;

    void join(int64_t at, float found) {
        if (value != value || !(found > value || (found == value && at < place) || found != found)) return;
        place = at, value = found;
    }
};

// Scores of a row: as they are, or divided by a temperature and with noise on top of that.
template <class T>
struct Plain {
    const T* x;
    Floats some(int64_t i) const { return load(x + i); }
    float one(int64_t i) const { return value(x[i]); }
};
template <class T>
struct Noisy {
    const T* x;
    float temperature;
    const float* noise;
    Floats some(int64_t i) const { return load(x + i) / temperature + load(noise + i); }
    float one(int64_t i) const { return value(x[i]) / temperature + noise[i]; }
};

template <class Scores>
inline Highest highest_of(Scores scores, int64_t begin, int64_t end) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, where = Ints{} + int32_t(begin), odd = {};
    Floats most = Floats{} - INFINITY;
    int64_t i = begin;
    for (lanes += int32_t(begin); i + LANES <= end; i += LANES, lanes += LANES) {
        const Floats some = scores.some(i);
        where = some > most ? lanes : where;
        most = some > most ? some : most;
        odd |= some != some;
    }
    Highest all = {begin, -INFINITY};
    for (int lane = 0; lane < LANES; lane++) all.join(where[lane], odd[lane] ? NAN : most[lane]);
    for (; i < end; i++) all.join(i, scores.one(i));
    return all;
}
