// Attention of one new token per sequence over the KV cache, from the projections of the token. Part 3.
//
// A cluster of SPLITS blocks computes HEADS query heads that share a key/value head, for one sequence: blocks take the keys in
// turns, PER_BLOCK at a time. LANES lanes share a key, 16 bytes each. Results are merged in three stages: the groups of lanes
// of a warp by shuffles, the warps of a block in its shared memory, the blocks of the cluster through each other's shared
// memory. The first block also computes the new key, which is not in the cache yet, and the cluster of the first heads of a
// key/value head stores it there.
//
// The kernel of a whole step (step.cu) has no clusters: it calls `attend_items`, which writes the results of each block to
// global memory, and the matmul that follows merges them.
//
// The sequences of a batch end at the same slot of the cache and begin at slot start[b]: the position of a slot is
// slot - start[b]. Layouts: qkv (B, H K + G K + G U) float32; keys (B, G, capacity, K) and values (B, G, capacity, U);
// out (B, H U).
//
// Macros: H, G, K, U, HEADS, SPLITS, WARPS, ROUNDS, ROTATED (components), HALVES, QK_NORM (0 none, 1 RMS, 2 layer norm),
// NORM_OVER (0 each head, 1 each head with a weight of its own, 2 the whole projection), NORM_LAST (after the rotation).

#define PACK (16 / (int)sizeof(Stored))
#define WIDE (K > U ? K : U)
#define LANES (WIDE <= PACK ? 1 : WIDE <= 2 * PACK ? 2 : WIDE <= 4 * PACK ? 4 : WIDE <= 8 * PACK ? 8 : WIDE <= 16 * PACK ? 16 : 32)
#define PER_BLOCK (THREADS / LANES)
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

struct Shared {
    float vector[HEADS + 1][K], value[U];  // queries, times the scale; the new key; the new value
    float peak[HEADS][WARPS], sum[HEADS][WARPS], mixed[HEADS][WARPS][U];
    float block_peak[HEADS], block_sum[HEADS], block_mixed[HEADS][U];  // read by the other blocks of the cluster
};

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

// The keys of one block, its share `rank` of SPLITS, for the heads of a cluster: leaves s.block_peak, block_sum and block_mixed.
// `wait` waits for the projections of the token.
template <typename Wait>
__device__ inline void attend_keys(const Arguments& a, Shared& s, int cluster, int rank, Wait wait) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int which = cluster % CLUSTERS_OF_GROUP, kv = cluster / CLUSTERS_OF_GROUP % G, row = cluster / CLUSTERS_OF_GROUP / G;
    const int head = kv * (H / G) + which * HEADS, slot = (int)load_fresh(a.slot);
    const int first = max(a.start[row], slot + 1 - a.window);
    const bool has_key = part * PACK < K, has_value = part * PACK < U;
    Stored *keys = a.keys + ((long long)row * G + kv) * a.capacity * K, *values = a.values + ((long long)row * G + kv) * a.capacity * U;
    Pack key[ROUNDS] = {}, value[ROUNDS] = {};
    auto load = [&](int n, int at) {  // what earlier steps wrote to the cache
        if (at < slot && has_key) key[n] = load_fresh16(keys + (long long)at * K + part * PACK);
        if (at < slot && has_value) value[n] = load_fresh16(values + (long long)at * U + part * PACK);
    };
    const int mine = first + rank * PER_BLOCK + group;
#pragma unroll
    for (int n = 0; n < ROUNDS; n++) load(n, mine + n * SPLITS * PER_BLOCK);
    const long long position = slot - a.start[row];
    float waves[2 * WAVES + 1];  // cosines and sines of the pairs of a lane, read before the wait
#pragma unroll
    for (int n = 0; n < WAVES; n++)
        if (lane + 32 * n < ROTATED / 2) {
            waves[2 * n] = a.cosines[position * (ROTATED / 2) + lane + 32 * n];
            waves[2 * n + 1] = a.sines[position * (ROTATED / 2) + lane + 32 * n];
        }
    wait();
    const float *q = a.qkv + (long long)row * QKV, *k = q + H * K, *v = k + G * K;
    for (int h = warp; h < HEADS + (rank == 0); h += WARPS) {
        if (h < HEADS) prepare(s.vector[h], a, q, H * K, head + h, a.q_weight, a.q_bias, waves, a.scale);
        else prepare(s.vector[h], a, k, G * K, kv, a.k_weight, a.k_bias, waves, 1.f);
    }
    if (rank == 0)
        for (int i = threadIdx.x; i < U; i += THREADS) s.value[i] = clipped(load_fresh(v + kv * U + i), a.clip);
    sync_block();
    if (rank == 0 && which == 0) {
        for (int i = threadIdx.x; i < K; i += THREADS) keys[(long long)slot * K + i] = to_stored(s.vector[HEADS][i]);
        for (int i = threadIdx.x; i < U; i += THREADS) values[(long long)slot * U + i] = to_stored(s.value[i]);
    }
    float query[HEADS][PACK], slope[HEADS];
    Partial m[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        slope[h] = a.slopes ? a.slopes[head + h] : 0.f;
        m[h].peak = MINUS_INFINITY, m[h].sum = 0;
#pragma unroll
        for (int i = 0; i < PACK; i++) query[h][i] = has_key && part * PACK + i < K ? s.vector[h][part * PACK + i] : 0.f, m[h].value[i] = 0;
    }
    // all lanes of a warp make the same number of rounds, because of the shuffles
    for (int base = first + rank * PER_BLOCK; base < slot; base += ROUNDS * SPLITS * PER_BLOCK) {
        float score[ROUNDS][HEADS], held[ROUNDS][PACK];
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            int at = base + n * SPLITS * PER_BLOCK + group;
            float numbers[PACK];
            unpack(key[n], numbers);
            unpack(value[n], held[n]);
            load(n, at + ROUNDS * SPLITS * PER_BLOCK);
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
        if (rank == 0) {  // the new token itself
            float sum = 0, itself[PACK];
#pragma unroll
            for (int i = 0; i < PACK; i++) {
                int at = part * PACK + i;
                sum += has_key && at < K ? query[h][i] * s.vector[HEADS][at] : 0.f;
                itself[i] = has_value && at < U ? s.value[at] : 0.f;
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
            if (group == 0) merge(m[h], finished_score(a, sum, slope[h], 0), 1, itself);
            const float nothing[PACK] = {};
            if (group == 0 && a.sinks) merge(m[h], a.sinks[head + h] * LOG2_E, 1, nothing);
        }
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
    sync_block();
    for (int e = threadIdx.x; e < HEADS * U; e += THREADS) {
        int h = e / U, i = e % U;
        float peak = MINUS_INFINITY, sum = 0, mixed = 0;
        for (int w = 0; w < WARPS; w++) peak = fmaxf(peak, s.peak[h][w]);
        for (int w = 0; w < WARPS; w++) {
            float share = s.peak[h][w] == MINUS_INFINITY ? 0.f : exp2f(s.peak[h][w] - peak);
            sum += share * s.sum[h][w];
            mixed += share * s.mixed[h][w][i];
        }
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
        attend_keys(a, s, cluster, rank, [&] { if (item == (int)blockIdx.x) wait(); });
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
extern "C" __global__ void __launch_bounds__(THREADS, 2) attend(const Arguments a) {
    __shared__ Shared s;
    const int rank = SPLITS > 1 ? rank_in_cluster() : 0, cluster = blockIdx.x / SPLITS;
    attend_keys(a, s, cluster, rank, [] { wait_for_previous_kernel(); });
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
