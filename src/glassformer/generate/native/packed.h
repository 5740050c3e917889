// Products with matrices that are kept in panels: 32 rows, and of each 4 bytes in turn.
//
// A step of a panel is 128 bytes: 2 columns of bfloat16, 4 of int8, or 8 of int4 (the first four in the low halves).
// The weights of a step meet one broadcast word of activations, so that every lane is a row of its own: nothing is summed
// across lanes, and a matrix is one stream through memory for any number of vectors. A panel stays in the second cache
// while all tiles of vectors meet it.
//
// Few vectors (decoding) keep their precision: bfloat16 weights are widened and meet floats; whole numbers meet
// activations of 16 bits, whose rounding, 1/65024 of the largest of a group, is far below a weight's own. Many vectors
// (prompts) are limited by multiplications: there bfloat16 meets bfloat16, and whole numbers meet activations of 8 bits
// with a scale per vector and group of columns. tests/generate/native bounds all of these.
#pragma once
#include "panels.h"

namespace glass {

constexpr int STEP = WIDE * 4;  // bytes

template <int KIND> constexpr int COLUMNS = KIND == BF16 ? 2 : KIND == INT8 ? 4 : 8;  // of a step

inline int steps_of(const Matrix& m) {
    return m.kind == BF16 ? (m.columns + 1) / 2 : m.columns / (m.kind == INT8 ? 4 : 8);
}
inline const uint8_t* panel_of(const Matrix& m, int row) {
    return (const uint8_t*)m.weights + (long)(row / WIDE) * steps_of(m) * STEP;
}
inline const float* scales_of(const Matrix& m, int row) {
    return m.scales + (long)(row / WIDE) * (m.columns / m.group) * WIDE;
}

#if defined(__AVX512VNNI__)
typedef __m512i Bytes;  // 16 rows of 4 weights
inline vi dot_bytes(vi sums, Bytes weights, uint32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, weights, _mm512_set1_epi32((int)x));
}
inline Bytes bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low_halves(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes v) { return low_halves(_mm512_srli_epi16(v, 4)); }
#else  // the same arithmetic, lane by lane: the compiler makes of it what the processor has
struct Bytes { uint8_t at[64]; };
inline vi dot_bytes(vi sums, const Bytes& weights, uint32_t x) {
    int8_t four[4];
    std::memcpy(four, &x, 4);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < 4; j++) sums[i] += (int32_t)weights.at[4 * i + j] * four[j];
    return sums;
}
inline Bytes bytes(const uint8_t* p) { Bytes b; std::memcpy(b.at, p, 64); return b; }
inline Bytes low_halves(Bytes v) { for (auto& b : v.at) b &= 15; return v; }
inline Bytes high_halves(Bytes v) { for (auto& b : v.at) b >>= 4; return v; }
#endif

inline vf floats(vi v) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, vf);
#endif
}

// A panel of bfloat16 times B vectors of floats.
template <int B>
inline void few_brains(const uint8_t* w, int steps, const float* x, float (*out)[WIDE]) {
    vf sums[B][2] = {};
    for (int k = 0; k < steps; k++, w += STEP, x += 2 * B)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const vu both = *(const vu*)(w + j * 64);
            const vf even = (vf)(both << 16), odd = (vf)(both & 0xffff0000u);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) sums[b][j] += even * x[b];
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) sums[b][j] += odd * x[B + b];
        }
    std::memcpy(out, sums, sizeof sums);
}

// Some steps of a panel times the high (or the low) bytes of B vectors; BOTH: from nothing, high ones to `high` and low
// ones to `low`.
template <int KIND, int B, bool BOTH>
inline void meet_halves(const uint8_t* w, int steps, const uint32_t* x, vi (*high)[2], vi (*low)[2]) {
    constexpr int PARTS = KIND == INT4 ? 2 : 1;
    vi a[B][2], z[B][2];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) a[b][j] = BOTH ? vi{} : high[b][j], z[b][j] = vi{};
    for (int k = 0; k < steps; k++, w += STEP)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++, x += 2 * B) {
            Bytes weights[2] = {bytes(w), bytes(w + 64)};
            if (KIND == INT4)
                for (Bytes& one : weights) one = part ? high_halves(one) : low_halves(one);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++)
