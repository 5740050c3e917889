// Attention of one new token per sequence over the KV cache, from the projections of the token. Part 3.
//
// A cluster of SPLITS blocks computes HEADS query heads that share a key/value head, for one sequence: blocks take the keys in
// turns, PER_TURN at a time. With TENSOR_CORES a warp computes tiles of 16 keys; without, LANES lanes share a key, 16 bytes each.
// Results are merged by the lanes of a warp, then by the warps of a block in its shared memory, then by the blocks of the cluster
// through each other's. The first block also computes the new key, which is not in the cache yet, and the cluster of the first
// heads of a key/value head stores it there.
//
// The kernel of a whole step (step.cu) has no clusters: it calls `attend_items`, which writes the results of each block to
// global memory, and the matmul that follows merges them.
//
// The sequences of a batch end at the same slot of the cache and begin at slot start[b]: the position of a slot is
// slot - start[b]. Layouts: qkv (B, H K + G K + G U) float32; keys (B, G, capacity, K) and values (B, G, capacity, U);
// out (B, H U).
//
// Macros: H, G, K, U, HEADS, SPLITS, WARPS, TENSOR_CORES, DEPTH, ROUNDS, BLOCKS_AT_ONCE, DYNAMIC_BYTES, ROTATED (components),
// HALVES, QK_NORM (0 none, 1 RMS, 2 layer norm), NORM_OVER (0 each head, 1 each head with a weight of its own, 2 the whole
// projection), NORM_LAST (after the rotation).

#define PACK (16 / (int)sizeof(Stored))
#define WIDE (K > U ? K : U)
#define LANES (WIDE <= PACK ? 1 : WIDE <= 2 * PACK ? 2 : WIDE <= 4 * PACK ? 4 : WIDE <= 8 * PACK ? 8 : WIDE <= 16 * PACK ? 16 : 32)
#define CLUSTERS_OF_GROUP (H / G / HEADS)
#define QKV (H * K + G * K + G * U)
#define OF_LANE ((K + 31) / 32)
#define WAVES ((ROTATED / 2 + 31) / 32)

struct Arguments {
    const float* qkv;
    const float *q_weight, *q_bias, *k_weight, *k_bias;  // of the norms of queries and keys; null: ones, zeros
    const float *cosines, *sines;                        // (positions, ROTATED / 2)
    const float *slopes, *sinks;                         // (H) of ALiBi; (H) extra scores; null: none
    Stored *keys, *values;
    u16* out;
    const long long* slot;                               // index of the new token in the cache
    const int* start;                                    // (B) first slot of each sequence
    float scale, eps, softcap, clip;
    int capacity, window;
};

#if TENSOR_CORES
#define CHUNKS_OF(width) (((width) + 63) / 64 * 8)  // of 16 bytes
struct Tile { Pack keys[16][CHUNKS_OF(K)], values[16][CHUNKS_OF(U)]; };
#endif
struct Shared {
    float vector[HEADS + 1][K], value[U];  // queries, times the scale; the new key; the new value
    float itself[HEADS], peak[HEADS][WARPS], sum[HEADS][WARPS];
    union {
        float mixed[HEADS][WARPS][U];
#if TENSOR_CORES
        alignas(128) Tile ring[WARPS][DEPTH];
#endif
    };
    float block_peak[HEADS], block_sum[HEADS], block_mixed[HEADS][U];  // read by the other blocks of the cluster
};
#ifndef WHOLE_STEP
static_assert(sizeof(Shared) <= DYNAMIC_BYTES, "attend.py counts these");
#endif

__device__ inline void unpack(const Pack& pack, float* out) {
#if STORED == 2
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __uint_as_float(pack.word[i]);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) out[2 * i] = to_float((u16)pack.word[i]), out[2 * i + 1] = to_float((u16)(pack.word[i] >> 16));
#endif
}

