// Activations in the layout of the matmuls: tiles of a few vectors, interleaved element by element.
#pragma once
#include <vector>
#include "rows.h"
#include "amx.h"

namespace glass {

constexpr int WIDE = 32;         // rows of a panel
constexpr int PARTS = WIDE / LANES;  // registers of them
template <int KIND> constexpr int ZERO = KIND == INT8 ? 128 : 8;  // a weight of whole numbers is (byte - ZERO) * scale

// Parts of a panel that are multiplied with B vectors at once: as many as there are registers for.
template <int B> constexpr int AT_ONCE = SUMS / B >= PARTS ? PARTS : SUMS / B >= 4 && PARTS > 4 ? 4 : SUMS / B >= 2 ? 2 : 1;
constexpr int TALL = LANES == 16 ? 14 : LANES == 8 ? 6 : 4, SHORT = LANES / 2;  // vectors of a tile where there are many; LANES at most
static_assert(TALL <= LANES, "");

// How numbers are kept, in words of 32 bits: FLOATS one, PAIRS two of bfloat16, BYTES four of one byte. SPLIT are two
// words for four numbers of 16 bits: where bytes can be multiplied, their high and their low bytes; elsewhere the first
// and third number, and the second and fourth. SIGNS are two words for four numbers of one byte: their absolute values, and
// what weights are XORed with: 0x80, which turns w + 128 into w, or 0x7f, which turns it into -w - 1, where a number is
// negative. LINES are PAIRS of which each vector lies in one piece.
enum Form : int32_t { FLOATS, PAIRS, BYTES, SPLIT, SIGNS, LINES };

#if defined(__AVX512VNNI__)
constexpr bool HAS_BYTES = true;
#else
constexpr bool HAS_BYTES = false;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr Form ROUNDED = SIGNS;  // the form of many vectors for int8 weights
#else
constexpr Form ROUNDED = HAS_BYTES ? BYTES : SPLIT;
#endif

inline bool whole(const Matrix& m) { return m.kind == INT8 || m.kind == INT4; }

// Whether so many vectors are multiplied by arithmetic that pays off for many only: panels of float32 weights, which are transposed
// first, and where the processor has the instructions, activations in bfloat16 or 8 bits.
inline bool is_many(const Matrix& m, int batch) { return batch >= (LANES < 16 || m.kind == F32 ? 48 : 16); }

inline Form form_of(const Matrix& m, int batch) {
    if (whole(m)) return (m.kind == INT4 ? HAS_BYTES : is_many(m, batch)) ? ROUNDED : SPLIT;
    if (m.kind != BF16 || !is_many(m, batch)) return FLOATS;
    if (HAS_TILES && m.columns % (2 * TILE) == 0 && may_use_tiles()) return LINES;
    return HAS_PAIRS ? PAIRS : FLOATS;
}

inline int tile_of(Form form, int batch, bool many) {  // vectors of a tile: what the registers hold, and little that is empty
    if (form == LINES) return 2 * TILE;
    if (form == SIGNS) return 2;  // with all rows of a panel: weights are operands in memory, and only sums need registers
    if (!many || form == SPLIT) return batch <= 2 ? std::max(batch, 1) : batch <= 4 ? 4 : std::min(8, LANES);
    const auto filled = [=](int tile) { return (batch + tile - 1) / tile * tile; };
    return filled(TALL) <= filled(SHORT) || batch >= 64 ? TALL : SHORT;
}

struct Vectors {
    Form form;
    int batch, tile, tiles, columns, depth, group, zero;  // depth: words of one vector
    std::vector<uint32_t> words;                          // (tiles, depth, tile)
    std::vector<float> scales;                            // (tiles, groups, tile)
    std::vector<int32_t> starts;                          // the same: -zero * sum of a group, where its sum starts

