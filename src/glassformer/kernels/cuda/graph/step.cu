// One launch for whole decode steps of one sequence, with weights in 8 bits. Last part, after matmul.cuh, vectors.cu and attend.cu in namespaces.
//
// A step reads every weight once and computes little: memory and the latency between dependent matmuls are what limits it. Here
// the blocks, one per multiprocessor, stay for all layers and steps. They run the instructions of a program in order: embedding,
// matmuls, attention, norms, choice of the token. After each one all blocks wait for each other. Weights do not depend on any
// result, so each warp requests its next stages of weights long before it needs them, across instructions, layers and steps.
//
// A tile is 8 rows of a matrix; a unit is a tile or, of a gated pair, a tile of the gate and the same one of up. Unit u belongs to
// block u % gridDim.x, where some warps share its columns: warp p of n takes pieces p, p + n, ... of PIECE bytes of each row. A
// stage is such a piece of the 8 rows of a tile. In shared memory the halves of each 128 bytes of an odd row are exchanged, so that
// the lanes of a quarter warp, which read two rows, are on different banks. Every warp has a ring of STAGES stages of its own and
// refills a stage as soon as it has used it: no other warp takes part. One warp more does nothing but wait for the other blocks,
// because a fence waits for the copies of its thread too.
//
// Macros: WEIGHTS, OPERAND_IS_BF16, STORED, WARPS, STAGES, ENTRIES (matmuls of a step), FLOATS (vectors of 4 floats that a thread
// holds of the stream), HEAD_FLOATS (of the values of all heads), MOST_SPLITS (blocks that share the keys of a head), WIDEST
// (columns), GIVEN (bytes of the arguments of an instruction).

#define PIECE (32 * 16)
#define STAGE (8 * PIECE)
#define HALF(row) ((row & 1) * 64)  // where the first half of 128 bytes of a row lies
#define COLUMNS (PIECE / (int)sizeof(matmul::Weight))  // of a piece
#define COLUMNS_OF_PACK (16 / (int)sizeof(matmul::Weight))
#define PACKS ((WIDEST / 8 + THREADS - 1) / THREADS)      // vectors of 8 operands that a thread holds
#define WORDS ((int)sizeof(Instruction) / 4)
#define WORDS_OF_THREAD ((WORDS + THREADS - 1) / THREADS)

enum { STARTED = 14, DONE = 15 };  // barriers of all threads of a block: an instruction may start, it is done
enum { LINEAR, ATTEND, EMBED, ADD_NORM, CHOOSE };

// What is needed to request the weights of a matmul, in the order of the program. Kept in shared memory.
struct Entry {
    const u8* weight[3];
    int rows[3];     // of each matrix
    int row_bytes, units, gated;
    int shift;       // 1 << shift warps share a unit
    int unused;
};

struct Instruction {
    int kind, inner, norm, out, activation;  // norm, out: see linear.cu
    int entry;                               // of a matmul
    int splits, value_width;                 // of a matmul after attention: x is merged from `partial`. Otherwise 0
    int variant, unused;                     // of attention
    float* partial;
    alignas(8) u8 given[GIVEN];              // the arguments of the kernel that computes the same
};

static_assert(sizeof(Entry) == 56 && sizeof(Instruction) == 48 + GIVEN, "program.py writes these");

struct Arguments {
    const Instruction* program;
    const Entry* entries;
    u32* counter;  // zero at launch
    int instructions, steps;
};

struct Two { float first, second; };
struct Shared {
    Entry entries[ENTRIES];
    alignas(8) u32 instruction[2][WORDS];
    Two partial[2][WARPS][8];
    float room[2 * WARPS];
    u64 best;
    alignas(16) u16 x[WIDEST];  // operands of the present matmul
};

__device__ inline u8* ring_of(int warp) { return dynamic_memory() + warp * STAGES * STAGE; }
__device__ inline Shared& shared() { return *(Shared*)(dynamic_memory() + WARPS * STAGES * STAGE); }

// What a warp requests next: a piece of a tile of a unit of a matmul of a step.
struct Feed {
    int step, entry, unit, tile, piece, slot;
    const u8* rows;      // the first row of the tile
    int row_bytes, last;  // the last row of the tile that exists; it stands for those beyond

