// The backward pass of causal attention with heads of width 64, on Hopper GPUs; causal.py has the formulas.
//
// Work distribution. A thread block computes one head after the other. Within a head it loops over key blocks (128
// positions), and for each of them over the query blocks that see it (the diagonal one and all later ones), alternating
// the direction. Heads from index `whole` on are split into `parts`, because they would leave blocks of the grid idle; one
// thread block computes a part, which owns some of the key blocks of its head.
//
// Roles in a thread block (384 threads):
//   - Warp group 0: one thread issues TMA copies (load_all), one tile ahead. It gives up its registers.
//   - Warp groups 1 and 2 (four warps each) own 64 of the 128 keys each. p^T and dp^T (keys by queries) stay in registers
//     in the accumulator layout of wgmma, which is also the operand layout for dv = p^T do and dk = ds^T q. ds is written
//     to shared memory for dq = ds k, of which each group computes 64 query rows, one tile later. So one group can
//     be half a tile ahead of the other, and one takes exponentials while the other multiplies.
//
// Accumulation of dq. It grows with every key block, in global memory (`sums`). Each thread adds only to what it wrote
// itself: the order of the sum is fixed, there are no atomics between threads, and nothing has to be zeroed before. The
// sums of the parts of a split head are added by finish_queries afterwards, in the order of the parts.
//
// Synchronisation. mbarriers in shared memory, in pairs (one per stage): filled[0..1] and emptied[0..1] for queries,
// filled[2..3] and emptied[2..3] for keys, `written` and `read` for ds. A barrier distinguishes only even from odd rounds,
// so no thread may wait for round n before round n - 1 has completed; the waits below respect that.
//
// The text of hopper.cuh precedes this one. tests/kernels/cuda/training compiles the same text for a CPU.

struct Arguments {
    Map query, key, value, d_out, d_query, d_key, d_value;  // (batch time, heads 64)
    const uint4 *results, *d_results;  // o and do: (batch, time, heads, 64) in bfloat16
    const float* logs;                 // (batch heads, time): logsumexp of the scores
    float *bits, *means;               // the same shape: the logsumexp times log2(e), and mean = sum of p dp
    float4* sums;  // (parts of split heads, then thread blocks; time / 128; 8; 256): partial dq in register layout
    float scale;
    int heads, sharing, time, count, whole, parts;  // sharing: heads that read the same keys; count: heads of all sequences
    __device__ int pieces() const { return whole + (count - whole) * parts; }
    __device__ float4* sums_of(int slot, int i) const { return sums + ((long long)slot * (time / 128) + i) * 8 * 256; }
};

#define TILE 128
// Offsets in shared memory. Each of KEYS, QUERIES and DS has two stages of PAIR bytes.
#define PART (2 * BOX)      // 128 rows of 64 numbers: 16 KB
#define PAIR (2 * PART)     // keys and values, or queries and do, or ds (128 keys by 128 queries)
#define KEYS 0
#define QUERIES (2 * PAIR)
#define DS (4 * PAIR)   // ds
#define STAGING (6 * PAIR)  // results on their way to global memory: two boxes per warp group
#define ROWS (STAGING + 4 * BOX)             // logsumexp and mean of 128 queries, two stages
#define BARRIERS (ROWS + 2 * 2 * 4 * TILE)  // twelve mbarriers of 8 bytes
#define SHARED (BARRIERS + 128)
#define THREADS 384

// mean of each query: sum of p dp = sum of o do. Eight lanes compute one query.
extern "C" __global__ void __launch_bounds__(256) find_means(const __grid_constant__ Arguments a) {
    const long long at = (long long)blockIdx.x * 256 + threadIdx.x, row = at / 8;  // index over (batch, time, heads)
    if (row >= (long long)a.count * a.time) return;
    const uint4 x = a.results[at], y = a.d_results[at];
    float sum = low(x.x) * low(y.x) + high(x.x) * high(y.x) + low(x.y) * low(y.y) + high(x.y) * high(y.y);
    sum += low(x.z) * low(y.z) + high(x.z) * high(y.z) + low(x.w) * low(y.w) + high(x.w) * high(y.w);
    for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const long long token = row / a.heads, to = (token / a.time * a.heads + row % a.heads) * a.time + token % a.time;
    if (at % 8 == 0) a.means[to] = sum, a.bits[to] = a.logs[to] * LOG2_E;
}

