// What float8.cuh asks of the machine, on a CPU (tests/emulated_cuda/cuda.h): by arithmetic, not by a table of torch's.
static inline u32 eighth(float x, int mantissa, int bias, float largest) {
    if (x != x) return 0x7f;
    float size = std::fmin(std::fabs(x), largest);
    int exponent = size > 0 ? std::max(std::ilogb(size), 1 - bias) : 1 - bias;
    u32 steps = (u32)std::nearbyint(std::ldexp(size, mantissa - exponent));  // ties to even
    return ((u32)(exponent + bias - 1) << mantissa) + steps + (std::signbit(x) ? 0x80 : 0);
}
static inline u32 four_e4m3(float a, float b, float c, float d) {
    return eighth(a, 3, 7, 448) | eighth(b, 3, 7, 448) << 8 | eighth(c, 3, 7, 448) << 16 | eighth(d, 3, 7, 448) << 24;
}
static inline u32 four_e5m2(float a, float b, float c, float d) {
    const float most = 57344;
    return eighth(a, 2, 15, most) | eighth(b, 2, 15, most) << 8 | eighth(c, 2, 15, most) << 16 | eighth(d, 2, 15, most) << 24;
}
