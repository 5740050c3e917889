// Types, and sizes that follow from a model's. First of the parts of all kernels.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define THREADS (WARPS * 32)
#define EACH(n) (((n) + THREADS - 1) / THREADS)  // of n things, held by one thread
#define QKV ((H + G) * K + G * U)
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
#define LANES (K / PACK)                       // that share a key
#define SLOTS (WARPS * 32 / LANES)             // keys looked at together by a block

#define NOTHING __uint_as_float(0xff800000u)    // lower than every number

struct alignas(16) Pack { u32 word[4]; };
struct alignas(16) Four { float number[4]; };

// Which numbers of the stream a thread holds, HELD of them.
#define HELD EACH(D)
__device__ inline int column(int n) { return threadIdx.x + n * THREADS; }

// Where number e of a vector stands in shared memory: for decode.cu a pack's halves are kept apart, so that neighbouring
// lanes read neighbouring 16 bytes.
__device__ inline int spot(int e, int width) {
#ifdef CLUSTERS
    if (PACK == 8) return (e & 4 ? width / 2 : 0) + (e >> 3) * 4 + (e & 3);
#endif
    return e;
}
