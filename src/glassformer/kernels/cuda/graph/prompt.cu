// What lies between the matmuls of a prompt: norms, heads made ready for attention, and gates. Part 3.
//
// A prompt has B sequences of T tokens, N = B T rows. Every thread reads and writes eight numbers of 16 bits at a time. Weights
// and biases of norms are those of the model, read in place.

struct Arguments {
    const Stored* projected[3];         // (N, heads, width) of queries, keys and values; rows are `row_step` numbers apart
    Stored* prepared[3];                // their heads, ready for attention
    const Stored *norm_weight[2], *norm_bias[2];  // of the norms of queries and of keys, or null
    Stored* x;                          // (N, WIDTH); gates (count)
    Stored* out;                        // (N, WIDTH)
    const Stored* up;                   // (count)
    const Stored *weight, *bias;        // of a norm, or null
    const Stored *cosines, *sines;      // (T, ROTATED / 2), or for each sequence its own
    long long count;                    // N; numbers of the gates
    long long row_step[3], sequence_step[3], token_step[3], head_step[3];  // steps in `prepared` are in numbers, too
    float norm_eps[2], norm_offset[2];  // of queries and of keys
    float eps, offset, scale, clip, limit, up_offset;  // `offset` is added to the weight of a norm
    int heads[3], first_block[3];       // blocks from first_block on prepare queries, keys or values
    int tokens, own_waves;              // own_waves: 1 if sequences have their own cosines and sines
};

__device__ inline void load8(float* x, const Stored* at) {
    const Pack p = *(const Pack*)at;
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = to_float((Stored)(p.word[j / 2] >> 16 * (j % 2)));
}
__device__ inline void store8(Stored* at, const float* x) {
    Pack p;
#pragma unroll
    for (int j = 0; j < 4; j++) p.word[j] = to_stored(x[2 * j]) | (u32)to_stored(x[2 * j + 1]) << 16;
    *(Pack*)at = p;
}
#ifdef NORM
// Eight numbers of a vector, normed: `i` is the index of the first one in the norm's weight and bias. Whether there are any is
// a macro, WEIGHT and BIAS: without branches the compiler begins all loads of a thread before it waits for one.
__device__ inline void apply_norm(
    float* x, const Stored* weight, const Stored* bias, float offset, int i, float mean, float inverse) {
    float factor[8], shift[8];
    if (WEIGHT) load8(factor, weight + i);
    if (BIAS) load8(shift, bias + i);
#pragma unroll
    for (int j = 0; j < 8; j++)
        x[j] = (x[j] - mean) * inverse * (WEIGHT ? factor[j] + offset : 1.f) + (BIAS ? shift[j] : 0.f);
}
#endif

#if defined(LANES)
// LANES neighbouring threads prepare one head, and a block heads of one part only: of queries (0), keys (1) or values (2). Keys
// and values go to the cache, whose heads are further apart. Values are neither normed nor rotated, and may have another width.
#define HEADS_OF_BLOCK (THREADS / LANES)

// The sum over the threads of a head.
__device__ inline float head_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// The norm of a head: x are its numbers first to first + 7. NORM_OVER is 1 if each head has a weight of its own.
__device__ inline void normalize_head(float* x, int first, const Arguments& a, int part, int head) {
    const float centre = NORM == 2 ? __shfl_sync(FULL_MASK, x[0], threadIdx.x % 32 / LANES * LANES) : 0.f;
    float mean = 0, inverse = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float d = first < WIDTH ? x[j] - centre : 0.f;
        mean += d, inverse += d * d;
    }
    mean = head_sum(mean), inverse = head_sum(inverse);
    moments(mean, inverse, centre, WIDTH, a.norm_eps[part], NORM == 2);
    const Stored* weight = a.norm_weight[part] + (NORM_OVER ? head * WIDTH : 0);
    if (first < WIDTH) apply_norm(x, weight, a.norm_bias[part], a.norm_offset[part], first, mean, inverse);
}

