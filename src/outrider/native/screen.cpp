// The highest score of a row without most of its logits: bounds are enough to see that they are lower.
//
// A logit is a sum of products, rounded; a score is a logit, or a logit divided by a temperature with noise on top. No step of that
// makes a larger number smaller than a smaller one. So the same steps make a bound of the score from one of the sum, also where
// rounding makes scores equal. The piece of outputs with the highest bound is multiplied first, then every other piece whose bound
// reaches the best score of that one: by the kernel that makes all logits, so that what is found has its bits.

#include "bounds.h"
#include "highest.h"

namespace {

// What becomes of logits from an output on.
struct AsTheyAre {
    template <class T>
    Plain<T> operator()(const T* x, int64_t) const { return {x}; }
};
struct WithNoise {
    float temperature;
    const float* noise;
    template <class T>
    Noisy<T> operator()(const T* x, int64_t first) const { return {x, temperature, noise + first}; }
};

// The highest scores of rows, by pieces whose highest bounds are `top`.
template <class T, class Scores>
class Search {
  public:
    Search(const Screen& screen, const T* x, int64_t rows, Scores scores, int64_t threads, Workspace& space)
        : m(screen), x(x), rows(rows), pieces(m.exact.pieces()), scores(scores), tops(space.take<float>(rows * pieces)),
          starts(space.take<Start>(rows)), best(space.take<Highest>(rows)), gathered(space.take<T>(threads * together(rows) * m.inputs)) {}
    static int64_t padded(const Screen& m, int64_t rows, int64_t threads) {
        return Workspace::padded<float>(rows * m.exact.pieces()) + Workspace::padded<Start>(rows) + Workspace::padded<Highest>(rows) +
               Workspace::padded<T>(threads * together(rows) * m.inputs);
    }
    float& top(int64_t row, int64_t piece) { return tops[row * pieces + piece]; }
    int64_t first(int64_t piece) const { return m.exact.output(piece * SIDE); }
    int64_t count(int64_t piece) const { return std::min(m.exact.outs, (piece + 1) * COLUMNS) - first(piece); }

    void operator()() {
#pragma omp barrier
        each(rows, [&](int64_t row) {
            starts[row].piece = std::max_element(&top(row, 0), &top(row, 0) + pieces) - &top(row, 0);
            best[row] = {0, -INFINITY};
            multiply(starts[row].piece, x + row * m.inputs, 1, [&](int64_t) { return row; });
            starts[row].value = best[row].value;
        });
        shared(pieces, [&](int64_t piece) { go_on(piece); });
#pragma omp barrier
    }
    const Highest& operator[](int64_t row) const { return best[row]; }

  private:
    struct Start {
        int64_t piece;
        float value;
    };
    const Screen& m;
    const T* x;
    const int64_t rows, pieces;
    const Scores scores;
    float* tops;    // [M, pieces]
    Start* starts;  // [M]
    Highest* best;  // [M]
    T* gathered;    // [threads, rows together, K]

    static int64_t together(int64_t rows) { return std::min(rows, MOST_ROWS); }

    // The rows whose best score may be in a piece; of NaN nothing is known.
    void go_on(int64_t piece) {
        T* some = gathered + omp_get_thread_num() * together(rows) * m.inputs;
        int64_t which[MOST_ROWS], many = 0;
        for (int64_t row = 0; row < rows; row++) {
            if (!(top(row, piece) < starts[row].value) && starts[row].piece != piece) {
                memcpy(some + many * m.inputs, x + row * m.inputs, m.inputs * sizeof(T));
                which[many++] = row;
            }
            if (many == MOST_ROWS || (many && row == rows - 1)) {
                multiply(piece, some, many, [&](int64_t i) { return which[i]; });
                many = 0;
            }
        }
    }

