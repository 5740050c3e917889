// The inner loop of all matmuls with many vectors, in decoding and in training: a tile of the result, summed in registers.
//
// Operands are floats, or pairs of bf16 along the summed dimension where the processor has instructions for them.
#pragma once
#include "vectors.h"

namespace glass {

typedef uint32_t pair __attribute__((may_alias));  // two bf16, which one instruction multiplies and adds

inline uints load(const pair* from) { return *(const uints*)from; }

template <typename T>
struct Left {  // (i, d) at data[i * row + d * step]: a matrix or its transpose
    const T* data;
    int64_t row, step;
};

template <int VECTORS, typename T>
struct Tile {  // (i, d) at data[d * VECTORS + i]: vectors that are interleaved element by element
    const T* data;
    static constexpr int64_t row = 1, step = VECTORS;
};
template <typename A> constexpr bool IS_INTERLEAVED = false;
template <int VECTORS, typename T> constexpr bool IS_INTERLEAVED<Tile<VECTORS, T>> = true;

// sum + a b, rounded once. Written explicitly, because GCC's tuning for some processors splits it into a multiplication and
// an addition, and then a vector gets different bits in a batch than alone.
inline floats multiply_add(floats sum, floats a, floats b) {
#if defined(__AVX512F__)  // with the intrinsic, GCC moves sums between registers at every step
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}
inline floats multiply_add(floats sum, floats a, float b) { return multiply_add(sum, a, b - floats{}); }

// The same in the loop below. AVX-512 reads b from memory as part of the instruction: with a broadcast before it, a
// feed-forward takes 8 % longer.
inline floats accumulate(floats sum, floats a, const float& b) {
#if defined(__AVX512F__)
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(b));
    return sum;
#else
    return multiply_add(sum, a, b);
#endif
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
inline floats accumulate(floats sum, uints a, const pair& b) {  // with the intrinsic, GCC 12 spills the sums
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(_mm512_set1_epi32((int)b)));
    return sum;
}
// LANES numbers rounded to bf16, in pairs of neighbours.
inline void narrow(void* to, floats x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline uints rounded(floats x) { return (uints)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)); }
inline uints both(floats even, floats odd) { return rounded(even) | rounded(odd) << 16; }  // in pairs of one of each
#else
constexpr bool HAS_PAIRS = false;
inline void narrow(void*, floats) {}  // these two are never called
inline uints both(floats, floats) { return uints{}; }
#endif

struct Nothing {
    void operator()(int64_t) const {}
};

// out (ROWS, COLUMNS * LANES) = a (ROWS, depth) b (depth, COLUMNS * LANES), b with `b_row` elements from row to row. The sums
// and one row of b occupy ROWS * COLUMNS + COLUMNS registers. `meanwhile(d)` is called before every sixteenth step d.
template <int ROWS, int COLUMNS, typename A, typename T, typename Meanwhile = Nothing>
inline void sum_tile(A a, const T* b, int64_t b_row, int64_t depth, floats (&out)[ROWS][COLUMNS], Meanwhile meanwhile = {}) {
    floats sums[ROWS][COLUMNS];  // not `out` itself, which may be in memory: it would be written at every step
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++) sums[i][j] = floats{};
    const T* row[ROWS];  // used where they are few enough to stay in registers
    for (int i = 0; i < ROWS; i++) row[i] = a.data + i * a.row;
    for (int64_t d = 0; d < depth; d++) {
        if (!std::is_same_v<Meanwhile, Nothing> && d % LINE == 0) meanwhile(d);
        decltype(load(b)) right[COLUMNS];
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++) right[j] = load(b + d * b_row + j * LANES);
        const T* left = a.data + d * a.step;
#pragma GCC unroll 16
        for (int i = 0; i < ROWS; i++) {
            const T& one = ROWS <= 6 && !IS_INTERLEAVED<A> ? row[i][d * a.step] : left[i * a.row];
#pragma GCC unroll 8
            for (int j = 0; j < COLUMNS; j++) sums[i][j] = accumulate(sums[i][j], right[j], one);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++) out[i][j] = sums[i][j];
}

}  // namespace glass