    // Go to the first matmul from `entry` on in which this warp has a unit. All steps done: `step` is a.steps.
    __device__ inline void begin(const Arguments& a, const Shared& s) {
        for (; step < a.steps; entry = 0, step++)
            for (; entry < ENTRIES; entry++) {
                const Entry& e = s.entries[entry];
                unit = blockIdx.x + gridDim.x * ((threadIdx.x / 32 >> e.shift)), tile = 0;
                if (unit < e.units) {
                    find_tile(e);
                    return;
                }
            }
    }
    __device__ inline void find_tile(const Entry& e) {
        int row = unit * 8, m = tile;
        if (!e.gated)
            for (m = 0; row >= e.rows[m]; m++) row -= e.rows[m];
        row_bytes = e.row_bytes, last = min(7, e.rows[m] - 1 - row), piece = threadIdx.x / 32 & (1 << e.shift) - 1;
        rows = e.weight[m] + (long long)row * row_bytes;
    }
    // Request a stage into the slot that has just become free, and go to the next one.
    __device__ inline void request(const Arguments& a, Shared& s) {
        if (step < a.steps) {
            const int column = piece * PIECE + threadIdx.x % 32 * 16;
            u8* to = ring_of(threadIdx.x / 32) + slot * STAGE;
            const int at = threadIdx.x % 32 * 16;
            const u8* from = rows + column;
            if (column < row_bytes)
#pragma unroll
                for (int r = 0; r < 8; r++) copy_weights16(to + r * PIECE + (at ^ HALF(r)), from), from += r < last ? row_bytes : 0;
            slot = slot + 1 == STAGES ? 0 : slot + 1;
            const Entry& e = s.entries[entry];
            piece += 1 << e.shift;
            if (piece * PIECE >= row_bytes) {
                tile = e.gated && tile == 0;
                if (tile == 0) unit += gridDim.x * (WARPS >> e.shift);
                if (unit < e.units) find_tile(e);
                else entry++, begin(a, s);
            }
        }
        end_group();  // an empty one at the end
    }
};

// The operands x in shared memory: of every 8 columns first 0, 1, 4 and 5, then the others (`multiply_stage`).
__device__ inline void put_x(Shared& s, int column, u32 low, u32 high) {  // four columns
    u32* group = (u32*)&s.x[column / 8 * 8] + column / 4 % 2;
    group[0] = low, group[2] = high;
}

// sums += a stage times x[0 ...], by the tensor cores. Their left matrix has 16 rows: row g holds columns 0, 1, 4 and 5 of each
// 8 of row g of the tile, row g + 8 the other four, so that the registers of a lane are the weights as they lie in memory.
// Their right matrix has x in two columns, in the same way. So the sum of row g is c[0] + c[3] of lane 4 g; all else is not
// used. There are four sums, so that fewer multiplications wait for each other.
template <bool WHOLE>
__device__ inline void multiply_stage(const u8* stage, const u16* x, int bytes, float (*sums)[4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u8* weights = stage + g * PIECE + q * 16;
    const u64* operands = (const u64*)(x + q * COLUMNS_OF_PACK) + g % 2;
#pragma unroll
    for (int n = 0; n < PIECE / 64; n++) {
        if (!WHOLE && n * 64 >= bytes) break;
        const Pack pack = *(const Pack*)(weights + (n * 64 ^ HALF(g)));
        u32 left[COLUMNS_OF_PACK / 2];
        matmul::operands(pack, left);
#pragma unroll
        for (int m = 0; m < COLUMNS_OF_PACK / 8; m++) {
            const u64 right = operands[(n * 4 * COLUMNS_OF_PACK / 8 + m) * 2];
            multiply_add(sums[(n * COLUMNS_OF_PACK / 8 + m) % 4], left + 4 * m, (u32)right, (u32)(right >> 32));
        }
    }
}

// The residual stream as operands, normalized.
__device__ inline void read_stream(const Instruction& in, const matmul::Arguments& a, const Four* weight, Shared& s) {
    const Four* stream = (const Four*)a.x;
    Four held[FLOATS];
    float sum = 0, squares = 0, centre = in.norm == 2 ? load_fresh((const float*)a.x) : 0.f;
#pragma unroll
    for (int n = 0; n < FLOATS; n++) held[n] = as_floats(load_fresh16(stream + min(threadIdx.x + n * THREADS, in.inner / 4 - 1)));
#pragma unroll
    for (int n = 0; n < FLOATS; n++) {
        const int at = threadIdx.x + n * THREADS;
        if (at * 4 >= in.inner) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float d = held[n].n[j] - centre;
            sum += d, squares += d * d;
        }
    }
    if (in.norm > 0) {
        block_sums(sum, squares, s.room);
        moments(sum, squares, centre, in.inner, a.eps, in.norm == 2);
    }
#pragma unroll
    for (int n = 0; n < FLOATS; n++) {
        const int at = threadIdx.x + n * THREADS;
        if (at * 4 >= in.inner) continue;
        u16 out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float y = held[n].n[j];
            if (in.norm > 0) y = (y - sum) * squares * (a.norm_weight ? weight[n].n[j] : 1.f);
            if (in.norm == 2 && a.norm_bias) y += a.norm_bias[at * 4 + j];
            out[j] = to_operand(y);
        }
        put_x(s, at * 4, out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
    }
    sync_block();
}

