// A token's look at the kept keys of one head. Fourth of the parts. A block looks at every `apart`-th of them.

// Component i of a query or a key at its place, it and its partner turned by the angle of their pair.
template <typename T>
__device__ inline float turned(const T* vector, int i, const float* cosines, const float* sines, int place) {
    float x = widened(vector[i]);
    if (i >= ROTATED) return x;
    const int half = ROTATED / 2;
    bool first = HALVES ? i < half : i % 2 == 0;
    int partner = HALVES ? (first ? i + half : i - half) : (first ? i + 1 : i - 1);
    int pair = HALVES ? (first ? i : i - half) : i / 2;
    float other = widened(vector[partner]);
    float c = cosines[(long long)place * half + pair], s = sines[(long long)place * half + pair];
    return x * c + (first ? -other : other) * s;
}

#define LOG2_E 1.44269504f

// The query, key and value of the token itself, in shared memory one after another: 2 K + U numbers. Queries are scaled
// so that a score is the logarithm of its exponential to the base 2, which is what the machine can raise.
template <typename T>
__device__ inline void arrange(
    float* out, const T* q, const T* k, const T* v, float scale, const float* cosines, const float* sines, int place
) {
    for (int i = threadIdx.x; i < K; i += THREADS) {
        out[i] = turned(q, i, cosines, sines, place) * (scale * LOG2_E);
        out[K + i] = turned(k, i, cosines, sines, place);
    }
    for (int i = threadIdx.x; i < U; i += THREADS) out[2 * K + i] = widened(v[i]);
    meet();
}

struct Kept { Pack key, value; };

#ifndef ROUNDS
#define ROUNDS 2  // of SLOTS keys that a block asks for before it can begin
#endif

// What a thread looks at of the key at place `at`, one of those before `last`.
__device__ inline void recall(Kept& kept, const Stored* keys, const Stored* values, int at, int last) {
    int lane = threadIdx.x % LANES;
    if (at < last) {
        kept.key = read16_fresh(keys + (long long)at * K + lane * PACK);
        kept.value = read16_fresh(values + (long long)at * U + lane * PACK);
    }
}

// The first of the keys from `first` on.
__device__ inline void recall_first(
    Kept* kept, const Stored* keys, const Stored* values, int first, int last, int apart
) {
#pragma unroll
    for (int n = 0; n < ROUNDS; n++)
        recall(kept[n], keys, values, first + (n * SLOTS + (int)threadIdx.x / LANES) * apart, last);
}

// What a softmax over some keys needs: the highest score, the sum of exponentials, the weighted values.
struct Mixture { float peak, sum, value[PACK]; };

__device__ inline void mix_in(Mixture& m, float peak, float sum, const float* value) {
    float higher = fmaxf(m.peak, peak);
    if (higher == NOTHING) return;
    float old = exp2f(m.peak - higher), now = exp2f(peak - higher);
#pragma unroll
    for (int i = 0; i < PACK; i++) m.value[i] = m.value[i] * old + value[i] * now;
    m.sum = m.sum * old + sum * now;
    m.peak = higher;
}

// The whole block looks at its kept keys in first..last, and at the token itself where `own`; each warp's mixture goes to
// a shared board. `kept` holds the first of them (recall_first).
__device__ inline void look(
    Kept* kept, const Stored* keys, const Stored* values, int first, int last, int apart, bool own, const float* q,
    float* board
) {
    int t = threadIdx.x, lane = t % LANES, warp = t >> 5;
    const float *k = q + K, *v = k + K;
    Mixture m = {NOTHING, 0, {0}};
    float mine[PACK];
#pragma unroll
    for (int i = 0; i < PACK; i++) mine[i] = q[lane * PACK + i];
    for (int base = first; base < last; base += ROUNDS * SLOTS * apart) {  // all lanes of a warp stay together
        float score[ROUNDS], value[ROUNDS][PACK], higher = m.peak;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            int at = base + (n * SLOTS + t / LANES) * apart;
            float key[PACK];
            unpack(kept[n].key, key);
            unpack(kept[n].value, value[n]);
            recall(kept[n], keys, values, at + ROUNDS * SLOTS * apart, last);
            score[n] = 0;
#pragma unroll
            for (int i = 0; i < PACK; i++) score[n] += key[i] * mine[i];
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) score[n] += __shfl_xor_sync(EVERYONE, score[n], step);
            score[n] = at < last ? score[n] : NOTHING;
            higher = fmaxf(higher, score[n]);
        }
        if (higher == NOTHING) continue;
        float old = exp2f(m.peak - higher);
        m.sum *= old;
#pragma unroll
        for (int i = 0; i < PACK; i++) m.value[i] *= old;
#pragma unroll
        for (int n = 0; n < ROUNDS; n++) {
            if (score[n] == NOTHING) continue;  // its value was not read
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
    for (int step = LANES / 2; step > 0; step /= 2) score += __shfl_xor_sync(EVERYONE, score, step);
    if (own && t / LANES == 0) mix_in(m, score, 1, v + lane * PACK);
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        float value[PACK], peak = __shfl_xor_sync(EVERYONE, m.peak, step), sum = __shfl_xor_sync(EVERYONE, m.sum, step);
#pragma unroll
        for (int i = 0; i < PACK; i++) value[i] = __shfl_xor_sync(EVERYONE, m.value[i], step);
        mix_in(m, peak, sum, value);
    }
    if ((t & 31) < LANES) {
        if (lane == 0) board[warp] = m.peak, board[WARPS + warp] = m.sum;
        for (int i = 0; i < PACK; i++) board[2 * WARPS + warp * U + lane * PACK + i] = m.value[i];
    }
    meet();
}

// The token's own key and value into the cache.
__device__ inline void keep(const float* q, Stored* keys, Stored* values, int place) {
    for (int i = threadIdx.x; i < K; i += THREADS) keys[(long long)place * K + i] = narrowed(q[K + i]);
    for (int i = threadIdx.x; i < U; i += THREADS) values[(long long)place * U + i] = narrowed(q[2 * K + i]);
}

struct Seen { float peak, sum, value; };

// How many warps had any of n keys to look at; the first has the token itself.
__device__ inline int busy_warps(int n) { return max(1, min(WARPS, (n * LANES + 31) / 32)); }

// The mixtures of some warps as one, for component i.
__device__ inline Seen seen(const float* board, int warps, int i) {
    Seen all = {NOTHING, 0, 0};
    for (int w = 0; w < warps; w++) all.peak = fmaxf(all.peak, board[w]);
    for (int w = 0; w < warps; w++) {
        float share = board[w] == NOTHING ? 0.f : exp2f(board[w] - all.peak);
        all.sum += board[WARPS + w] * share;
        all.value += board[2 * WARPS + w * U + i] * share;
    }
    return all;
}

#define BOARD (2 * WARPS + WARPS * U > 64 ? 2 * WARPS + WARPS * U : 64)