// Normalize a vector of a head, held by a warp: element n of a lane is component lane + 32 n. `whole` is the projection of all
// heads, of `width` elements, over which NORM_OVER 2 runs.
__device__ inline void norm_of_head(
    float* x, const float* whole, int width, int head, const float* weight, const float* bias, float eps
) {
    const int lane = threadIdx.x % 32;
    float sum = 0, squares = 0, centre = 0;
    if (NORM_OVER == 2) {
        centre = QK_NORM == 2 ? load_fresh(whole) : 0.f;
        for (int i = lane; i < width; i += 32) {
            float d = load_fresh(whole + i) - centre;
            sum += d, squares += d * d;
        }
    } else {
        centre = QK_NORM == 2 ? __shfl_sync(FULL_MASK, x[0], 0) : 0.f;
#pragma unroll
        for (int n = 0; n < OF_LANE; n++)
            if (lane + 32 * n < K) sum += x[n] - centre, squares += (x[n] - centre) * (x[n] - centre);
    }
    sum = warp_sum(sum), squares = warp_sum(squares);
    moments(sum, squares, centre, NORM_OVER == 2 ? width : K, eps, QK_NORM == 2);
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) {
        int i = lane + 32 * n, at = NORM_OVER ? head * K + i : i;
        if (i < K) x[n] = (x[n] - sum) * squares * (weight ? weight[at] : 1.f) + (bias ? bias[at] : 0.f);
    }
}

__device__ inline float clipped(float x, float limit) { return limit > 0 ? fminf(fmaxf(x, -limit), limit) : x; }

// One warp: norm, clip and rotate the query or key of a head as the model does; `to` is shared memory.
__device__ inline void prepare(
    float* to, const Arguments& a, const float* whole, int width, int head, const float* weight, const float* bias,
    const float* waves, float factor
) {
    const int lane = threadIdx.x % 32;
    float x[OF_LANE];
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) x[n] = lane + 32 * n < K ? load_fresh(whole + head * K + lane + 32 * n) : 0.f;
    if (QK_NORM && !NORM_LAST) norm_of_head(x, whole, width, head, weight, bias, a.eps);
#pragma unroll
    for (int n = 0; n < OF_LANE; n++) {
        x[n] = clipped(x[n], a.clip);
        if (lane + 32 * n < K) to[lane + 32 * n] = x[n];
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < WAVES; n++) {
        int p = lane + 32 * n, first = HALVES ? p : 2 * p, second = HALVES ? p + ROTATED / 2 : 2 * p + 1;
        if (p >= ROTATED / 2) continue;
        float cosine = waves[2 * n], sine = waves[2 * n + 1];
        float u = to[first], v = to[second];
        to[first] = u * cosine - v * sine;
        to[second] = u * sine + v * cosine;
    }
    __syncwarp();
    if (QK_NORM && NORM_LAST) {
#pragma unroll
        for (int n = 0; n < OF_LANE; n++) x[n] = lane + 32 * n < K ? to[lane + 32 * n] : 0.f;
        norm_of_head(x, nullptr, K, head, weight, bias, a.eps);
#pragma unroll
        for (int n = 0; n < OF_LANE; n++)
            if (lane + 32 * n < K) to[lane + 32 * n] = x[n];
    }
    if (factor != 1.f)
#pragma unroll
        for (int n = 0; n < OF_LANE; n++)
            if (lane + 32 * n < K) to[lane + 32 * n] *= factor;
}

// A softmax over some of the keys, to the base 2: largest score, sum of exponentials, weighted sum of values.
struct Partial { float peak, sum, value[PACK]; };

__device__ inline void merge(Partial& m, float peak, float sum, const float* value) {
    float higher = fmaxf(m.peak, peak);
    if (higher == MINUS_INFINITY) return;
    float old = exp2f(m.peak - higher), now = exp2f(peak - higher);
#pragma unroll
    for (int i = 0; i < PACK; i++) m.value[i] = m.value[i] * old + value[i] * now;
    m.sum = m.sum * old + sum * now;
    m.peak = higher;
}

// The score of a key from its sum over components: soft cap, ALiBi, base 2.
__device__ inline float finished_score(const Arguments& a, float score, float slope, int distance) {
    if (a.softcap > 0) score = a.softcap * tanhf(score / a.softcap);
    return (score - slope * distance) * LOG2_E;
}

