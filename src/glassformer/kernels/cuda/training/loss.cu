// Cross-entropy of rows of logits and its gradient: each row is read from global memory once and written once.
//
// One block computes one row. It copies the row (100 KB at 50,000 columns of bfloat16) to shared memory and keeps it
// between the two passes of a softmax; two blocks share a multiprocessor, so that one computes while the other waits for
// memory. A thread reads back only what it copied itself, so the copy needs no __syncthreads. A row that is too long
// (KEPT is 0) is read from global memory twice. The formulas are in loss.py.
//
// Macros: THREADS; COLUMNS, the number of logits; STRIDE, the numbers from row to row, a multiple of 8. Columns from
// COLUMNS on are padding: their values are ignored and their gradient is 0. SMOOTHED: label smoothing is used. EIGHT: if
// not 0, the gradient is written in e5m2, multiplied by EIGHT (a power of two); float8.cuh then precedes this text.
// floats.cuh always does. tests/kernels/cuda/training compiles the same text for a CPU.

typedef unsigned short u16;

struct alignas(16) Pack { u32 word[4]; };  // eight numbers of bfloat16
#if KEPT
typedef const Pack& Read;
#else
typedef const Pack Read;  // by value: one load of 16 bytes
#endif
#if EIGHT
struct alignas(8) Gradients { u32 word[2]; };  // eight numbers of e5m2
#else
typedef Pack Gradients;
#endif

struct Arguments {
    const Pack* logits;
    Gradients* gradients;
    const long long* targets;
    float *totals, *plains;
    long long ignored;
    float smoothing, z_loss;
};

#define WARPS (THREADS / 32)
#define PACKS (STRIDE / 8)
#define REAL ((COLUMNS + 7) / 8)  // packs that hold logits; the rest of a row is padding
#define PART (COLUMNS % 8)        // logits in the last of them, 0 if it is full
#define FULL_MASK 0xffffffffu
#define MINUS_INFINITY __uint_as_float(0xff800000u)  // minus infinity
#define FACTOR (EIGHT ? (float)EIGHT : 1.f)

#ifdef __CUDACC__
#if KEPT
#define ROW extern __shared__ Pack row[]
#else
#define ROW const Pack* row = a.logits + (long long)blockIdx.x * PACKS
#endif
__device__ inline void copy_async(Pack* kept, const Pack* at) {
    u32 here = (u32)__cvta_generic_to_shared(kept);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(here), "l"(at));
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#if EIGHT
__device__ inline void store_streaming(Gradients* at, const Gradients& p) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]) : "memory");
}
#else
__device__ inline void store_streaming(Gradients* at, const Gradients& p) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(p.word[0]), "r"(p.word[1]), "r"(p.word[2]),
                 "r"(p.word[3])
                 : "memory");
}
#endif
#else
#include "emulated_loss.h"
#endif

// Merge two sums of exponentials. Each stands for 2^highest * sum.
__device__ inline void merge(float& highest, float& sum, float other_highest, float other_sum) {
    float higher = fmaxf(highest, other_highest);
    if (higher == MINUS_INFINITY) return;
    sum = sum * exp2_approx(highest - higher) + other_sum * exp2_approx(other_highest - higher);
    highest = higher;
}

