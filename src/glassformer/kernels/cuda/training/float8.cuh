// Conversions to float8, for fp8.cu and loss.cu, whose text follows this one: round to nearest even, saturating.

typedef unsigned char u8;

#ifdef __CUDACC__
__device__ inline u32 four_e4m3(float a, float b, float c, float d) {
    u32 all;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(all) : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
}
__device__ inline u32 four_e5m2(float a, float b, float c, float d) {
    u32 all;
    asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(all) : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
}
#else
#include "emulated_float8.h"
#endif

// The conversions would saturate infinity as well. This makes it NaN, so that it stays visible, and changes no other value.
__device__ inline float infinity_to_nan(float x) { return fmaf(x, 0.f, x); }