// What a block computes: HEADS heads of a sequence that share a key/value head, with the keys first + n for which
// n / PER_TURN % SPLITS == rank.
struct Task {
    int row, kv, head, rank, which, slot, first;
    Stored *keys, *values;
    __device__ inline Task(const Arguments& a, int cluster, int block) {
        which = cluster % CLUSTERS_OF_GROUP, kv = cluster / CLUSTERS_OF_GROUP % G, row = cluster / CLUSTERS_OF_GROUP / G;
        rank = block, head = kv * (H / G) + which * HEADS, slot = (int)load_fresh(a.slot);
        first = max(a.start[row], slot + 1 - a.window);
        const long long slots = ((long long)row * G + kv) * a.capacity;
        keys = a.keys + slots * K, values = a.values + slots * U;
    }
};

// Read the projections of the token, which `wait` waits for. Queries are left in s.vector; the first block also computes the new
// key and value, stores them in the cache, and leaves the scores of the token with itself in s.itself.
template <typename Wait>
__device__ inline void read_token(const Arguments& a, Shared& s, const Task& task, Wait wait) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long position = task.slot - a.start[task.row];
    float waves[2 * WAVES + 1];  // cosines and sines of the pairs of a lane, read before the wait
#pragma unroll
    for (int n = 0; n < WAVES; n++)
        if (lane + 32 * n < ROTATED / 2) {
            waves[2 * n] = a.cosines[position * (ROTATED / 2) + lane + 32 * n];
            waves[2 * n + 1] = a.sines[position * (ROTATED / 2) + lane + 32 * n];
        }
    wait();
    const float *q = a.qkv + (long long)task.row * QKV, *k = q + H * K, *v = k + G * K;
    for (int h = warp; h < HEADS + (task.rank == 0); h += WARPS) {
        if (h < HEADS) prepare(s.vector[h], a, q, H * K, task.head + h, a.q_weight, a.q_bias, waves, a.scale);
        else prepare(s.vector[h], a, k, G * K, task.kv, a.k_weight, a.k_bias, waves, 1.f);
    }
    if (task.rank == 0)
        for (int i = threadIdx.x; i < U; i += THREADS) s.value[i] = clipped(load_fresh(v + task.kv * U + i), a.clip);
    sync_block();
    if (task.rank > 0) return;
    if (task.which == 0) {
        for (int i = threadIdx.x; i < K; i += THREADS) task.keys[(long long)task.slot * K + i] = to_stored(s.vector[HEADS][i]);
        for (int i = threadIdx.x; i < U; i += THREADS) task.values[(long long)task.slot * U + i] = to_stored(s.value[i]);
    }
    for (int h = warp; h < HEADS; h += WARPS) {
        float sum = 0;
        for (int i = lane; i < K; i += 32) sum += s.vector[h][i] * s.vector[HEADS][i];
        sum = warp_sum(sum);
        if (lane == 0) s.itself[h] = finished_score(a, sum, a.slopes ? a.slopes[task.head + h] : 0.f, 0);
    }
}

#if TENSOR_CORES
// Keys in tiles of 16, multiplied by the tensor cores; each warp has a ring of DEPTH tiles of its own. Their left matrix holds up
// to 16 heads: queries, then the exponentials of the scores, which each lane has computed where the left matrix needs them. Which
// component is which "k" of queries times keys does not matter: a lane takes 8 neighbouring ones of both.
#define PER_TURN (16 * WARPS)

// Where 16 bytes of a row lie in it: lanes that read at a time, four of two rows or one of eight, are on different banks.
__device__ inline int swizzled(int row, int chunk) { return chunk ^ ((row & 1) << 2 | (row >> 1 & 3)); }
__device__ inline u32 stored_pair(float low, float high) { return to_stored(low) | (u32)to_stored(high) << 16; }

