// What kernels over a few rows have in common: shares of threads, norms, memory.
#pragma once

#include <cmath>
#include <cstdlib>
#include <new>

#include "products.h"

// An even share of `count` for every thread, and a barrier.
template <class Work>
inline void each(int64_t count, Work work) {
    int64_t id = omp_get_thread_num(), team = omp_get_num_threads();
    for (int64_t i = count * id / team; i < count * (id + 1) / team; i++) work(i);
#pragma omp barrier
}

// out = x / rms(x) * weight
template <class In, class Out>
inline void normed(const In* x, const float* weight, float epsilon, int64_t width, Out* out) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(x + i) * load(x + i);
    float sum = total(squares);
    for (; i < width; i++) sum += value(x[i]) * value(x[i]);
    float factor = 1.0f / std::sqrt(sum / width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < width; i++) set(out + i, value(x[i]) * factor * weight[i]);
}

// Memory of the calling thread that passes use one after another.
class Workspace {
  public:
    void begin(int64_t bytes) {
        if (bytes > size) {
            free(data);
            data = static_cast<char*>(aligned_alloc(64, size = bytes + bytes / 2 / 64 * 64));
            if (!data) size = 0, throw std::bad_alloc();
        }
        used = 0;
    }
    template <class T>
    T* take(int64_t count) {
        char* at = data + used;
        used += padded<T>(count);
        return reinterpret_cast<T*>(at);
    }
    template <class T>
    static int64_t padded(int64_t count) { return (count * int64_t(sizeof(T)) + 63) / 64 * 64; }
    ~Workspace() { free(data); }

  private:
    char* data = nullptr;
    int64_t size = 0, used = 0;
};

// 0, or 1 where there is no memory for the work.
template <class Work>
inline int in_workspace(Work work) {
    thread_local Workspace space;
    try {
        work(space);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