// The current tile: `piece` (a head or a part of one), `turn` (index of the key block within the piece), `j` (index of the
// key block within the head) and `i` (index of the query block).
struct Tile {
    int piece, head, part, turn, j, i;
    __device__ explicit Tile(const Arguments& a) : piece((int)blockIdx.x) { begin(a); }
    __device__ bool is_split(const Arguments& a) const { return piece >= a.whole; }
    __device__ bool is_first(int blocks) const { return i == (turn & 1 ? blocks - 1 : j); }
    __device__ bool is_last(int blocks) const { return i == (turn & 1 ? j : blocks - 1); }
    __device__ void begin(const Arguments& a) {
        const int split = piece - a.whole;
        head = split < 0 ? piece : a.whole + split / a.parts, part = split < 0 ? 0 : split % a.parts;
        turn = 0, j = i = part;
    }
    // Parts take key blocks in alternating order (0, 1, .., then .., 1, 0), because early key blocks have more queries.
    __device__ void move(const Arguments& a, int blocks) {
        if (!is_last(blocks)) {
            i += turn & 1 ? -1 : 1;
            return;
        }
        const int parts = is_split(a) ? a.parts : 1;
        turn++;
        j = turn & 1 ? (turn + 1) * parts - 1 - part : turn * parts + part;
        i = turn & 1 ? blocks - 1 : j;
        if (j < blocks) return;
        piece += gridDim.x;
        begin(a);
    }
};

__device__ inline void load_all(const Arguments& a, u32 memory, u32 filled, u32 emptied, int blocks) {
    u32 n = 0, round = 0;
    const int pieces = a.pieces();
    for (Tile p(a); p.piece < pieces; p.move(a, blocks), n++) {
        const int column = p.head % a.heads * 64, row = p.head / a.heads * a.time;
        const int shared = p.head % a.heads / a.sharing * 64;
        if (p.is_first(blocks)) {
            const u32 stage = round & 1, at = memory + KEYS + stage * PAIR, bar = filled + 16 + 8 * stage;
            if (round >= 2) await(emptied + 16 + 8 * stage, round / 2 - 1);
            arrive_expecting(bar, PAIR);
            tma_load(at, &a.key, shared, row + p.j * TILE, bar);
            tma_load(at + PART, &a.value, shared, row + p.j * TILE, bar);
            round++;
        }
        const u32 stage = n & 1, at = memory + QUERIES + stage * PAIR, bar = filled + 8 * stage;
        const u32 numbers = memory + ROWS + stage * 8 * TILE;
        const long long first = (long long)p.head * a.time + p.i * TILE;
        if (n >= 2) await(emptied + 8 * stage, n / 2 - 1);
        arrive_expecting(bar, PAIR + 8 * TILE);
        tma_load(at, &a.query, column, row + p.i * TILE, bar);
        tma_load(at + PART, &a.d_out, column, row + p.i * TILE, bar);
        bulk_load(numbers, a.bits + first, 4 * TILE, bar);
        bulk_load(numbers + 4 * TILE, a.means + first, 4 * TILE, bar);
    }
}

// Start s^T = k q^T (64 keys by 128 queries), or dp^T = v do^T. One wgmma group.
__device__ inline void begin_scores(float (&d)[64], u32 left, u32 right) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k == 0) multiply(d, left, right);
        else multiply(d, left + 2 * k, right + 2 * k, true);
    }
    wgmma_commit();
}

// Start d += (64 keys by 128 queries, in registers) times (128 queries by 64). One wgmma group.
__device__ inline void begin_gradient(float (&d)[32], const u32 (&left)[32], u32 right, bool grows) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) multiply_registers(d, left + 4 * k, right + 128 * k, grows || k > 0);
    wgmma_commit();
}

// Compute p = 2^(scale s - bits) in bfloat16; the scores are overwritten. Accumulator layout of wgmma: a thread has keys
// 16 warp + lane / 4 and eight below it, and two of every eight queries.
__device__ inline void compute_p(float (&scores)[64], u32 (&p)[32], u32 bits, float scale, int key, bool is_diagonal) {
    const int pair = 2 * (threadIdx.x & 3);
    if (is_diagonal) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            if (key + 8 * (i >> 1 & 1) > 8 * (i >> 2) + pair + (i & 1)) scores[i] = -1e30f;
    }
#pragma unroll
    for (int c = 0; c < 16; c++) {
        const float2 b = load_shared_pair(bits + 4 * (8 * c + pair));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float x = exp2_approx(scores[4 * c + 2 * h] * scale - b.x), y = exp2_approx(scores[4 * c + 2 * h + 1] * scale - b.y);
            p[2 * c + h] = pack_bf16(x, y);
        }
    }
}