template <typename Wait>
__device__ inline void attend_keys(const Arguments& a, Shared& s, const Task& task, Wait wait) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
    const int mine = task.first + task.rank * PER_TURN + 16 * warp;  // the first key of this warp
    auto copy_rows = [&](Pack* to, int of_row, const Stored* from, int base, int chunks) {
#pragma unroll
        for (int i = 0; i < (16 * chunks + 31) / 32; i++) {
            const int row = (lane + 32 * i) / chunks, chunk = (lane + 32 * i) % chunks;
            if (row >= 16) continue;
            const long long at = (long long)min(base + row, a.capacity - 1) * chunks + chunk;
            copy_fresh16(to + row * of_row + swizzled(row, chunk), from + at * 8, base + row < task.slot);
        }
    };
    auto request = [&](int n) {
        Tile& tile = s.ring[warp][n % DEPTH];
        const int base = mine + n * SPLITS * PER_TURN;
        if (base < task.slot) {
            copy_rows(tile.keys[0], CHUNKS_OF(K), task.keys, base, K / 8);
            copy_rows(tile.values[0], CHUNKS_OF(U), task.values, base, U / 8);
        }
        end_group();
    };
#pragma unroll
    for (int n = 0; n < DEPTH; n++) request(n);
    read_token(a, s, task, wait);
    Pack query[(K + 31) / 32][2];  // of the heads g and g + 8
    float slope[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int h = g + 8 * half;
        const bool exists = h < HEADS;
        if (exists && a.slopes) slope[half] = a.slopes[task.head + h];
#pragma unroll
        for (int c = 0; c < (K + 31) / 32; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = c * 32 + q * 8 + 2 * i;
                query[c][half].word[i] = exists && at < K ? stored_pair(s.vector[h][at], s.vector[h][at + 1]) : 0;
            }
    }
    float peak[2] = {MINUS_INFINITY, MINUS_INFINITY}, total[2] = {}, mixed[U / 8][4] = {};
    for (int n = 0; mine + n * SPLITS * PER_TURN < task.slot; n++) {
        const Tile& tile = s.ring[warp][n % DEPTH];
        const int base = mine + n * SPLITS * PER_TURN;
        await_copies<DEPTH - 1>();
        __syncwarp();
        float score[2][4] = {};  // of keys 2q, 2q + 1 of each half of the tile: for head g, then for head g + 8
#pragma unroll
        for (int c = 0; c < (K + 31) / 32; c++)
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const int row = t * 8 + g, chunk = c * 4 + q;
                const Pack key = chunk < K / 8 ? tile.keys[row][swizzled(row, chunk)] : Pack{};
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const u32 left[4] = {query[c][0].word[i], query[c][1].word[i], query[c][0].word[i + 1], query[c][1].word[i + 1]};
                    multiply_add<STORED == 0>(score[t], left, key.word[i], key.word[i + 1]);
                }
            }
        u32 share[4];  // exponentials as a left matrix
        float old[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half == 1 && HEADS <= 8) {
                share[1] = share[3] = 0, old[1] = 1;
                continue;
            }
            float highest = peak[half], now[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = base + i / 2 * 8 + 2 * q + i % 2;
                float& x = score[i / 2][half * 2 + i % 2];
                x = at < task.slot ? finished_score(a, x, slope[half], task.slot - at) : MINUS_INFINITY;
                highest = fmaxf(highest, x);
            }
            highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));  // a tile has a key, so it is a number
            old[half] = exp2f(peak[half] - highest), peak[half] = highest, total[half] *= old[half];
#pragma unroll
            for (int i = 0; i < 4; i++) now[i] = exp2f(score[i / 2][half * 2 + i % 2] - highest), total[half] += now[i];
            share[half] = stored_pair(now[0], now[1]), share[half + 2] = stored_pair(now[2], now[3]);
        }
#pragma unroll
        for (int i = 0; i < U / 8; i += 2) {
            u32 right[4];
            load_transposed(right, &tile.values[lane % 16][swizzled(lane % 16, min(i + lane / 16, U / 8 - 1))]);
#pragma unroll
            for (int t = 0; t < 2 && i + t < U / 8; t++) {
                float* sum = mixed[i + t];
                sum[0] *= old[0], sum[1] *= old[0];
                if (HEADS > 8) sum[2] *= old[1], sum[3] *= old[1];
                multiply_add<STORED == 0>(sum, share, right[2 * t], right[2 * t + 1]);
            }
        }
        __syncwarp();
        request(n + DEPTH);
    }
    await_copies<0>();
    sync_block();  // nothing is read from or written to the rings any more: their place is used again
