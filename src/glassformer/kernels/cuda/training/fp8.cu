// Casts to float8 for the matmuls of fp8.py, which defines what each kernel computes. Each input is read from global
// memory once, and each result is written once in each layout (row-major and transposed).
//
// A block processes a tile of DOWN rows and 128 columns, a thread four rows of sixteen columns of it. The thread writes
// its rows to the row-major result, transposes squares of 4 x 4 bytes in registers, and stores them in shared memory,
// where the squares form columns. After a __syncthreads, the block writes the columns to the transposed result: 16 bytes
// per thread, DOWN bytes per column. Rows and columns are multiples of 16.
//
// Macros: DOWN (128 or 256), WIDE (the input is float32, not bfloat16), SHORT (e5m2, not e4m3), KIND (of the activation,
// as in fp8_cuda.py) and SUMMED (column sums of the gradient are wanted). This text follows float8.cuh.
// tests/kernels/cuda/training compiles the same text for a CPU.

struct alignas(16) Pack { u32 word[4]; };  // sixteen numbers of 8 bits, eight of bfloat16, or four of float32
struct alignas(8) Half { u32 word[2]; };   // eight bytes

struct Arguments {
    const u8 *x, *pre;  // x: the input, or the gradient of the activation's output; pre: the activation's input
    const float *scale, *post_scale;
    u8 *out, *transposed, *post_transposed;
    float* sums;  // (tiles down, columns)
    int rows, columns;
    int real;                   // rows of x; the rows below are written as zeros
    int stride, transposed_stride;  // bytes from row to row of the two results
};

#define THREADS (2 * DOWN)
#define COLUMNS_EACH 16     // columns of a thread
#define ACROSS 128  // columns of a tile
#define RUN 4       // groups of eight numbers that a thread of `activate` processes
#define FULL_MASK 0xffffffffu

#ifdef __CUDACC__
__device__ inline Pack read(const u8* at) {
    Pack p;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3]) : "l"(at));
    return p;
}
__device__ inline float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
#include "emulated_fp8.h"
#endif

__device__ inline float exponential(float x) { return exp2_approx(x * LOG2_E); }
__device__ inline float sigmoid(float x) { return reciprocal(1 + exponential(-x)); }

// An activation and its derivative, as fp8.activation.
__device__ inline void activated(float y, float& value, float& slope) {
    if (KIND == 0) {
        value = y <= 0 ? 0.f : y;  // not fmaxf: NaN must stay NaN
        slope = y > 0 ? 1.f : 0.f;
    } else if (KIND == 1) {
        float r = y <= 0 ? 0.f : y;
        value = r * r;
        slope = 2 * r;
    } else if (KIND == 2) {
        float s = sigmoid(y);
        value = y * s;
        slope = s * (1 + y * (1 - s));
    } else if (KIND == 3) {
        const float steep = 1.5957691216057308f, cubic = 0.044715f;
        float square = y * y, s = reciprocal(1 + exp2_approx(y * (-steep * LOG2_E - steep * cubic * LOG2_E * square)));
        value = y * s;
        slope = s + value * (1 - s) * (steep + 3 * steep * cubic * square);
    } else if (KIND == 4) {
        float share = 0.5f * (1 + erff(y * 0.7071067811865476f));
        value = y * share;
        slope = share + y * exponential(-0.5f * y * y) * 0.3989422804014327f;
    } else {
        value = tanhf(y);
        slope = 1 - value * value;
    }
}

__device__ inline u32 pack_four(const float* x, bool short_one) {
    return short_one ? four_e5m2(infinity_to_nan(x[0]), infinity_to_nan(x[1]), infinity_to_nan(x[2]), infinity_to_nan(x[3]))
                     : four_e4m3(infinity_to_nan(x[0]), infinity_to_nan(x[1]), infinity_to_nan(x[2]), infinity_to_nan(x[3]));
}

// Eight numbers of bfloat16.
__device__ inline void unpack(float* x, const Pack& p) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        x[2 * n] = __uint_as_float(p.word[n] << 16);
        x[2 * n + 1] = __uint_as_float(p.word[n] & 0xffff0000u);
    }
}

