// Products of a weight matrix with a few vectors, at the speed memory delivers the matrix.
//
// Written with the compiler's own vector types, not with one processor's intrinsics: 16 floats at a time, which becomes
// AVX-512, two AVX registers or four NEON ones. Activations are float32 throughout; weights are float32, bfloat16 or
// int8 with one scale per group of columns, widened in registers. Sums are float32, in a fixed order that does not
// depend on the number of threads: a row is always summed by one thread.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace glass {

constexpr int W = 16;
constexpr int AHEAD = 1024;  // bytes that are asked for before they are needed
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(32), aligned(2), may_alias));
typedef int8_t vb __attribute__((vector_size(16), aligned(1), may_alias));

enum Kind : int32_t { F32 = 0, BF16 = 1, INT8 = 2 };

struct Matrix {           // rows of `columns` weights; y = weights x + bias
    const void* weights;
    const float* scales;  // INT8: (rows, columns / group)
    const float* bias;    // or null
    int32_t rows, columns, group;
    int32_t kind;
};

inline vf load(const float* p) { return *(const vf*)p; }
#if defined(__AVX512F__)  // compilers still widen element by element here
inline vf load(const uint16_t* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline vf load(const int8_t* p) {
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
#else
inline vf load(const uint16_t* p) { return (vf)(__builtin_convertvector(*(const vh*)p, vu) << 16); }
inline vf load(const int8_t* p) { return __builtin_convertvector(__builtin_convertvector(*(const vb*)p, vi), vf); }
#endif

inline float total(vf v) {  // pairwise, the same tree every time
    float a[W];
    std::memcpy(a, &v, sizeof a);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
}

inline float sum_of(const float* a, int n) {
    vf sum = {};
    int i = 0;
    for (; i + W <= n; i += W) sum += load(a + i);
    float rest = total(sum);
    for (; i < n; i++) rest += a[i];
    return rest;
}

inline float dot(const float* a, const float* b, int n) {
    vf sum = {};
    int i = 0;
    for (; i + W <= n; i += W) sum += load(a + i) * load(b + i);
    float rest = total(sum);
    for (; i < n; i++) rest += a[i] * b[i];
    return rest;
}

// R rows times B vectors. x is (B, columns), y is (B, stride).
template <class T, int R, int B>
inline void tile(const T* w, int columns, const float* x, vf (&sums)[R][B], int from, int to) {
    vf held[R][B];  // in registers: what is reached through a reference need not be
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) held[r][b] = sums[r][b];
    for (int i = from; i < to; i += W) {
        vf in[B];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) in[b] = load(x + (long)b * columns + i);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const T* at = w + (long)r * columns + i;
            __builtin_prefetch((const char*)at + AHEAD, 0, 3);
            vf weights = load(at);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) held[r][b] += weights * in[b];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r][b] = held[r][b];
}

template <class T, int R, int B>
inline void rows_times(const Matrix& m, int row, const float* x, float* y, long stride) {
    const T* w = (const T*)m.weights + (long)row * m.columns;
    const int whole = m.columns / W * W, groups = m.group ? m.columns / m.group : 1;
    vf sums[R][B] = {};
    float out[R][B];
    if (m.kind == INT8) {
        const int group = m.group ? m.group : m.columns;
        const float* scales = m.scales + (long)row * groups;
        for (int g = 0; g < groups; g++) {
            vf part[R][B] = {};
            tile<T, R, B>(w, m.columns, x, part, g * group, (g + 1) * group);
            for (int r = 0; r < R; r++)
                for (int b = 0; b < B; b++) sums[r][b] += part[r][b] * scales[(long)r * groups + g];
        }
    } else {
        tile<T, R, B>(w, m.columns, x, sums, 0, whole);
    }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) out[r][b] = total(sums[r][b]);
    if (m.kind != INT8)  // int8 matrices are packed only where columns are whole vectors
        for (int i = whole; i < m.columns; i++)
            for (int r = 0; r < R; r++) {
                float weight;
                if constexpr (sizeof(T) == 4) weight = w[(long)r * m.columns + i];
                else {
                    uint32_t bits = (uint32_t)(uint16_t)w[(long)r * m.columns + i] << 16;
                    std::memcpy(&weight, &bits, 4);
                }
                for (int b = 0; b < B; b++) out[r][b] += weight * x[(long)b * m.columns + i];
            }
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) y[b * stride + row + r] = out[r][b] + (m.bias ? m.bias[row + r] : 0.0f);
}

template <class T, int B>
inline void band(const Matrix& m, int first, int last, const float* x, float* y, long stride) {
    constexpr int R = B == 1 ? 4 : B <= 4 ? 4 : 2;
    int row = first;
    for (; row + R <= last; row += R) rows_times<T, R, B>(m, row, x, y, stride);
    for (; row < last; row++) rows_times<T, 1, B>(m, row, x, y, stride);
}

template <class T>
inline void band_of(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride) {
    while (batch >= 8) {
        band<T, 8>(m, first, last, x, y, stride);
        x += 8L * m.columns, y += 8 * stride, batch -= 8;
    }
    if (batch >= 4) {
        band<T, 4>(m, first, last, x, y, stride);
        x += 4L * m.columns, y += 4 * stride, batch -= 4;
    }
    for (; batch; batch--, x += m.columns, y += stride) band<T, 1>(m, first, last, x, y, stride);
}

// Rows first..last of y = m x (+ bias) for `batch` vectors.
inline void multiply(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride) {
    if (m.kind == F32) band_of<float>(m, first, last, x, batch, y, stride);
    else if (m.kind == BF16) band_of<uint16_t>(m, first, last, x, batch, y, stride);
    else band_of<int8_t>(m, first, last, x, batch, y, stride);
}

// exp to about 2 ulp: x = n ln 2 + r, a polynomial on |r| <= ln(2)/2, and 2^n by its bits. Loops over it vectorise.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f;
    n = (float)(int)(n + (n < 0 ? -0.5f : 0.5f));
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666418f + r * (0.00833336748f +
              r * (0.00138870882f + r * 0.000198412698f))))));
    uint32_t bits = (uint32_t)((int)n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

inline float tanh_of(float x) {
    float e = exp_of(2 * (x < 0 ? -x : x));
    float t = 1 - 2 / (e + 1);
    return x < 0 ? -t : t;
}

// Abramowitz and Stegun 7.1.26: |error| <= 1.5e-7, a rounding of float32.
inline float erf_of(float x) {
    float a = x < 0 ? -x : x, t = 1 / (1 + 0.3275911f * a);
    float p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    float y = 1 - p * exp_of(-a * a);
    return x < 0 ? -y : y;
}

}  // namespace glass
