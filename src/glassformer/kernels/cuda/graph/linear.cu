// y = W norm(x) for B vectors x at once, and what follows the matmul. Part 4; compiled for one shape.
//
// A decode step reads every weight once and computes little, so memory is what limits it. The kernel keeps many loads in flight,
// from its first instruction on: the first chunks of weights are requested before it waits for the kernel before it
// (wait_for_previous_kernel), while that one still computes. Each thread copies the weights that it needs itself to a ring in
// shared memory. Loads into registers pass through L1, which has little room next to much shared memory: fewer are in flight.
//
// A tile is 8 rows of W; a unit is TILES tiles that are computed together (GATED: tile 0 of the gate, tile 1 of the same rows
// of up), by SPLIT warps of a block that share the columns: warp p of them reads chunks p, p + SPLIT, ... of 64 columns, DEPTH
// chunks ahead. The groups of SPLIT warps do not wait for each other. Group i of block j computes units
// j + gridDim.x * (i + GROUPS * round).
// A lane of (g, q) = (lane / 4, lane % 4) reads 16 columns of a chunk of row g of each tile, in one load of 16 bytes or in two
// (COLUMN), and the same columns of the vectors g, g + 8 of each group of 16. The four lanes of a row read neighbouring 16
// bytes in one load: reading half of a 32-byte sector would fetch it twice. Which column is which "k" of the tensor core's
// matmul does not matter as long as both operands agree, so no weights are rearranged.
//
// Many vectors of many columns do not fit the shared memory of a block. Then CLUSTER blocks share the units of a cluster: each
// has a slice of the columns, keeps its sums in its shared memory, and at the end they add them up through each other's.
//
// An RMS norm of several vectors takes no kernel of its own: the matmul that adds to the stream also writes the stream times the
// weight of the norm, as operands, and its sums of squares (BEFORE_NORM); the one that reads them divides its results (NORM 3).
//
// Macros: INNER (columns), ROWS0..2 (rows of up to three matrices that share x), TILES, SPLIT, DEPTH, CLUSTER, CLUSTERS, B,
// VECTORS (groups of 16 vectors), WARPS, WEIGHTS (0: 16 bits, 1: int8, 2: float8), NORM (-1: x are operands; 0: the stream
// itself; 1: RMS norm; 2: layer norm; 3: operands that an RMS norm has yet to divide), OUT (0: float32; 1: activation; 2: gated;
// 3: added to the residual stream; 4: logits), BEFORE_NORM, EXPERTS, IN_SHARED (x is read from shared memory), DYNAMIC_BYTES
// (of shared memory).

#define CHUNK 64
#define CHUNKS ((INNER / CHUNK + CLUSTER - 1) / CLUSTER)  // of a block
#define SLICE (CHUNKS * CHUNK)                            // columns of a block
#define CHUNKS_OF_WARP ((CHUNKS + SPLIT - 1) / SPLIT)     // and unit
#define WHOLE (INNER / CHUNK % (CLUSTER * SPLIT) == 0)    // every warp has as many chunks
#define GROUPS (WARPS / SPLIT)
#define ROWS (OUT == 2 ? ROWS0 : ROWS0 + ROWS1 + ROWS2)
#define ROWS_OF_UNIT (OUT == 2 ? 8 : TILES * 8)
#define UNITS ((ROWS + ROWS_OF_UNIT - 1) / ROWS_OF_UNIT)
#define UNITS_OF_CLUSTER ((UNITS + CLUSTERS - 1) / CLUSTERS)
#define LOADS (WEIGHTS ? 1 : 2)
#define COLUMN(half) (WEIGHTS ? q * 16 + (half)*8 : (half)*32 + q * 8)  // first of 8 columns of a lane
#define HALVES_OF_SUM (B > 8 ? 2 : 1)  // sums of the vectors g + 8 are needed only if there are more than 8
#define SUMS (VECTORS * TILES * HALVES_OF_SUM * 2)
#define BUFFERS (2 * GROUPS * (SPLIT - 1) * SUMS * 128 <= 24576 ? 2 : 1)
#define PADDING (WEIGHTS ? 8 : 32)  // after a vector: the lanes that read at a time are on different banks
#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef BEFORE_NORM
#define BEFORE_NORM 0
#endif
#define READS_STREAM (NORM >= 0 && NORM < 3)
#define DEFERRED (NORM == 1 && OPERAND_IS_BF16)  // the RMS norm divides the sums, not x: bfloat16 has the range