#pragma GCC unroll 2
                for (int j = 0; j < 2; j++) {
                    a[b][j] = dot_bytes(a[b][j], weights[j], x[b]);
                    if (BOTH) z[b][j] = dot_bytes(z[b][j], weights[j], x[B + b]);
                }
        }
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            high[b][j] = a[b][j];
            if (BOTH) low[b][j] = z[b][j];
        }
}

// A panel of whole numbers times B vectors of 16 bits, (group, then high and low bytes in turn, vector). The high bytes
// go first: their sums move up by 8 bits, and the low ones are added.
template <int KIND, int B>
inline void few_integers(const uint8_t* w, const Vectors& v, int tile, const float* scales, float (*out)[WIDE]) {
    constexpr int PARTS = KIND == INT4 ? 2 : 1;
    const int groups = v.groups(), steps = v.group / COLUMNS<KIND>;
    const uint32_t* x = v.words_of(tile);
    const float* x_scales = v.scales_of(tile);
    const int32_t* starts = v.starts_of(tile);
    vf sums[B][2] = {};
    for (int g = 0; g < groups; g++, scales += WIDE, x_scales += B, starts += B) {
        vi whole[B][2];
        if (B < 4) {  // few sums: both halves at once, so that one addition need not wait for the last
            vi low[B][2];
            meet_halves<KIND, B, true>(w, steps, x, whole, low);
            for (int b = 0; b < B; b++)
                for (int j = 0; j < 2; j++) whole[b][j] = (whole[b][j] << 8) + low[b][j] + starts[b];
        } else {
            for (auto& one : whole) one[0] = one[1] = vi{};
            meet_halves<KIND, B, false>(w, steps, x, whole, whole);
            for (int b = 0; b < B; b++)
                for (int j = 0; j < 2; j++) whole[b][j] = (whole[b][j] << 8) + starts[b];
            meet_halves<KIND, B, false>(w, steps, x + B, whole, whole);
        }
        w += (long)steps * STEP, x += (long)steps * PARTS * 2 * B;
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++)
                sums[b][j] += floats(whole[b][j]) * (load(scales + j * W) * x_scales[b]);
    }
    std::memcpy(out, sums, sizeof sums);
}

template <int KIND, int B>
inline void few_of(const Matrix& m, int row, const Vectors& v, int tile, float (*out)[WIDE]) {
    const uint8_t* w = panel_of(m, row);
    if (KIND == BF16) return few_brains<B>(w, steps_of(m), (const float*)v.words_of(tile), out);
    few_integers<KIND, B>(w, v, tile, scales_of(m, row), out);
}

// A panel of bfloat16 times M vectors of bfloat16.
template <int M>
inline void many_brains(const uint8_t* w, int steps, const uint32_t* x, float (*out)[WIDE]) {
#if defined(__AVX512BF16__)
    __m512 sums[M][2];
    for (int i = 0; i < M; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int k = 0; k < steps; k++, w += STEP, x += M) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 64);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)x[i]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], low, one), sums[i][1] = _mm512_dpbf16_ps(sums[i][1], high, one);
        }
    }
    std::memcpy(out, sums, sizeof sums);
#endif
}

// A panel of whole numbers times M vectors of bytes.
template <int KIND, int M>
inline void many_integers(const uint8_t* w, const Vectors& v, int tile, const float* scales, float (*out)[WIDE]) {
    constexpr int PARTS = KIND == INT4 ? 2 : 1;
    const int groups = v.groups(), steps = v.group / COLUMNS<KIND>;
    const uint32_t* x = v.words_of(tile);
    const float* x_scales = v.scales_of(tile);
    const int32_t* starts = v.starts_of(tile);
    for (int g = 0; g < groups; g++, scales += WIDE, x_scales += M, starts += M) {
        vi sums[M][2];
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) sums[i][0] = sums[i][1] = vi{} + starts[i];
        for (int k = 0; k < steps; k++, w += STEP)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++, x += M) {
                Bytes low = bytes(w), high = bytes(w + 64);
                if (KIND == INT4)
                    low = part ? high_halves(low) : low_halves(low), high = part ? high_halves(high) : low_halves(high);
#pragma GCC unroll 16
                for (int i = 0; i < M; i++)
                    sums[i][0] = dot_bytes(sums[i][0], low, x[i]), sums[i][1] = dot_bytes(sums[i][1], high, x[i]);
            }
