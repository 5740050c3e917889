// Products of a weight matrix with many vectors where the processor multiplies pairs of bfloat16 numbers.
//
// As panels.h, at twice the speed: a word holds columns c and c + 16 of one row, as bfloat16 matrices are kept. int8 and
// int4 weights are whole numbers that bfloat16 holds exactly; their scales are applied to the sums of a group. The
// activations are rounded to bfloat16 (2^-9 of each), which is why one vector, or a few, never come this way.
#pragma once
#include "panels.h"

namespace glass {

#if defined(__AVX512BF16__)
inline bool suits(const Matrix& m) { return m.kind != F32 && m.columns % 32 == 0; }

// 32 floats as 16 words: numbers i and 16 + i, rounded to bfloat16.
inline void pair_up(const float* x, uint32_t* words) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(x + W), (__m512)load(x));  // first 16 below, others above
    const __m512i wide = (__m512i)both;
    const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(wide));
    const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(wide, 1));
    _mm512_storeu_si512(words, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline __m512i whole_numbers(__m128i bytes, int zero) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(zero))));
}

// Columns from..from+32 of one row, without their scale, as 16 words.
inline void words_of(const Matrix& m, long row, int from, uint32_t* words) {
    if (m.kind == BF16) {
        std::memcpy(words, (const uint16_t*)m.weights + row * m.columns + from, 64);
        return;
    }
    __m128i first, second;
    int zero = ZERO<INT8>;
    if (m.kind == INT8) {
        const uint8_t* at = (const uint8_t*)m.weights + row * m.columns + from;
        first = _mm_loadu_si128((const __m128i*)at), second = _mm_loadu_si128((const __m128i*)(at + W));
    } else {
        const uint8_t* at = (const uint8_t*)m.weights + row * m.columns / 2 + from / 128 * 64 + from % 64;
        first = _mm_loadu_si128((const __m128i*)at), second = _mm_loadu_si128((const __m128i*)(at + W));
        if (from % 128 >= 64) first = _mm_srli_epi16(first, 4), second = _mm_srli_epi16(second, 4);
        first = _mm_and_si128(first, _mm_set1_epi8(15)), second = _mm_and_si128(second, _mm_set1_epi8(15));
        zero = ZERO<INT4>;
    }
    const __m512i low = _mm512_srli_epi32(whole_numbers(first, zero), 16);
    _mm512_storeu_si512(words, _mm512_or_si512(low, whole_numbers(second, zero)));  // whole: no bits below the upper half
}

// panel[word][r] = the words of 32 rows; rows beyond the last are 0.
inline void fill_pairs(const Matrix& m, int row, int from, int to, uint32_t* panel) {
    alignas(64) uint32_t lines[WIDE][W];
    const int rows = std::min(WIDE, m.rows - row);
    for (int c = from; c < to; c += 32, panel += W * WIDE) {
        for (int r = 0; r < WIDE; r++) {
            if (r < rows) words_of(m, row + r, c, lines[r]);
            else std::memset(lines[r], 0, sizeof lines[r]);
        }
        for (int r = 0; r < WIDE; r += W) turn((const float*)lines[r], W, (float*)panel + r, WIDE);
    }
}

template <int M>
inline void meet_pairs(const uint32_t* panel, int words, const uint32_t* x, float* y, long stride, int width, bool first,
                       const float* bias, const float* scales) {
    __m512 sums[M][2];
    for (int i = 0; i < M; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int k = 0; k < words; k++) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(panel + k * WIDE);
        const __m512bh high = (__m512bh)_mm512_loadu_si512(panel + k * WIDE + W);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const __m512bh one = (__m512bh)_mm512_set1_epi32((int)x[(long)i * words + k]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], low, one), sums[i][1] = _mm512_dpbf16_ps(sums[i][1], high, one);
        }
    }
    for (int i = 0; i < M; i++) {
        float out[WIDE], *at = y + i * stride;
        std::memcpy(out, sums[i], sizeof out);
        for (int r = 0; r < width; r++) out[r] *= scales[r];
        if (!first)
            for (int r = 0; r < width; r++) at[r] += out[r];
        else
            for (int r = 0; r < width; r++) at[r] = out[r] + (bias ? bias[r] : 0.0f);
    }
}

inline void multiply_pairs(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride) {
    static thread_local std::vector<uint32_t> panel(WIDE * DEEP / 2 + W), vectors;
    vectors.resize((long)batch * DEEP / 2);
    const int depth = m.kind == BF16 ? DEEP : m.group;
    for (int from = 0; from < m.columns; from += depth) {
        const int to = std::min(from + depth, m.columns), words = (to - from) / 2;
        for (long i = 0; i < batch; i++)
            for (int c = from; c < to; c += 32) pair_up(x + i * m.columns + c, &vectors[i * words + (c - from) / 2]);
        for (int row = first; row < last; row += WIDE) {
            const int width = std::min(WIDE, last - row);
            float scales[WIDE];
            for (int r = 0; r < width; r++)
                scales[r] = m.kind == BF16 ? 1.0f : m.scales[(long)(row + r) * (m.columns / m.group) + from / m.group];
            fill_pairs(m, row, from, to, panel.data());
            const float* bias = m.bias ? m.bias + row : nullptr;
            const uint32_t* at = vectors.data();
            float* out = y + row;
            int left = batch;
            auto some = [&](auto size) {
                constexpr int M = decltype(size)::value;
                for (; left >= M; left -= M, at += (long)M * words, out += M * stride)
                    meet_pairs<M>(panel.data(), words, at, out, stride, width, from == 0, bias, scales);
            };
            some(std::integral_constant<int, 14>()), some(std::integral_constant<int, 8>());
            some(std::integral_constant<int, 4>()), some(std::integral_constant<int, 1>());
        }
    }
}
#else
inline bool suits(const Matrix&) { return false; }
inline void multiply_pairs(const Matrix&, int, int, const float*, int, float*, long) {}
#endif

// Rows first..last of y = m x (+ bias) for `batch` vectors, by whichever way suits their number.
inline void multiply(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride,
                     bool fresh = true) {
    if (batch < MANY) multiply_few(m, first, last, x, batch, y, stride, fresh);
    else if (suits(m)) multiply_pairs(m, first, last, x, batch, y, stride);
    else multiply_many(m, first, last, x, batch, y, stride);
}

}  // namespace glass
