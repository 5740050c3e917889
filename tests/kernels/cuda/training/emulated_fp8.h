// What fp8.cu asks of the machine, on a CPU (tests/emulated_cuda/cuda.h).
static inline Pack read(const u8* at) {
    if ((size_t)at % 16) abort();  // as the machine would
    Pack p;
    memcpy(&p, at, 16);
    return p;
}
static inline float reciprocal(float x) { return 1 / x; }
static inline u32 __byte_perm(u32 a, u32 b, u32 which) {
    unsigned long long both = (unsigned long long)b << 32 | a;
    u32 made = 0;
    for (int n = 0; n < 4; n++) made |= (u32)(both >> 8 * (which >> 4 * n & 7) & 0xff) << 8 * n;
    return made;
}
