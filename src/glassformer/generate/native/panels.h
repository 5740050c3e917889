// Products of a weight matrix with many vectors, at the speed the processor multiplies.
//
// 32 rows of the matrix are turned into a panel (columns, 32) of floats, whatever they were kept as, and stay in the
// second cache while every vector meets them: one broadcast activation times two registers of weights, 14 vectors at a
// time, 28 sums in registers. Turning takes a few percent where there are hundreds of vectors.
#pragma once
#include <algorithm>
#include "integers.h"

namespace glass {

constexpr int WIDE = 32;   // rows of a panel
constexpr int DEEP = 384;  // columns of a panel: 14 vectors of them fit the first cache
constexpr int MANY = 16;   // vectors from which turning pays

inline float weight_at(const Matrix& m, long row, long column) {
    const long at = row * m.columns + column;
    switch (m.kind) {
        case F32: return ((const float*)m.weights)[at];
        case BF16: {
            const long whole = m.columns / 32 * 32, inside = column % 32;
            const long place = column < whole ? column - inside + inside % 16 * 2 + inside / 16 : column;
            return Brains::one(((const uint16_t*)m.weights)[row * m.columns + place]);
        }
        case INT8: {
            const float scale = m.scales[row * (m.columns / m.group) + column / m.group];
            return ((int)((const uint8_t*)m.weights)[at] - ZERO<INT8>) * scale;
        }
        default: {
            const float scale = m.scales[row * (m.columns / m.group) + column / m.group];
            const uint8_t both = ((const uint8_t*)m.weights)[row * m.columns / 2 + column / 128 * 64 + column % 64];
            return ((int)(column % 128 < 64 ? both & 15 : both >> 4) - ZERO<INT4>) * scale;
        }
    }
}

// out[c][0..16) = rows[0..16)[c] for 16 columns c: neighbours change places at distances 8, 4, 2 and 1.
inline void turn(const float* rows, long pitch, float* out, long out_pitch) {
#if defined(__clang__)  // has no shuffle by a variable
    for (int c = 0; c < W; c++)
        for (int r = 0; r < W; r++) out[c * out_pitch + r] = rows[r * pitch + c];
#else
    vf v[W];
    for (int i = 0; i < W; i++) v[i] = load(rows + i * pitch);
#define GLASS_EXCHANGE(D)                                                                                   \
    for (int i = 0; i < W; i++)                                                                             \
        if (!(i & D)) {                                                                                     \
            vi low, high;                                                                                   \
            for (int c = 0; c < W; c++) low[c] = c & D ? c - D + W : c, high[c] = c & D ? c + W : c + D;    \
            const vf a = __builtin_shuffle(v[i], v[i + D], low), b = __builtin_shuffle(v[i], v[i + D], high); \
            v[i] = a, v[i + D] = b;                                                                         \
        }
    GLASS_EXCHANGE(8)
    GLASS_EXCHANGE(4)
    GLASS_EXCHANGE(2)
    GLASS_EXCHANGE(1)
#undef GLASS_EXCHANGE
    for (int c = 0; c < W; c++) *(vf*)(out + c * out_pitch) = v[c];
#endif
}

// panel[c - from][r] = weight (row + r, c); rows beyond the last are 0.
inline void fill_panel(const Matrix& m, int row, int from, int to, float* panel) {
    const int rows = std::min(WIDE, m.rows - row);
    if (m.kind == F32 && rows == WIDE) {
        const float* w = (const float*)m.weights + (long)row * m.columns;
        int c = from;
        for (; c + W <= to; c += W)
            for (int r = 0; r < WIDE; r += W) turn(w + r * m.columns + c, m.columns, panel + (c - from) * WIDE + r, WIDE);
        for (; c < to; c++)
            for (int r = 0; r < WIDE; r++) panel[(c - from) * WIDE + r] = w[(long)r * m.columns + c];
        return;
    }
    for (int r = 0; r < WIDE; r++) {
        if (r >= rows) {
            for (int c = from; c < to; c++) panel[(long)(c - from) * WIDE + r] = 0;
        } else if (m.kind == F32) {
            const float* w = (const float*)m.weights + (long)(row + r) * m.columns;
            for (int c = from; c < to; c++) panel[(long)(c - from) * WIDE + r] = w[c];
        } else {
            for (int c = from; c < to; c++) panel[(long)(c - from) * WIDE + r] = weight_at(m, row + r, c);
        }
    }
}

// y[i][0..32) (+)= sum over k of x[i][k] * panel[k][0..32), for M vectors i. `pitch`: floats from one k to the next.
template <int M>
inline void meet(const float* panel, long pitch, int depth, const float* x, long x_stride, float* y, long y_stride,
                 int width, bool first, const float* bias) {
    vf sums[M][2];
    for (int i = 0; i < M; i++) sums[i][0] = sums[i][1] = vf{};
    for (int k = 0; k < depth; k++) {
        const vf low = load(panel + k * pitch), high = load(panel + k * pitch + W);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const float one = x[i * x_stride + k];
            sums[i][0] += low * one, sums[i][1] += high * one;
        }
    }
    for (int i = 0; i < M; i++) {
        float out[WIDE];
        std::memcpy(out, sums[i], sizeof out);
        float* at = y + i * y_stride;
        if (!first)
            for (int r = 0; r < width; r++) at[r] += out[r];
        else if (bias)
            for (int r = 0; r < width; r++) at[r] = out[r] + bias[r];
        else
            for (int r = 0; r < width; r++) at[r] = out[r];
    }
}

inline void meet_all(const float* panel, long pitch, int depth, const float* x, long x_stride, int vectors, float* y,
                     long y_stride, int width, bool first, const float* bias) {
    auto some = [&](auto m) {
        constexpr int M = decltype(m)::value;
        for (; vectors >= M; vectors -= M, x += M * x_stride, y += M * y_stride)
            meet<M>(panel, pitch, depth, x, x_stride, y, y_stride, width, first, bias);
    };
    some(std::integral_constant<int, 14>()), some(std::integral_constant<int, 8>());
    some(std::integral_constant<int, 4>()), some(std::integral_constant<int, 1>());
}

// Rows first..last of y = m x (+ bias) for many vectors; `first` is a multiple of 32.
inline void multiply_many(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride) {
    static thread_local std::vector<float> panel(WIDE * DEEP + W), vectors;
    vectors.resize((long)batch * DEEP);
    for (int from = 0; from < m.columns; from += DEEP) {
        const int to = std::min(from + DEEP, m.columns), depth = to - from;
        // side by side: at a distance of a power of two they would push each other out of the cache
        for (long i = 0; i < batch; i++) std::memcpy(&vectors[i * depth], x + i * m.columns + from, depth * sizeof(float));
        for (int row = first; row < last; row += WIDE) {
            fill_panel(m, row, from, to, panel.data());
            meet_all(panel.data(), WIDE, depth, vectors.data(), depth, batch, y + row, stride,
                     std::min(WIDE, last - row), from == 0, m.bias ? m.bias + row : nullptr);
        }
    }
}

}  // namespace glass
