// Products with whole-number weights: bytes or half bytes, one scale per row and group of columns.
//
// A weight is (byte - ZERO) * scale. The activations of a group are rounded to 16 bits, x = s (256 high + low), each
// half a signed byte, so that one instruction multiplies 64 weights with 64 halves and adds them up exactly; that
// rounding is at most 1/65024 of the largest activation of the group, far below a weight's own. The zero point costs
// nothing: -ZERO * sum(x) does not depend on the row and is where the sums start.
#pragma once
#include <vector>
#include "kernels.h"

namespace glass {

constexpr int CHUNK = 64;  // weights one instruction multiplies
template <int KIND> constexpr int ZERO = KIND == INT8 ? 128 : 8;

#if defined(__AVX512VNNI__)
typedef __m512i Sums;
inline Sums dot_bytes(Sums sums, __m512i weights, const int8_t* x) {
    return _mm512_dpbusd_epi32(sums, weights, _mm512_loadu_si512(x));
}
inline __m512i bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline __m512i low_halves(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline __m512i high_halves(__m512i v) { return low_halves(_mm512_srli_epi16(v, 4)); }
inline vf combined(Sums high, Sums low) {
    return (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
}
inline Sums nothing() { return _mm512_setzero_si512(); }
inline Sums started(const int32_t* at) { return _mm512_loadu_si512(at); }
#else  // the same arithmetic, lane by lane: the compiler makes of it what the processor has
struct Block { uint8_t at[CHUNK]; };
struct Sums { int32_t at[W]; };
inline Sums dot_bytes(Sums sums, const Block& weights, const int8_t* x) {
    for (int i = 0; i < W; i++)
        for (int j = 0; j < 4; j++) sums.at[i] += (int32_t)weights.at[4 * i + j] * x[4 * i + j];
    return sums;
}
inline Block bytes(const uint8_t* p) { Block b; std::memcpy(b.at, p, CHUNK); return b; }
inline Block low_halves(Block v) { for (auto& b : v.at) b &= 15; return v; }
inline Block high_halves(Block v) { for (auto& b : v.at) b >>= 4; return v; }
inline vf combined(const Sums& high, const Sums& low) {
    vf out;
    for (int i = 0; i < W; i++) out[i] = (float)(high.at[i] * 256 + low.at[i]);
    return out;
}
inline Sums nothing() { return Sums{}; }
inline Sums started(const int32_t* at) { Sums s; std::memcpy(s.at, at, sizeof s.at); return s; }
#endif

// Some vectors of activations, rounded group by group.
struct Rounded {
    std::vector<int8_t> high, low;  // (batch, columns)
    std::vector<float> scales;      // (batch, groups)
    std::vector<int32_t> starts;    // (batch, groups, 16): -ZERO * sum(x), as the instruction's 16 sums
    int columns = 0, group = 0;

    void take(const float* x, int batch, int columns_, int group_, int zero) {
        columns = columns_, group = group_;
        const long n = (long)batch * columns, groups = n / group;
        high.resize(n), low.resize(n), scales.resize(groups);
        starts.assign(groups * W, 0);
        for (long g = 0; g < groups; g++) one(x + g * group, g, zero);
    }

    void one(const float* x, long g, int zero) {
        vf most = {};
        for (int i = 0; i < group; i += W) {
            const vf here = load(x + i), size = here < 0 ? -here : here;
            most = size > most ? size : most;
        }
        float largest = 1e-30f;
        for (int k = 0; k < W; k++) largest = most[k] > largest ? most[k] : largest;
        const float inverse = 32512 / largest;
        scales[g] = largest / 32512;
        int8_t *h = &high[g * group], *l = &low[g * group];
        int32_t* start = &starts[g * W];
#if defined(__AVX512VNNI__)
        const __m512i ones = _mm512_set1_epi8(1);
        Sums highs = nothing(), lows = nothing();
        for (int c = 0; c < group; c += CHUNK) {
            for (int i = c; i < c + CHUNK; i += W) {
                const __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + i) * inverse));
                const __m128i bottom = _mm512_cvtepi32_epi8(whole);
                const __m512i rest = _mm512_sub_epi32(whole, _mm512_cvtepi8_epi32(bottom));
                _mm_storeu_si128((__m128i*)(l + i), bottom);
                _mm_storeu_si128((__m128i*)(h + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(rest, 8)));
            }
            highs = dot_bytes(highs, ones, h + c), lows = dot_bytes(lows, ones, l + c);
        }
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(highs, 8), lows);
        _mm512_storeu_si512(start, _mm512_mullo_epi32(sum, _mm512_set1_epi32(-zero)));
#else
        int32_t whole[4 * CHUNK];
        for (int i = 0; i < group; i++) whole[i] = (int32_t)std::nearbyintf(x[i] * inverse);
        for (int i = 0; i < group; i++) {
            l[i] = (int8_t)whole[i];
            h[i] = (int8_t)((whole[i] - l[i]) >> 8);
        }
        for (int c = 0; c < group; c += CHUNK)
            for (int k = 0; k < W; k++)
                for (int j = 0; j < 4; j++) start[k] -= zero * whole[c + 4 * k + j];
#endif
    }
};

