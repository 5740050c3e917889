// What lies between the matmuls of a prompt: heads made ready for attention, and gates. Part 3.
//
// A prompt has B sequences of T tokens, N = B T rows. One warp prepares one head of one token: H queries, then G keys, then
// G values. Queries stay where they are, keys and values go to the cache.

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
// The norm of a head in shared memory. NORM_OVER is 1 if each head has a weight of its own.
__device__ inline void normalize_head(float* x, const float* weight, const float* bias, int head, float eps, int lane) {
    const float centre = QK_NORM == 2 ? x[0] : 0.f;
    float mean = 0, inverse = 0;
    for (int i = lane; i < K; i += 32) {
        float d = x[i] - centre;
        mean += d, inverse += d * d;
    }
    mean = warp_sum(mean), inverse = warp_sum(inverse);
    moments(mean, inverse, centre, K, eps, QK_NORM == 2);
    if (weight && NORM_OVER == 1) weight += head * K;
    __syncwarp();
    for (int i = lane; i < K; i += 32)
        x[i] = (x[i] - mean) * inverse * (weight ? weight[i] : 1.f) + (bias ? bias[i] : 0.f);
    __syncwarp();
}

// Pair p of a head becomes (a cos - b sin, a sin + b cos).
__device__ inline void rotate_head(float* x, const Stored* cosines, const Stored* sines, int lane) {
    for (int p = lane; p < ROTATED / 2; p += 32) {
        const int i = HALVES ? p : 2 * p, j = HALVES ? p + ROTATED / 2 : 2 * p + 1;
        const float a = x[i], b = x[j], cosine = to_float(cosines[p]), sine = to_float(sines[p]);
        x[i] = a * cosine - b * sine, x[j] = a * sine + b * cosine;
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS) prepare_heads(const Arguments a) {
    __shared__ float room[WARPS][K];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long index = (long long)blockIdx.x * WARPS + warp;
    if (index >= a.count) return;
    const long long row = index / (H + 2 * G), sequence = row / a.tokens;
    const int t = (int)(row % a.tokens), n = (int)(index % (H + 2 * G));
    if (n >= H + G) {
        const int head = n - H - G;
        const Stored* from = a.v + (row * G + head) * U;
        Stored* to = a.values + ((sequence * G + head) * a.capacity + a.first + t) * U;
        for (int i = lane; i < U; i += 32)
            to[i] = a.clip > 0 ? to_stored(fminf(fmaxf(to_float(from[i]), -a.clip), a.clip)) : from[i];
        return;
    }
    const bool is_key = n >= H;
    const int head = is_key ? n - H : n;
    Stored* from = is_key ? a.k + (row * G + head) * K : a.q + (row * H + head) * K;
    Stored* to = is_key ? a.keys + ((sequence * G + head) * a.capacity + a.first + t) * K : from;
    float* x = room[warp];
    for (int i = lane; i < K; i += 32) x[i] = to_float(from[i]);
    __syncwarp();
    const float *weight = is_key ? a.k_weight : a.q_weight, *bias = is_key ? a.k_bias : a.q_bias;
    if (QK_NORM && !NORM_LAST) normalize_head(x, weight, bias, head, a.eps, lane);
    if (a.clip > 0) {
        for (int i = lane; i < K; i += 32) x[i] = fminf(fmaxf(x[i], -a.clip), a.clip);
        __syncwarp();
    }
    if (ROTATED) {
        const long long wave = ((a.own_waves ? sequence * a.tokens : 0) + t) * (ROTATED / 2);
        rotate_head(x, a.cosines + wave, a.sines + wave, lane);
    }
    if (QK_NORM && NORM_LAST) normalize_head(x, weight, bias, head, a.eps, lane);
    for (int i = lane; i < K; i += 32) to[i] = to_stored(x[i]);
}
#else
// gate = activation(gate) * (up + offset), eight numbers of 16 bits to a thread
extern "C" __global__ void __launch_bounds__(THREADS) apply_gate(const Arguments a) {
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
            two |= (u32)to_stored(activate(gate) * (up + a.up_offset)) << 16 * half;
        }
        gates.word[i] = two;
    }
    *(Pack*)(a.gate + at) = gates;
}
#endif
