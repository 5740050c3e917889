// One step of AdamW over many tensors in a single pass: parameter, gradient and both averages are read once, and
// parameter and averages written once, 28 bytes for each number. A gradient may be bfloat16, and a parameter may have a
// copy in bfloat16 that matmuls read, which is written with it. Clipping multiplies the gradient while it is read, and
// a step that failed writes nothing. A block processes a piece of one tensor, a thread eight numbers of it.
// Blocks are independent: there is no synchronisation.
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
    float decay, taken1, beta2, taken2, epsilon;  // taken: 1 - beta, which float32 betas would give four digits of
    double log_beta1, log_beta2;
};

#define THREADS 256
#define EACH 8
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

// What is the same for all numbers of a tensor.
struct Factors { float scale, kept, step_size, root; };

__device__ inline void update(const Arguments& a, const Factors& f, float g, float& p, float& m, float& v) {
    g *= f.scale;
    m += a.taken1 * (g - m);
    v = a.beta2 * v + a.taken2 * g * g;
    p = p * f.kept - f.step_size * m / (sqrtf(v) * f.root + a.epsilon);
}

extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ Arguments a) {
    if (a.failed && *a.failed > 0) return;
    int low = 0, high = a.tensors;  // the last tensor whose first block is not after this one
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (a.first[middle] <= (int)blockIdx.x) low = middle;
        else high = middle;
    }
    const long long numbers = a.numbers[low];
    // a thread has four numbers of each half of its block's, so that neighbouring threads read and write neighbouring 16 bytes
    const long long at = (long long)((int)blockIdx.x - a.first[low]) * THREADS * EACH + (int)threadIdx.x * 4;
    float *parameter = a.parameter[low] + at, *mean = a.mean[low] + at, *square = a.square[low] + at;
    u16* copy = a.copy[low] ? a.copy[low] + at : nullptr;
    const bool narrow = a.narrow >> low & 1, whole = at + HALF + 4 <= numbers;
    Four p[2], g[2], m[2], v[2];
    if (whole) {
#pragma unroll
        for (int half = 0; half < 2; half++) {  // all loads first
            p[half] = *(Four*)(parameter + half * HALF), g[half] = load_gradient(a.gradient[low], at + half * HALF, narrow);
            m[half] = *(Four*)(mean + half * HALF), v[half] = *(Four*)(square + half * HALF);
        }
    }
    __shared__ Factors shared;
    if (threadIdx.x == 0) {  // 1 - beta^step in double precision: in float32, 1 - 0.999 would keep four digits
        const double step = *a.step[low], first = -expm1(step * a.log_beta1), second = -expm1(step * a.log_beta2);
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
            const float g = narrow ? from_bf16(((const u16*)a.gradient[low])[at + n]) : ((const float*)a.gradient[low])[at + n];
            update(a, f, g, parameter[n], mean[n], square[n]);
            if (copy) copy[n] = to_bf16(parameter[n]);
        }
}