// What attention wrote in parts, merged (attend.cu: attend_items).
__device__ inline void merge_heads(const Instruction& in, Shared& s) {
    const float* pairs = in.partial + (long long)in.splits * in.inner;
    const int heads = in.inner / in.value_width;
    Four value[HEAD_FLOATS][MOST_SPLITS];
    Two pair[HEAD_FLOATS][MOST_SPLITS];  // peak and sum
#pragma unroll
    for (int n = 0; n < HEAD_FLOATS; n++) {  // all loads first; a part that does not exist repeats the last one
        const int at = min((threadIdx.x + n * THREADS) * 4, in.inner - 4), head = at / in.value_width;
#pragma unroll
        for (int r = 0; r < MOST_SPLITS; r++) {
            const int part = min(r, in.splits - 1);
            value[n][r] = as_floats(load_fresh16(in.partial + (long long)part * in.inner + at));
            const u64 both = load_fresh((const u64*)pairs + part * heads + head);
            pair[n][r] = {__uint_as_float((u32)both), __uint_as_float((u32)(both >> 32))};
        }
    }
#pragma unroll
    for (int n = 0; n < HEAD_FLOATS; n++) {
        const int at = (threadIdx.x + n * THREADS) * 4;
        float highest = MINUS_INFINITY, sum = 0, y[4] = {};
#pragma unroll
        for (int r = 0; r < MOST_SPLITS; r++) highest = fmaxf(highest, pair[n][r].first);
#pragma unroll
        for (int r = 0; r < MOST_SPLITS; r++) {
            float share = r >= in.splits || pair[n][r].first == MINUS_INFINITY ? 0.f : exp2f(pair[n][r].first - highest);
            sum += share * pair[n][r].second;
#pragma unroll
            for (int j = 0; j < 4; j++) y[j] += share * value[n][r].n[j];
        }
        u16 out[4];
#pragma unroll
        for (int j = 0; j < 4; j++) out[j] = to_operand(y[j] / sum);
        if (at < in.inner) put_x(s, at, out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16);
    }
    sync_block();
}

