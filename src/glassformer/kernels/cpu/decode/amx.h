// bfloat16 matmuls on a matrix unit (Intel's AMX): 16 x 16 sums, 32 products each, in 16 clocks.
//
// A tile of weights is 16 steps of half a panel just as it lies, because both store pairs of columns next to each other. A
// tile of activations is 32 columns of 16 vectors, each vector contiguous. For tests on other processors, a file that is
// included before this one emulates the unit: it defines GLASS_EMULATED_TILES, and everything that stands under GLASS_TILES.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AMX_BF16__) && !defined(GLASS_EMULATED_TILES) && defined(__AVX512BF16__) && defined(__linux__)
#define GLASS_TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace glass {

constexpr int TILE = 16;  // rows of a tile, and words of a row

#if defined(GLASS_TILES)
constexpr bool HAS_TILES = true;

inline bool may_use_tiles() {  // the operating system must enable the tile registers, and may refuse
    constexpr long ASK = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return granted;
}

// What was stored so far is in memory: GCC does not know that these instructions read it.
inline void written() { asm volatile("" ::: "memory"); }

struct Unit {  // this thread's, as long as it lives: eight tiles of 16 x 64 bytes
    Unit() {
        alignas(64) uint8_t shape[64] = {1};
        for (int i = 0; i < 8; i++) shape[16 + 2 * i] = 64, shape[48 + i] = TILE;
        written();
        _tile_loadconfig(shape);
    }
    ~Unit() { _tile_release(); }
};
#define GLASS_TILE_ZERO(T) _tile_zero(T)
#define GLASS_TILE_LOAD(T, FROM, STRIDE) _tile_loadd(T, FROM, STRIDE)
#define GLASS_TILE_STORE(T, TO, STRIDE) _tile_stored(T, TO, STRIDE)
#define GLASS_TILE_ADD(SUM, A, B) _tile_dpbf16ps(SUM, A, B)
#elif !defined(GLASS_EMULATED_TILES)
constexpr bool HAS_TILES = false;
inline bool may_use_tiles() { return false; }
struct Unit {};
#endif

// out[32][32] = 32 vectors of bfloat16, `depth` words each, times 32 rows, of which a step of one pair takes `step` bytes.
inline void amx_multiply(Unit& unit, const uint8_t* w, long step, const uint32_t* x, int depth, float* out) {
    (void)unit;
#if defined(GLASS_TILE_ADD)
    const long line = depth * sizeof(uint32_t), row = 2 * TILE * sizeof(float);
    written();
    GLASS_TILE_ZERO(0); GLASS_TILE_ZERO(1); GLASS_TILE_ZERO(2); GLASS_TILE_ZERO(3);
    for (int k = 0; k < depth; k += TILE) {
        GLASS_TILE_LOAD(4, x + k, line); GLASS_TILE_LOAD(5, x + (long)TILE * depth + k, line);
        GLASS_TILE_LOAD(6, w + k * step, step); GLASS_TILE_LOAD(7, w + k * step + step / 2, step);
        GLASS_TILE_ADD(0, 4, 6); GLASS_TILE_ADD(1, 4, 7); GLASS_TILE_ADD(2, 5, 6); GLASS_TILE_ADD(3, 5, 7);
    }
    GLASS_TILE_STORE(0, out, row); GLASS_TILE_STORE(1, out + TILE, row);
    GLASS_TILE_STORE(2, out + 2 * TILE * TILE, row); GLASS_TILE_STORE(3, out + 2 * TILE * TILE + TILE, row);
#else
    (void)w, (void)step, (void)x, (void)depth, (void)out;
#endif
}

}  // namespace glass
