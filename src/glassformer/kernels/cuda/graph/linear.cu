// y = W norm(x) for B vectors x at once, and what follows the matmul. Part 4; compiled for one shape.
//
// A decode step reads every weight once and computes little, so memory is what limits it. The kernel keeps as many loads in
// flight as registers hold, from its first instruction on: the first chunks of weights are requested before it waits
// for the kernel before it (wait_for_previous_kernel), while that one still computes.
//
// A tile is 8 rows of W; a unit is TILES tiles that are computed together (GATED: tile 0 of the gate, tile 1 of the same rows
// of up), by SPLIT warps of a block that share the columns: warp p of them reads chunks p, p + SPLIT, ... of 64 columns,
// WIDTH chunks in a step, as many as registers hold. The next step's are requested when the registers are free; other warps
// keep the memory busy meanwhile. (Requests in smaller portions, several steps ahead, were up to 1.5 times slower.) The
// groups of SPLIT warps do not wait for each other. Group i of block j computes units j + gridDim.x * (i + GROUPS * round).
// A lane of (g, q) = (lane / 4, lane % 4) reads 16 columns of a chunk of row g of each tile, in one load of 16 bytes or in two
// (COLUMN), and the same columns of the vectors g, g + 8 of each group of 16. The four lanes of a row read neighbouring 16
// bytes in one load: reading half of a 32-byte sector would fetch it twice. Which column is which "k" of the tensor core's
// matmul does not matter as long as both operands agree, so no weights are rearranged.
//
// Macros: INNER (columns), ROWS0..2 (rows of up to three matrices that share x), TILES, SPLIT, WIDTH, B, VECTORS (groups of
// 16 vectors), WARPS, WEIGHTS (0: 16 bits, 1: int8, 2: float8), NORM (-1: x are operands; 0: the stream itself; 1: RMS
// norm; 2: layer norm), OUT (0: float32; 1: activation; 2: gated; 3: added to the residual stream; 4: logits), EXPERTS.

#define CHUNK 64
#define CHUNKS (INNER / CHUNK)
#define STEPS ((CHUNKS + SPLIT * WIDTH - 1) / (SPLIT * WIDTH))
#define WHOLE (CHUNKS % (SPLIT * WIDTH) == 0)  // every warp has as many chunks
#define GROUPS (WARPS / SPLIT)
#define ROWS (OUT == 2 ? ROWS0 : ROWS0 + ROWS1 + ROWS2)
#define ROWS_OF_UNIT (OUT == 2 ? 8 : TILES * 8)
#define UNITS ((ROWS + ROWS_OF_UNIT - 1) / ROWS_OF_UNIT)
#define LOADS (WEIGHTS ? 1 : 2)
#define COLUMN(half) (WEIGHTS ? q * 16 + (half)*8 : (half)*32 + q * 8)  // first of 8 columns of a lane
#define HALVES_OF_SUM (B > 8 ? 2 : 1)  // sums of the vectors g + 8 are needed only if there are more than 8
#define SUMS (VECTORS * TILES * HALVES_OF_SUM * 2)
#define BUFFERS (2 * GROUPS * (SPLIT - 1) * SUMS * 128 <= 24576 ? 2 : 1)
#define IN_SHARED (NORM >= 0 || B * (INNER + 8) * 2 <= 34816)  // x is read from shared memory
#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#define DEFERRED (NORM == 1 && OPERAND_IS_BF16)  // the RMS norm divides the sums, not x: bfloat16 has the range

struct Shared {
#if SPLIT > 1
    float partial[BUFFERS][GROUPS][SPLIT - 1][SUMS][32];
#endif
    float room[B][2 * WARPS];
    u64 best[B];
#if IN_SHARED
    alignas(16) u16 x[B][INNER + 8];  // the padding keeps rows on different banks
#endif
};

#if NORM >= 0
#define FLOATS ((INNER / 4 + THREADS - 1) / THREADS)  // vectors of 4 floats that a thread holds

