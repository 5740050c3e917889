// Matmuls of a float32 matrix with many vectors, limited by arithmetic.
//
// 32 rows of the matrix are transposed into a panel (columns, 32), which stays in the L2 cache while it is multiplied with
// every vector: one broadcast activation times two registers of weights, 14 vectors at a time, 28 sums in registers (6 and
// 12 on processors with 16 registers). The transposition takes a few percent of the time for hundreds of vectors.
#pragma once
#include "operands.h"

namespace glass {

constexpr int DEEP = 768;  // columns of a panel that are processed at once: they fit the L2 cache together with hundreds of vectors

// panel[c - from][r] = row + r, column c of a float32 matrix whose rows are `pitch` apart; rows beyond the last are 0.
inline void fill_panel(const Matrix& m, int row, int from, int to, float* panel, long pitch) {
    const int rows = std::min(WIDE, m.rows - row);
    const float* w = (const float*)m.weights + row * pitch;
    int c = from;
    for (; rows == WIDE && c + LANES <= to; c += LANES)
        for (int r = 0; r < WIDE; r += LANES) transpose_square(w + r * pitch + c, pitch, panel + (c - from) * WIDE + r, WIDE);
    for (; c < to; c++)
        for (int r = 0; r < WIDE; r++) panel[(c - from) * WIDE + r] = r < rows ? w[r * pitch + c] : 0.0f;
}

// to[0..width) = 32 sums (+ bias), or added to what is there.
inline void store_sums(float* to, const float* sums, int width, bool more, const float* bias) {
    if (width < WIDE) {
        for (int r = 0; r < width; r++) to[r] = sums[r] + (more ? to[r] : bias ? bias[r] : 0.0f);
        return;
    }
    const float* other = more ? to : bias;
#pragma GCC unroll 8
    for (int r = 0; r < WIDE; r += LANES) store(to + r, other ? load(sums + r) + load(other + r) : load(sums + r));
}

// y[i][0..32) (+)= sum over k of x(i, k) * panel[k][0..32), for the first `vectors` of M vectors i. `pitch`: floats from one k
// to the next.
template <int M, typename X, typename T, typename Meanwhile = Nothing>
inline void multiply_tile(const T* panel, long pitch, int depth, X x, float* y, long y_stride, int width,
                          bool first, const float* bias, int vectors = M, Meanwhile meanwhile = {}) {
    constexpr int N = AT_ONCE<M>;
    float out[M][WIDE];
    for (int part = 0; part < PARTS; part += N) {
        floats sums[M][N];
        if (part) sum_tile<M, N>(x, panel + part * LANES, pitch, depth, sums);
        else sum_tile<M, N>(x, panel, pitch, depth, sums, meanwhile);
        for (int i = 0; i < vectors; i++) std::memcpy(out[i] + part * LANES, sums[i], sizeof sums[i]);
    }
    for (int i = 0; i < vectors; i++) store_sums(y + i * y_stride, out[i], width, !first, bias);
}

// The same for the last tile of some vectors, which is TILE wide: M is the smallest even number of vectors that holds them. The
// tile is computed whole otherwise, and of 128 vectors that is 9 % of the time.
template <int TILE, int M = TILE, typename Meanwhile>
inline void multiply_last(const float* panel, long pitch, int depth, const float* x, float* y, long y_stride, int width,
                          bool first, const float* bias, int vectors, Meanwhile meanwhile) {
    if constexpr (M > 2)
        if (vectors <= M - 2)
            return multiply_last<TILE, M - 2>(panel, pitch, depth, x, y, y_stride, width, first, bias, vectors, meanwhile);
    multiply_tile<M>(panel, pitch, depth, Tile<TILE, float>{x}, y, y_stride, width, first, bias, vectors, meanwhile);
}

// The same for any number of vectors, `x_stride` apart.
template <typename T>
inline void multiply_tiles(const T* panel, long pitch, int depth, const T* x, long x_stride, int vectors, float* y,
                           long y_stride) {
    auto some = [&](auto m) {
        constexpr int M = decltype(m)::value;
        for (; vectors >= M; vectors -= M, x += M * x_stride, y += M * y_stride)
            multiply_tile<M>(panel, pitch, depth, Left<T>{x, x_stride, 1}, y, y_stride, WIDE, true, nullptr);
    };
    some(std::integral_constant<int, TALL>()), some(std::integral_constant<int, SHORT>());
    some(std::integral_constant<int, SHORT / 2>()), some(std::integral_constant<int, 1>());
}

// Prefetches some rows of the next panel, a cache line of each at a time, between the multiplications of this one. Prefetched in
// one go, they would fill the processor's queue of loads, and it would wait: 10 % of an encoder that reads 64 to 128 tokens.
struct Ahead {
    const float* start;
    long pitch;
    int first, last;
    void operator()(int64_t column) const {
        for (int r = first; r < last; r++) __builtin_prefetch(start + r * pitch + column, 0, 2);  // into the L2 cache
    }
};

// A chunk of y = m x (+ bias) for many vectors of floats. All panels of the chunk are multiplied with some columns of the vectors
// before the next columns.
inline void multiply_floats(const Matrix& m, const Chunk& chunk, const Vectors& v, float* y, long stride) {
    static thread_local Rows held;
    const int deep = std::min(DEEP, m.columns);
    float* const panel = held.need((long)WIDE * deep);
    for (int from = 0; from < m.columns; from += deep) {
        const int depth = std::min(deep, m.columns - from);
        const bool more = from + deep < m.columns;
        for (int row = chunk.first; row < chunk.last; row += WIDE) {
            const int width = std::min(WIDE, chunk.last - row);
            const float* bias = m.bias ? m.bias + row : nullptr;
            fill_panel(m, row, from, from + depth, panel, m.columns);
            const bool below = row + WIDE < chunk.last;
            const long next = below ? row + WIDE : more ? chunk.first : chunk.next_row;
            const float* ahead = (const float*)m.weights + next * m.columns + (below ? from : more ? from + deep : 0);
            for (int i = chunk.from; i < chunk.to; i++) {
                const int rows = below || more || next ? WIDE : 0, tiles = chunk.to - chunk.from, tile = i - chunk.from;
                const Ahead prefetch{ahead, m.columns, rows * tile / tiles, rows * (tile + 1) / tiles};
                const float* x = (const float*)v.words_of(i) + (long)from * v.tile;
                float* to = y + (long)i * v.tile * stride + row;
                const int vectors = std::min(v.tile, v.batch - i * v.tile);
                auto multiply = [&](auto size) {
                    constexpr int M = decltype(size)::value;
                    if (vectors == M) multiply_tile<M>(panel, WIDE, depth, Tile<M, float>{x}, to, stride, width, !from, bias, M, prefetch);
                    else multiply_last<M>(panel, WIDE, depth, x, to, stride, width, !from, bias, vectors, prefetch);
                };
                if (v.tile == TALL) multiply(std::integral_constant<int, TALL>());
                else multiply(std::integral_constant<int, SHORT>());
            }
        }
    }
}

}  // namespace glass