// One row times B vectors. INT4: each 64 bytes hold 128 columns, the first 64 in the low halves.
template <int KIND, int B>
inline void row_of_integers(const Matrix& m, int row, const Rounded& x, long from, float* y, long stride) {
    constexpr int HALVES = KIND == INT4 ? 2 : 1;
    const int groups = m.columns / m.group, chunks = KIND == INT4 ? 1 : m.group / CHUNK;
    const uint8_t* w = (const uint8_t*)m.weights + (long)row * m.columns / HALVES;
    const float* scales = m.scales + (long)row * groups;
    vf sums[B] = {};
    for (int g = 0; g < groups; g += HALVES) {
        __builtin_prefetch((const char*)w + AHEAD, 0, 3);
        if (KIND == INT8) __builtin_prefetch((const char*)w + AHEAD + 64, 0, 3);
        Sums high[B][HALVES], low[B][HALVES];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) {
                high[b][half] = nothing();
                low[b][half] = started(&x.starts[((from + b) * groups + g + half) * W]);
            }
        for (int c = 0; c < chunks; c++, w += CHUNK) {
            const auto packed = bytes(w);
            const long at = (long)g * m.group + c * CHUNK;
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) {
                const auto weights = KIND == INT8 ? packed : half ? high_halves(packed) : low_halves(packed);
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) {
                    const long place = (from + b) * m.columns + at + half * CHUNK;
                    high[b][half] = dot_bytes(high[b][half], weights, &x.high[place]);
                    low[b][half] = dot_bytes(low[b][half], weights, &x.low[place]);
                }
            }
        }
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; half++)
#pragma GCC unroll 8
            for (int b = 0; b < B; b++)
                sums[b] += combined(high[b][half], low[b][half]) *
                           (scales[g + half] * x.scales[(from + b) * groups + g + half]);
    }
    for (int b = 0; b < B; b++) y[b * stride + row] = total(sums[b]) + (m.bias ? m.bias[row] : 0.0f);
}

template <int KIND>
inline void band_of_integers(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride,
                             bool fresh) {
    static thread_local Rounded rounded;
    if (fresh) rounded.take(x, batch, m.columns, m.group, ZERO<KIND>);
    constexpr int MOST = KIND == INT4 ? 4 : 8;  // what the registers hold
    long b = 0;
    for (; b + MOST <= batch; b += MOST)
        for (int row = first; row < last; row++)
            row_of_integers<KIND, MOST>(m, row, rounded, b, y + b * stride, stride);
    for (; b < batch; b++)
        for (int row = first; row < last; row++) row_of_integers<KIND, 1>(m, row, rounded, b, y + b * stride, stride);
}

// Rows first..last of y = m x (+ bias) for `batch` vectors. Not `fresh`: the same x as in this thread's last call.
inline void multiply_few(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride,
                         bool fresh = true) {
    switch (m.kind) {
        case F32: return band_of<Floats>(m, first, last, x, batch, y, stride);
        case BF16: return band_of<Brains>(m, first, last, x, batch, y, stride);
        case INT8: return band_of_integers<INT8>(m, first, last, x, batch, y, stride, fresh);
        default: return band_of_integers<INT4>(m, first, last, x, batch, y, stride, fresh);
    }
}

}  // namespace glass
