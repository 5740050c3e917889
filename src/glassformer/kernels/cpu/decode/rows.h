// The matrices of a model, and matmuls of a float32 matrix with a few vectors, limited by memory bandwidth.
//
// A float32 matrix is read in place, row by row; the other kinds are copies in panels (packed.h). Sums are float32 in an
// order that does not depend on the number of threads: a row is always summed by one thread.
#pragma once
#include <algorithm>
#include <vector>
#include "../tile.h"

namespace glass {

#if defined(__AVX512F__)
constexpr int SUMS = 28;  // registers that hold sums; the others hold operands
#elif defined(__aarch64__)
constexpr int SUMS = 24;
#else
constexpr int SUMS = 12;
#endif
enum Kind : int32_t { F32 = 0, BF16 = 1, INT8 = 2, INT4 = 3 };

struct Matrix {           // y = weights x + bias
    const void* weights;  // F32: rows of `columns` weights; others: panels of 32 rows
    const float* scales;  // INT8, INT4: (panels, columns / group, 32)
    const float* bias;    // or null
    int32_t rows, columns, group;
    int32_t kind;
};

struct Rows {  // a buffer that grows, from a cache line boundary on
    std::vector<float> held;
    float* at = nullptr;
    float* need(long n) {
        if ((long)held.size() < n + LANES) held.resize(n + LANES);
        return at = cache_aligned(held.data());
    }
};

// Keep a vector in its register: the compiler would load it again for each multiplication, and loads would then be the
// bottleneck.
inline floats in_register(floats v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
    return v;
}

// The first n < LANES floats of p, then `rest`.
inline floats load_some(const float* p, int n, float rest) {
    float a[LANES];
    for (int i = 0; i < LANES; i++) a[i] = i < n ? p[i] : rest;
    return load(a);
}
inline void store_some(float* p, int n, floats v) { std::memcpy(p, &v, n * sizeof(float)); }

inline float sum_of(const float* a, int n) {
    floats sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum += load(a + i);
    float rest = sum_lanes(sum);
    for (; i < n; i++) rest += a[i];
    return rest;
}

inline float dot(const float* a, const float* b, int n) {
    floats sum = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) sum = multiply_add(sum, load(a + i), load(b + i));
    float rest = sum_lanes(sum);
    for (; i < n; i++) rest += a[i] * b[i];
    return rest;
}

// The columns from `whole` on, fewer than LANES. Not inline: few matrices have such columns.
__attribute__((noinline)) inline void add_rest(const float* w, long columns, long whole, const float* const* x, int vectors, float* out) {
    for (int b = 0; b < vectors; b++)
        for (long c = whole; c < columns; c++) out[b] += w[c] * x[b][c];
}

// y[b][row] = the sum of all lanes (+ bias).
template <int B>
inline void finish_row(const Matrix& m, int row, const floats* sums, const float* const* x, float* const* y) {
    const long columns = m.columns, whole = columns / LANES * LANES;
    float out[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) out[b] = sum_lanes(sums[b]);
    if (whole < columns) add_rest((const float*)m.weights + row * columns, columns, whole, x, B, out);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) y[b][row] = out[b] + (m.bias ? m.bias[row] : 0.0f);
}

// sums[r][b] (+)= some columns of R rows, `columns` apart, times B vectors; `next` is what is read after them. The order of a sum
// is the same for every R and B: a vector gets the same bits alone and in a batch.
template <int R, int B, bool NEXT>
inline void rows_times(const float* w, long columns, long from, long to, const float* next, const float* const* x, floats* sums,
                       long stride) {
    constexpr bool IN_REGISTER = R > 1 && R * B + R + 1 < SUMS + 4;  // not with all registers: GCC 12 then keeps a sum in memory
    floats a[R][B];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) a[r][b] = from ? sums[r * stride + b] : floats{};
    for (long i = from; i < to; i += LANES) {
        floats weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            weights[r] = in_register(load(w + r * columns + i));
            if (NEXT) __builtin_prefetch(next + r * columns + i - from, 0, 3);
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            const floats here = IN_REGISTER ? in_register(load(x[b] + i)) : load(x[b] + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) a[r][b] = multiply_add(a[r][b], weights[r], here);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) sums[r * stride + b] = a[r][b];
}

