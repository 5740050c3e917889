// Matmuls of matrices in a core's cache. A tile of the result is summed in registers, in float32: 12 x 32 numbers with
// AVX-512 (16 floats per register), 6 x 16 with AVX (8 floats).
#pragma once
#include <memory>
#include "../tile.h"

using namespace glass;

constexpr int64_t WIDE = LANES, TALL = LANES == 16 ? 12 : 6;  // rows of a tile: its sums occupy 2 TALL registers
constexpr int64_t PANEL = 2 * WIDE;                           // columns of a tile

typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t bf16;

static inline floats load(const bf16* from) { return (floats)(__builtin_convertvector(*(const halves*)from, ints) << 16); }
static inline void store(bf16* to, floats x) {  // round to nearest even; NaN stays NaN
    ints bits = (ints)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ints chosen = x == x ? rounded : ((bits >> 16) | 0x40);
    *(halves*)to = __builtin_convertvector(chosen, halves);
}

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

template <typename T>
struct Right {  // (d, j) at data[d * row + j]; with columns in panels, at data[j / PANEL * panel + d * row + j % PANEL]
    const T* data;
    int64_t row, panel = PANEL;
};

template <int ROWS, int COLUMNS, typename T>
static inline void tile(Left<T> a, const T* b, int64_t b_row, float* c, int64_t c_row, int64_t depth, bool add) {
    floats sums[ROWS][COLUMNS];
    sum_tile<ROWS, COLUMNS>(a, b, b_row, depth, sums);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int j = 0; j < COLUMNS; ++j) {  // added up apart, then to what was there: fewer roundings on the way
            float* to = c + r * c_row + j * WIDE;
            store(to, add ? load(to) + sums[r][j] : sums[r][j]);
        }
}

template <int ROWS, typename T>
static inline int64_t rows(Left<T> a, Right<T> b, float* c, int64_t c_row, int64_t i, int64_t m, int64_t j, int64_t n, int64_t depth, bool add) {
    const T* right = b.data + j / PANEL * b.panel;
    for (; i + ROWS <= m; i += ROWS) {
        Left<T> at{a.data + i * a.row, a.row, a.step};
        if (n - j >= PANEL) tile<ROWS, 2>(at, right, b.row, c + i * c_row + j, c_row, depth, add);
        else tile<ROWS, 1>(at, right, b.row, c + i * c_row + j, c_row, depth, add);
    }
    return i;
}

// c (m,n) = or += a (m,depth) b (depth,n); n is a multiple of WIDE.
template <typename T = float>
static void multiply(Left<T> a, Right<T> b, float* c, int64_t c_row, int64_t m, int64_t n, int64_t depth, bool add = false) {
    for (int64_t j = 0; j < n; j += PANEL) {
        int64_t i = rows<TALL>(a, b, c, c_row, 0, m, j, n, depth, add);
        i = rows<4>(a, b, c, c_row, i, m, j, n, depth, add);
        rows<1>(a, b, c, c_row, i, m, j, n, depth, add);
    }
}

// A block of the left matrix, BLOCK_ROWS x BLOCK_DEPTH, fits the second-level cache (288 KB with AVX-512, 144 KB with AVX); a
// panel of BLOCK_DEPTH rows (48 or 24 KB) has about the size of the first.
constexpr int64_t BLOCK_DEPTH = 384, BLOCK_ROWS = 16 * TALL;

// Pack a column-major (m,depth) into tiles of TALL rows: (i, d) at tile i / TALL, row d, column i % TALL.
static void pack_tiles(Left<float> a, int64_t m, int64_t depth, float* to) {
    for (int64_t i = 0; i < m; i += TALL)
        for (int64_t d = 0; d < depth; ++d)
            for (int64_t r = 0; r < TALL && i + r < m; ++r) to[i * depth + d * TALL + r] = a.data[d * a.step + i + r];
}

// Multiply rows of a (or tiles of them, if TILED) by one panel.
template <bool TILED>
static void multiply_panel(const float* a, int64_t a_row, const float* panel, float* c, int64_t c_row, int64_t m, int64_t n, int64_t depth, bool add) {
    for (int64_t i = 0; i < m; i += TALL) {
        Left<float> left = TILED ? Left<float>{a + i * depth, 1, TALL} : Left<float>{a + i * a_row, a_row, 1};
        if (m - i >= TALL && n == PANEL) {
            tile<TALL, 2>(left, panel, PANEL, c + i * c_row, c_row, depth, add);
            continue;
        }
        Right<float> right{panel, PANEL};
        multiply(left, right, c + i * c_row, c_row, m - i < TALL ? m - i : TALL, n, depth, add);
    }
}

// As `multiply`, for large matrices. Operands are first packed into contiguous buffers: rows at a stride of some kilobytes
// map to few cache sets and evict each other. `left` holds a transposed block of a in tiles (pack_tiles), `right` a panel of
// b, (length, PANEL); a row-major a and a b that lies in panels are read in place.
static void multiply_large(Left<float> a, Right<float> b, float* c, int64_t c_row, int64_t m, int64_t n, int64_t depth, bool add = false) {
    static thread_local float held[(BLOCK_ROWS + PANEL) * BLOCK_DEPTH + WIDE];
    float *left = cache_aligned(held), *right = left + BLOCK_ROWS * BLOCK_DEPTH;
    const int64_t parts = (depth + BLOCK_DEPTH - 1) / BLOCK_DEPTH, deep = (depth + parts - 1) / parts;
    for (int64_t from = 0; from < depth; from += deep)
        for (int64_t i = 0; i < m; i += BLOCK_ROWS) {
            const int64_t high = i + BLOCK_ROWS < m ? BLOCK_ROWS : m - i, length = from + deep < depth ? deep : depth - from;
            const Left<float> at{a.data + i * a.row + from * a.step, a.row, a.step};
            const bool more = add || from > 0;
            if (a.step != 1) pack_tiles(at, high, length, left);
            for (int64_t j = 0; j < n; j += PANEL) {
                const int64_t width = n - j < PANEL ? n - j : PANEL;
                const float* panel = b.data + j / PANEL * b.panel + from * b.row;
                if (b.row != PANEL) {
                    for (int64_t d = 0; d < length; ++d)
                        for (int64_t k = 0; k < width; k += WIDE) store(right + d * PANEL + k, load(panel + d * b.row + k));
                    panel = right;
                }
                if (a.step != 1) multiply_panel<true>(left, 0, panel, c + i * c_row + j, c_row, high, width, length, more);
                else multiply_panel<false>(at.data, a.row, panel, c + i * c_row + j, c_row, high, width, length, more);
            }
        }
}
