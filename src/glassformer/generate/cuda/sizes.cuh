// Types, and sizes that follow from a model's. First of the parts of both kernels.

typedef unsigned int u32;
typedef unsigned short u16;

#define THREADS (WARPS * 32)
#define EACH(n) ((n + THREADS - 1) / THREADS)  // of n numbers, held by one thread
#define QKV ((H + G) * K + G * U)
#define WIDEST (F > D ? (F > H * U ? F : H * U) : (D > H * U ? D : H * U))
#define EVERYONE 0xffffffffu

#if HALF
typedef u16 Stored;  // bfloat16
__device__ inline float widened(Stored h) { return __uint_as_float((u32)h << 16); }
__device__ inline float widened(float f) { return f; }
__device__ inline Stored narrowed(float f) {
    u32 b = __float_as_uint(f);
    return f != f ? 0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);  // to the nearest, ties to even
}
#else
typedef float Stored;
__device__ inline float widened(Stored f) { return f; }
__device__ inline Stored narrowed(float f) { return f; }
#endif

#define PACK (16 / (int)sizeof(Stored))        // numbers in one load of 16 bytes
#define SPAN (32 * PACK)                       // numbers in one load of a warp
#define LOADS ((D + SPAN - 1) / SPAN < 4 ? (D + SPAN - 1) / SPAN : 4)
#define CHUNK (LOADS * SPAN)                   // the part of a row that a warp multiplies at once
#define CHUNKS(n) ((n + CHUNK - 1) / CHUNK)
#define LANES (K / PACK)                       // that share a key
#define SLOTS (WARPS * 32 / LANES)             // keys looked at together by a block

#define NOTHING __uint_as_float(0xff800000u)    // lower than every number

struct alignas(16) Pack { u32 word[4]; };
