// Vectors as long as a register, by the vector extensions of GCC and Clang. GCC keeps longer vectors in memory: a training
// step then took five to eight times as long as torch's on a processor without AVX-512.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int64_t WIDE = 16, TALL = 12;  // floats of a register; rows of a tile, whose sums occupy 2 TALL registers
#elif defined(__AVX__)
constexpr int64_t WIDE = 8, TALL = 6;
#else
constexpr int64_t WIDE = 4, TALL = 6;
#endif

typedef float floats __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint16_t bf16;
typedef uint32_t pair __attribute__((may_alias));  // two bf16, which one instruction multiplies and adds

static inline floats all(float x) { return x - floats{}; }
static inline ints all(int32_t x) { return x - ints{}; }
static inline floats as_floats(ints x) { return (floats)x; }
static inline ints as_ints(floats x) { return (ints)x; }

static inline floats load(const float* from) { return *(const floats*)from; }
static inline words load(const pair* from) { return *(const words*)from; }
static inline floats load(const bf16* from) {
    return as_floats(__builtin_convertvector(*(const halves*)from, ints) << 16);
}
static inline void store(float* to, floats x) { *(floats*)to = x; }
static inline void store(bf16* to, floats x) {  // round to nearest even; NaN stays NaN
    ints bits = as_ints(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ints chosen = x == x ? rounded : ((bits >> 16) | 0x40);
    *(halves*)to = __builtin_convertvector(chosen, halves);
}

// e^x to within 2 ulp. Returns 0 below -87, where the result would be subnormal.
static inline floats exponential(floats x) {
    floats held = x < -87.0f ? all(-87.0f) : (x > 88.0f ? all(88.0f) : x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits of the sum hold
    floats shifted = held * 1.44269504f + magic;
    ints whole = as_ints(shifted) << 23;
    floats n = shifted - magic;
    floats r = (held - n * 0.693359375f) + n * 2.12194440e-4f;
    floats p = ((((1.3888889e-3f * r + 8.3333333e-3f) * r + 4.1666667e-2f) * r + 1.6666667e-1f) * r + 0.5f) * r * r + r + 1.0f;
    floats y = as_floats(as_ints(p) + whole);
    return x < -87.0f ? floats{} : (x == x ? y : x);
}

// The first aligned address in a buffer: vectors that span two cache lines load at half the speed.
static inline float* cache_aligned(float* at) { return at + (-(uintptr_t)at / sizeof(float)) % WIDE; }

// The scratch buffer of this thread. It is kept between calls, because page faults cost more than the computation.
static inline float* scratch(int64_t n) {
    static thread_local std::unique_ptr<float[]> held;
    static thread_local int64_t size = 0;
    if (n > size) {
        held.reset(new float[n + WIDE]);
        size = n;
    }
    return cache_aligned(held.get());
}
