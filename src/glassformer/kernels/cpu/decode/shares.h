// How the threads of a step share its work, and what they write on the way.
#pragma once
#include "packed.h"
#include "pool.h"

namespace glass {

// Vectors for products with one kind of matrix: of many there is one set that all threads prepare together, of few each
// thread has its own.
struct Prepared {
    std::vector<Vectors> sets;
    bool joint = false, needed = false;

    void shape(const Matrix& w, int batch, int threads) {
        joint = batch >= MANY, needed = w.rows && batch && (joint || w.kind != F32);
        if ((int)sets.size() < threads) sets.resize(threads);
        for (int t = 0; t < (joint ? 1 : threads); t++) sets[t].shape(w, batch, needed);
    }
    const Vectors& take(int t, int threads, const float* x, long pitch, Barrier& barrier) {
        Vectors& set = sets[joint ? 0 : t];
        if (needed) joint ? set.take(x, pitch, t, threads) : set.take(x, pitch, 0, 1);
        if (joint) barrier.wait();
        return set;
    }
};

// Floats from one vector to the next of n: an odd number of cache lines, because vectors at a distance of a power of two
// would push each other out of the caches.
inline long apart(long n) { return ((n + W - 1) / W | 1) * W; }

// Where the first cache line of some memory begins: vectors that lie across two are loaded at half the speed.
inline float* lined(std::vector<float>& held) {
    return held.data() + (-(uintptr_t)held.data() / sizeof(float)) % W;
}

// What a step writes on its way. It is kept for the next: new memory costs a prompt of hundreds of tokens 5 %.
struct Scratch {
    static constexpr long MOST = 64 << 20;  // bytes that are kept
    std::vector<float> qkv, mixed, first, second, hidden, gates, stream, normed;
    Prepared narrow, mixes, wide, judged;  // the stream, attention's output, the hidden layer, what the head reads
    long used = 0;

    float* need(std::vector<float>& held, long n) {
        if ((long)held.size() < n + W) held.resize(n + W);
        used += held.size() * sizeof(float);
        return lined(held);
    }
    static Scratch& kept() {  // under the pool's turn
        static Scratch* made = new Scratch;
        return *made;
    }
};

// Rows that a thread takes at once: a panel of those that many vectors meet, else about as much as CHUNK bytes.
inline int chunk_of(const Matrix& w, int batch, int threads) {
    constexpr long CHUNK = 256 << 10;
    if (batch >= MANY) return WIDE;
    const long bits = w.kind == F32 ? 32 : w.kind == BF16 ? 16 : w.kind == INT8 ? 8 : 4;
    const long rows = std::min(CHUNK * 8 / (w.columns * bits), (long)w.rows / threads);
    const bool threes = w.kind == F32 && batch > (SUMS < 24 ? 2 : 4);  // so many rows of float32 meet 4 or 8 vectors at once
    const int step = threes ? 24 : WIDE;
    return (int)std::max(rows / step * step, (long)step);
}

// work(first, last, soon) for rows of a matrix, and those that are probably next: each thread has a chunk of its own and
// then takes the next that nobody has, because memory serves threads unevenly. Who sums a row changes no bit.
template <class F>
inline void share_rows(int t, int threads, std::atomic<int>& taken, const Matrix& w, int batch, F work) {
    const int chunk = chunk_of(w, batch, threads), rows = w.rows;
    for (int i = t; (long)i * chunk < rows; i = threads + taken.fetch_add(1, std::memory_order_relaxed))
        work(i * chunk, std::min((i + 1) * chunk, rows), (i + threads) * chunk < rows ? (i + threads) * chunk : 0);
}

}  // namespace glass