    template <class Which>
    void multiply(int64_t piece, const T* some, int64_t many, Which which) {
        alignas(64) T logits[MOST_ROWS][COLUMNS];
        const int64_t start = first(piece);
        product_piece(m.exact, piece, m.inputs, some, many, [&](int64_t i, int64_t o, Floats found) {
            store_some(logits[i] + o - start, found + m.exact.shift(o), m.exact.some());
        });
        for (int64_t i = 0; i < many; i++) {
            const Highest found = highest_of(scores(logits[i], start), 0, count(piece));
#pragma omp critical
            best[which(i)].join(start + found.place, found.value);
        }
    }
};

template <class T, class Scores>
void tell(const Search<T, Scores>& found, int64_t rows, int64_t* places, float* values) {
    for (int64_t row = 0; row < rows; row++) places[row] = found[row].place, values[row] = found[row].value;
}

// Of all rows, as they are. Bounds stay where they are made.
template <class T>
void highest_of_rows(const Screen& m, const T* x, int64_t rows, int64_t* places, float* values, int64_t threads, Workspace& space) {
    space.begin(Bounds<T>::padded(m, rows) + Search<T, AsTheyAre>::padded(m, rows, threads));
    Bounds<T> bounds(m, x, rows, space);
    Search<T, AsTheyAre> search(m, x, rows, AsTheyAre{}, threads, space);
#pragma omp parallel num_threads(int(threads))
    {
        bounds([&](int64_t row, int64_t piece, const Floats* found, int64_t beside) {
            Floats most = found[0];
            for (int64_t c = 1; c < beside; c++) most = found[c] > most ? found[c] : most;
            T rounded;
            set(&rounded, most_of(most));
            search.top(row, piece) = value(rounded);
        });
        search();
    }
    tell(search, rows, places, values);
}

template <class T>
void bounds_of_rows(const Screen& m, const T* x, int64_t rows, T* out, int64_t threads, Workspace& space) {
    space.begin(Bounds<T>::padded(m, rows));
    Bounds<T> bounds(m, x, rows, space);
#pragma omp parallel num_threads(int(threads))
    bounds([&](int64_t row, int64_t piece, const Floats* found, int64_t beside) {
        for (int64_t c = 0; c < beside; c++) store(out + row * m.exact.outs + m.exact.output(piece * SIDE + c), found[c]);
    });
}

// Of a row with noise, of whose logits the bounds are known.
template <class T>
void drawn_of_row(const Screen& m, const T* x, const T* bounds, WithNoise scores, int64_t* place, float* value, int64_t threads,
                  Workspace& space) {
    space.begin(Search<T, WithNoise>::padded(m, 1, threads));
    Search<T, WithNoise> search(m, x, 1, scores, threads, space);
#pragma omp parallel num_threads(int(threads))
    {
        shared(m.exact.pieces(), [&](int64_t piece) {
            const int64_t first = search.first(piece), count = search.count(piece);
            const auto bound = scores(bounds + first, first);
            Floats most = bound.some(0);
            for (int64_t i = LANES; i + LANES <= count; i += LANES) most = bound.some(i) > most ? bound.some(i) : most;
            most = bound.some(count - LANES) > most ? bound.some(count - LANES) : most;
            search.top(0, piece) = most_of(most);
        });
        search();
    }
    tell(search, 1, place, value);
}

// A weight's bytes, larger by 128, their scales, and how far they are from it.
template <class T>
void in_bytes(const T* w, int64_t outs, int64_t inputs, uint8_t* out, float* scales, float* errors, float* sizes, int64_t threads) {
#pragma omp parallel for num_threads(int(threads))
    for (int64_t o = 0; o < outs; o++) {
        const T* row = w + o * inputs;
        double top = 0.0, apart = 0.0, size = 0.0;
        for (int64_t i = 0; i < inputs; i++) top = std::max(top, std::fabs(double(value(row[i]))));
        const float scale = float(top / 127.0);
        const double by = scale > LEAST_SCALE ? 1.0 / scale : 0.0;
        for (int64_t i = 0; i < inputs; i++) {
            const double wide = value(row[i]), near = std::max(-127.0, std::min(127.0, std::nearbyint(wide * by)));
            const double off = wide - near * scale;
            apart += off * off, size += near * scale * (near * scale);
            out[o * inputs + i] = uint8_t(int(near) + 128);
        }
        scales[o] = scale;
        errors[o] = float(std::sqrt(apart)) * (1.0f + 0x1p-20f) + TINY;
        sizes[o] = float(std::sqrt(size)) * (1.0f + 0x1p-20f) + TINY;
    }
}

}  // namespace

extern "C" {

// Bytes [V, K] of a weight of two or four bytes a number, and by output scales, errors and sizes; those are no numbers where the
// weight's are not.
void outrider_in_bytes(int64_t bytes, const void* weight, int64_t outs, int64_t inputs, uint8_t* out, float* scales, float* errors,
                       float* sizes, int64_t threads) {
    if (bytes == 2) in_bytes(static_cast<const bf16*>(weight), outs, inputs, out, scales, errors, sizes, threads);
    else in_bytes(static_cast<const float*>(weight), outs, inputs, out, scales, errors, sizes, threads);
}

// The highest logit of every row of x [M, K] and where it is, the first place of several; NaN where there is one.
int outrider_screen_highest(const Screen* m, const void* x, int64_t rows, int64_t* places, float* values, int64_t threads) {
    return in_workspace([&](Workspace& space) {
        if (m->bytes == 2) highest_of_rows(*m, static_cast<const bf16*>(x), rows, places, values, threads, space);
        else highest_of_rows(*m, static_cast<const float*>(x), rows, places, values, threads, space);
    });
}

// Upper bounds [M, V] of the logits of x [M, K].
int outrider_screen_bounds(const Screen* m, const void* x, int64_t rows, void* out, int64_t threads) {
    return in_workspace([&](Workspace& space) {
        if (m->bytes == 2) bounds_of_rows(*m, static_cast<const bf16*>(x), rows, static_cast<bf16*>(out), threads, space);
        else bounds_of_rows(*m, static_cast<const float*>(x), rows, static_cast<float*>(out), threads, space);
    });
}

// The highest of a row's logits divided by a temperature with noise [V] on top, and where it is: of x [K], and the bounds [V] of its
// logits.
int outrider_screen_drawn(const Screen* m, const void* x, const void* bounds, float temperature, const float* noise, int64_t* place,
                          float* value, int64_t threads) {
    const WithNoise scores{temperature, noise};
    return in_workspace([&](Workspace& space) {
        if (m->bytes == 2)
            drawn_of_row(*m, static_cast<const bf16*>(x), static_cast<const bf16*>(bounds), scores, place, value, threads, space);
        else drawn_of_row(*m, static_cast<const float*>(x), static_cast<const float*>(bounds), scores, place, value, threads, space);
    });
}
}
