// Matmuls with matrices that are stored in panels of 32 rows: 4 bytes of each row in turn.
//
// A step of a panel is 128 bytes: 2 columns of bfloat16, 4 of int8, or 8 of int4 (the first four in the low halves).
// The weights of a step are multiplied with one broadcast word of activations, so that every lane is a row of its own:
// nothing is summed across lanes, and a matrix is one stream through memory for any number of vectors. A panel stays in
// the L2 cache while all tiles of vectors are multiplied with it.
//
// Few vectors (decoding) keep their precision: bfloat16 weights are widened and multiplied with floats; int8 weights
// are multiplied with 16-bit activations, whose rounding error, 1/65024 of the largest of a group, is far below that of
// the weights. For int4 weights, 8 bits are as far below (1/254 to 1/14), at half the work. Many vectors (prompts) are
// limited by multiplications: there, if the processor has the instructions (for int8, AVX2 suffices), bfloat16 is multiplied
// with bfloat16, and integers with 8-bit activations that have a scale per vector and group of columns.
// tests/kernels/cpu/decode bounds the error of all of these.
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
inline ints dot_bytes(ints sums, uints weights, uint32_t x) {  // four weights of each of LANES rows
    return (ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32((int)x));
}
#else
ints dot_bytes(ints sums, uints weights, uint32_t x);  // never called: without the instruction no vectors have the form BYTES
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
// Two steps for the form SIGNS: absolute values times weights that have the signs of the products. Four products are added in
// 16 bits: the absolute values of four numbers are at most 255 together, and weights 128.
template <int B>
inline ints dot_signs(ints sums, const uints* weights, const uint32_t* x) {
    const auto word = [=](int i) { return _mm256_set1_epi32((int)x[i * B]); };
    ints a, b;  // written in assembly, because GCC keeps weights in registers that the sums need
    asm("vpxor %3, %4, %1\n\tvpxor %5, %6, %2\n\tvpmaddubsw %1, %7, %1\n\tvpmaddubsw %2, %8, %2\n\t"
        "vpaddw %2, %1, %1\n\tvpmaddwd %9, %1, %1\n\tvpaddd %1, %0, %0"
        : "+x"(sums), "=&x"(a), "=&x"(b)
        : "m"(weights[0]), "x"(word(1)), "m"(weights[PARTS]), "x"(word(3)), "x"(word(0)), "x"(word(2)), "x"(ints{} + 0x10001));
    return sums;
}
#else
template <int B> ints dot_signs(ints sums, const uints* weights, const uint32_t* x);
#endif
inline uints halves(uints v, bool high) { return (high ? v >> 4 : v) & 0x0f0f0f0fu; }  // of each byte

// Two 16-bit weights of each of LANES rows times two 16-bit numbers.
inline ints dot_pairs(ints sums, uints weights, const uint32_t& x) {
#if defined(__AVX512BW__)
    return sums + (ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32((int)x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    ints both;  // written in assembly, because GCC loads many x at once and then has no registers for the sums
    asm("vpbroadcastd %3, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0" : "+x"(sums), "=&x"(both) : "x"(weights), "m"(x));
    return sums;
#else
    return sums + (ints)(weights & 0xffffu) * (int32_t)(int16_t)x + (ints)(weights >> 16) * ((int32_t)x >> 16);
#endif
}

inline floats to_floats(ints v) {
#if defined(__AVX512F__)
    return (floats)_mm512_cvtepi32_ps((__m512i)v);
#else
    return __builtin_convertvector(v, floats);
#endif
}

// Prefetch the step of a panel that is `ahead` bytes after this one. The loops over a panel end after some columns, and the hardware
// prefetcher starts too late: 24 matrices of 3072 x 1024 take 29 % less time with four vectors and bfloat16, 25 % with eight and int8.
template <int B>
inline void prefetch_step(const uints* w, int ahead) {
    if constexpr (B <= 8)
        for (int i = 0; i < STEP; i += 64) __builtin_prefetch((const char*)w + ahead + i, 0, 3);
}
constexpr int AHEAD = 4096;  // of integers; 3 to 5 KB are as good

// A panel of bfloat16 times B vectors of floats. Where the registers do not hold all sums, some columns are multiplied in parts of the
// panel, and meanwhile the next ones are prefetched. Sums are stored one by one, because GCC 12 keeps what is copied by memcpy in
// memory. Not inlined: with its callers there are too few registers for eight vectors.
template <int B>
__attribute__((noinline)) void few_bf16(const uint8_t* w, int steps, const float* x, float (*out)[WIDE]) {
    constexpr int N = AT_ONCE<B>, BLOCK = 64;
    for (int from = 0; from < steps; from += BLOCK, w += BLOCK * STEP, x += BLOCK * 2 * B)
        for (int part = 0; part < PARTS; part += N) {
            floats sums[B][N];
#pragma GCC unroll 16
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) sums[b][j] = from ? load(out[b] + (part + j) * LANES) : floats{};
            const uints* at = (const uints*)w + part;
            const float* one = x;
            for (int k = 0; k < std::min(BLOCK, steps - from); k++, at += PARTS, one += 2 * B) {
                if (part == 0) prefetch_step<B>(at, BLOCK * STEP);
#pragma GCC unroll 2
                for (int odd = 0; odd < 2; odd++) {
                    floats weights[N];
#pragma GCC unroll 8
                    for (int j = 0; j < N; j++) weights[j] = (floats)(odd ? at[j] & 0xffff0000u : at[j] << 16);
#pragma GCC unroll 16
                    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                        for (int j = 0; j < N; j++) sums[b][j] = multiply_add(sums[b][j], weights[j], broadcast(one[odd * B + b]));
                }
            }
#pragma GCC unroll 16
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) store(out[b] + (part + j) * LANES, sums[b][j]);
        }
}