    void shape(const Matrix& m, int batch_, bool filled = true) {
        batch = batch_, columns = m.columns, group = whole(m) ? m.group : m.columns;
        form = form_of(m, batch), tile = tile_of(form, batch, is_many(m, batch)), tiles = (batch + tile - 1) / tile;
        zero = form == SIGNS ? 1 : m.kind == INT8 ? ZERO<INT8> : ZERO<INT4>;
        depth = form == FLOATS ? (columns + 1) / 2 * 2 : form == BYTES ? columns / 4 : (columns + 1) / 2;
        if (!filled) return;
        if ((long)words.size() < (long)tiles * depth * tile) words.resize((long)tiles * depth * tile);
        if (rounds()) scales.resize((long)tiles * groups() * tile), starts.resize(scales.size());
    }
    bool words_apart() const { return !HAS_BYTES && rounds(); }  // integers are written word by word, to their positions in the tile
    bool rounds() const { return form == BYTES || form == SPLIT || form == SIGNS; }
    int groups() const { return columns / group; }
    const uint32_t* words_of(int i) const { return &words[(long)i * depth * tile]; }
    const float* scales_of(int i) const { return &scales[(long)i * groups() * tile]; }
    const int32_t* starts_of(int i) const { return &starts[(long)i * groups() * tile]; }

    int start_of(int part, int parts) const { return (int)((long)tiles * part / parts); }  // its first tile

    // One of some parts of `batch` vectors at a distance of `pitch`; or, if `rows` are given, the vectors at these.
    void pack(const float* x, long pitch, int part, int parts, const int32_t* rows = nullptr) {
        static thread_local std::vector<uint32_t> room;
        const bool in_place = tile == 1 || form == LINES || words_apart();
        const long line = form == LINES ? depth : (depth + LANES - 1) / LANES * LANES;
        room.resize(LANES * line);
        for (int i = start_of(part, parts); i < start_of(part + 1, parts); i++) {
            const float* from = x + (long)i * tile * pitch;
            uint32_t* to = &words[(long)i * depth * tile];
            if (!rows && form == FLOATS && (i + 1L) * tile + LANES <= batch && depth % LANES == 0) {
                interleave((const uint32_t*)from, pitch, to);
                continue;
            }
            uint32_t* lines = in_place ? to : room.data();
            for (int b = 0; b < tile; b++) {
                uint32_t* one = words_apart() ? to + b : lines + b * line;
                if (i * tile + b < batch) convert(rows ? x + rows[i * tile + b] * pitch : from + b * pitch, one, i, b);
                else clear(one, i, b);
            }
            if (!in_place) interleave(lines, line, to);
        }
    }

private:
    // to[k][b] = lines[b][k]; whole vectors are written, and what is too much of one is written over by the next
    void interleave(const uint32_t* lines, long line, uint32_t* to) const {
        uint32_t last[LANES * LANES];
        for (int k = 0; k < depth; k += LANES) {
            const bool more = k + 2 * LANES <= depth;
            transpose_square((const float*)lines + k, line, more ? (float*)to + (long)k * tile : (float*)last, more ? tile : LANES);
            if (more) continue;
            for (int c = 0; c < std::min(LANES, depth - k); c++)
                std::memcpy(to + (long)(k + c) * tile, last + c * LANES, tile * sizeof(uint32_t));
        }
    }

    void clear(uint32_t* to, int i, int b) {
        for (long k = 0, step = words_apart() ? tile : 1; k < depth; k++) to[k * step] = 0;
        if (rounds())
            for (int g = 0; g < groups(); g++)
                scales[((long)i * groups() + g) * tile + b] = 0, starts[((long)i * groups() + g) * tile + b] = 0;
    }

    void convert(const float* x, uint32_t* to, int i, int b) {
        if (form == FLOATS) {
            std::memcpy(to, x, columns * sizeof(float));
            if (columns % 2) to[columns] = 0;
        } else if (form == PAIRS || form == LINES) {
            pairs(x, to);
        } else {
            for (int g = 0; g < groups(); g++) quantise(x + (long)g * group, to, i, b, g);
        }
    }