struct Shared {
    Pack ring[DEPTH][TILES][LOADS][THREADS];
#if SPLIT > 1
    float partial[BUFFERS][GROUPS][SPLIT - 1][SUMS][32];
#endif
#if CLUSTER > 1
    float sums[UNITS_OF_CLUSTER][SUMS][32];
#endif
    float room[B][2 * WARPS];
    float factor[B];
    u64 best[B];
#if IN_SHARED
    alignas(16) u16 x[B][SLICE + PADDING];
#endif
};
static_assert(sizeof(Shared) <= DYNAMIC_BYTES, "linear.py counts these");

#if READS_STREAM
#define FLOATS ((INNER / 4 + THREADS - 1) / THREADS)  // vectors of 4 floats that a thread holds

// Write the norm of each vector of the stream to shared memory, as operands; s.factor is what the sums are multiplied with.
__device__ inline void normalize(const Arguments& a, const Four* weight, Shared& s) {
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
    for (int v = threadIdx.x; v < B; v += THREADS) {
        float squares = 0;
        for (int w = 0; w < WARPS && DEFERRED; w++) squares += s.room[v][w];
        s.factor[v] = DEFERRED ? rsqrtf(squares / INNER + a.eps) : 1.f;
    }
    sync_block();
}
#elif IN_SHARED
// Copy `columns` of each vector, which the kernel before wrote, to shared memory, eight loads of a thread at a time: a copy without
// registers would wait for the weights that were requested before it.
__device__ inline void copy_operands(const u16* x, int columns, Shared& s) {
    for (int base = threadIdx.x; base < B * (SLICE / 8); base += 8 * THREADS) {
        Pack held[8];
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int e = base + n * THREADS, v = e / (SLICE / 8), at = e % (SLICE / 8) * 8;
            if (v < B && (WHOLE || at < columns)) held[n] = load_fresh16(x + (long long)v * INNER + at);
        }
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const int e = base + n * THREADS, v = e / (SLICE / 8), at = e % (SLICE / 8) * 8;
            if (v < B && (WHOLE || at < columns)) *(Pack*)&s.x[v][at] = held[n];
        }
    }
}
#endif