#pragma GCC unroll 16
        for (int i = 0; i < M; i++)
            for (int j = 0; j < 2; j++) {
                vf* at = (vf*)(out[i] + j * W);
                const vf here = floats(sums[i][j]) * (load(scales + j * W) * x_scales[i]);
                *at = g ? *at + here : here;
            }
    }
}

template <int KIND, int M>
inline void many_of(const Matrix& m, int row, const Vectors& v, int tile, float (*out)[WIDE]) {
    if (KIND == BF16) many_brains<M>(panel_of(m, row), steps_of(m), v.words_of(tile), out);
    else many_integers<KIND, M>(panel_of(m, row), v, tile, scales_of(m, row), out);
}

// y[i][row..] = out[i] + bias, for the vectors that there are.
inline void deliver(const Matrix& m, int row, int last, const Vectors& v, int tile, const float (*out)[WIDE], float* y,
                    long stride) {
    const int width = std::min(WIDE, last - row), vectors = std::min(v.tile, v.batch - tile * v.tile);
    for (int i = 0; i < vectors; i++)
        put(y + ((long)tile * v.tile + i) * stride + row, out[i], width, false, m.bias ? m.bias + row : nullptr);
}

template <int KIND>
inline void multiply_panels(const Matrix& m, int first, int last, const Vectors& v, float* y, long stride) {
    float out[14][WIDE];
    for (int row = first; row < last; row += WIDE)
        for (int tile = 0; tile < v.tiles; tile++) {
            switch (v.tile) {
                case 1: few_of<KIND, 1>(m, row, v, tile, out); break;
                case 2: few_of<KIND, 2>(m, row, v, tile, out); break;
                case 4: few_of<KIND, 4>(m, row, v, tile, out); break;
                case 14: many_of<KIND, 14>(m, row, v, tile, out); break;
                default: v.batch < MANY ? few_of<KIND, 8>(m, row, v, tile, out) : many_of<KIND, 8>(m, row, v, tile, out);
            }
            deliver(m, row, last, v, tile, out, y, stride);
        }
}

// panel[c][r] = weight (row + r, c) as a float, for processors that cannot multiply what is kept.
inline void widen_panel(const Matrix& m, int row, float* panel) {
    const uint8_t* w = panel_of(m, row);
    for (int c = 0; c < m.columns; c++)
        for (int r = 0; r < WIDE; r++) {
            float value;
            if (m.kind == BF16) {
                const uint32_t bits = (uint32_t)((const uint16_t*)w)[(c / 2 * WIDE + r) * 2 + c % 2] << 16;
                std::memcpy(&value, &bits, 4);
            } else {
                const float scale = scales_of(m, row)[c / m.group * WIDE + r];
                const uint8_t byte = m.kind == INT8 ? w[(c / 4 * WIDE + r) * 4 + c % 4]
                                                    : w[(c / 8 * WIDE + r) * 4 + c % 4] >> (c % 8 / 4 * 4) & 15;
                value = ((int)byte - (m.kind == INT8 ? ZERO<INT8> : ZERO<INT4>)) * scale;
            }
            panel[(long)c * WIDE + r] = value;
        }
}

// Rows first..last of y = m x (+ bias); `v` holds x as form_of asks for it, but for few vectors and float32, which meet
// x itself. `first` is a multiple of 32. `soon`: the row, if not 0, that this thread will probably go on from.
inline void multiply(const Matrix& m, int first, int last, const float* x, long pitch, const Vectors& v, float* y,
                     long stride, int soon = 0) {
    if (v.form == FLOATS && v.batch >= MANY) return multiply_floats(m, first, last, v, y, stride, soon, widen_panel);
    switch (m.kind) {
        case F32: return multiply_rows(m, first, last, x, pitch, v.batch, y, stride, soon);
        case BF16: return multiply_panels<BF16>(m, first, last, v, y, stride);
        case INT8: return multiply_panels<INT8>(m, first, last, v, y, stride);
        default: return multiply_panels<INT4>(m, first, last, v, y, stride);
    }
}

}  // namespace glass