// Two panels of bfloat16 times one or two vectors, for the reasons of two_streams (rows.h). Where memory is read at 85 GB/s, a step of
// Llama-1B takes 20.8 to 21.3 ms instead of 21.8 to 22.2 by few_bf16; at 54 GB/s, and with AVX2, nothing is gained.
template <int B>
__attribute__((noinline)) void two_bf16(const uint8_t* w, const uint8_t* v, int steps, const float* x, float (*out)[WIDE]) {
    floats sums[2][B][PARTS] = {};
    for (int k = 0; k < steps; k++, w += STEP, v += STEP, x += 2 * B)
#pragma GCC unroll 8
        for (int j = 0; j < PARTS; j++) {
            const uints pair[] = {((const uints*)w)[j], ((const uints*)v)[j]};
#pragma GCC unroll 8
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int p = 0; p < 2; p++) {
                    sums[p][b][j] = multiply_add(sums[p][b][j], (floats)(pair[p] << 16), broadcast(x[b]));
                    sums[p][b][j] = multiply_add(sums[p][b][j], (floats)(pair[p] & 0xffff0000u), broadcast(x[B + b]));
                }
        }
    std::memcpy(out, sums, sizeof sums);
}

// sums[b][j] += N parts of some steps of a panel times bytes of B vectors, whose words are STRIDE apart in x.
template <int KIND, int STRIDE, int B, int N>
inline void add_bytes(const uints* w, int steps, const uint32_t* x, ints (&sums)[B][N]) {
    ints a[B][N];  // a copy stays in registers
    std::memcpy(a, sums, sizeof a);
    for (int k = 0; k < steps; k++, w += PARTS) {
        prefetch_step<B>(w, AHEAD);
#pragma GCC unroll 2
        for (int half = 0; half < (KIND == INT4 ? 2 : 1); half++, x += STRIDE) {
            uints weights[N];
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) weights[j] = KIND == INT4 ? halves(w[j], half) : w[j];
#pragma GCC unroll 16
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) a[b][j] = dot_bytes(a[b][j], weights[j], x[b]);
        }
    }
    std::memcpy(sums, a, sizeof a);
}

// sums += some steps of a panel of int8 times B vectors of 16 bits: 256 times the sum of the high bytes, plus that of the low.
template <int B, int N>
inline void add_split_bytes(const uints* w, int steps, const uint32_t* x, ints (&sums)[B][N]) {
    if constexpr (2 * B * N <= 16) {  // few sums: both at once, so that additions do not wait for each other
        ints high[B][N] = {}, low[B][N] = {};
        for (int k = 0; k < steps; k++, w += PARTS, x += 2 * B) {
            prefetch_step<B>(w, AHEAD);
#pragma GCC unroll 8
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++)
                    high[b][j] = dot_bytes(high[b][j], w[j], x[b]), low[b][j] = dot_bytes(low[b][j], w[j], x[B + b]);
        }
        for (int b = 0; b < B; b++)
            for (int j = 0; j < N; j++) sums[b][j] += (high[b][j] << 8) + low[b][j];
    } else {  // otherwise one after the other: 25 % faster at batch 8 than half a panel at a time
        ints high[B][N] = {};
        add_bytes<INT8, 2 * B>(w, steps, x, high);
        for (int b = 0; b < B; b++)
            for (int j = 0; j < N; j++) sums[b][j] += high[b][j] << 8;
        add_bytes<INT8, 2 * B>(w, steps, x + B, sums);
    }
}

