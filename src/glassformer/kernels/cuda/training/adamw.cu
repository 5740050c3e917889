// `adamw`: one step of AdamW over many tensors in a single pass: parameter, gradient and both averages are read once, and
// parameter and averages written once, 28 bytes for each number. A gradient may be bfloat16, and a parameter may have a
// copy in bfloat16 that matmuls read, which is written with it. Clipping multiplies the gradient while it is read, and
// a step that failed writes nothing. A block processes a piece of one tensor, a thread eight numbers of it.
// Blocks are independent: there is no synchronisation. `squares`: the norm of all gradients before that, block by block.
//
// The macro MOST is the largest number of tensors of a launch; their addresses travel in the arguments struct.
// tests/kernels/cuda/training compiles the same text for a CPU.

typedef unsigned int u32;
typedef unsigned short u16;
struct alignas(16) Four { float x[4]; };
struct alignas(8) Narrow { u16 x[4]; };

struct Arguments {
    float* parameter[MOST];
    const void* gradient[MOST];
    u16* copy[MOST];                   // of the parameter, or null
    float *mean[MOST], *square[MOST];  // averages of the gradient and of its square
    const float* step[MOST];           // number of the step, from 1 on
    long long numbers[MOST];           // in each tensor
    unsigned long long narrow;         // bit n: the gradient of tensor n is bfloat16
    int first[MOST];                   // the first block of each tensor
    int tensors;
    const float *rate, *scale, *failed;  // scalars on the device; null scale means 1, null failed means 0
    float* parts;                      // of `squares`: the sum of each block
    float decay, taken1, beta2, taken2, epsilon;  // taken: 1 - beta, which float32 betas would give four digits of
    double log_beta1, log_beta2;
};

#define THREADS 256
#define WARPS (THREADS / 32)
#define EACH 8
#define SQUARED 64  // numbers of a thread in `squares`
#define HALF (THREADS * EACH / 2)
#ifndef __CUDACC__
#define __grid_constant__
#endif

__device__ inline float from_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
__device__ inline u16 to_bf16(float f) {
    const u32 b = __float_as_uint(f);
    return f != f ? 0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);  // round to nearest, ties to even
}
__device__ inline Four load_gradient(const void* gradient, long long at, bool narrow) {
    if (!narrow) return *(const Four*)((const float*)gradient + at);
    const Narrow n = *(const Narrow*)((const u16*)gradient + at);
    return {{from_bf16(n.x[0]), from_bf16(n.x[1]), from_bf16(n.x[2]), from_bf16(n.x[3])}};
}

__device__ inline float one_gradient(const void* gradient, long long at, bool narrow) {
    return narrow ? from_bf16(((const u16*)gradient)[at]) : ((const float*)gradient)[at];
}

// What is the same for all numbers of a tensor.
struct Factors { float scale, kept, step_size, root; };

__device__ inline void update(const Arguments& a, const Factors& f, float g, float& p, float& m, float& v) {
    g *= f.scale;
    m += a.taken1 * (g - m);
    v = a.beta2 * v + a.taken2 * g * g;
    p = p * f.kept - f.step_size * m / (sqrtf(v) * f.root + a.epsilon);
}

// The tensor of this block: the last one whose first block is not after this one.
__device__ inline int tensor_of_block(const Arguments& a) {
    int low = 0, high = a.tensors;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (a.first[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

// The sum of squares of a piece of one gradient: parts[block]. The caller adds the parts.
extern "C" __global__ void __launch_bounds__(THREADS) squares(const __grid_constant__ Arguments a) {
    __shared__ float room[WARPS];
    const int which = tensor_of_block(a), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long numbers = a.numbers[which];
    const long long at = (long long)((int)blockIdx.x - a.first[which]) * THREADS * SQUARED + (int)threadIdx.x * 4;
    const bool narrow = a.narrow >> which & 1;
    float sum = 0;
    if (at + (SQUARED / 4 - 1) * THREADS * 4 + 4 <= numbers) {
#pragma unroll 8
        for (int k = 0; k < SQUARED / 4; k++) {
            const Four g = load_gradient(a.gradient[which], at + k * THREADS * 4, narrow);
            sum += (g.x[0] * g.x[0] + g.x[1] * g.x[1]) + (g.x[2] * g.x[2] + g.x[3] * g.x[3]);
        }
    } else {
        for (int k = 0; k < SQUARED / 4; k++)
            for (long long i = at + k * THREADS * 4; i < at + k * THREADS * 4 + 4 && i < numbers; i++) {
                const float g = one_gradient(a.gradient[which], i, narrow);
                sum += g * g;
            }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) room[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < WARPS; w++) sum += room[w];
    a.parts[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ Arguments a) {
    if (a.failed && *a.failed > 0) return;
    const int which = tensor_of_block(a);
    const long long numbers = a.numbers[which];
    // a thread has four numbers of each half of its block's, so that neighbouring threads read and write neighbouring 16 bytes
    const long long at = (long long)((int)blockIdx.x - a.first[which]) * THREADS * EACH + (int)threadIdx.x * 4;
    float *parameter = a.parameter[which] + at, *mean = a.mean[which] + at, *square = a.square[which] + at;
    u16* copy = a.copy[which] ? a.copy[which] + at : nullptr;
    const bool narrow = a.narrow >> which & 1, whole = at + HALF + 4 <= numbers;
    Four p[2], g[2], m[2], v[2];
    if (whole) {
#pragma unroll
        for (int half = 0; half < 2; half++) {  // all loads first
            p[half] = *(Four*)(parameter + half * HALF), g[half] = load_gradient(a.gradient[which], at + half * HALF, narrow);
            m[half] = *(Four*)(mean + half * HALF), v[half] = *(Four*)(square + half * HALF);
        }
    }
    __shared__ Factors shared;
    if (threadIdx.x == 0) {  // 1 - beta^step in double precision: in float32, 1 - 0.999 would keep four digits
        const double step = *a.step[which], first = -expm1(step * a.log_beta1), second = -expm1(step * a.log_beta2);
        const float rate = *a.rate;
        shared = {a.scale ? *a.scale : 1.f, 1 - rate * a.decay, (float)(rate / first), (float)(1 / sqrt(second))};
    }
    __syncthreads();
    const Factors f = shared;
    if (whole) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Narrow rounded;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                update(a, f, g[half].x[n], p[half].x[n], m[half].x[n], v[half].x[n]);
                rounded.x[n] = to_bf16(p[half].x[n]);
            }
            *(Four*)(parameter + half * HALF) = p[half], *(Four*)(mean + half * HALF) = m[half];
            *(Four*)(square + half * HALF) = v[half];
            if (copy) *(Narrow*)(copy + half * HALF) = rounded;
        }
        return;
    }
    for (int half = 0; half < 2; half++)
        for (int n = half * HALF; n < half * HALF + 4 && at + n < numbers; n++) {
            const float g = one_gradient(a.gradient[which], at + n, narrow);
            update(a, f, g, parameter[n], mean[n], square[n]);
            if (copy) copy[n] = to_bf16(parameter[n]);
        }
}
