// Products of a weight matrix with a few vectors, at the speed memory delivers the matrix.
//
// Written with the compiler's own vector types: 16 floats at a time, which becomes AVX-512, two AVX registers or four
// NEON ones. Weights are float32, bfloat16, int8 or int4 (the last two with one scale per row and group of columns) and
// are widened in registers; activations stay float32, and sums are float32 in a fixed order that does not depend on the
// number of threads: a row is always summed by one thread. Whole-number weights meet activations rounded to 16 bits
// where the processor multiplies bytes (integers.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace glass {

constexpr int W = 16;
constexpr int AHEAD = 2048;  // bytes that are asked for before they are needed
typedef float vf __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint8_t vb __attribute__((vector_size(16), aligned(1), may_alias));

enum Kind : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

struct Matrix {           // rows of `columns` weights; y = weights x + bias
    const void* weights;
    const float* scales;  // INT8, INT4: (rows, columns / group)
    const float* bias;    // or null
    int32_t rows, columns, group;
    int32_t kind;
};

inline vf load(const float* p) { return *(const vf*)p; }

// How weights lie in memory, and how STEP of them become floats for as many consecutive activations.
struct Floats {
    typedef float T;
    static constexpr int STEP = W, N = 1;
    static void widen(const T* p, vf* out) { out[0] = load(p); }
    static float one(T w) { return w; }
};
struct Brains {  // columns i and 16 + i of each 32 are neighbours: a word holds both, a shift and a mask part them
    typedef uint16_t T;
    static constexpr int STEP = 2 * W, N = 2;
    static void widen(const T* p, vf* out) {
        vu both = *(const vu*)p;
        out[0] = (vf)(both << 16), out[1] = (vf)(both & 0xffff0000u);
    }
    static float one(T w) {
        uint32_t bits = (uint32_t)w << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
};

inline float total(vf v) {  // pairwise, the same tree every time
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float a[W];
    std::memcpy(a, &v, sizeof a);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
#endif
}

inline float sum_of(const float* a, int n) {
    vf sum = {};
    int i = 0;
    for (; i + W <= n; i += W) sum += load(a + i);
    float rest = total(sum);
    for (; i < n; i++) rest += a[i];
    return rest;
}

inline float largest_of(const float* a, int n) {
    vf top = {};
    top -= INFINITY;
    int i = 0;
    for (; i + W <= n; i += W) {
        const vf here = load(a + i);
        top = here > top ? here : top;
    }
    float rest = -INFINITY;
    for (int k = 0; k < W; k++) rest = top[k] > rest ? top[k] : rest;
    for (; i < n; i++) rest = a[i] > rest ? a[i] : rest;
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

// R rows times B vectors, K sums for each so that one addition need not wait for the last. x is (B, columns).
template <class L, int R, int B, int K>
inline void rows_times(const Matrix& m, int row, const float* x, float* y, long stride) {
    typedef typename L::T T;
    const T* w = (const T*)m.weights + (long)row * m.columns;
    const long columns = m.columns, whole = columns / L::STEP * L::STEP;
    constexpr int N = L::N, SPAN = K * L::STEP / N;
    const long ahead = R == 1 ? AHEAD : R * columns * (long)sizeof(T);  // of several rows at once: the next ones
    vf sums[R][B][K] = {};
    auto step = [&](long i, int k) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf weights[N];
            L::widen(w + r * columns + i, weights);
#pragma GCC unroll 2
            for (int n = 0; n < N; n++)
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) sums[r][b][(k + n) % K] += weights[n] * load(x + b * columns + i + n * W);
        }
    };
    long i = 0;
    for (; i + SPAN <= whole; i += SPAN) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (unsigned long at = 0; at < SPAN * sizeof(T); at += 64)
                __builtin_prefetch((const char*)(w + r * columns + i) + ahead + at, 0, 3);
#pragma GCC unroll 8
        for (int k = 0; k < K / N; k++) step(i + k * L::STEP, k * N);
    }
    for (; i < whole; i += L::STEP) step(i, 0);
    for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) {
            vf sum = sums[r][b][0];
            for (int k = 1; k < K; k++) sum += sums[r][b][k];
            float out = total(sum);
            for (long c = whole; c < columns; c++) out += L::one(w[r * columns + c]) * x[b * columns + c];
            y[b * stride + row + r] = out + (m.bias ? m.bias[row + r] : 0.0f);
        }
}

// One vector is a single stream through the weights; several share each weight among more sums than one row has.
template <class L, int B>
inline void band(const Matrix& m, int first, int last, const float* x, float* y, long stride) {
    constexpr int R = B == 1 ? 1 : B == 4 ? 4 : 2, K = B == 1 ? 4 : L::N;
    int row = first;
    for (; row + R <= last; row += R) rows_times<L, R, B, K>(m, row, x, y, stride);
    for (; row < last; row++) rows_times<L, 1, B, K>(m, row, x, y, stride);
}

template <class L>
inline void band_of(const Matrix& m, int first, int last, const float* x, int batch, float* y, long stride) {
    for (; batch >= 8; batch -= 8, x += 8L * m.columns, y += 8 * stride) band<L, 8>(m, first, last, x, y, stride);
    for (; batch >= 4; batch -= 4, x += 4L * m.columns, y += 4 * stride) band<L, 4>(m, first, last, x, y, stride);
    for (; batch; batch--, x += m.columns, y += stride) band<L, 1>(m, first, last, x, y, stride);
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
