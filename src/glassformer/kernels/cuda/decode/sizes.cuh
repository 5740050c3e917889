// Types, and constants that follow from the sizes of the model. Part 1 of every kernel source (library.py).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define THREADS (WARPS * 32)
#define EACH(n) (((n) + THREADS - 1) / THREADS)  // elements per thread, for n elements
#define QKV ((H + G) * K + G * U)
#define FULL_MASK 0xffffffffu

#if HALF
typedef u16 Stored;  // bfloat16
__device__ inline float to_float(Stored h) { return __uint_as_float((u32)h << 16); }
__device__ inline float to_float(float f) { return f; }
__device__ inline Stored to_stored(float f) {
    u32 b = __float_as_uint(f);
    return f != f ? 0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);  // round to nearest, ties to even
}
#else
typedef float Stored;
__device__ inline float to_float(Stored f) { return f; }
__device__ inline Stored to_stored(float f) { return f; }
#endif

#define PACK (16 / (int)sizeof(Stored))        // elements in one 16-byte load
#define LANES (K / PACK)                       // threads that share one key
#define SLOTS (WARPS * 32 / LANES)             // keys that a block processes at once

#define MINUS_INFINITY __uint_as_float(0xff800000u)    // the score of a masked or missing key

struct alignas(16) Pack { u32 word[4]; };
struct alignas(16) Four { float number[4]; };

// Each thread holds HELD elements of the residual stream, in registers: element column(n) for n < HELD.
#define HELD EACH(D)
__device__ inline int column(int n) { return threadIdx.x + n * THREADS; }

// Index of element e of a vector in shared memory. For decode.cu the two halves of each pack are stored apart, so that
// neighbouring lanes read neighbouring 16 bytes and no bank conflict arises.
__device__ inline int shared_index(int e, int width) {
#ifdef CLUSTERS
    if (PACK == 8) return (e & 4 ? width / 2 : 0) + (e >> 3) * 4 + (e & 3);
#endif
    return e;
}
