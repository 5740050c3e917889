// Conversions to float8, for fp8.cu and loss.cu, whose text follows this one: round to nearest even, saturating.

typedef unsigned char u8;

#ifdef __CUDACC__
#define FOUR(name, format)                                                                                          \
    __device__ inline u32 name(float a, float b, float c, float d) {                                                \
        u32 all;                                                                                                    \
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite." format "x2.f32 low, %2, %1;\n"                            \
            "cvt.rn.satfinite." format "x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}"                          \
            : "=r"(all) : "f"(a), "f"(b), "f"(c), "f"(d));                                                          \
        return all;                                                                                                 \
    }
FOUR(four_e4m3, "e4m3")
FOUR(four_e5m2, "e5m2")
#else
#include "emulated_float8.h"
#endif

// The conversions would saturate infinity as well. This makes it NaN, so that it stays visible, and changes no other value.
__device__ inline float infinity_to_nan(float x) { return fmaf(x, 0.f, x); }
