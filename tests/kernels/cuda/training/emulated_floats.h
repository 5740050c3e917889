// What floats.cuh asks of the machine, on a CPU (tests/emulated_cuda/cuda.h).
static inline float exp2_approx(float x) { return exp2f(x); }
static inline u32 half(float f) {
    u32 b = __float_as_uint(f);
    return f != f ? 0x7fc0 : (b + 0x7fff + ((b >> 16) & 1)) >> 16;
}
static inline u32 pack_bf16(float low, float high) { return half(low) | half(high) << 16; }
