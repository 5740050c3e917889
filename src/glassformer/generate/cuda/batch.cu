// What lies between the matrix products of a step of many sequences: two kernels. Products are left to cuBLAS, which
// has tensor cores' work to do once there are many rows; the whole step is replayed as one CUDA graph (batch.py).
// Compiled at run time for one model, after the shared parts.

struct Given {
    const int *tokens, *lengths;
    const Stored *table, *delta, *qkv;
    const float *places, *cosines, *sines, *weight, *bias;
    float* stream;
    Stored *normed, *keys, *values, *mixed;
    float embed_scale, factor, scale, eps;
    int capacity, window;
};

__device__ inline float first_of(const float* x, float* shared) {
    if (threadIdx.x == 0) shared[0] = x[0];
    __syncthreads();
    float first = shared[0];
    __syncthreads();
    return first;
}

// The stream of a row, begun with its token's embedding or moved on by `delta`, and its norm times `factor`.
extern "C" __global__ void __launch_bounds__(THREADS) advance(const Given a) {
    __shared__ float vector[D], moments[64];
    const long long row = blockIdx.x;
    float x[EACH(D)], weight[EACH(D)], bias[EACH(D)];
    gain(weight, bias, a.weight, a.bias);
#pragma unroll
    for (int n = 0; n < EACH(D); n++) {
        int i = threadIdx.x + n * THREADS;
        if (i >= D) continue;
        if (a.tokens) {
            x[n] = widened(a.table[(long long)a.tokens[row] * D + i]) * a.embed_scale;
            if (PLACED) x[n] += a.places[(long long)a.lengths[row] * D + i];
        } else {
            x[n] = a.stream[row * D + i] + widened(a.delta[row * D + i]);
        }
        a.stream[row * D + i] = x[n];
    }
    // rows' means are unlike: the first number of each is near enough
    float centre = CENTRED ? first_of(x, moments) : 0.f;
    normalise(x, weight, bias, a.eps, a.factor, vector, moments, centre);
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
    recall_first(kept, keys, values, first, place);
    arrange(query, a.qkv + row * QKV, head, a.scale, a.cosines, a.sines, place);
    look(kept, keys, values, first, place, true, query, board);
    if (head % (H / G) == 0) keep(query, keys, values, place);
    for (int i = threadIdx.x; i < U; i += THREADS) {
        Seen all = seen(board, i);
        a.mixed[(row * H + head) * U + i] = narrowed(all.value / all.sum);
    }
}
