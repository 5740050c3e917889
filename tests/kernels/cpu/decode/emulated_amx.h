// Intel's matrix unit, emulated by loops: what amx.h expects of it.
#pragma once
#define GLASS_EMULATED_TILES
#include <cstdint>
#include <cstring>

namespace glass {

constexpr int SIDE = 16;  // rows of a tile, and words of a row
constexpr bool HAS_TILES = true;
inline bool may_use_tiles() { return true; }
inline void written() {}
struct Unit {
    uint32_t tiles[8][SIDE][SIDE];

    void load(int t, const void* from, long stride) {
        for (int r = 0; r < SIDE; r++) std::memcpy(tiles[t][r], (const char*)from + r * stride, sizeof tiles[t][r]);
    }
    void store(int t, void* to, long stride) const {
        for (int r = 0; r < SIDE; r++) std::memcpy((char*)to + r * stride, tiles[t][r], sizeof tiles[t][r]);
    }
    void add(int sum, int a, int b) {
        const auto number = [](uint32_t bits) {
            float value;
            std::memcpy(&value, &bits, sizeof value);
            return value;
        };
        for (int i = 0; i < SIDE; i++)
            for (int j = 0; j < SIDE; j++) {
                float total = number(tiles[sum][i][j]);
                for (int k = 0; k < SIDE; k++) {
                    const uint32_t x = tiles[a][i][k], w = tiles[b][k][j];
                    total += number(x << 16) * number(w << 16) + number(x & 0xffff0000u) * number(w & 0xffff0000u);
                }
                std::memcpy(&tiles[sum][i][j], &total, sizeof total);
            }
    }
};
#define GLASS_TILE_ZERO(T) std::memset(unit.tiles[T], 0, sizeof unit.tiles[T])
#define GLASS_TILE_LOAD(T, FROM, STRIDE) unit.load(T, FROM, STRIDE)
#define GLASS_TILE_STORE(T, TO, STRIDE) unit.store(T, TO, STRIDE)
#define GLASS_TILE_ADD(SUM, A, B) unit.add(SUM, A, B)

}  // namespace glass
