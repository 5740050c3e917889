// Mean squares of several tensors in one launch. PARTS blocks process a tensor, and each writes its share of the mean;
// the shares are added by the caller, so the order of the sum is fixed. The numbers of a tensor fill whole packs of 16
// bytes. Of a sampled tensor, one line of eight packs (128 bytes) is read of every eight lines; a hash of the index
// chooses it, as in fp8.sample. MOST (tensors of a launch) and PARTS are macros. tests/kernels/cuda/training compiles
// the same text for a CPU.

typedef unsigned int u32;

struct alignas(16) Pack { u32 word[4]; };  // four numbers of float32, or eight of bfloat16

struct Arguments {
    const Pack* x[MOST];
    long long numbers[MOST];  // numbers that are read
    int wide[MOST];           // 1 for float32, 0 for bfloat16
    int sampled[MOST];
    float* parts;    // (tensors, PARTS)
};

#define THREADS 256
#define RUN 4  // packs that a thread loads at once, to keep several loads in flight
#define FULL_MASK 0xffffffffu

__device__ inline float square(float x) { return x * x; }

// Index of the i-th sampled pack in the tensor.
__device__ inline long long sampled_pack(long long i) {
    const long long line = i >> 3;
    return (line * 8 + ((u32)line * 2654435761u >> 29)) * 8 + (i & 7);
}

extern "C" __global__ void __launch_bounds__(THREADS) squares(const Arguments a) {
    __shared__ float scratch[THREADS / 32];
    const int t = threadIdx.x, which = blockIdx.x / PARTS;
    const Pack* x = a.x[0];
    bool wide = a.wide[0], sampled = a.sampled[0];
    long long numbers = a.numbers[0];
#pragma unroll
    for (int n = 1; n < MOST; n++)  // a dynamic index would copy the arguments to local memory
        if (which == n) x = a.x[n], wide = a.wide[n], sampled = a.sampled[n], numbers = a.numbers[n];
    const long long packs = numbers / (wide ? 4 : 8), step = (long long)PARTS * THREADS;
    float sum[RUN] = {};
    for (long long i = (long long)(blockIdx.x - which * PARTS) * THREADS + t; i < packs; i += RUN * step) {
        Pack p[RUN] = {};
#pragma unroll
        for (int n = 0; n < RUN; n++)
            if (i + n * step < packs) p[n] = x[sampled ? sampled_pack(i + n * step) : i + n * step];
#pragma unroll
        for (int n = 0; n < RUN; n++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                u32 word = p[n].word[m];
                if (wide) sum[n] += square(__uint_as_float(word));
                else sum[n] += square(__uint_as_float(word << 16)) + square(__uint_as_float(word & 0xffff0000u));
            }
    }
    float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (int step = 16; step > 0; step /= 2) all += __shfl_xor_sync(FULL_MASK, all, step);
    if ((t & 31) == 0) scratch[t >> 5] = all;
    __syncthreads();
    if (t == 0) {
        for (int warp = 1; warp < THREADS / 32; warp++) all += scratch[warp];
        a.parts[blockIdx.x] = all / numbers;
    }
}
