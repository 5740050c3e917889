// Exponentials, and pairs of bfloat16 packed in a 32-bit word. Its text precedes that of the kernels.

typedef unsigned int u32;

#define LOG2_E 1.4426950408889634f  // exp(x) = 2^(x log2 e)

#ifdef __CUDACC__
__device__ inline float exp2_approx(float x) {  // 2^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline u32 pack_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
#else
#include "emulated_floats.h"
#endif

__device__ inline float low(u32 both) { return __uint_as_float(both << 16); }
__device__ inline float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