#pragma unroll
    for (int half = 0; half < (HEADS > 8 ? 2 : 1); half++) {
        const int h = g + 8 * half;
        total[half] += __shfl_xor_sync(FULL_MASK, total[half], 1);
        total[half] += __shfl_xor_sync(FULL_MASK, total[half], 2);
        if (h >= HEADS) continue;
        if (q == 0) s.peak[h][warp] = peak[half], s.sum[h][warp] = total[half];
#pragma unroll
        for (int i = 0; i < U / 8; i++)
            s.mixed[h][warp][i * 8 + 2 * q] = mixed[i][half * 2], s.mixed[h][warp][i * 8 + 2 * q + 1] = mixed[i][half * 2 + 1];
    }
}
#else
#define PER_TURN (THREADS / LANES)

template <typename Wait>
__device__ inline void attend_keys(const Arguments& a, Shared& s, const Task& task, Wait wait) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int slot = task.slot, stride = SPLITS * PER_TURN;
    const bool has_key = part * PACK < K, has_value = part * PACK < U;
    Pack key[ROUNDS] = {}, value[ROUNDS] = {};
    auto load = [&](int n, int at) {  // what earlier steps wrote to the cache
        if (at < slot && has_key) key[n] = load_fresh16(task.keys + (long long)at * K + part * PACK);
        if (at < slot && has_value) value[n] = load_fresh16(task.values + (long long)at * U + part * PACK);
    };
    const int mine = task.first + task.rank * PER_TURN + group;
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) load(n, mine + n * stride);
    read_token(a, s, task, wait);
    float query[HEADS][PACK], slope[HEADS];
    Partial m[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        slope[h] = a.slopes ? a.slopes[task.head + h] : 0.f;
        m[h].peak = MINUS_INFINITY, m[h].sum = 0;
#pragma unroll
        for (int i = 0; i < PACK; i++) query[h][i] = has_key && part * PACK + i < K ? s.vector[h][part * PACK + i] : 0.f, m[h].value[i] = 0;
    }
    // all lanes of a warp make the same number of rounds, because of the shuffles
    for (int base = mine - group; base < slot; base += ROUNDS * stride) {
        float score[ROUNDS][HEADS], held[ROUNDS][PACK];
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            int at = base + n * stride + group;
            float numbers[PACK];
            unpack(key[n], numbers);
            unpack(value[n], held[n]);
            load(n, at + ROUNDS * stride);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float sum = 0;
#pragma unroll
                for (int i = 0; i < PACK; i++) sum += numbers[i] * query[h][i];
#pragma unroll
                for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
                score[n][h] = at < slot ? finished_score(a, sum, slope[h], slot - at) : MINUS_INFINITY;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float higher = m[h].peak;
#pragma unroll
            for (int n = 0; n < ROUNDS; n++) higher = fmaxf(higher, score[n][h]);
            if (higher == MINUS_INFINITY) continue;
            float old = exp2f(m[h].peak - higher);
            m[h].sum *= old;
#pragma unroll
            for (int i = 0; i < PACK; i++) m[h].value[i] *= old;
#pragma unroll
            for (int n = 0; n < ROUNDS; n++) {
                float now = exp2f(score[n][h] - higher);
                m[h].sum += now;
#pragma unroll
                for (int i = 0; i < PACK; i++) m[h].value[i] += now * held[n][i];
            }
            m[h].peak = higher;
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            float other[PACK], peak = __shfl_xor_sync(FULL_MASK, m[h].peak, step), sum = __shfl_xor_sync(FULL_MASK, m[h].sum, step);
#pragma unroll
            for (int i = 0; i < PACK; i++) other[i] = __shfl_xor_sync(FULL_MASK, m[h].value[i], step);
            merge(m[h], peak, sum, other);
        }
        if (lane < LANES) {
            if (lane == 0) s.peak[h][warp] = m[h].peak, s.sum[h][warp] = m[h].sum;
#pragma unroll
            for (int i = 0; i < PACK; i++)
                if (part * PACK + i < U) s.mixed[h][warp][part * PACK + i] = m[h].value[i];
        }
    }
}
#endif

