// How the threads of a step divide its work, and buffers.
#pragma once
#include "packed.h"
#include "pool.h"

namespace glass {

inline bool converts(const Matrix& w, int batch) { return w.kind != F32 || is_many(w, batch); }  // vectors are not read as they are

// Vectors in the form that one kind of matrix needs: many vectors are one set that all threads prepare together, of few
// vectors each thread has a copy.
struct Prepared {
    std::vector<Vectors> sets;
    int columns = 0;
    bool joint = false, needed = false;

    void shape(const Matrix& w, int batch, int threads) {
        columns = w.columns, joint = is_many(w, batch), needed = w.rows && batch && converts(w, batch);
        if ((int)sets.size() < threads) sets.resize(threads);
        for (int t = 0; t < (joint ? 1 : threads); t++) sets[t].shape(w, batch, needed);
    }
    const Vectors& take(int t, int threads, const float* x, long pitch, Barrier& barrier) {
        Vectors& set = sets[joint ? 0 : t];
        if (needed) joint ? set.pack(x, pitch, t, threads) : set.pack(x, pitch, 0, 1);
        if (joint) barrier.wait();
        return set;
    }
};

inline int bits_of(const Matrix& w) { return w.kind == F32 ? 32 : w.kind == BF16 ? 16 : w.kind == INT8 ? 8 : 4; }  // of a weight

// Rows that a thread takes at once: a panel for many vectors, otherwise about CHUNK bytes. Many floats that the L3 cache may not
// hold are read from memory for each chunk: it has up to eight panels then, but there are eight chunks or more.
inline int rows_per_chunk(const Matrix& w, int batch, int threads) {
    constexpr long CHUNK = 256 << 10, CACHED = 16 << 20;
    if (is_many(w, batch)) {
        const bool is_large = w.kind == F32 && (long)batch * w.columns * sizeof(float) > CACHED;
        return is_large ? std::min(std::max(w.rows / (8 * WIDE), 1), 8) * WIDE : WIDE;
    }
    const long rows = std::min(CHUNK * 8 / ((long)w.columns * bits_of(w)), (long)w.rows / threads);
    const int step = w.kind == F32 && batch > 2 ? 24 : WIDE;  // 24: see band (rows.h)
    return (int)std::max(rows / step * step, (long)step);
}

// Parts of the vectors that a matmul is divided by, next to its rows. With many vectors each thread has vectors of its own as
// far as possible: what it wrote for them before, it then reads from its own cache (GELU took six times as long with two
// threads). Each thread then reads all weights, which takes little of the time from 8 vectors for each bit of a weight on.
inline int shares_of(const Matrix& w, int batch, int threads) {
    return std::max(1, std::min(threads, batch / (8 * bits_of(w))));
}

// work(chunk) for all chunks of a matmul, by all threads. Each thread has a first chunk and then takes the next free one, first
// of its own share of the vectors, then of the others: memory serves threads unevenly, and other programs interrupt them.
// `taken`: the chunks that were taken in each share, beyond the first ones. Which thread sums a row does not change the result.
template <class F>
inline void for_chunks(int t, int threads, std::atomic<int>* taken, const Matrix& w, const Vectors& v, F work) {
    const int rows = rows_per_chunk(w, v.batch, threads), shares = shares_of(w, v.batch, threads);
    const auto first_thread = [=](int share) { return (share * threads + shares - 1) / shares; };
    for (int n = 0, share = t * shares / threads; n < shares; n++, share = (share + 1) % shares) {
        const int begin = first_thread(share), team = first_thread(share + 1) - begin;
        const auto next = [&] { return team + taken[share].fetch_add(1, std::memory_order_relaxed); };
        for (int i = n ? next() : t - begin; (long)i * rows < w.rows; i = next())
            work(Chunk{i * rows, std::min((i + 1) * rows, w.rows), v.start_of(share, shares), v.start_of(share + 1, shares),
                       (i + team) * rows < w.rows ? (i + team) * rows : 0});
    }
}

// y = w x for `count` vectors, by one thread.
inline void multiply_alone(const Matrix& w, int count, const float* x, long pitch, float* y, long stride) {
    static thread_local Vectors v;
    v.shape(w, count, converts(w, count));
    if (converts(w, count)) v.pack(x, pitch, 0, 1);
    multiply(w, Chunk{0, w.rows, 0, v.tiles, 0}, x, pitch, v, y, stride);
}

}  // namespace glass