// Row and column of the first of a thread's four rows of COLUMNS_EACH columns.
struct Origin {
    int down, row, column;
    bool inside;
};
__device__ inline Origin origin(const Arguments& a) {
    const int t = threadIdx.x, tiles = (a.columns + ACROSS - 1) / ACROSS, down = blockIdx.x / tiles;
    const int row = down * DOWN + (t >> 3) * 4, column = (blockIdx.x - down * tiles) * ACROSS + (t & 7) * COLUMNS_EACH;
    return {down, row, column, row < a.rows && column < a.columns};
}

// Store a thread's bytes in the tile, transposed. Layout of the tile: 128 columns of DOWN bytes. The sixteen rows of a
// column that one warp holds are one Pack of 16 bytes. The index of the Pack within its column is XORed with the column
// group of the lane, so that the lanes of a warp write to different banks.
__device__ inline void store_transposed(u32* tile, const Pack (&made)[4]) {
    const int t = threadIdx.x, mine = t & 7;
    u32* at = tile + mine * COLUMNS_EACH * (DOWN / 4) + (((t >> 5) ^ mine) << 2 | (t >> 3 & 3));
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const u32 first = made[0].word[n], second = made[1].word[n], third = made[2].word[n], fourth = made[3].word[n];
        const u32 a = __byte_perm(first, second, 0x5140), b = __byte_perm(first, second, 0x7362);
        const u32 c = __byte_perm(third, fourth, 0x5140), d = __byte_perm(third, fourth, 0x7362);
        at[(4 * n + 0) * (DOWN / 4)] = __byte_perm(a, c, 0x5410);
        at[(4 * n + 1) * (DOWN / 4)] = __byte_perm(a, c, 0x7632);
        at[(4 * n + 2) * (DOWN / 4)] = __byte_perm(b, d, 0x5410);
        at[(4 * n + 3) * (DOWN / 4)] = __byte_perm(b, d, 0x7632);
    }
}

// Write the columns of the tile to global memory, undoing the XOR of `store_transposed`.
__device__ inline void write_columns(u8* transposed, const Pack* tile, const Arguments& a, const Origin& p) {
    const int t = threadIdx.x, first = p.column - (t & 7) * COLUMNS_EACH, pack = t % (DOWN / 16);
    const int row = p.down * DOWN + pack * 16;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int column = t / (DOWN / 16) + 32 * n;
        if (row < a.rows && first + column < a.columns)
            *(Pack*)(transposed + (long long)(first + column) * a.transposed_stride + row) =
                tile[column * (DOWN / 16) + (pack ^ (column / COLUMNS_EACH))];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) cast(const Arguments a) {
    __shared__ Pack tile[ACROSS * DOWN / 16];
    const Origin p = origin(a);
    const long long at = (long long)p.row * a.columns + p.column;
    Pack raw[4][4] = {}, made[4];
    if (p.inside) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u8* from = a.x + (at + (long long)i * a.columns) * (WIDE ? 4 : 2);
            if (p.row + i >= a.real) continue;
#pragma unroll
            for (int w = 0; w < (WIDE ? 4 : 2); w++) raw[i][w] = read(from + 16 * w);
        }
    }
    const float inverse_scale = 1 / *a.scale;  // exact, since the scale is a power of two; loaded after the longer loads
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x[COLUMNS_EACH];
        if (WIDE) {
#pragma unroll
            for (int n = 0; n < COLUMNS_EACH; n++) x[n] = __uint_as_float(raw[i][n / 4].word[n % 4]);
        } else {
            unpack(x, raw[i][0]);
            unpack(x + 8, raw[i][1]);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS_EACH; n++) x[n] *= inverse_scale;
#pragma unroll
        for (int w = 0; w < 4; w++) made[i].word[w] = pack_four(x + 4 * w, SHORT);
        if (p.inside) *(Pack*)(a.out + (long long)(p.row + i) * a.stride + p.column) = made[i];
    }
    store_transposed(&tile[0].word[0], made);
    __syncthreads();
    write_columns(a.transposed, tile, a, p);
}