// Merge the results of the warps, in the first block with the token itself and the sink: s.block_peak, block_sum and block_mixed.
__device__ inline void merge_warps(const Arguments& a, Shared& s, const Task& task) {
    sync_block();
    for (int e = threadIdx.x; e < HEADS * U; e += THREADS) {
        const int h = e / U, i = e % U;
        const float itself = task.rank == 0 ? s.itself[h] : MINUS_INFINITY;
        const float sink = task.rank == 0 && a.sinks ? a.sinks[task.head + h] * LOG2_E : MINUS_INFINITY;
        float peak = fmaxf(itself, sink), sum = 0, mixed = 0;
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, s.peak[h][w]);
        auto add = [&](float score, float weight, float value) {
            const float share = score == MINUS_INFINITY ? 0.f : exp2f(score - peak);
            sum += share * weight, mixed += share * value;
        };
        for (int w = 0; w < WARPS; w++) add(s.peak[h][w], s.sum[h][w], s.mixed[h][w][i]);
        if (task.rank == 0) add(itself, 1, s.value[i]), add(sink, 1, 0);
        if (i == 0) s.block_peak[h] = peak, s.block_sum[h] = sum;
        s.block_mixed[h][i] = mixed;
    }
}

#ifdef WHOLE_STEP
// Work items of this block of a whole step. `partial` holds (SPLITS, H U) values, then (SPLITS, H) pairs of peak and sum.
template <typename Wait>
__device__ inline void attend_items(const Arguments& a, float* partial, Wait wait) {
    __shared__ Shared s;
    const int items = H / HEADS * SPLITS;
    if ((int)blockIdx.x >= items) wait();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int cluster = item / SPLITS, rank = item % SPLITS;
        const Task task(a, cluster, rank);
        attend_keys(a, s, task, [&] { if (item == (int)blockIdx.x) wait(); });
        merge_warps(a, s, task);
        sync_block();
        for (int e = threadIdx.x; e < HEADS * U; e += THREADS) {
            partial[((long long)rank * H + cluster * HEADS) * U + e] = s.block_mixed[e / U][e % U];
            if (e % U) continue;
            float* pair = partial + (long long)SPLITS * H * U + 2 * (rank * H + cluster * HEADS + e / U);
            pair[0] = s.block_peak[e / U], pair[1] = s.block_sum[e / U];
        }
        sync_block();
    }
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE) attend(const Arguments a) {
    Shared& s = *(Shared*)dynamic_memory();
    const int rank = SPLITS > 1 ? rank_in_cluster() : 0, cluster = blockIdx.x / SPLITS;
    const Task task(a, cluster, rank);
    attend_keys(a, s, task, [] { wait_for_previous_kernel(); });
    merge_warps(a, s, task);
    if (SPLITS > 1) sync_cluster(&s);
    else sync_block();
    for (int e = rank * THREADS + threadIdx.x; e < HEADS * U; e += SPLITS * THREADS) {
        int h = e / U, i = e % U;
        float peak[SPLITS], sums[SPLITS], values[SPLITS];
#pragma unroll
        for (int r = 0; r < SPLITS; r++) {  // all loads first: each takes a microsecond's fraction
            peak[r] = SPLITS > 1 ? read_remote(&s.block_peak[h], r) : s.block_peak[h];
            sums[r] = SPLITS > 1 ? read_remote(&s.block_sum[h], r) : s.block_sum[h];
            values[r] = SPLITS > 1 ? read_remote(&s.block_mixed[h][i], r) : s.block_mixed[h][i];
        }
        float sum = 0, mixed = 0, highest = MINUS_INFINITY;
#pragma unroll
        for (int r = 0; r < SPLITS; r++) highest = fmaxf(highest, peak[r]);
#pragma unroll
        for (int r = 0; r < SPLITS; r++) {
            float share = peak[r] == MINUS_INFINITY ? 0.f : exp2f(peak[r] - highest);
            sum += share * sums[r];
            mixed += share * values[r];
        }
        a.out[((long long)cluster * HEADS + h) * U + i] = to_operand(mixed / sum);
    }
    if (SPLITS > 1) sync_cluster(&s);  // no block may leave while another reads its shared memory
}
#endif
