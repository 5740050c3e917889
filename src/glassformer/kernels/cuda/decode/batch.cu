// The three kernels between the matmuls of one step of many sequences. cuBLAS computes the matmuls, on tensor cores; the
// whole step is replayed as one CUDA graph (batch.py). Compiled at run time for one model, after parts 1 to 4.
//
// Layouts, B = a.rows sequences: tokens and lengths (B); history (B, capacity + 1); delta (shares, B, D); qkv (B, QKV)
// with all query heads, then keys, then values; logits (B, COLUMNS); stream and normed (B, D); keys and values
// (B, G, capacity, K or U) of one layer; mixed (B, H * U). Kernels of one stream run in order: no other synchronisation.

struct Arguments {
    int *tokens, *lengths, *history;
    const Stored *table, *delta, *qkv, *logits;
    const float *position_table, *cosines, *sines, *weight, *bias, *delta_bias;
    float* stream;
    Stored *normed, *keys, *values, *mixed;
    float embed_scale, factor, scale, eps;
    int rows, capacity, window, shares;
};

// Element i of the new residual stream of a sequence: the embedding of its token if there is no delta, otherwise the old
// element plus the sum of `shares` partial results and a bias.
__device__ inline float residual_update(const Arguments& a, long long row, int i) {
    if (!a.delta) {
        float x = to_float(a.table[(long long)a.tokens[row] * D + i]) * a.embed_scale;
        return ADDS_POSITIONS ? x + a.position_table[(long long)a.lengths[row] * D + i] : x;
    }
    float x = a.stream[row * D + i] + (a.delta_bias ? a.delta_bias[i] : 0.f);
    for (int share = 0; share < a.shares; share++) x += to_float(a.delta[(share * (long long)a.rows + row) * D + i]);
    return x;
}

// One block per sequence: update the residual stream and write its norm, times `factor`, to `normed`.
extern "C" __global__ void __launch_bounds__(THREADS) advance(const Arguments a) {
    __shared__ float moments[64];
    const long long row = blockIdx.x;
    float x[HELD], centre = CENTRED ? residual_update(a, row, 0) : 0.f;  // any element is near enough to the mean of its sequence
    const NormWeights of_norm = load_norm(a.weight, a.bias);
#pragma unroll
    for (int n = 0; n < HELD; n++) x[n] = column(n) < D ? residual_update(a, row, column(n)) : 0.f;
    normalize(x, of_norm, a.eps, a.factor, moments, centre, [&](int i, float number) {
        a.normed[row * D + i] = to_stored(number);
    });
    // only now, because every thread has read element 0 as its centre
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (column(n) < D) a.stream[row * D + column(n)] = x[n];
}

// One block per head of one sequence: attend over the cached keys within the window. The first head of each group also
// writes the key and value of the new token to the cache.
extern "C" __global__ void __launch_bounds__(THREADS) attend(const Arguments a) {
    __shared__ __align__(16) float query[2 * K + U];
    __shared__ float partials[PARTIALS];
    const int head = blockIdx.x % H, position = a.lengths[blockIdx.x / H];
    const long long row = blockIdx.x / H, group = row * G + head / (H / G);
    Stored *keys = a.keys + group * a.capacity * K, *values = a.values + group * a.capacity * U;
    const int first = max(position + 1 - a.window, 0);
    CachedKV cached[ROUNDS];
    load_first_kv(cached, keys, values, first, position, 1);
    const Stored *q = a.qkv + row * QKV, *k = q + H * K + head / (H / G) * K, *v = q + (H + G) * K + head / (H / G) * U;
    load_qkv(query, q + head * K, k, v, a.scale, a.cosines, a.sines, position);
    attend_cached(cached, keys, values, first, position, 1, true, query, partials);
    if (head % (H / G) == 0) store_kv(query, keys, values, position);
    for (int i = threadIdx.x; i < U; i += THREADS) {
        Combined all = combine_warps(partials, busy_warps(position - first), i);
        a.mixed[(row * H + head) * U + i] = to_stored(all.value / all.sum);
    }
}

// One block per sequence: the most likely token (of equal logits, the lowest id) becomes the next token.
extern "C" __global__ void __launch_bounds__(THREADS) choose(const Arguments a) {
    __shared__ float highest_of[32];
    __shared__ int best_id_of[32];
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Stored* logits = a.logits + (long long)row * COLUMNS;
    float highest = MINUS_INFINITY;
    int best_id = V;
#pragma unroll 4
    for (int at = threadIdx.x * PACK; at < V; at += THREADS * PACK) {
        float z[PACK];
        unpack(read16_fresh(logits + at), z);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            if (at + i < V && z[i] > highest) highest = z[i], best_id = at + i;
    }
    for (int step = 16; step > 0; step /= 2) {
        float z = __shfl_xor_sync(FULL_MASK, highest, step);
        int other = __shfl_xor_sync(FULL_MASK, best_id, step);
        if (z > highest || (z == highest && other < best_id)) highest = z, best_id = other;
    }
    if (lane == 0) highest_of[warp] = highest, best_id_of[warp] = best_id;
    sync_compute_threads();
    if (threadIdx.x) return;
    for (int i = 0; i < WARPS; i++)
        if (highest_of[i] > highest || (highest_of[i] == highest && best_id_of[i] < best_id))
            highest = highest_of[i], best_id = best_id_of[i];
    const int token = min(best_id, V - 1), next = min(a.lengths[row] + 1, a.capacity);  // if all logits are NaN: any token
    a.tokens[row] = token;
    a.lengths[row] = next;
    a.history[(long long)row * (a.capacity + 1) + next] = token;
}