// The same for processors without byte multiplication: int8 or int4 times 16-bit numbers.
template <int KIND, int B, int N>
inline void add_word_pairs(const uints* w, int steps, const uint32_t* x, ints (&sums)[B][N], const uints* next) {
    ints a[B][N];
    std::memcpy(a, sums, sizeof a);
    for (int k = 0; k < steps; k++, w += PARTS) {
        if (N < PARTS) __builtin_prefetch(next + k * N);
        else prefetch_step<B>(w, AHEAD);
#pragma GCC unroll 2
        for (int half = 0; half < (KIND == INT4 ? 2 : 1); half++, x += 2 * B)
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) {
                const uints weights = KIND == INT4 ? halves(w[j], half) : w[j];
                const uints even = weights & 0x00ff00ffu, odd = weights >> 8 & 0x00ff00ffu;
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) a[b][j] = dot_pairs(dot_pairs(a[b][j], even, x[b]), odd, x[B + b]);
            }
    }
    std::memcpy(sums, a, sizeof a);
}

// sums += some steps of a panel of int8 times B vectors of the form SIGNS.
template <int B, int N>
inline void add_signs(const uints* w, int steps, const uint32_t* x, ints (&sums)[B][N]) {
    ints a[B][N];
    std::memcpy(a, sums, sizeof a);
    for (int k = 0; k < steps; k += 2, w += 2 * PARTS, x += 4 * B)
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 8
            for (int j = 0; j < N; j++) a[b][j] = dot_signs<B>(a[b][j], w + j, x + b);
    std::memcpy(sums, a, sizeof a);
}

// A panel of integers times B vectors of integers, of a tile that is TILE wide, one group of columns after another. Where the registers do not hold all sums,
// a group is multiplied in parts of the panel, and meanwhile the next group is prefetched: the hardware would do so during the
// first part only.
template <int KIND, Form FORM, int B, int TILE = B>
inline void multiply_integers(const uint8_t* panel, const Vectors& v, int tile, const float* scales, float (*out)[WIDE]) {
    constexpr int N = AT_ONCE<B>;
    const int groups = v.groups(), steps = v.group / COLUMNS<KIND>, size = steps * PARTS;
    const uints* w = (const uints*)panel;
    const uint32_t* x = v.words_of(tile);
    const float* x_scales = v.scales_of(tile);
    const int32_t* starts = v.starts_of(tile);
    for (int g = 0; g < groups; g++, w += size, x += v.depth / groups * TILE, scales += WIDE, x_scales += TILE, starts += TILE)
        for (int part = 0; part < PARTS; part += N) {
            ints sums[B][N];
#pragma GCC unroll 16
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) sums[b][j] = ints{} + starts[b];
            if constexpr (FORM == BYTES) add_bytes<KIND, TILE>(w + part, steps, x, sums);
            else if constexpr (FORM == SIGNS) add_signs(w + part, steps, x, sums);
            else if constexpr (HAS_BYTES) add_split_bytes(w + part, steps, x, sums);
            else add_word_pairs<KIND>(w + part, steps, x, sums, w + size + part * steps);
#pragma GCC unroll 16
            for (int b = 0; b < B; b++)
#pragma GCC unroll 8
                for (int j = 0; j < N; j++) {
                    floats* at = (floats*)out[b] + part + j;
                    const floats scale = load(scales + (part + j) * LANES) * x_scales[b];
                    *at = multiply_add(g ? *at : floats{}, to_floats(sums[b][j]), scale);
                }
        }
}

// Some vectors of a tile that is B wide, in pairs of bf16: as many as there are, rounded up to an even number.
template <int B, int M = B>
inline void multiply_pairs(const pair* panel, int steps, const pair* x, int vectors, float (*out)[WIDE]) {
    if constexpr (M > 2)
        if (vectors <= M - 2) return multiply_pairs<B, M - 2>(panel, steps, x, vectors, out);
    floats sums[M][PARTS];
    sum_tile<M, PARTS>(Tile<B, pair>{x}, panel, WIDE, steps, sums);
    std::memcpy(out, sums, sizeof sums);
}

// The same for the last tile of many vectors: as many as there are, rounded up to an even number.
template <int KIND, int TILE, int M = TILE>
inline void multiply_last_integers(const uint8_t* panel, const Vectors& v, int tile, const float* scales, float (*out)[WIDE]) {
    if constexpr (M > 2)
        if (v.batch - tile * TILE <= M - 2) return multiply_last_integers<KIND, TILE, M - 2>(panel, v, tile, scales, out);
    multiply_integers<KIND, BYTES, M, TILE>(panel, v, tile, scales, out);
}

