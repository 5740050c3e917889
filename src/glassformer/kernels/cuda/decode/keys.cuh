// Attention of one new token and one head over the cached keys. Part 4. A block processes every `apart`-th key.

// Component i of a query or a key after the rotary rotation of its pair. Tables are (positions, ROTATED / 2).
template <typename T>
__device__ inline float rotated(const T* vector, int i, const float* cosines, const float* sines, int position) {
    float x = to_float(vector[i]);
    if (i >= ROTATED) return x;
    const int half = ROTATED / 2;
    bool first = HALVES ? i < half : i % 2 == 0;
    int partner = HALVES ? (first ? i + half : i - half) : (first ? i + 1 : i - 1);
    int pair = HALVES ? (first ? i : i - half) : i / 2;
    float other = to_float(vector[partner]);
    float c = cosines[(long long)position * half + pair], s = sines[(long long)position * half + pair];
    return x * c + (first ? -other : other) * s;
}

#define LOG2_E 1.44269504f

// Write the query, key and value of the new token to shared memory, one after the other: 2 K + U floats. Queries are
// multiplied by scale * log2(e), so that the softmax can use exp2f, which is one instruction.
template <typename T>
__device__ inline void load_qkv(
    float* out, const T* q, const T* k, const T* v, float scale, const float* cosines, const float* sines, int position
) {
    for (int i = threadIdx.x; i < K; i += THREADS) {
        out[i] = rotated(q, i, cosines, sines, position) * (scale * LOG2_E);
        out[K + i] = rotated(k, i, cosines, sines, position);
    }
    for (int i = threadIdx.x; i < U; i += THREADS) out[2 * K + i] = to_float(v[i]);
    sync_compute_threads();
}

struct CachedKV { Pack key, value; };

#define ROUNDS 2  // times SLOTS keys are loaded ahead of their use

// Load a thread's 16 bytes of the key and value at position `at`, if `at` < `last`.
__device__ inline void load_kv(CachedKV& cached, const Stored* keys, const Stored* values, int at, int last) {
    int lane = threadIdx.x % LANES;
    if (at < last) {
        cached.key = read16_fresh(keys + (long long)at * K + lane * PACK);
        cached.value = read16_fresh(values + (long long)at * U + lane * PACK);
    }
}

// Load the first ROUNDS * SLOTS keys and values from position `first` on.
__device__ inline void load_first_kv(
    CachedKV* cached, const Stored* keys, const Stored* values, int first, int last, int apart
) {
#pragma unroll
    for (int n = 0; n < ROUNDS; n++)
        load_kv(cached[n], keys, values, first + (n * SLOTS + (int)threadIdx.x / LANES) * apart, last);
}

// A softmax over some of the keys: the largest score, the sum of exponentials, and the weighted sum of values.
struct PartialSoftmax { float peak, sum, value[PACK]; };

__device__ inline void merge(PartialSoftmax& m, float peak, float sum, const float* value) {
    float higher = fmaxf(m.peak, peak);
    if (higher == MINUS_INFINITY) return;
    float old = exp2f(m.peak - higher), now = exp2f(peak - higher);
#pragma unroll
    for (int i = 0; i < PACK; i++) m.value[i] = m.value[i] * old + value[i] * now;
    m.sum = m.sum * old + sum * now;
    m.peak = higher;
}

// Online softmax of the whole block over its cached keys in first..last, and over the new token itself if `own`. Each warp
// writes its result to the shared buffer `partials`: WARPS largest scores, WARPS sums, then (WARPS, U) values. `cached`
// holds the first keys and values (load_first_kv).
__device__ inline void attend_cached(
    CachedKV* cached, const Stored* keys, const Stored* values, int first, int last, int apart, bool own, const float* q,
    float* partials
) {
    int t = threadIdx.x, lane = t % LANES, warp = t >> 5;
    const float *k = q + K, *v = k + K;
    PartialSoftmax m = {MINUS_INFINITY, 0, {0}};
    float mine[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) mine[i] = q[lane * PACK + i];
    for (int base = first; base < last; base += ROUNDS * SLOTS * apart) {  // the same number of iterations for all lanes, because of the shuffles
        float score[ROUNDS], value[ROUNDS][PACK], higher = m.peak;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            int at = base + (n * SLOTS + t / LANES) * apart;
            float key[PACK];
            unpack(cached[n].key, key);
            unpack(cached[n].value, value[n]);
            load_kv(cached[n], keys, values, at + ROUNDS * SLOTS * apart, last);
            score[n] = 0;
#pragma unroll
            for (int i = 0; i < PACK; i++) score[n] += key[i] * mine[i];
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) score[n] += __shfl_xor_sync(FULL_MASK, score[n], step);
            score[n] = at < last ? score[n] : MINUS_INFINITY;
            higher = fmaxf(higher, score[n]);
        }
        if (higher == MINUS_INFINITY) continue;
        float old = exp2f(m.peak - higher);
        m.sum *= old;
#pragma unroll
        for (int i = 0; i < PACK; i++) m.value[i] *= old;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            if (score[n] == MINUS_INFINITY) continue;  // its value was not loaded
            float now = exp2f(score[n] - higher);
            m.sum += now;
#pragma unroll
            for (int i = 0; i < PACK; i++) m.value[i] += now * value[n][i];
        }
        m.peak = higher;
    }
    float score = 0;
#pragma unroll
    for (int i = 0; i < PACK; i++) score += mine[i] * k[lane * PACK + i];
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) score += __shfl_xor_sync(FULL_MASK, score, step);
    if (own && t / LANES == 0) merge(m, score, 1, v + lane * PACK);
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        float value[PACK], peak = __shfl_xor_sync(FULL_MASK, m.peak, step), sum = __shfl_xor_sync(FULL_MASK, m.sum, step);
#pragma unroll
        for (int i = 0; i < PACK; i++) value[i] = __shfl_xor_sync(FULL_MASK, m.value[i], step);
        merge(m, peak, sum, value);
    }
    if ((t & 31) < LANES) {
        if (lane == 0) partials[warp] = m.peak, partials[WARPS + warp] = m.sum;
        for (int i = 0; i < PACK; i++) partials[2 * WARPS + warp * U + lane * PACK + i] = m.value[i];
    }
    sync_compute_threads();
}

// Write the key and value of the new token to the cache.
__device__ inline void store_kv(const float* q, Stored* keys, Stored* values, int position) {
    for (int i = threadIdx.x; i < K; i += THREADS) keys[(long long)position * K + i] = to_stored(q[K + i]);
    for (int i = threadIdx.x; i < U; i += THREADS) values[(long long)position * U + i] = to_stored(q[2 * K + i]);
}

struct Combined { float peak, sum, value; };

// Number of warps that had at least one of n keys. The first warp always has the new token itself.
__device__ inline int busy_warps(int n) { return max(1, min(WARPS, (n * LANES + 31) / 32)); }

// Merge the results of the first `warps` warps, for component i of the value.
__device__ inline Combined combine_warps(const float* partials, int warps, int i) {
    Combined all = {MINUS_INFINITY, 0, 0};
    for (int w = 0; w < warps; w++) all.peak = fmaxf(all.peak, partials[w]);
    for (int w = 0; w < warps; w++) {
        float share = partials[w] == MINUS_INFINITY ? 0.f : exp2f(partials[w] - all.peak);
        all.sum += partials[WARPS + w] * share;
        all.value += partials[2 * WARPS + w * U + i] * share;
    }
    return all;
}

#define PARTIALS (2 * WARPS + WARPS * U > 64 ? 2 * WARPS + WARPS * U : 64)
