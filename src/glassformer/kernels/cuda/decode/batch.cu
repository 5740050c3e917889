// What lies between the matrix products of a step of many sequences: three kernels. Products are left to cuBLAS, which
// has tensor cores' work to do once there are many rows; the whole step is replayed as one CUDA graph (batch.py).
// Compiled at run time for one model, after the shared parts.

struct Given {
    int *tokens, *lengths, *history;
    const Stored *table, *delta, *qkv, *logits;
    const float *places, *cosines, *sines, *weight, *bias, *delta_bias;
    float* stream;
    Stored *normed, *keys, *values, *mixed;
    float embed_scale, factor, scale, eps;
    int rows, capacity, window, shares;
};

// Number i of a row's stream: its token's embedding, or what it was, moved on by the sum of `shares` deltas and a bias.
__device__ inline float moved(const Given& a, long long row, int i) {
    if (!a.delta) {
        float x = widened(a.table[(long long)a.tokens[row] * D + i]) * a.embed_scale;
        return PLACED ? x + a.places[(long long)a.lengths[row] * D + i] : x;
    }
    float x = a.stream[row * D + i] + (a.delta_bias ? a.delta_bias[i] : 0.f);
    for (int share = 0; share < a.shares; share++) x += widened(a.delta[(share * (long long)a.rows + row) * D + i]);
    return x;
}

// The stream of a row moved on, and its norm times `factor`.
extern "C" __global__ void __launch_bounds__(THREADS) advance(const Given a) {
    __shared__ float moments[64];
    const long long row = blockIdx.x;
    float x[HELD], centre = CENTRED ? moved(a, row, 0) : 0.f;  // rows' means are unlike: this is near enough
    const Gain of_norm = gain(a.weight, a.bias);
#pragma unroll
    for (int n = 0; n < HELD; n++) x[n] = column(n) < D ? moved(a, row, column(n)) : 0.f;
    normalise(x, of_norm, a.eps, a.factor, moments, centre, [&](int i, float number) {
        a.normed[row * D + i] = narrowed(number);
    });
    // after all have read the first number
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (column(n) < D) a.stream[row * D + column(n)] = x[n];
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