template <int KIND, int B>
inline void tile_times(const Matrix& m, int row, const Vectors& v, int tile, float (*out)[WIDE]) {
    const uint8_t* w = panel_of(m, row);
    if constexpr (KIND == BF16) {
        if (v.form == FLOATS) return few_bf16<B>(w, steps_of(m), (const float*)v.words_of(tile), out);
        if constexpr (HAS_PAIRS) {
            const int vectors = std::min(B, v.batch - tile * B);
            if (vectors < B) return multiply_pairs<B>((const pair*)w, steps_of(m), v.words_of(tile), vectors, out);
            floats sums[B][PARTS];
            sum_tile<B, PARTS>(Tile<B, pair>{v.words_of(tile)}, (const pair*)w, WIDE, steps_of(m), sums);
            std::memcpy(out, sums, sizeof sums);
        }
    } else {
        // int4 weights: one form for any number of vectors
        constexpr Form many = KIND == INT8 || HAS_BYTES ? ROUNDED : SPLIT, few = KIND == INT8 || !HAS_BYTES ? SPLIT : ROUNDED;
        if constexpr (many == BYTES && B == TALL)
            if (v.form == many) return multiply_last_integers<KIND, B>(w, v, tile, scales_of(m, row), out);
        if (v.form == many) multiply_integers<KIND, many, B>(w, v, tile, scales_of(m, row), out);
        else multiply_integers<KIND, few, B>(w, v, tile, scales_of(m, row), out);
    }
}

// y[i][row..] = out[i] + bias, for the vectors that exist.
inline void store_tile(const Matrix& m, int row, int last, const Vectors& v, int tile, const float (*out)[WIDE], float* y,
                    long stride) {
    const int width = std::min(WIDE, last - row), vectors = std::min(v.tile, v.batch - tile * v.tile);
    for (int i = 0; i < vectors; i++)
        store_sums(y + ((long)tile * v.tile + i) * stride + row, out[i], width, false, m.bias ? m.bias + row : nullptr);
}

template <int KIND>
inline void multiply_panels(const Matrix& m, const Chunk& chunk, const Vectors& v, float* y, long stride) {
    float out[2 * TILE][WIDE];
    if (v.form == LINES) {
        Unit unit;
        for (int row = chunk.first; row < chunk.last; row += WIDE)
            for (int tile = chunk.from; tile < chunk.to; tile++) {
                amx_multiply(unit, panel_of(m, row), STEP, v.words_of(tile), v.depth, out[0]);
                store_tile(m, row, chunk.last, v, tile, out, y, stride);
            }
        return;
    }
    const int half = KIND == BF16 && v.batch <= 2 && LANES == 16 ? (chunk.last - chunk.first) / WIDE / 2 * WIDE : 0;
    for (int row = chunk.first; row < chunk.first + half; row += WIDE) {
        const auto two = v.batch == 1 ? two_bf16<1> : two_bf16<2>;
        two(panel_of(m, row), panel_of(m, row + half), steps_of(m), (const float*)v.words_of(0), out);
        for (int k = 0; k < 2; k++) store_tile(m, row + k * half, chunk.last, v, 0, out + k * v.batch, y, stride);
    }
    for (int row = chunk.first + 2 * half; row < chunk.last; row += WIDE)
        for (int tile = chunk.from; tile < chunk.to; tile++) {
            switch (v.tile) {
                case 1: tile_times<KIND, 1>(m, row, v, tile, out); break;
                case 2: tile_times<KIND, 2>(m, row, v, tile, out); break;
                case 4: tile_times<KIND, 4>(m, row, v, tile, out); break;
                case 6: if constexpr (TALL == 6 && KIND == BF16) tile_times<KIND, 6>(m, row, v, tile, out); break;
                case 14: if constexpr (TALL == 14) tile_times<KIND, 14>(m, row, v, tile, out); break;
                default: tile_times<KIND, 8>(m, row, v, tile, out);
            }
            store_tile(m, row, chunk.last, v, tile, out, y, stride);
        }
}

// A chunk of y = m x (+ bias), whose first row is a multiple of 32; `v` holds x in the form that form_of returns, except for few
// vectors and float32, which use x itself: all of them.
inline void multiply(const Matrix& m, const Chunk& chunk, const float* x, long pitch, const Vectors& v, float* y, long stride) {
    switch (m.kind) {
        case F32:
            if (is_many(m, v.batch)) return multiply_floats(m, chunk, v, y, stride);
            return multiply_rows(m, chunk.first, chunk.last, x, pitch, v.batch, y, stride, chunk.next_row);
        case BF16: return multiply_panels<BF16>(m, chunk, v, y, stride);
        case INT8: return multiply_panels<INT8>(m, chunk, v, y, stride);
        default: return multiply_panels<INT4>(m, chunk, v, y, stride);
    }
}

}  // namespace glass