#if ROTATED
// Pair p of a head, (a, b), becomes (a cos - b sin, a sin + b cos). All threads of a warp call it. The partner of number i is
// i + 1 or i - 1 or, with HALVES, ROTATED / 2 numbers further or before, in a register of another thread.
__device__ inline void rotate_head(float* x, int first, const Stored* cosines, const Stored* sines) {
    const int half = ROTATED / 2, lane = threadIdx.x % 32;
#if HALVES && ROTATED % 16 == 0
    // all eight partners are in one thread, and eight neighbouring pairs are rotated
    const bool is_first = first < half;
    float other[8], cosine[8], sine[8];
#pragma unroll
    for (int j = 0; j < 8; j++) other[j] = __shfl_sync(FULL_MASK, x[j], (lane + (is_first ? half / 8 : 32 - half / 8)) % 32);
    if (first >= ROTATED) return;
    load8(cosine, cosines + first % half), load8(sine, sines + first % half);
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = x[j] * cosine[j] + (is_first ? -other[j] : other[j]) * sine[j];
#else
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int i = first + j, p = HALVES ? i % half : i / 2;
        const bool is_first = HALVES ? i < half : j % 2 == 0;
        float other = x[j ^ 1];
        if (HALVES) {
            const float after = __shfl_sync(FULL_MASK, x[(j + half) % 8], (lane + (j + half) / 8) % 32);
            const float before = __shfl_sync(FULL_MASK, x[(j + 256 - half) % 8], (lane + (j + 256 - half) / 8) % 32);
            other = is_first ? after : before;
        }
        y[j] = x[j];
        if (i >= ROTATED) continue;
        const float cosine = to_float(cosines[p]), sine = to_float(sines[p]);
        y[j] = is_first ? x[j] * cosine - other * sine : other * sine + x[j] * cosine;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = y[j];
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) prepare_heads(const Arguments a) {
    wait_for_previous_kernel();
    const int part = (blockIdx.x >= a.first_block[1]) + (blockIdx.x >= a.first_block[2]);
    const int first = threadIdx.x % LANES * 8, width = part == 2 ? VALUE_WIDTH : WIDTH;
    const u32 number = (blockIdx.x - a.first_block[part]) * HEADS_OF_BLOCK + threadIdx.x / LANES;
    const u32 heads = a.heads[part], count = (u32)a.count * heads;
    const bool exists = number < count;  // threads of a last head that is not there compute too: a warp sums together
    const u32 index = exists ? number : count - 1, row = index / heads, head = index % heads;
    const u32 sequence = row / (u32)a.tokens, t = row % (u32)a.tokens;
    float x[8] = {};
    if (first < width) load8(x, a.projected[part] + row * a.row_step[part] + head * width + first);
    if (NORM && !NORM_LAST && part < 2) normalize_head(x, first, a, part, head);
    if (a.clip > 0)
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = fminf(fmaxf(x[j], -a.clip), a.clip);
#if ROTATED
    const long long wave = ((a.own_waves ? (long long)sequence * a.tokens : 0) + t) * (ROTATED / 2);
    if (part < 2) rotate_head(x, first, a.cosines + wave, a.sines + wave);
#endif
    if (NORM && NORM_LAST && part < 2) normalize_head(x, first, a, part, head);
    Stored* out = a.prepared[part] + sequence * a.sequence_step[part] + t * a.token_step[part] + head * a.head_step[part];
    if (exists && first < width) store8(out + first, x);
}
#elif defined(NORM)
// out = norm(x), or with a residual stream: out += scale * norm(x) (ADD 1) or out = norm(out + scale * x) (ADD 2), in one pass.
// WARPS_OF_ROW warps have a row, each thread up to PACKS times eight numbers of it in registers.
#define THREADS_OF_ROW (32 * WARPS_OF_ROW)
#define PACKS ((WIDTH / 8 + THREADS_OF_ROW - 1) / THREADS_OF_ROW)

extern "C" __global__ void __launch_bounds__(THREADS) normalize(const Arguments a) {
    __shared__ float room[2 * WARPS];
    wait_for_previous_kernel();
    const int begin = threadIdx.x % THREADS_OF_ROW * 8, warp = threadIdx.x / 32;
    const long long number = (long long)blockIdx.x * (WARPS / WARPS_OF_ROW) + threadIdx.x / THREADS_OF_ROW;
    const bool exists = number < a.count;  // all threads of a block wait for each other
    const long long row = (exists ? number : a.count - 1) * WIDTH;
    float x[PACKS][8], old[PACKS][8];
    float centre = NORM == 2 ? to_float(a.x[row]) : 0.f, mean = 0, inverse = 0;
    if (NORM == 2 && ADD == 2) centre = to_float(a.out[row]) + a.scale * centre;
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int i = begin + p * THREADS_OF_ROW * 8;
        if (i >= WIDTH) continue;
        load8(x[p], a.x + row + i);
        if (ADD) load8(old[p], a.out + row + i);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (ADD == 2) x[p][j] = old[p][j] + a.scale * x[p][j];
            const float d = x[p][j] - centre;
            mean += d, inverse += d * d;
        }
    }
    mean = warp_sum(mean), inverse = warp_sum(inverse);
    if (WARPS_OF_ROW > 1) {
        if (threadIdx.x % 32 == 0) room[warp] = mean, room[WARPS + warp] = inverse;
        sync_block();
        mean = inverse = 0;
#pragma unroll
        for (int w = 0; w < WARPS_OF_ROW; w++) {
            const int other = warp / WARPS_OF_ROW * WARPS_OF_ROW + w;
            mean += room[other], inverse += room[WARPS + other];
        }
    }
    moments(mean, inverse, centre, WIDTH, a.eps, NORM == 2);
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        const int i = begin + p * THREADS_OF_ROW * 8;
        if (i >= WIDTH) continue;
        apply_norm(x[p], a.weight, a.bias, a.offset, i, mean, inverse);
        if (ADD == 1)
#pragma unroll
            for (int j = 0; j < 8; j++) x[p][j] = old[p][j] + a.scale * x[p][j];
        if (exists) store8(a.out + row + i, x[p]);
    }
}
#else
// x = activation(x) * (up + offset). The last numbers first: of more than the L2 cache holds, those were written last and are
// still there, and the down projection then finds the first ones.
extern "C" __global__ void __launch_bounds__(THREADS) apply_gate(const Arguments a) {
    wait_for_previous_kernel();
    const long long at = a.count - 8 - ((long long)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (at < 0) return;
    float gate[8], up[8];
    load8(gate, a.x + at), load8(up, a.up + at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (a.limit > 0) gate[j] = fminf(gate[j], a.limit), up[j] = fminf(fmaxf(up[j], -a.limit), a.limit);
        gate[j] = activate(ACTIVATION, gate[j]) * (up[j] + a.up_offset);
    }
    store8(a.x + at, gate);
}
#endif