// The same over the lanes of a warp, and the sum of plain_sum.
__device__ inline void merge_lanes(float& highest, float& sum, float& plain_sum) {
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(FULL_MASK, highest, step), more = __shfl_xor_sync(FULL_MASK, sum, step);
        merge(highest, sum, other, more);
        plain_sum += __shfl_xor_sync(FULL_MASK, plain_sum, step);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) loss(const Arguments a) {
    ROW;
    __shared__ float scratch[3][32];
    const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const long long r = blockIdx.x;
    const Pack* logits = a.logits + r * PACKS;
#if KEPT
    for (int i = t; i < REAL; i += THREADS) copy_async(row + i, logits + i);
#endif
    const long long target = a.targets[r];
    const bool counted = target != a.ignored;
#if KEPT
    wait_for_copies();  // wait for this thread's own copies
#endif

    float highest = MINUS_INFINITY, sum = 0, plain_sum = 0;  // of z * log2(e), so that exponentials are powers of two
    for (int i = t; i < REAL; i += THREADS) {
        Read p = row[i];
        float z[8], here = MINUS_INFINITY, added = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            z[2 * n] = low(p.word[n]) * LOG2_E;
            z[2 * n + 1] = high(p.word[n]) * LOG2_E;
        }
#if PART
#pragma unroll
        for (int n = PART; n < 8; n++)
            if (i == REAL - 1) z[n] = MINUS_INFINITY;
#endif
#pragma unroll
        for (int n = 0; n < 8; n++) here = fmaxf(here, z[n]);
        here = fmaxf(here, highest);
#pragma unroll
        for (int n = 0; n < 8; n++) added += exp2_approx(z[n] - here);
        if (here != MINUS_INFINITY) sum = sum * exp2_approx(highest - here) + added, highest = here;
#if SMOOTHED
#pragma unroll
        for (int n = 0; n < 8; n++) plain_sum += PART && n >= PART && i == REAL - 1 ? 0.f : z[n];
#endif
    }
    merge_lanes(highest, sum, plain_sum);
    if (lane == 0) scratch[0][warp] = highest, scratch[1][warp] = sum, scratch[2][warp] = plain_sum;
    __syncthreads();
    highest = lane < WARPS ? scratch[0][lane] : MINUS_INFINITY;
    sum = lane < WARPS ? scratch[1][lane] : 0.f;
    plain_sum = lane < WARPS ? scratch[2][lane] : 0.f;
    merge_lanes(highest, sum, plain_sum);
    const float bits = highest + log2f(sum), lse = bits / LOG2_E;  // NaN if the row holds a NaN
    if (t == 0) {
        const u16* numbers = (const u16*)logits;
        float picked = counted ? low(numbers[target]) : 0.f;
        float plain = counted ? lse - picked : 0.f, flat = counted ? lse - plain_sum / LOG2_E / COLUMNS : 0.f;
        a.plains[r] = plain;
        a.totals[r] = (1 - a.smoothing) * plain + a.smoothing * flat + (counted ? a.z_loss * lse * lse : 0.f);
    }
    const float weight = counted ? (1 + 2 * a.z_loss * lse) * FACTOR : 0.f;
    const float even = SMOOTHED && counted ? a.smoothing / COLUMNS * FACTOR : 0.f;
    const float own = counted ? (1 - a.smoothing) * FACTOR : 0.f;
    const int target_pack = counted ? (int)(target / 8) : -1, target_lane = (int)(target & 7);
    Gradients* gradients = a.gradients + r * PACKS;
    for (int i = t; i < REAL; i += THREADS) {
        Read z = row[i];
        float g[8];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            g[2 * n] = exp2_approx(low(z.word[n]) * LOG2_E - bits) * weight - even;
            g[2 * n + 1] = exp2_approx(high(z.word[n]) * LOG2_E - bits) * weight - even;
        }
        if (i == target_pack) {
#pragma unroll
            for (int n = 0; n < 8; n++) g[n] -= n == target_lane ? own : 0.f;
        }
#if PART
#pragma unroll
        for (int n = PART; n < 8; n++)
            if (i == REAL - 1) g[n] = 0;
#endif
        Gradients p;
#if EIGHT
#pragma unroll
        for (int n = 0; n < 8; n++) g[n] = infinity_to_nan(g[n]);
        p.word[0] = four_e5m2(g[0], g[1], g[2], g[3]);
        p.word[1] = four_e5m2(g[4], g[5], g[6], g[7]);
#else
#pragma unroll
        for (int n = 0; n < 4; n++) p.word[n] = pack_bf16(g[2 * n], g[2 * n + 1]);
#endif
        store_streaming(gradients + i, p);
    }
#if REAL < PACKS
    for (int i = REAL + t; i < PACKS; i += THREADS) store_streaming(gradients + i, Gradients{});
#endif
}