#if NORM == 3
// What an RMS norm divides each vector by, from the sums of its squares, which LANES_OF_VECTOR lanes read all at once.
#define LANES_OF_VECTOR (THREADS / B >= 32 ? 32 : THREADS / B >= 16 ? 16 : THREADS / B >= 8 ? 8 : 4)
__device__ inline void read_squares(const Arguments& a, Shared& s) {
    const int v = threadIdx.x / LANES_OF_VECTOR, lane = threadIdx.x % LANES_OF_VECTOR;
    float held[(PRODUCERS + LANES_OF_VECTOR - 1) / LANES_OF_VECTOR], sum = 0;
#pragma unroll
    for (int n = 0; n < (int)(sizeof held / 4); n++) {
        const int i = lane + n * LANES_OF_VECTOR;
        held[n] = v < B && i < PRODUCERS ? load_fresh(a.squares + v * PRODUCERS + i) : 0.f;
    }
#pragma unroll
    for (int n = 0; n < (int)(sizeof held / 4); n++) sum += held[n];
#pragma unroll
    for (int step = LANES_OF_VECTOR / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    if (lane == 0 && v < B) s.factor[v] = rsqrtf(sum / INNER + a.eps);
}
static_assert(THREADS / LANES_OF_VECTOR >= B, "each vector has lanes");
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

extern "C" __global__ void __launch_bounds__(THREADS, 2) linear(const Arguments a) {
    Shared& s = *(Shared*)dynamic_memory();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int group = warp / SPLIT, part = warp % SPLIT, rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    const int cluster = blockIdx.x / CLUSTER % CLUSTERS, pair = blockIdx.x / CLUSTER / CLUSTERS;
    const int chunks = min(CHUNKS, INNER / CHUNK - rank * CHUNKS);
#if EXPERTS
    wait_for_previous_kernel();  // before it, the chosen experts are not known
    const int expert = (int)a.choice[pair];
#endif
    // what the warp requests next: a chunk of a unit, into a place of the ring
    int unit_ahead = cluster + CLUSTERS * group, chunk_ahead = 0, place_ahead = 0;
    const Weight* row_ahead[TILES];
    auto request = [&]() {
        if (unit_ahead < UNITS) {
            if (chunk_ahead == 0) {
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    Row r = find_row(unit_ahead, t, g);
                    row_ahead[t] = MATRIX(r.matrix) + (long long)r.row * INNER + rank * SLICE;
                }
            }
            const int chunk = chunk_ahead * SPLIT + part;
            if (WHOLE || chunk < chunks)
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int l = 0; l < LOADS; l++)
                        copy_weights16(&s.ring[place_ahead][t][l][threadIdx.x], row_ahead[t] + chunk * CHUNK + COLUMN(l));
            place_ahead = place_ahead + 1 == DEPTH ? 0 : place_ahead + 1;
            if (++chunk_ahead == CHUNKS_OF_WARP) chunk_ahead = 0, unit_ahead += CLUSTERS * GROUPS;
        }
        end_group();  // an empty one at the end
    };
    for (int n = 0; n < DEPTH; n++) request();
#if READS_STREAM
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
#if READS_STREAM
    normalize(a, weight, s);
#else
    const u16* x = (const u16*)a.x + (long long)(EXPERTS ? pair / a.slots : 0) * INNER + rank * SLICE;
#if NORM == 3
    read_squares(a, s);
#endif
#if IN_SHARED
    copy_operands(x, chunks * CHUNK, s);
#endif
    sync_block();
#endif
    float sum[VECTORS][TILES][4] = {};
    auto multiply = [&](int place, int chunk) {
        u32 b[TILES][8];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int half = 0; half < LOADS; half++) operands(s.ring[place][t][half][threadIdx.x], b[t] + 4 * half);
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
#define FOR_EACH_SUM                                             \
    _Pragma("unroll") for (int m = 0; m < VECTORS; m++)          \
        _Pragma("unroll") for (int t = 0; t < TILES; t++)        \
            _Pragma("unroll") for (int j = 0; j < 2 * HALVES_OF_SUM; j++)
