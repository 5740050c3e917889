// One step of AdamW over many tensors in a single pass: parameter, gradient and both averages are read once, and
// parameter and averages written once, 28 bytes for each number. Clipping multiplies the gradient while it is read, and
// a step that failed writes nothing. A block processes a piece of one tensor, a thread eight consecutive numbers of it.
// Blocks are independent: there is no synchronisation.
//
// The macro MOST is the largest number of tensors of a launch; their addresses travel in the arguments struct.
// tests/kernels/cuda/training compiles the same text for a CPU.

struct alignas(16) Four { float x[4]; };

struct Arguments {
    float* parameter[MOST];
    const float* gradient[MOST];
    float *mean[MOST], *square[MOST];  // averages of the gradient and of its square
    const float* step[MOST];           // number of the step, from 1 on
    long long numbers[MOST];           // in each tensor
    int first[MOST];                   // the first block of each tensor
    int tensors;
    const float *rate, *scale, *failed;  // scalars on the device; null scale means 1, null failed means 0
    float decay, taken1, beta2, taken2, epsilon;  // taken: 1 - beta, which float32 betas would give four digits of
    double log_beta1, log_beta2;
};

#define THREADS 256
#define EACH 8
#ifndef __CUDACC__
#define __grid_constant__
#endif

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
    const long long at = ((long long)((int)blockIdx.x - a.first[low]) * THREADS + (int)threadIdx.x) * EACH;
    if (at >= numbers) return;
    float *parameter = a.parameter[low] + at, *mean = a.mean[low] + at, *square = a.square[low] + at;
    const float* gradient = a.gradient[low] + at;
    // 1 - beta^step in double precision: in float32, 1 - 0.999 would keep four digits
    const double step = *a.step[low], first = -expm1(step * a.log_beta1), second = -expm1(step * a.log_beta2);
    const float rate = *a.rate;
    const Factors f = {a.scale ? *a.scale : 1.f, 1 - rate * a.decay, (float)(rate / first), (float)(1 / sqrt(second))};
    if (at + EACH <= numbers) {
        Four p[2], g[2], m[2], v[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {  // all loads first
            p[half] = ((Four*)parameter)[half], g[half] = ((const Four*)gradient)[half];
            m[half] = ((Four*)mean)[half], v[half] = ((Four*)square)[half];
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int n = 0; n < 4; n++) update(a, f, g[half].x[n], p[half].x[n], m[half].x[n], v[half].x[n]);
            ((Four*)parameter)[half] = p[half], ((Four*)mean)[half] = m[half], ((Four*)square)[half] = v[half];
        }
        return;
    }
    for (int n = 0; at + n < numbers; n++) update(a, f, gradient[n], parameter[n], mean[n], square[n]);
}