// Write the norm of each vector of the stream to shared memory, as operands; `factor` is what the sums are multiplied with.
__device__ inline void normalize(const Arguments& a, const Four* weight, Shared& s, float* factor) {
    for (int v = 0; v < B; v++) {
        const Four* stream = (const Four*)a.x + (long long)v * (INNER / 4);
        Four held[FLOATS];
        float sum = 0, squares = 0, centre = NORM == 2 ? as_floats(load_fresh16(stream)).n[0] : 0.f;
#pragma unroll
        for (int n = 0; n < FLOATS; n++)
            if ((threadIdx.x + n * THREADS) * 4 < INNER) held[n] = as_floats(load_fresh16(stream + threadIdx.x + n * THREADS));
#pragma unroll
        for (int n = 0; n < FLOATS; n++) {
            if ((threadIdx.x + n * THREADS) * 4 >= INNER) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float d = held[n].n[j] - centre;
                sum += d, squares += d * d;
            }
        }
        if (DEFERRED) {
            squares = warp_sum(squares);
            if (threadIdx.x % 32 == 0) s.room[v][threadIdx.x / 32] = squares;
            sum = 0, squares = 1;
        } else if (NORM > 0) {
            block_sums(sum, squares, s.room[v]);
            moments(sum, squares, centre, INNER, a.eps, NORM == 2);
        }
#pragma unroll
        for (int n = 0; n < FLOATS; n++) {
            int at = threadIdx.x + n * THREADS;
            if (at * 4 >= INNER) continue;
            u16 out[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float y = held[n].n[j];
                if (NORM > 0) y = (y - sum) * squares * (a.norm_weight ? weight[n].n[j] : 1.f);
                if (NORM == 2 && a.norm_bias) y += a.norm_bias[at * 4 + j];
                out[j] = to_operand(y);
            }
            *(u64*)&s.x[v][at * 4] = *(u64*)out;
        }
    }
    sync_block();
    for (int v = 0; v < B; v++) {
        float squares = 0;
        for (int w = 0; w < WARPS && DEFERRED; w++) squares += s.room[v][w];
        factor[v] = DEFERRED ? rsqrtf(squares / INNER + a.eps) : 1.f;
    }
}
#elif IN_SHARED
// Copy the operands that the kernel before wrote to shared memory.
__device__ inline void copy_operands(const u16* x, Shared& s) {
    for (int e = threadIdx.x; e < B * (INNER / 8); e += THREADS)
        *(Pack*)&s.x[e / (INNER / 8)][e % (INNER / 8) * 8] = load_fresh16(x + (long long)e * 8);
    sync_block();
}
#endif

// A matrix row: which of the three matrices, and the row there.
struct Row { int matrix, row; };
__device__ inline Row find_row(int unit, int tile, int g) {
    if (OUT == 2) return {tile, min(unit * 8 + g, ROWS0 - 1)};
    int row = min((unit * TILES + tile) * 8 + g, ROWS - 1);  // rows beyond the last are computed and not written
    if (row < ROWS0) return {0, row};
    return row < ROWS0 + ROWS1 ? Row{1, row - ROWS0} : Row{2, row - ROWS0 - ROWS1};
}

#if EXPERTS
#define MATRIX(m) (((const Weight* const*)a.weight[m])[expert])
#define BIAS(m) (a.bias[m] ? ((const float* const*)a.bias[m])[expert] : nullptr)
#define SCALE(m) (((const float* const*)a.scale[m])[expert])
#else
#define MATRIX(m) a.weight[m]
#define BIAS(m) a.bias[m]
#define SCALE(m) a.scale[m]
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) linear(const Arguments a) {
    __shared__ Shared s;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int group = warp / SPLIT, part = warp % SPLIT;
#if EXPERTS
    const int pair = blockIdx.x / BLOCKS_OF_PAIR, block = blockIdx.x % BLOCKS_OF_PAIR, blocks = BLOCKS_OF_PAIR;
    wait_for_previous_kernel();  // before it, the chosen experts are not known
    const int expert = (int)a.choice[pair];
#else
    const int pair = 0, block = blockIdx.x, blocks = gridDim.x;
#endif
    // position of the next fetch
    int unit_ahead = block + blocks * group, step_ahead = 0;
    const Weight* row_ahead[TILES];
    Pack held[WIDTH][TILES][LOADS];
    auto fetch = [&]() {
        if (unit_ahead >= UNITS) return;
        if (step_ahead == 0) {
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                Row r = find_row(unit_ahead, t, g);
                row_ahead[t] = MATRIX(r.matrix) + (long long)r.row * INNER;
            }
        }
#pragma unroll
        for (int n = 0; n < WIDTH; n++) {
            int chunk = (step_ahead * WIDTH + n) * SPLIT + part;
            if (!WHOLE && chunk >= CHUNKS) continue;
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int l = 0; l < LOADS; l++)
                    held[n][t][l] = load_weights(row_ahead[t] + chunk * CHUNK + COLUMN(l));
        }
        if (++step_ahead == STEPS) step_ahead = 0, unit_ahead += blocks * GROUPS;
    };
    fetch();
#if NORM >= 0
    Four weight[FLOATS];
    if (NORM > 0 && a.norm_weight)
#pragma unroll
        for (int n = 0; n < FLOATS; n++)
            if ((threadIdx.x + n * THREADS) * 4 < INNER) weight[n] = ((const Four*)a.norm_weight)[threadIdx.x + n * THREADS];
#endif
    if (OUT == 4)
        for (int v = threadIdx.x; v < B; v += THREADS) s.best[v] = 0;
#if !EXPERTS
    wait_for_previous_kernel();
#endif
    float factor[NORM >= 0 ? B : 1];
#if NORM >= 0
    normalize(a, weight, s, factor);
#else
    const u16* x = (const u16*)a.x + (long long)(EXPERTS ? pair / a.slots : 0) * INNER;
#if IN_SHARED
    copy_operands(x, s);
#endif
#endif
    float sum[VECTORS][TILES][4] = {};
    auto multiply = [&](const Pack(*weights)[LOADS], int chunk) {
        u32 b[TILES][8];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < LOADS; half++) operands(weights[t][half], b[t] + 4 * half);
