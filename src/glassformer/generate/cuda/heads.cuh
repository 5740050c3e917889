// Attention of one token, its heads and parts of its keys shared among blocks. Fifth of the parts of decode.cu.

struct Given {
    int *tokens, *counter, *best_at;
    const int* windows;
    const Stored *table, *head, *w_qkv, *w_out, *w_up, *w_down;
    const float *places, *cosines, *sines, *norm_a, *norm_a_bias, *norm_f, *norm_f_bias, *last_norm, *last_norm_bias;
    const float *head_bias, *b_qkv, *b_out, *b_up, *b_down;
    Stored *keys, *values;
    float *qkv, *peaks, *sums, *parts, *mix, *hidden, *fed, *best, *logits;
    float embed_scale, head_scale, scale, eps;
    int place, count, capacity, splits;
};

// Which kept keys a block looks at: one head over one of `active` parts of them.
struct Part { int head, split, active, first, last; };

__device__ inline Part part(int unit, int place, int window, int splits) {
    int start = max(place + 1 - window, 0), kept = place - start;
    int active = max(1, min(splits, (kept + ROUNDS * SLOTS - 1) / (ROUNDS * SLOTS)));
    int each = (kept + active - 1) / active, split = unit / H;
    int first = min(start + split * each, place);
    return {unit % H, split, active, first, min(first + each, place)};
}

__device__ inline const Stored* of_group(const Stored* all, const Part& p, int width, int capacity) {
    return all + (long long)(p.head / (H / G)) * capacity * width;
}

__device__ inline void attend(
    const Given& a, const Part& p, Kept* kept, const Stored* keys, const Stored* values, int place, float* q, float* board
) {
    arrange(q, a.qkv, p.head, a.scale, a.cosines, a.sines, place);
    look(kept, keys, values, p.first, p.last, p.split == 0, q, board);
    if (p.split == 0 && p.head % (H / G) == 0) keep(q, (Stored*)keys, (Stored*)values, place);
    int unit = p.split * H + p.head;
    for (int i = threadIdx.x; i < U; i += THREADS) {
        Seen all = seen(board, i);
        a.parts[unit * U + i] = all.value;
        if (i == 0) a.peaks[unit] = all.peak, a.sums[unit] = all.sum;
    }
}

// The heads side by side, their parts put together, into a shared vector.
__device__ inline void combine(const Given& a, int active, float* vector) {
    for (int j = threadIdx.x; j < H * U; j += THREADS) {
        int h = j / U;
        float peak = NOTHING, sum = 0, value = 0;
        for (int base = 0; base < active; base += 4) {  // four at a time: asked for together, they come together
            float p[4], here[4], v[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int unit = min(base + n, active - 1) * H + h;
                p[n] = fresh(a.peaks + unit), here[n] = fresh(a.sums + unit), v[n] = fresh(a.parts + unit * U + j % U);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (base + n >= active) break;
                float higher = fmaxf(peak, p[n]), old = exp2f(peak - higher), now = exp2f(p[n] - higher);
                value = value * old + v[n] * now;
                sum = sum * old + here[n] * now;
                peak = higher;
            }
        }
        vector[j] = value / sum;
    }
    __syncthreads();
}