    void pairs(const float* x, uint32_t* to) {
#if defined(__AVX512BF16__)
        int c = 0;
        for (; c + 2 * LANES <= columns; c += 2 * LANES)
            _mm512_storeu_si512(to + c / 2, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(x + c + LANES), (__m512)load(x + c)));
        for (; c < columns; c += 2) {
            const __m256bh both = _mm512_cvtneps_pbh(_mm512_setr4_ps(x[c], c + 1 < columns ? x[c + 1] : 0.0f, 0, 0));
            std::memcpy(to + c / 2, &both, 4);
        }
#else
        uint16_t* halves = (uint16_t*)to;
        for (int c = 0; c < columns; c++) {  // to the nearest, ties to even
            uint32_t bits;
            std::memcpy(&bits, x + c, sizeof bits);
            halves[c] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }
#endif
    }

    // One group of a vector: q = round(x / scale), scale = max|x| / 127 (BYTES) or / 32512 (SPLIT: q = 256 high + low). SIGNS: the
    // largest sum of the four |x| that are added in 16 bits (packed.h) / 253, so that rounded it is 255 at most.
    void quantise(const float* x, uint32_t* to, int i, int b, int g) {
        floats most = {};
        for (int c = 0; c < group; c += LANES) {
            const floats here = load(x + c);
            floats size = here < 0 ? -here : here;
            if (form == SIGNS) size = sum_of_four(size);
            most = size > most ? size : most;
        }
        float largest = 1e-30f;
        for (int k = 0; k < LANES; k++) largest = most[k] > largest ? most[k] : largest;
        const float top = form == SPLIT ? 32512.0f : form == SIGNS ? 253.0f : 127.0f, inverse = top / largest;
        const long position = ((long)i * groups() + g) * tile + b;
        ints sums = {};
        for (int c = 0; c < group; c += LANES) {
            const ints q = round_to_int(load(x + c) * inverse);
            sums += form == SIGNS ? q & q >> 31 : q;  // of the negative numbers alone: -w - 1 is one less than -w
            const int at = (g * group + c) / 4;
            uint32_t first[LANES / 4], second[LANES / 4];
            if (form == BYTES) {
                low_bytes(q, to + at);
                continue;
            } else if (form == SIGNS) {
                low_bytes(q < 0 ? -q : q, first), low_bytes(q >> 31 ^ 0x80, second);
            } else if (HAS_BYTES) {
                low_bytes(q, second), low_bytes((q - (q << 24 >> 24)) >> 8, first);
            } else {
                for (int k = 0; k < LANES; k += 4) {
                    first[k / 4] = (uint16_t)q[k] | (uint32_t)q[k + 2] << 16;
                    second[k / 4] = (uint16_t)q[k + 1] | (uint32_t)q[k + 3] << 16;
                }
            }
            const long step = words_apart() ? tile : 1;
            for (int k = 0; k < LANES / 4; k++) to[2 * (at + k) * step] = first[k], to[(2 * (at + k) + 1) * step] = second[k];
        }
        int32_t sum = 0;
        for (int k = 0; k < LANES; k++) sum += sums[k];
        scales[position] = largest / top, starts[position] = -zero * sum;
    }

    // In each lane: of the eight columns of two steps, the four that are added. 0, 1, 4 and 5, or 2, 3, 6 and 7.
    static floats sum_of_four(floats v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        v += (floats)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
        v += (floats)_mm256_permute_ps((__m256)v, 0xb1);
#endif
        return v;
    }

    static ints round_to_int(floats x) {
#if defined(__AVX512F__)
        return (ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
        return (ints)_mm256_cvtps_epi32((__m256)x);
#else
        ints q;
        for (int k = 0; k < LANES; k++) q[k] = (int32_t)std::nearbyintf(x[k]);
        return q;
#endif
    }

    static void low_bytes(ints q, uint32_t* to) {  // the lowest bytes of LANES numbers
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC would convert number by number
        const __m256i fours = _mm256_shuffle_epi8((__m256i)q, _mm256_set1_epi32(0x0c080400));  // in each half
        to[0] = (uint32_t)_mm256_extract_epi32(fours, 0), to[1] = (uint32_t)_mm256_extract_epi32(fours, 4);
#else
        typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
        *(bytes*)to = __builtin_convertvector(q, bytes);
#endif
    }
};

struct Chunk {  // of a matmul: rows first..last times the tiles of vectors from..to
    int first, last, from, to;
    int next_row;  // if not 0, the row from which this thread will probably continue
};

}  // namespace glass
