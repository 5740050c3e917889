// The two elementwise passes of Muon over matrices of one shape (training/muon.py): `look_ahead` before they are
// orthogonalized, `move` after. Each pass reads and writes every number once. A block processes a piece of one matrix,
// a thread eight consecutive numbers of it. Blocks are independent: there is no synchronisation.
//
// The macro MOST is the largest number of matrices of a launch; their addresses travel in the arguments struct.
// tests/kernels/cuda/training compiles the same text for a CPU.

typedef unsigned int u32;
typedef unsigned short u16;

struct alignas(16) Four { float x[4]; };
struct alignas(16) Eight { u32 pair[4]; };  // of bfloat16

struct Arguments {
    const float* gradient[MOST];
    float* momentum[MOST];
    float* matrix[MOST];
    u16* stack;  // (matrices, numbers) in bfloat16: the input of the orthogonalization, or its output
    const float *rate, *scale, *failed;  // scalars on the device; null scale means 1, null failed means 0
    float taken, decay, factor;  // 1 - momentum; weight decay; factor on the learning rate
    int numbers;  // in one matrix
};

#define THREADS 256
#define EACH 8
#ifndef __CUDACC__
#define __grid_constant__
#endif

__device__ inline u32 bfloat(float x) {  // round to nearest even
    const u32 bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

struct Position { int matrix, first; };
__device__ inline Position position(const Arguments& a) {
    const int pieces = (a.numbers + THREADS * EACH - 1) / (THREADS * EACH), matrix = blockIdx.x / pieces;
    return {matrix, ((int)blockIdx.x - matrix * pieces) * THREADS * EACH + (int)threadIdx.x * EACH};
}

extern "C" __global__ void __launch_bounds__(THREADS) look_ahead(const __grid_constant__ Arguments a) {
    const Position p = position(a);
    if (p.first >= a.numbers) return;
    const bool failed = a.failed && *a.failed > 0;
    const float scale = a.scale ? 1 / *a.scale : 1.f, taken = failed ? 0.f : a.taken;
    u32 made[EACH];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const Four g = *(const Four*)(a.gradient[p.matrix] + p.first + 4 * half);
        Four* at = (Four*)(a.momentum[p.matrix] + p.first + 4 * half);
        Four m = *at;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float x = failed ? 0.f : g.x[n] * scale;  // select, not multiply: NaN times zero is NaN
            m.x[n] += taken * (x - m.x[n]);
            made[4 * half + n] = bfloat(m.x[n] - a.taken * (m.x[n] - x));
        }
        *at = m;
    }
    Eight out;
#pragma unroll
    for (int n = 0; n < 4; n++) out.pair[n] = made[2 * n] | made[2 * n + 1] << 16;
    *(Eight*)(a.stack + (long long)p.matrix * a.numbers + p.first) = out;
}

extern "C" __global__ void __launch_bounds__(THREADS) move(const __grid_constant__ Arguments a) {
    const Position p = position(a);
    if (p.first >= a.numbers) return;
    const float rate = a.failed && *a.failed > 0 ? 0.f : *a.rate, kept = 1 - rate * a.decay, step = -rate * a.factor;
    const Eight given = *(const Eight*)(a.stack + (long long)p.matrix * a.numbers + p.first);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Four* at = (Four*)(a.matrix[p.matrix] + p.first + 4 * half);
        Four w = *at;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const u32 pair = given.pair[2 * half + n / 2];
            w.x[n] = w.x[n] * kept + step * __uint_as_float(n % 2 ? pair & 0xffff0000u : pair << 16);
        }
        *at = w;
    }
}