template <typename Wait>
__device__ inline void multiply_all(const Arguments& all, const Instruction& in, Shared& s, Feed& feed, int& slot, Wait wait) {
    const matmul::Arguments& a = *(const matmul::Arguments*)in.given;
    const Entry& e = s.entries[in.entry];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int groups = WARPS >> e.shift, group = warp >> e.shift, part = warp & (1 << e.shift) - 1;
    const int rows = e.gated ? e.rows[0] : e.rows[0] + e.rows[1] + e.rows[2];
    Four weight[FLOATS];
    if (in.norm > 0 && a.norm_weight)
#pragma unroll
        for (int n = 0; n < FLOATS; n++)
            if ((threadIdx.x + n * THREADS) * 4 < in.inner) weight[n] = ((const Four*)a.norm_weight)[threadIdx.x + n * THREADS];
    if (threadIdx.x == 0) s.best = 0;
    wait();
    if (in.norm >= 0) read_stream(in, a, weight, s);
    else if (in.splits) merge_heads(in, s);
    else {
        Pack held[PACKS];
#pragma unroll
        for (int n = 0; n < PACKS; n++)
            held[n] = load_fresh16((const u16*)a.x + min((threadIdx.x + n * THREADS) * 8, in.inner - 8));
#pragma unroll
        for (int n = 0; n < PACKS; n++)
            if ((threadIdx.x + n * THREADS) * 8 < in.inner)
                *(Pack*)&s.x[(threadIdx.x + n * THREADS) * 8] =
                    {{held[n].word[0], held[n].word[2], held[n].word[1], held[n].word[3]}};
        sync_block();
    }
    int buffer = 0;
    for (int unit = blockIdx.x + gridDim.x * group; unit < e.units; unit += gridDim.x * groups) {
        // every fourth lane of the first warp of a group writes a row: what else it needs is requested first
        const int row = unit * 8 + lane / 4;
        const bool writes = part == 0 && lane % 4 == 0 && row < rows;
        float old = 0, scale[2] = {1, 1}, bias[2] = {};
        if (writes) {
            if (in.out == 3) old = load_fresh((const float*)a.out + row);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (half == 1 && !e.gated) break;
                int m = half, at = row;
                if (!e.gated)
                    for (m = 0; at >= e.rows[m]; m++) at -= e.rows[m];
                scale[half] = a.scale[m][at];
                if (a.bias[m]) bias[half] = a.bias[m][at];
            }
        }
        float value[2] = {};
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            if (tile == 1 && !e.gated) break;
            float sums[4][4] = {};
            for (int piece = part; piece * PIECE < e.row_bytes; piece += 1 << e.shift) {
                const u8* stage = ring_of(warp) + slot * STAGE;
                const u16* x = s.x + piece * COLUMNS;
                const int bytes = e.row_bytes - piece * PIECE;
                await_copies<STAGES - 1>();
                __syncwarp();
                if (bytes >= PIECE) multiply_stage<true>(stage, x, bytes, sums);
                else multiply_stage<false>(stage, x, bytes, sums);
                __syncwarp();
                feed.request(all, s);
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) value[tile] += sums[i][0] + sums[i][3];
        }
        if (e.shift > 0) {
            // The other warps go on: they write to this buffer again only after the next barrier.
            if (part > 0 && lane % 4 == 0) s.partial[buffer][warp][lane / 4] = {value[0], value[1]};
            sync_warps(1 + group, 1 << e.shift);
            for (int p = 1; p < 1 << e.shift && writes; p++) {
                const Two other = s.partial[buffer][warp + p][lane / 4];
                value[0] += other.first, value[1] += other.second;
            }
            buffer ^= 1;
        }
        if (writes) {
#pragma unroll
            for (int half = 0; half < 2; half++) value[half] = value[half] * scale[half] + bias[half];
            matmul::put(a, in.out, in.activation, row, row, value[0], value[1], old, &s.best);
        }
    }
    if (in.out != 4) return;
    sync_block();
    if (threadIdx.x == 0) atomicMax(a.best, s.best);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) step(const Arguments a) {
    Shared& s = shared();
    const int count = 1 + a.steps * (a.instructions - 1);  // the first one embeds; later tokens are embedded where they are chosen
    if (threadIdx.x >= THREADS) {  // the warp that waits for the other blocks
        for (int n = 0; n < count; n++) {
            if (threadIdx.x == THREADS) await_count(a.counter, n * gridDim.x);
            sync_warps(STARTED, WARPS + 1);
            sync_warps(DONE, WARPS + 1);
            if (threadIdx.x == THREADS) arrive_at(a.counter);
        }
        return;
    }
    for (int i = threadIdx.x; i < ENTRIES * (int)sizeof(Entry) / 4; i += THREADS) ((u32*)s.entries)[i] = ((const u32*)a.entries)[i];
    for (int i = threadIdx.x; i < WORDS; i += THREADS) s.instruction[0][i] = ((const u32*)a.program)[i];
    sync_block();
    Feed feed = {};
    int slot = 0;  // of the ring, that the warp uses next
    feed.begin(a, s);
    for (int n = 0; n < STAGES; n++) feed.request(a, s);
    for (int n = 0; n < count; n++) {
        const Instruction& in = *(const Instruction*)s.instruction[n & 1];
        u32 next[WORDS_OF_THREAD];  // the next instruction is read meanwhile
#pragma unroll
        for (int i = 0; i < WORDS_OF_THREAD; i++)
            if (i * THREADS + threadIdx.x < WORDS)
                next[i] = ((const u32*)(a.program + 1 + n % (a.instructions - 1)))[i * THREADS + threadIdx.x];
        auto wait = [] { sync_warps(STARTED, WARPS + 1); };
        if (in.kind == LINEAR) multiply_all(a, in, s, feed, slot, wait);
        else if (in.kind == ATTEND) attend_variant(in.variant, in.given, in.partial, wait);
        else {
            wait();
            const vectors::Arguments& given = *(const vectors::Arguments*)in.given;
            if (blockIdx.x == 0) {
                if (in.kind == EMBED) vectors::embed_one(given, 0);
                if (in.kind == ADD_NORM) vectors::add_norm_one(given, 0);
                if (in.kind == CHOOSE) vectors::choose_one(given, 0);
                if (in.kind == CHOOSE && n + 1 < count) {
                    sync_block();
                    vectors::embed_one(given, 0);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < WORDS_OF_THREAD; i++)
            if (i * THREADS + threadIdx.x < WORDS) s.instruction[(n + 1) & 1][i * THREADS + threadIdx.x] = next[i];
        sync_warps(DONE, WARPS + 1);
    }
}
