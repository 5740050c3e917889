// Vector types, and matmuls of a float32 matrix with a few vectors, limited by memory bandwidth.
//
// Written with the vector types of the compiler, as long as the registers of the processor: with longer ones GCC keeps sums
// in memory (a step of GPT-2 then took five times as long on a processor without AVX-512). A float32 matrix is read in
// place, row by row; the other kinds are copies in panels (packed.h). Sums are float32 in an order that does not depend on
// the number of threads: a row is always summed by one thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace glass {

#if defined(__AVX512F__)
constexpr int W = 16, SUMS = 28;  // floats per register; registers available for sums
#elif defined(__AVX__)
constexpr int W = 8, SUMS = 12;
#elif defined(__aarch64__)
constexpr int W = 4, SUMS = 24;
#else
constexpr int W = 4, SUMS = 12;
#endif
typedef float vf __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), aligned(4), may_alias));
enum Kind : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

struct Matrix {           // y = weights x + bias
    const void* weights;  // F32: rows of `columns` weights; others: panels of 32 rows
    const float* scales;  // INT8, INT4: (panels, columns / group, 32)
    const float* bias;    // or null
    int32_t rows, columns, group;
    int32_t kind;
};

inline vf load(const float* p) { return *(const vf*)p; }

// Keep a vector in its register: the compiler would load it again for each multiplication, and loads would then be the
// bottleneck.
inline vf held(vf v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
    return v;
}

// sum + a b, rounded once. Written explicitly, because GCC's tuning for some processors splits it into a multiplication and
// an addition, and then a vector gets different bits in a batch than alone.
inline vf more(vf sum, vf a, vf b) {
#if defined(__AVX512F__)  // with the intrinsic, GCC moves sums between registers at every step
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}
inline vf more(vf sum, vf a, float b) { return more(sum, a, b - vf{}); }

// The first n < W floats of p, then `rest`.
inline vf load_some(const float* p, int n, float rest) {
    float a[W];
    for (int i = 0; i < W; i++) a[i] = i < n ? p[i] : rest;
    return load(a);
}
inline void store(float* p, vf v) { *(vf*)p = v; }
inline void store_some(float* p, int n, vf v) { std::memcpy(p, &v, n * sizeof(float)); }

inline float total(vf v) {  // pairwise, always in the same order
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
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

inline float dot(const float* a, const float* b, int n) {
    vf sum = {};
    int i = 0;
    for (; i + W <= n; i += W) sum = more(sum, load(a + i), load(b + i));
    float rest = total(sum);
    for (; i < n; i++) rest += a[i] * b[i];
    return rest;
}

// The contribution of the columns from `whole` on (fewer than W). Not inline: few matrices have such columns, and every
// instance of rows_times would contain the code.
__attribute__((noinline)) inline void add_rest(const float* w, long columns, long whole, const float* const* x,
                                               int rows, int vectors, float* out) {
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < vectors; b++)
            for (long c = whole; c < columns; c++) out[r * vectors + b] += w[r * columns + c] * x[b][c];
}

// R rows times B vectors.
//
// One row is a single stream, which the hardware prefetcher handles best. It cannot follow R streams, so there the rows that
// come `next`, if any, are prefetched into the L2 cache. The order of a sum is the same for every R and B: a vector gets the
// same bits alone and in a batch.
template <int R, int B, bool NEXT>
inline void rows_times(const Matrix& m, int row, const float* next, const float* const* x, float* const* y) {
    const long columns = m.columns, whole = columns / W * W;
    const float* w = (const float*)m.weights + (long)row * columns;
    vf sums[R][B] = {};
    float out[R * B];
    for (long i = 0; i < whole; i += W) {
        vf weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const float* at = w + r * columns + i;
            weights[r] = held(load(at));
            if (NEXT) __builtin_prefetch(next + r * columns + i, 0, 2);
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            const vf here = R > 1 ? held(load(x[b] + i)) : load(x[b] + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][b] = more(sums[r][b], weights[r], here);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) out[r * B + b] = total(sums[r][b]);
    if (whole < columns) add_rest(w, columns, whole, x, R, B, out);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) y[b][row + r] = out[r * B + b] + (m.bias ? m.bias[row + r] : 0.0f);
}

// B vectors; the last is repeated for missing ones, which are computed and written again. As many vectors as the registers
// hold are multiplied with the same rows at once, then the others, while the rows are in the L1 cache.
template <int B>
inline void band(const Matrix& m, int first, int last, const float* x, long pitch, int vectors, float* y, long stride,
                 int soon) {
    constexpr int FEW = std::min(B, SUMS / 3), R = B == 1 && W == 16 ? 1 : std::min(4, SUMS / FEW);
    const float* from[B];
    float* to[B];
    for (int b = 0; b < B; b++) {
        const long at = b < vectors ? b : vectors - 1;
        from[b] = x + at * pitch, to[b] = y + at * stride;
    }
    int row = first;
    const float* all = (const float*)m.weights;
    for (; row + R <= last; row += R) {
        const float* next = all + (long)(row + R < last || !soon ? row + R : soon) * m.columns;
        rows_times<R, FEW, (R > 1)>(m, row, next, from, to);
        for (int b = FEW; b < B; b += FEW) rows_times<R, FEW, false>(m, row, nullptr, from + b, to + b);
    }
    for (; row < last; row++)
        for (int b = 0; b < B; b += FEW) rows_times<1, FEW, false>(m, row, nullptr, from + b, to + b);
}

// Rows first..last of y = m x (+ bias) for a float32 matrix and a few vectors, `pitch` floats apart.
inline void multiply_rows(const Matrix& m, int first, int last, const float* x, long pitch, int batch, float* y,
                          long stride, int soon) {
    for (; batch > 4; batch -= 8, x += 8 * pitch, y += 8 * stride)
        band<8>(m, first, last, x, pitch, std::min(batch, 8), y, stride, soon);
    if (batch > 2) band<4>(m, first, last, x, pitch, batch, y, stride, soon);
    else if (batch == 2) band<2>(m, first, last, x, pitch, batch, y, stride, soon);
    else if (batch == 1) band<1>(m, first, last, x, pitch, batch, y, stride, soon);
}

}  // namespace glass