#pragma unroll
        for (int m = 0; m < VECTORS; m++) {
            Pack low[2] = {}, high[2] = {};  // 16 columns of the vectors g and g + 8
            int first = m * 16 + g, at = chunk * CHUNK + COLUMN(0), next = chunk * CHUNK + COLUMN(1);
#if IN_SHARED
#define OPERAND(v, at) (*(const Pack*)&s.x[v][at])
#else  // from L1, where nothing older can be: it is empty when a kernel starts, and no other kernel reads x meanwhile
#define OPERAND(v, at) (*(const Pack*)(x + (long long)(v)*INNER + (at)))
#endif
            if (first < B) low[0] = OPERAND(first, at), low[1] = OPERAND(first, next);
            if (first + 8 < B) high[0] = OPERAND(first + 8, at), high[1] = OPERAND(first + 8, next);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const u32 x4[4] = {low[n / 2].word[n % 2 * 2], high[n / 2].word[n % 2 * 2],
                                   low[n / 2].word[n % 2 * 2 + 1], high[n / 2].word[n % 2 * 2 + 1]};
#pragma unroll
                for (int t = 0; t < TILES; t++) multiply_add(sum[m][t], x4, b[t][2 * n], b[t][2 * n + 1]);
            }
        }
    };
    int step = 0, buffer = 0, unit = block + blocks * group;
    const int iterations = unit < UNITS ? (UNITS - unit + blocks * GROUPS - 1) / (blocks * GROUPS) * STEPS : 0;
    for (int iteration = 0; iteration < iterations; iteration++) {
#pragma unroll
        for (int n = 0; n < WIDTH; n++) {
            int chunk = (step * WIDTH + n) * SPLIT + part;
            if (WHOLE || chunk < CHUNKS) multiply(held[n], chunk);
        }
        fetch();
        if (++step < STEPS) continue;
        // The unit is complete. The first warp of the group adds the sums of the others, in order, and writes the
        // outputs. The others go on: they write to this buffer again only after the next barrier.
        float old[VECTORS][TILES][4] = {};
        const bool writes = part == 0;
#define FOR_EACH_SUM                                             \
_Pragma("unroll") for (int m = 0; m < VECTORS; m++)          \
    _Pragma("unroll") for (int t = 0; t < TILES; t++)        \
        _Pragma("unroll") for (int j = 0; j < 2 * HALVES_OF_SUM; j++)
#define VECTOR_OF_SUM (m * 16 + g + j / 2 * 8)
#define ROW_OF_SUM (unit * ROWS_OF_UNIT + (OUT == 2 ? 0 : t * 8) + q * 2 + j % 2)
        if (OUT == 3 && writes) {
            FOR_EACH_SUM if (VECTOR_OF_SUM < B && ROW_OF_SUM < ROWS) old[m][t][j] =
                load_fresh((const float*)a.out + (long long)VECTOR_OF_SUM * ROWS + ROW_OF_SUM);
        }
#if SPLIT > 1
#define INDEX_OF_SUM ((m * TILES + t) * 2 * HALVES_OF_SUM + j)
        if (!writes) FOR_EACH_SUM s.partial[buffer][group][part - 1][INDEX_OF_SUM][lane] = sum[m][t][j];
        sync_warps(1 + group, SPLIT);
        if (writes)
            for (int p = 0; p < SPLIT - 1; p++)
                FOR_EACH_SUM sum[m][t][j] += s.partial[buffer][group][p][INDEX_OF_SUM][lane];
        if (BUFFERS == 1) sync_warps(1 + group, SPLIT);
        buffer = (buffer + 1) % BUFFERS;
#endif
        if (writes) {
            FOR_EACH_SUM {
                const int v = VECTOR_OF_SUM, row = ROW_OF_SUM;
                if (v >= B || row >= ROWS || (OUT == 2 && t > 0)) continue;
                float value[2] = {sum[m][t][j], OUT == 2 ? sum[m][TILES - 1][j] : 0.f};
#pragma unroll
                for (int half = 0; half < (OUT == 2 ? 2 : 1); half++) {
                    Row r = find_row(unit, OUT == 2 ? half : t, q * 2 + j % 2);
                    if (NORM >= 0) value[half] *= factor[NORM >= 0 ? min(v, B - 1) : 0];
                    if (WEIGHTS) value[half] *= SCALE(r.matrix)[r.row];
                    const float* bias = BIAS(r.matrix);
                    if (bias) value[half] += bias[r.row];
                }
                const long long at = (EXPERTS ? pair : (long long)v) * ROWS + row;
                put(a, OUT, ACTIVATION, at, row, value[0], value[1], old[m][t][j], &s.best[v]);
            }
        }
        FOR_EACH_SUM sum[m][t][j] = 0;
        step = 0, unit += blocks * GROUPS;
    }
    if (OUT == 4) {
        sync_block();
        for (int v = threadIdx.x; v < B; v += THREADS) atomicMax(&a.best[v], s.best[v]);
    }
}