// Compute ds = p (dp - mean) in bfloat16, in registers and in shared memory.
__device__ inline void compute_ds(const float (&dp)[64], const u32 (&p)[32], u32 (&ds)[32], u32 means, u32 to) {
    const int pair = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int s = 0; s < 8; s++) {
#pragma unroll
        for (int c = 2 * s; c < 2 * s + 2; c++) {
            const float2 m = load_shared_pair(means + 4 * (8 * c + pair));
#pragma unroll
            for (int h = 0; h < 2; h++)
                ds[2 * c + h] = pack_bf16(low(p[2 * c + h]) * (dp[4 * c + 2 * h] - m.x),
                                         high(p[2 * c + h]) * (dp[4 * c + 2 * h + 1] - m.y));
        }
        store_fragment(to, PART, s, ds + 4 * s);
    }
}

// Start dq = (64 queries by 128 keys, in shared memory) times (128 keys by 64). One wgmma group.
__device__ inline void begin_queries(float (&dq)[32], u32 ds_tile, u32 keys) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; k++) {
        if (k == 0) multiply_transposed(dq, ds_tile, keys);
        else multiply_transposed(dq, ds_tile + 128 * k, keys + 128 * k, true);
    }
    wgmma_commit();
}

// Add the partial sums that this thread wrote to global memory before.
__device__ inline void add_sums(float (&d)[32], const float4* at) {
#pragma unroll
    for (int c = 0; c < 8; c++) {
        const float4 x = __ldcg(at + c * 256);
        d[4 * c] += x.x, d[4 * c + 1] += x.y, d[4 * c + 2] += x.z, d[4 * c + 3] += x.w;
    }
}

// Writes the results of a warp group to global memory.
struct ResultWriter {
    const Arguments& a;
    u32 group, staging, uses;  // staging: two boxes in shared memory, used in turn

    // Convert 64 rows to bfloat16 in a staging box and start a TMA store. Before it is reused, the store that read the box
    // two calls ago must have finished reading.
    __device__ void write(const float (&d)[32], float factor, const Map* to, int head, int block) {
        const int t = threadIdx.x & 127;
        const u32 at = staging + (uses++ & 1) * BOX;
        if (t == 0) wait_until_stores_have_read<1>();
        sync_threads<128>(group + 1);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = pack_bf16(d[8 * s + 2 * i] * factor, d[8 * s + 2 * i + 1] * factor);
            store_fragment(at + (t >> 5) * 16 * 128, BOX, s, words);
        }
        fence_async_proxy();
        sync_threads<128>(group + 1);
        if (t > 0) return;
        tma_store(to, at, head % a.heads * 64, head / a.heads * a.time + block * TILE + group * 64);
        commit_stores();
    }
    // Accumulate dq of 64 queries over one key block. For an unsplit head the diagonal block is the last, and dq is written.
    __device__ void write_queries(float (&d)[32], const Tile& p) {
        const int split = p.piece - a.whole;
        const int slot = split < 0 ? (a.count - a.whole) * a.parts + (int)blockIdx.x : split;
        float4* const at = a.sums_of(slot, p.i) + group * 128 + (threadIdx.x & 127);
        if (p.i != p.j || split >= 0) {
#pragma unroll
            for (int c = 0; c < 8; c++) {
                const float4 x = make_float4(d[4 * c], d[4 * c + 1], d[4 * c + 2], d[4 * c + 3]);
                if (p.turn == 0) __stcg(at + c * 256, x);
                else reduce_add(at + c * 256, x);
            }
            return;
        }
        if (p.j > 0) add_sums(d, at);
        write(d, a.scale, &a.d_query, p.head, p.i);
    }
};

// Add the partial dq of the parts of a split head. One thread block computes 128 queries of one head.
extern "C" __global__ void __launch_bounds__(256) finish_queries(const __grid_constant__ Arguments a) {
    DYNAMIC_SHARED(4 * BOX);
    const int t = threadIdx.x, blocks = a.time / TILE, split = blockIdx.x / blocks, i = blockIdx.x % blocks;
    const u32 group = warp_uniform(t >> 7);
    float d[32] = {};
    for (int part = 0; part < min(a.parts, i + 1); part++) add_sums(d, a.sums_of(split * a.parts + part, i) + t);
    ResultWriter{a, group, address(memory) + group * 2 * BOX, 0}.write(d, a.scale, &a.d_query, a.whole + split, i);
    if ((t & 127) == 0) wait_for_stores();
}