extern "C" __global__ void __launch_bounds__(THREADS) activate(const Arguments a) {
    const long long all = (long long)a.rows * a.columns / 8, first = (long long)blockIdx.x * (RUN * THREADS) + threadIdx.x;
    Pack raw[RUN] = {};
#pragma unroll
    for (int i = 0; i < RUN; i++)
        if (first + i * THREADS < all) raw[i] = read(a.pre + (first + i * THREADS) * 16);
    const float inverse_scale = 1 / *a.scale;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        float y[8], x[8], slope;
        unpack(y, raw[i]);
#pragma unroll
        for (int n = 0; n < 8; n++) activated(y[n], x[n], slope), x[n] *= inverse_scale;
        if (first + i * THREADS < all) *(Half*)(a.out + (first + i * THREADS) * 8) = {{pack_four(x, false), pack_four(x + 4, false)}};
    }
}

// Sum over the rows of the tile: first of a thread, then of a warp, then of the block. Contains a __syncthreads.
__device__ inline void sum_rows(float* sums, float (&sum)[COLUMNS_EACH], float (*scratch)[ACROSS], const Origin& p, int columns) {
    const int t = threadIdx.x;
#pragma unroll
    for (int n = 0; n < COLUMNS_EACH; n++) {
        sum[n] += __shfl_xor_sync(FULL_MASK, sum[n], 8);
        sum[n] += __shfl_xor_sync(FULL_MASK, sum[n], 16);
        if ((t & 31) < 8) scratch[t >> 5][(t & 7) * COLUMNS_EACH + n] = sum[n];
    }
    __syncthreads();
    const int column = p.column - (t & 7) * COLUMNS_EACH + t;
    if (t < ACROSS && column < columns) {
        float all = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / 32; warp++) all += scratch[warp][t];
        sums[(long long)p.down * columns + column] = all;
    }
}

#if DOWN == 128  // two larger tiles do not fit into shared memory
// Two blocks per multiprocessor: the loads in flight need many registers.
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS) activate_backward(const Arguments a) {
    __shared__ Pack tile[2][ACROSS * DOWN / 16];
    __shared__ float scratch[THREADS / 32][ACROSS];
    const Origin p = origin(a);
    const long long at = (long long)p.row * a.columns + p.column;
    Pack pre[4][2] = {}, given[4][2] = {}, made[4], post[4];
    float sum[COLUMNS_EACH] = {};
    if (p.inside) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const long long from = (at + (long long)(i / 2) * a.columns) * 2 + i % 2 * 16;
            pre[i / 2][i % 2] = read(a.pre + from), given[i / 2][i % 2] = read(a.x + from);
        }
    }
    const float inverse_scale = 1 / *a.scale, inverse_post_scale = 1 / *a.post_scale;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float y[8], d[8], value[8];
            unpack(y, pre[i][half]);
            unpack(d, given[i][half]);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float slope;
                activated(y[n], value[n], slope);
                d[n] *= slope;
                if (SUMMED) sum[8 * half + n] += d[n];
                d[n] *= inverse_scale;
                value[n] *= inverse_post_scale;
            }
            made[i].word[2 * half] = pack_four(d, true), made[i].word[2 * half + 1] = pack_four(d + 4, true);
            post[i].word[2 * half] = pack_four(value, false), post[i].word[2 * half + 1] = pack_four(value + 4, false);
        }
        if (p.inside) *(Pack*)(a.out + at + (long long)i * a.columns) = made[i];
    }
    store_transposed(&tile[0][0].word[0], made);
    store_transposed(&tile[1][0].word[0], post);
    if (SUMMED) sum_rows(a.sums, sum, scratch, p, a.columns);
    else __syncthreads();
    write_columns(a.transposed, tile[0], a, p);
    write_columns(a.post_transposed, tile[1], a, p);
}
#endif

// Transpose bytes without a cast.
extern "C" __global__ void __launch_bounds__(THREADS) transpose(const Arguments a) {
    __shared__ Pack tile[ACROSS * DOWN / 16];
    const Origin p = origin(a);
    Pack made[4] = {};
    if (p.inside) {
#pragma unroll
        for (int i = 0; i < 4; i++) made[i] = read(a.x + (long long)(p.row + i) * a.columns + p.column);
    }
    store_transposed(&tile[0].word[0], made);
    __syncthreads();
    write_columns(a.transposed, tile, a, p);
}
