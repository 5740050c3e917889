// What lies between the matrix products of a step of many sequences: three kernels. Products are left to cuBLAS, which
// has tensor cores' work to do once there are many rows; the whole step is replayed as one CUDA graph (batch.py).
// Compiled at run time for one model, after the shared parts.
//
// A kernel starts while the product before it ends: what no kernel of this step writes before it (weights, kept keys,
// lengths) is asked for before `await_former`, all else after it.

struct Given {
    int *tokens, *lengths, *history;
    const Stored *table, *delta, *qkv, *logits;
    const float *places, *cosines, *sines, *weight, *bias, *delta_bias;
    float* stream;
    Stored *normed, *keys, *values, *mixed;
    float embed_scale, factor, scale, eps;
    int rows, capacity, window, shares;
};

__device__ inline float first_of(const float* x, float* shared) {
    if (threadIdx.x == 0) shared[0] = x[0];
    meet();
    float first = shared[0];
    meet();
    return first;
}

// The stream of a row, begun with its token's embedding or moved on by the sum of `shares` deltas and their bias, and its
// norm times `factor`.
extern "C" __global__ void __launch_bounds__(THREADS) advance(const Given a) {
    __shared__ float vector[D], moments[64];
    const long long row = blockIdx.x;
    float x[HELD];
    const Gain of_norm = gain(a.weight, a.bias);
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        x[n] = a.delta_bias && i < D ? a.delta_bias[i] : 0.f;
    }
    await_former();
    if (a.delta) {
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int i = column(n);
            if (i < D) x[n] += a.stream[row * D + i];
        }
        for (int share = 0; share < a.shares; share++)
#pragma unroll
            for (int n = 0; n < HELD; n++) {
                int i = column(n);
                if (i < D) x[n] += widened(a.delta[(share * (long long)a.rows + row) * D + i]);
            }
    } else {
        const int token = a.tokens[row], place = a.lengths[row];
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            int i = column(n);
            if (i >= D) continue;
            x[n] = widened(a.table[(long long)token * D + i]) * a.embed_scale;
            if (PLACED) x[n] += a.places[(long long)place * D + i];
        }
    }
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        if (i < D) a.stream[row * D + i] = x[n];
    }
    // rows' means are unlike: the first number of each is near enough
    float centre = CENTRED ? first_of(x, moments) : 0.f;
    normalise(x, of_norm, a.eps, a.factor, vector, moments, centre);
    for (int i = threadIdx.x; i < D; i += THREADS) a.normed[row * D + i] = narrowed(vector[i]);
}

// One head of one row: its token's key and value are kept, and it looks at all of that row's within the window.
extern "C" __global__ void __launch_bounds__(THREADS) attend(const Given a) {
    __shared__ __align__(16) float query[2 * K + U];
    __shared__ float board[BOARD];
    const int head = blockIdx.x % H, place = a.lengths[blockIdx.x / H];
    const long long row = blockIdx.x / H, group = row * G + head / (H / G);
    Stored *keys = a.keys + group * a.capacity * K, *values = a.values + group * a.capacity * U;
    const int first = max(place + 1 - a.window, 0);
    Kept kept[ROUNDS];
    recall_first(kept, keys, values, first, place, 1);
    await_former();
    const Stored *q = a.qkv + row * QKV, *k = q + H * K + head / (H / G) * K, *v = q + (H + G) * K + head / (H / G) * U;
    arrange(query, q + head * K, k, v, a.scale, a.cosines, a.sines, place);
    look(kept, keys, values, first, place, 1, true, query, board);
    if (head % (H / G) == 0) keep(query, keys, values, place);
    for (int i = threadIdx.x; i < U; i += THREADS) {
        Seen all = seen(board, busy_warps(place - first), i);
        a.mixed[(row * H + head) * U + i] = narrowed(all.value / all.sum);
    }
}

// The likeliest token of a row, the first of equals, is its next one.
extern "C" __global__ void __launch_bounds__(THREADS) choose(const Given a) {
    __shared__ float highest_of[32];
    __shared__ int place_of[32];
    const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Stored* logits = a.logits + (long long)row * COLUMNS;
    float highest = NOTHING;
    int place = V;
    await_former();
#pragma unroll 4
    for (int at = threadIdx.x * PACK; at < V; at += THREADS * PACK) {
        float z[PACK];
        unpack(read16_fresh(logits + at), z);
#pragma unroll
        for (int i = 0; i < PACK; i++)
            if (at + i < V && z[i] > highest) highest = z[i], place = at + i;
    }
    for (int step = 16; step > 0; step /= 2) {
        float z = __shfl_xor_sync(EVERYONE, highest, step);
        int other = __shfl_xor_sync(EVERYONE, place, step);
        if (z > highest || (z == highest && other < place)) highest = z, place = other;
    }
    if (lane == 0) highest_of[warp] = highest, place_of[warp] = place;
    meet();
    if (threadIdx.x) return;
    for (int i = 0; i < WARPS; i++)
        if (highest_of[i] > highest || (highest_of[i] == highest && place_of[i] < place))
            highest = highest_of[i], place = place_of[i];
    const int token = min(place, V - 1), next = min(a.lengths[row] + 1, a.capacity);  // of no number at all: any
    a.tokens[row] = token;
    a.lengths[row] = next;
    a.history[(long long)row * (a.capacity + 1) + next] = token;
}