__device__ inline void work(const Arguments& a, u32 memory, u32 filled, u32 emptied, int blocks, u32 group) {
    const int t = threadIdx.x & 127, lane = t & 31, warp = warp_uniform(t >> 5);
    const float scale = a.scale * LOG2_E;
    const u32 keys0 = descriptor_word(memory + KEYS), queries0 = descriptor_word(memory + QUERIES), ds0 = descriptor_word(memory + DS);
    const u32 written = filled + 64, read = filled + 80;  // of ds, two each
    const int pieces = a.pieces();
    ResultWriter writer{a, group, memory + STAGING + group * 2 * BOX, 0};
    float s[64], dp[64], dk[32], dv[32], dq[32];
    u32 p[32], ds[32], n = 0, round = 0, keys_before = keys0;
    Tile now(a), before = now;
    if (now.piece >= pieces) return;
    await(filled + 16, 0);
    await(filled, 0);
    begin_scores(s, keys0 + group * (BOX / 16), queries0);
    wgmma_wait<0>();
    wgmma_result_fence(s);
#pragma unroll 1
    for (bool more = true; more; n++) {
        const u32 odd = n & 1, keys = keys0 + (round & 1) * (PAIR / 16), queries = queries0 + odd * (PAIR / 16);
        const u32 numbers = memory + ROWS + odd * 8 * TILE;
        const bool is_first = now.is_first(blocks);
        begin_scores(dp, keys + (PART + group * BOX) / 16, queries + PART / 16);
        compute_p(s, p, numbers, scale, group * 64 + warp * 16 + lane / 4, now.i == now.j);
        begin_gradient(dv, p, queries + PART / 16, !is_first);
        wgmma_wait<1>();
        wgmma_result_fence(dp);
        if (n > 1) await(read + 8 * odd, n / 2 - 1);
        compute_ds(dp, p, ds, numbers + 4 * TILE, memory + DS + odd * PAIR + (group * 64 + warp * 16) * 128);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) arrive(written + 8 * odd);
        if (n > 0) await(written + 8 * (odd ^ 1), (n - 1) / 2);
        // in the first tile this multiplies unused data; the result is dropped
        begin_queries(dq, ds0 + ((odd ^ 1) * PAIR + group * PART) / 16, keys_before);
        begin_gradient(dk, ds, queries, !is_first);
        wgmma_wait<1>();
        wgmma_result_fence(dq);
        if (lane == 0 && n > 0) {
            arrive(read + 8 * (odd ^ 1));
            if (before.is_last(blocks)) arrive(emptied + 16 + 8 * ((round - 1) & 1));
        }
        const Tile done = now;
        const bool was_last = now.is_last(blocks);
        now.move(a, blocks);
        more = now.piece < pieces;
        if (more) {
            if (was_last) await(filled + 16 + 8 * ((round + 1) & 1), (round + 1) / 2);
            await(filled + 8 * (odd ^ 1), (n + 1) / 2);
        }
        // after the last tile this multiplies unused data: a branch here would make every wgmma wait
        begin_scores(s, keys0 + (((round + was_last) & 1) * PAIR + group * BOX) / 16, queries0 + (odd ^ 1) * (PAIR / 16));
        wgmma_wait<1>();
        wgmma_result_fence(dk);
        wgmma_result_fence(dv);
        if (lane == 0) arrive(emptied + 8 * odd);
        if (n > 0) writer.write_queries(dq, before);
        if (was_last) {
            writer.write(dv, 1.f, &a.d_value, done.head, done.j);
            writer.write(dk, a.scale, &a.d_key, done.head, done.j);
            round++;
        }
        before = done, keys_before = keys;
        wgmma_wait<0>();
        wgmma_result_fence(s);
    }
    await(written + 8 * ((n - 1) & 1), (n - 1) / 2);
    begin_queries(dq, ds0 + (((n - 1) & 1) * PAIR + group * PART) / 16, keys_before);
    wgmma_wait<0>();
    wgmma_result_fence(dq);
    writer.write_queries(dq, before);
    if (t == 0) wait_for_stores();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) causal_backward(const __grid_constant__ Arguments a) {
    DYNAMIC_SHARED(SHARED);
    const int t = threadIdx.x, blocks = a.time / TILE;
    const u32 group = warp_uniform(t >> 7), base = address(memory), filled = base + BARRIERS, emptied = filled + 32;
    if (t == 0) {
        for (int i = 0; i < 4; i++) init_barrier(filled + 8 * i, 1), init_barrier(emptied + 8 * i, 8);
        for (int i = 8; i < 12; i++) init_barrier(filled + 8 * i, 8);
        fence_barrier_init();
    }
    __syncthreads();
    if (group == 0) {
        FEWER_REGISTERS(24);
        if (t < 32 && elect_one()) load_all(a, base, filled, emptied, blocks);
    } else {
        MORE_REGISTERS(240);
        work(a, base, filled, emptied, blocks, group - 1);
    }
}