#define VECTOR_OF_SUM (m * 16 + g + j / 2 * 8)
#define ROW_OF_SUM (unit * ROWS_OF_UNIT + (OUT == 2 ? 0 : t * 8) + q * 2 + j % 2)
#define INDEX_OF_SUM ((m * TILES + t) * 2 * HALVES_OF_SUM + j)
    float old[VECTORS][TILES][4] = {}, squares[VECTORS][2] = {};
    auto read_old = [&](int unit) {
        if (OUT == 3)
            FOR_EACH_SUM if (VECTOR_OF_SUM < B && ROW_OF_SUM < ROWS) old[m][t][j] =
                load_fresh((const float*)a.out + (long long)VECTOR_OF_SUM * ROWS + ROW_OF_SUM);
    };
    auto write = [&](int unit) {  // the outputs of a unit from its sums
        FOR_EACH_SUM {
            const int v = VECTOR_OF_SUM, row = ROW_OF_SUM;
            if (v >= B || row >= ROWS || (OUT == 2 && t > 0)) continue;
            float value[2] = {sum[m][t][j], OUT == 2 ? sum[m][TILES - 1][j] : 0.f};
#pragma unroll
            for (int half = 0; half < (OUT == 2 ? 2 : 1); half++) {
                Row r = find_row(unit, OUT == 2 ? half : t, q * 2 + j % 2);
                if (NORM >= 0) value[half] *= s.factor[v];
                if (WEIGHTS) value[half] *= SCALE(r.matrix)[r.row];
                const float* bias = BIAS(r.matrix);
                if (bias) value[half] += bias[r.row];
            }
            const long long at = (EXPERTS ? pair : (long long)v) * ROWS + row;
            put(a, OUT, ACTIVATION, at, row, value[0], value[1], old[m][t][j], &s.best[v]);
            if (BEFORE_NORM) {
                const float y = old[m][t][j] + a.factor * value[0];
                a.normed[at] = to_operand(y * (a.next_weight ? a.next_weight[row] : 1.f));
                squares[m][j / 2] += y * y;
            }
        }
    };
    int place = 0, buffer = 0, unit = cluster + CLUSTERS * group;
    for (; unit < UNITS; unit += CLUSTERS * GROUPS) {
        for (int n = 0; n < CHUNKS_OF_WARP; n++) {
            const int chunk = n * SPLIT + part;
            await_copies<DEPTH - 1>();  // of this thread: it reads no others
            if (WHOLE || chunk < chunks) multiply(place, chunk);
            place = place + 1 == DEPTH ? 0 : place + 1;
            request();
        }
        // The unit is complete. The first warp of the group adds the sums of the others, in order, and writes the
        // outputs. The others go on: they write to this buffer again only after the next barrier.
        const bool writes = part == 0;
        if (CLUSTER == 1 && writes) read_old(unit);
#if SPLIT > 1
        if (!writes) FOR_EACH_SUM s.partial[buffer][group][part - 1][INDEX_OF_SUM][lane] = sum[m][t][j];
        sync_warps(1 + group, SPLIT);
        if (writes)
            for (int p = 0; p < SPLIT - 1; p++)
                FOR_EACH_SUM sum[m][t][j] += s.partial[buffer][group][p][INDEX_OF_SUM][lane];
        if (BUFFERS == 1) sync_warps(1 + group, SPLIT);
        buffer = (buffer + 1) % BUFFERS;
#endif
#if CLUSTER > 1
        if (writes) FOR_EACH_SUM s.sums[unit / CLUSTERS][INDEX_OF_SUM][lane] = sum[m][t][j];
#else
        if (writes) write(unit);
#endif
        FOR_EACH_SUM sum[m][t][j] = 0;
    }
#if CLUSTER > 1
    // The warps of all blocks divide the units of the cluster. They add the sums of the slices in order.
    unit = cluster + CLUSTERS * (rank * WARPS + warp);
    if (unit < UNITS) read_old(unit);
    sync_cluster(&s);
    for (; unit < UNITS; unit += CLUSTERS * CLUSTER * WARPS) {
        if (unit / CLUSTERS >= CLUSTER * WARPS) read_old(unit);
        FOR_EACH_SUM {
            float parts[CLUSTER];
#pragma unroll
            for (int r = 0; r < CLUSTER; r++) parts[r] = read_remote(&s.sums[unit / CLUSTERS][INDEX_OF_SUM][lane], r);
            sum[m][t][j] = parts[0];
#pragma unroll
            for (int r = 1; r < CLUSTER; r++) sum[m][t][j] += parts[r];
        }
        write(unit);
    }
    sync_cluster(&s);  // no block may leave while another reads its shared memory
#endif
#if BEFORE_NORM
    for (int m = 0; m < VECTORS; m++)
        for (int half = 0; half < HALVES_OF_SUM; half++) {
            float sum = squares[m][half];
            sum += __shfl_xor_sync(FULL_MASK, sum, 1), sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            const int v = m * 16 + half * 8 + g;
            if (q == 0 && v < B) s.room[v][warp] = sum;
        }
    sync_block();
    for (int v = threadIdx.x; v < B; v += THREADS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += s.room[v][w];
        a.squares_out[(long long)v * gridDim.x + blockIdx.x] = sum;
    }
#endif
    if (OUT == 4) {
        sync_block();
        for (int v = threadIdx.x; v < B; v += THREADS) atomicMax(&a.best[v], s.best[v]);
    }
}
