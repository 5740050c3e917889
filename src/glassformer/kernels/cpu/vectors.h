// Vectors as long as a register of the processor, for the decode and the training kernels, by the vector extensions of GCC
// and Clang. GCC keeps longer vectors in memory: on a processor without AVX-512, a decoding step then took five times as
// long, and a training step five to eight times as long as torch's.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace glass {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // floats of a register
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

constexpr int LINE = 16;  // floats of a cache line

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline floats broadcast(float x) { return x - floats{}; }
inline floats load(const float* from) { return *(const floats*)from; }
inline void store(float* to, floats x) { *(floats*)to = x; }

// float16, in which the KV cache may be kept. Only processors that convert it by an instruction use it.
struct half { uint16_t bits; };
#if defined(__AVX512F__) || defined(__F16C__)
constexpr bool HAS_HALVES = true;
#if defined(__AVX512F__)
inline floats load(const half* from) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline void store(half* to, floats x) { _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)x, 0)); }
#else
inline floats load(const half* from) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline void store(half* to, floats x) { _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)x, 0)); }
#endif
#else
constexpr bool HAS_HALVES = false;
inline floats load(const half*) { return floats{}; }  // never called
inline void store(half*, floats) {}
#endif

inline float sum_lanes(floats v) {  // pairwise, always in the same order
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
#else
    float a[LANES];
    std::memcpy(a, &v, sizeof a);
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) a[i] += a[i + step];
    return a[0];
#endif
}

inline float max_lanes(floats v) {
    float highest = v[0];
    for (int i = 1; i < LANES; i++) highest = v[i] > highest ? v[i] : highest;
    return highest;
}

// e^x to within 2 ulp: x = n ln 2 + r, a polynomial in r, and 2^n by its bits. 0 below -87, where e^x would be subnormal.
inline floats exponential(floats x) {
    const floats bounded = x < -87.0f ? broadcast(-87.0f) : (x > 88.0f ? broadcast(88.0f) : x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits of the sum hold
    const floats shifted = bounded * 1.44269504f + magic, n = shifted - magic;
    const floats r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    const floats p =
        ((((1.3888889e-3f * r + 8.3333333e-3f) * r + 4.1666667e-2f) * r + 1.6666667e-1f) * r + 0.5f) * r * r + r + 1.0f;
    const floats y = (floats)((ints)p + ((ints)shifted << 23));
    return x < -87.0f ? floats{} : (x == x ? y : x);
}

struct Gate {
    floats value, slope;  // value = gelu(x) / x, slope = d gelu(x) / dx
};

// The exact GELU, x Phi(x). Phi(-|x|) = P(t) e^(-x^2/2) with t = 1 / (1 + 0.28 |x|): P is fitted to within 1.3e-8, below
// the rounding of float32.
inline Gate exact_gate(floats x) {
    const floats size = x < 0.0f ? -x : x, bell = exponential(-0.5f * x * x), t = 1.0f / (1.0f + 0.28f * size);
    floats p = -0.10656837373971939f * t + 0.39305901527404785f;
    p = ((((p * t - 0.24229998886585236f) * t + 0.2733031213283539f) * t + 0.06569038331508636f) * t + 0.11681583523750305f) * t;
    const floats tail = p * bell, phi = x < 0.0f ? tail : 1.0f - tail;
    return {phi, phi + x * bell * 0.3989422804f};
}

// GELU by the tanh formula: 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
inline Gate tanh_gate(floats x) {
    const floats square = x * x, twice = 1.5957691216f * x * (1.0f + 0.044715f * square);
    const floats gate = 1.0f / (1.0f + exponential(-twice));
    return {gate, gate + x * gate * (1.0f - gate) * 1.5957691216f * (1.0f + 0.134145f * square)};
}

// The first address on a cache line boundary in a buffer: vectors that cross two lines are loaded at half the speed.
inline float* cache_aligned(float* at) { return at + (-(uintptr_t)at / sizeof(float)) % LANES; }

// Floats from one row of n to the next: an odd number of cache lines, because rows at a distance of a power of two would
// evict each other from the caches.
inline long padded_stride(long n) { return ((n + LINE - 1) / LINE | 1) * LINE; }

// out[c][0..LANES) = rows[0..LANES)[c] for LANES columns c: neighbours change places at distances 8, 4, 2 and 1.
inline void transpose_square(const float* rows, long pitch, float* out, long out_pitch) {
#if defined(__clang__)  // has no shuffle by a variable
    for (int c = 0; c < LANES; c++)
        for (int r = 0; r < LANES; r++) out[c * out_pitch + r] = rows[r * pitch + c];
#else
    floats v[LANES];
    for (int i = 0; i < LANES; i++) v[i] = load(rows + i * pitch);
#define GLASS_EXCHANGE(D)                                                                                   \
    for (int i = 0; i < LANES; i++)                                                                             \
        if (LANES > D && !(i & D)) {                                                                                \
            ints low, high;                                                                                   \
            for (int c = 0; c < LANES; c++) low[c] = c & D ? c - D + LANES : c, high[c] = c & D ? c + LANES : c + D;    \
            floats& other = v[(i + D) % LANES];                                                                     \
            const floats a = __builtin_shuffle(v[i], other, low), b = __builtin_shuffle(v[i], other, high);     \
            v[i] = a, other = b;                                                                            \
        }
    GLASS_EXCHANGE(8)
    GLASS_EXCHANGE(4)
    GLASS_EXCHANGE(2)
    GLASS_EXCHANGE(1)
#undef GLASS_EXCHANGE
    for (int c = 0; c < LANES; c++) *(floats*)(out + c * out_pitch) = v[c];
#endif
}

}  // namespace glass
