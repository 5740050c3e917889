// What lies between the matmuls of a prompt: heads made ready for attention, and gates. Part 3.
//
// A prompt has B sequences of T tokens, N = B T rows of H queries, G keys and G values. LANES neighbouring threads prepare one
// of these heads, eight numbers each, in one load and one store of 16 bytes. Queries stay where they are, keys and values go
// to the cache.

struct Arguments {
    Stored *q, *k, *v;                  // (N, H, K), (N, G, K), (N, G, U): what the projections wrote
    Stored *keys, *values;              // (B, G, capacity, K or U)
    const Stored *cosines, *sines;      // (T, ROTATED / 2), or for each sequence its own
    const float *q_weight, *q_bias, *k_weight, *k_bias;  // of the norms of queries and keys, or null
    Stored* gate;                       // (count): gates, replaced by what the down projection reads
    const Stored* up;                   // (count)
    long long count;                    // heads of all tokens; numbers of `gate`
    float eps, clip, limit, up_offset;
    int tokens, first, capacity, own_waves;  // `first`: slot of the first token. own_waves: 1 if sequences have their own
};

#ifndef ACTIVATION
#define HEADS_OF_BLOCK (THREADS / LANES)

// The sum over the threads of a head.
__device__ inline float head_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}

// The norm of a query or a key: x are its numbers first to first + 7. All threads of a warp call it, those of values too, which
// stay as they are. NORM_OVER is 1 if each head has a weight of its own.
__device__ inline void normalize_head(
    float* x, int first, bool is_value, const float* weight, const float* bias, int head, float eps) {
    const float centre = QK_NORM == 2 ? __shfl_sync(FULL_MASK, x[0], threadIdx.x % 32 / LANES * LANES) : 0.f;
    float mean = 0, inverse = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float d = first < K ? x[j] - centre : 0.f;
        mean += d, inverse += d * d;
    }
    mean = head_sum(mean), inverse = head_sum(inverse);
    moments(mean, inverse, centre, K, eps, QK_NORM == 2);
    if (first >= K || is_value) return;
    if (weight && NORM_OVER == 1) weight += head * K;
#pragma unroll
    for (int j = 0; j < 8; j++)
        x[j] = (x[j] - mean) * inverse * (weight ? weight[first + j] : 1.f) + (bias ? bias[first + j] : 0.f);
}

#if ROTATED
// Pair p of a query or a key, (a, b), becomes (a cos - b sin, a sin + b cos). All threads of a warp call it. The partner of
// number i is i + 1 or i - 1 or, with HALVES, ROTATED / 2 numbers further or before, in a register of another thread.
__device__ inline void rotate_head(float* x, int first, bool is_value, const Stored* cosines, const Stored* sines) {
    const int half = ROTATED / 2, lane = threadIdx.x % 32;
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
        if (i >= ROTATED || is_value) continue;
        const float cosine = to_float(cosines[p]), sine = to_float(sines[p]);
        y[j] = is_first ? x[j] * cosine - other * sine : other * sine + x[j] * cosine;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = y[j];
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS) prepare_heads(const Arguments a) {
    wait_for_previous_kernel();
    const int place = threadIdx.x / LANES, first = threadIdx.x % LANES * 8;
    const long long number = (long long)blockIdx.x * HEADS_OF_BLOCK + place;
    const bool exists = number < a.count;  // threads of a last head that is not there compute too: a warp sums together
    const long long index = exists ? number : a.count - 1;
    const u32 row = (u32)(index / (H + 2 * G)), sequence = row / (u32)a.tokens, t = row % (u32)a.tokens;
    const int n = (int)(index % (H + 2 * G));
    const bool is_value = n >= H + G, is_key = n >= H && !is_value;
    const int head = is_value ? n - H - G : is_key ? n - H : n, width = is_value ? U : K;
    const long long kept = ((long long)sequence * G + head) * a.capacity + a.first + t;  // in the cache
    const Stored* from = is_value ? a.v + ((long long)row * G + head) * U + first
                         : is_key ? a.k + ((long long)row * G + head) * K + first
                                  : a.q + ((long long)row * H + head) * K + first;
    Stored* to = is_value ? a.values + kept * U + first : is_key ? a.keys + kept * K + first : (Stored*)from;
    Pack loaded = {};
    if (first < width) loaded = *(const Pack*)from;
    float x[8];
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = to_float((Stored)(loaded.word[j / 2] >> 16 * (j % 2)));
    const float *weight = is_key ? a.k_weight : a.q_weight, *bias = is_key ? a.k_bias : a.q_bias;
    if (QK_NORM && !NORM_LAST) normalize_head(x, first, is_value, weight, bias, head, a.eps);
    if (a.clip > 0)
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = fminf(fmaxf(x[j], -a.clip), a.clip);
#if ROTATED
    const long long wave = ((a.own_waves ? (long long)sequence * a.tokens : 0) + t) * (ROTATED / 2);
    rotate_head(x, first, is_value, a.cosines + wave, a.sines + wave);
#endif
    if (QK_NORM && NORM_LAST) normalize_head(x, first, is_value, weight, bias, head, a.eps);
#pragma unroll
    for (int j = 0; j < 4; j++) loaded.word[j] = to_stored(x[2 * j]) | (u32)to_stored(x[2 * j + 1]) << 16;
    if (exists && first < width) *(Pack*)to = loaded;
}
#else
// gate = activation(gate) * (up + offset), eight numbers of 16 bits to a thread
extern "C" __global__ void __launch_bounds__(THREADS) apply_gate(const Arguments a) {
    wait_for_previous_kernel();
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (at >= a.count) return;
    Pack gates = *(const Pack*)(a.gate + at), ups = *(const Pack*)(a.up + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 two = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float gate = to_float((u16)(gates.word[i] >> 16 * half)), up = to_float((u16)(ups.word[i] >> 16 * half));
            if (a.limit > 0) gate = fminf(gate, a.limit), up = fminf(fmaxf(up, -a.limit), a.limit);
            two |= (u32)to_stored(activate(ACTIVATION, gate) * (up + a.up_offset)) << 16 * half;
        }
        gates.word[i] = two;
    }
    *(Pack*)(a.gate + at) = gates;
}
#endif