// Some rows times B vectors: the first half of them together with the second, row by row.
//
// Additions of one row wait for each other, and then memory waits for them. Two rows at once do not, and as they are far apart,
// each half is one long stream, which the hardware prefetcher follows: 83 to 86 GB/s instead of 72 to 80 by two threads and one
// vector, and with AVX2 a step of GPT-2 takes 7 ms instead of 8.5. For more than two vectors, three or four adjacent rows are
// faster, because they share the vectors. Two cache lines of each stream at a time: with four a step of GPT-2 takes 5 % longer
// with AVX-512, with one 3 % longer with AVX2.
template <int B>
inline void two_streams(const Matrix& m, int first, int last, const float* const* x, float* const* y) {
    const int half = (last - first + 1) / 2, apart = last - first - half;  // of an odd number of rows, both compute one
    const long columns = m.columns, whole = columns / LANES * LANES;
    for (int row = first; row < first + half; row++) {
        const float *w = (const float*)m.weights + (long)row * columns, *v = w + apart * columns;
        floats a[B] = {}, b[B] = {};
#pragma GCC unroll 32 / LANES
        for (long i = 0; i < whole; i += LANES) {
            const floats left = in_register(load(w + i)), right = in_register(load(v + i));
#pragma GCC unroll 8
            for (int n = 0; n < B; n++) {
                const floats here = in_register(load(x[n] + i));
                a[n] = multiply_add(a[n], left, here), b[n] = multiply_add(b[n], right, here);
            }
        }
        finish_row<B>(m, row, a, x, y), finish_row<B>(m, row + apart, b, x, y);
    }
}

// Some rows times B vectors; the last is repeated for missing ones, which are computed and written again. Columns are multiplied in
// blocks, whose part of the vectors stays in the L1 cache: three rows at once, or two where the registers do not hold the sums of
// all vectors and some are multiplied after the others. What is read next is prefetched meanwhile: the hardware does not follow
// streams that end so soon. Eight vectors take 14 to 28 % less time for a model 2048 wide than without blocks.
template <int B>
inline void band(const Matrix& m, int first, int last, const float* x, long pitch, int vectors, float* y, long stride,
                 int next_row) {
    constexpr int FEW = std::min(B, SUMS / 3), R = FEW < B ? 2 : 3, ROWS = 24;
    constexpr long BLOCK = 1024;
    const float* from[B];
    float* to[B];
    for (int b = 0; b < B; b++) {
        const long at = b < vectors ? b : vectors - 1;
        from[b] = x + at * pitch, to[b] = y + at * stride;
    }
    if constexpr (LANES >= 8 && B <= 2) return two_streams<B>(m, first, last, from, to);
    const long columns = m.columns, whole = columns / LANES * LANES;
    const float* all = (const float*)m.weights;
    floats sums[ROWS][B] = {};
    for (int top = first; top < last; top += ROWS) {
        const int bottom = std::min(top + ROWS, last), after = bottom < last ? bottom : next_row ? next_row : top;
        for (long c = 0; c < whole; c += BLOCK) {
            const long end = std::min(c + BLOCK, whole);
            int row = top;
            for (; row + R <= bottom; row += R) {
                const float *w = all + row * columns, *below = w + R * columns + c;
                const float* next = row + 2 * R <= bottom ? below : all + (end < whole ? top * columns + end : after * columns);
                rows_times<R, FEW, (R > 1)>(w, columns, c, end, next, from, sums[row - top], B);
                for (int b = FEW; b < B; b += FEW)
                    rows_times<R, FEW, false>(w, columns, c, end, nullptr, from + b, sums[row - top] + b, B);
            }
            for (; row < bottom; row++)
                for (int b = 0; b < B; b += FEW)
                    rows_times<1, FEW, false>(all + row * columns, columns, c, end, nullptr, from + b, sums[row - top] + b, B);
        }
        for (int row = top; row < bottom; row++) finish_row<B>(m, row, sums[row - top], from, to);
    }
}

// Rows first..last of y = m x (+ bias) for a float32 matrix and a few vectors, `pitch` floats apart.
inline void multiply_rows(const Matrix& m, int first, int last, const float* x, long pitch, int batch, float* y,
                          long stride, int next_row) {
    for (; batch > 4; batch -= 8, x += 8 * pitch, y += 8 * stride)
        band<8>(m, first, last, x, pitch, std::min(batch, 8), y, stride, next_row);
    if (batch > 2) band<4>(m, first, last, x, pitch, batch, y, stride, next_row);
    else if (batch == 2) band<2>(m, first, last, x, pitch, batch, y, stride, next_row);
    else if (batch == 1) band<1>(m, first, last, x, pitch, batch, y, stride, next_row);
}

}  // namespace glass
