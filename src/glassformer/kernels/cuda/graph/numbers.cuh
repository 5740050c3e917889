// Number formats, sums over a warp or a block, and activations. Part 2.
//
// STORED: the format of the model, of the KV cache and of the hidden vectors between kernels: 0 bfloat16, 1 float16,
// 2 float32. The residual stream, queries, keys and values before the cache, and logits are float32.

#define THREADS (WARPS * 32)
#define FULL_MASK 0xffffffffu
#define MINUS_INFINITY __uint_as_float(0xff800000u)
#define LOG2_E 1.4426950408889634f

__device__ inline float bf16_to_float(u16 h) { return __uint_as_float((u32)h << 16); }
__device__ inline u16 float_to_bf16(float f) {
    u32 b = __float_as_uint(f);
    return f != f ? 0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);  // round to nearest, ties to even
}

#if STORED == 2
typedef float Stored;
__device__ inline float to_float(Stored f) { return f; }
__device__ inline Stored to_stored(float f) { return f; }
#elif STORED == 1
typedef u16 Stored;
__device__ inline float to_float(Stored h) { return half_to_float(h); }
__device__ inline Stored to_stored(float f) { return float_to_half(f); }
#else
typedef u16 Stored;
__device__ inline float to_float(Stored h) { return bf16_to_float(h); }
__device__ inline Stored to_stored(float f) { return float_to_bf16(f); }
#endif

// What the tensor cores multiply: bfloat16, or float16 with weights in float16, int8 or float8.
#if OPERAND_IS_BF16
__device__ inline u16 to_operand(float f) { return float_to_bf16(f); }
#else
__device__ inline u16 to_operand(float f) { return float_to_half(f); }
#endif

struct alignas(16) Four { float n[4]; };
__device__ inline Four as_floats(const Pack& p) {
    return {{__uint_as_float(p.word[0]), __uint_as_float(p.word[1]), __uint_as_float(p.word[2]), __uint_as_float(p.word[3])}};
}

// Barrier of the threads that compute: of all, but for one warp of step.cu.
__device__ inline void sync_block() { sync_warps(0, WARPS); }

__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// Sums of a and b over the block, the same in every thread. `room` is shared memory for 2 * WARPS floats.
__device__ inline void block_sums(float& a, float& b, float* room) {
    a = warp_sum(a), b = warp_sum(b);
    sync_block();  // the room may still be read from the last call
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = a, room[WARPS + threadIdx.x / 32] = b;
    sync_block();
    a = b = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) a += room[w], b += room[WARPS + w];
}

// Mean and 1 / sqrt(variance + eps) from the sums of x - centre and (x - centre)^2 over n elements; an RMS norm has mean 0.
__device__ inline void moments(float& sum, float& squares, float centre, int n, float eps, bool centred) {
    float mean = sum / n, square = squares / n;
    sum = centred ? centre + mean : 0.f;
    squares = rsqrtf((centred ? square - mean * mean : square) + eps);
}

// Numbered as ACTIVATION_NAMES of linear.py.
__device__ inline float activate(int kind, float y) {
    if (kind == 0) return fmaxf(y, 0.f);
    if (kind == 1) return 0.5f * y * (1 + erff(y * 0.70710678f));
    if (kind == 2) return y / (1 + __expf(-1.59576912f * (y + 0.044715f * y * y * y)));
    if (kind == 3) return y / (1 + __expf(-y));
    if (kind == 4) return fmaxf(y, 0.f) * fmaxf(y, 0.f);
    if (kind == 5) return tanhf(y);
    return y / (1 + __expf(-1.702f * y));
}
