// Tokens of one sequence, one after another, in a single kernel that stays on the GPU: nothing is launched per layer.
//
// At batch 1 a step reads every weight once and computes almost nothing; launching some hundred kernels takes longer
// than reading. So as many blocks as there are multiprocessors walk through the layers together. Each keeps the whole
// residual stream and computes its share of the rows of each matrix; shares are exchanged through memory and a barrier
// of all blocks, five times a layer: projections, attention over a part of the keys, its output, up, down. Weights do
// not depend on what a barrier waits for: the first of them are asked for before it.
//
// Compiled at run time for one model: its sizes are macros (decoder.py). The definition is glassformer.model;
// tests/generate/cuda holds the two together, on a CPU too, where blocks are threads and their threads fibers.

// This block's share of the logits; the highest of them and where it stands, the first of equals.
__device__ inline void judge(const Given& a, Held held, Share rows, const float* vector, float* board) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, place = V;
    float highest = NOTHING;
    const int parts = CHUNKS(D);
    for (int row = rows.first + warp; row < rows.last; row += WARPS) {
        float z = 0;
        for (int chunk = 0; chunk < parts; chunk++) {
            Held next;
            bool same = chunk + 1 < parts;
            int ahead = same ? row : row + WARPS;
            if (ahead < rows.last) fetch(next, a.head + (long long)ahead * D, D, same ? chunk + 1 : 0);
            z += dot(held, vector, D, chunk);
            held = next;
        }
        z = warp_sum(z);
        if (HEAD_BIASED) z += a.head_bias[row];
        if (lane == 0) a.logits[row] = z;
        if (z > highest) highest = z, place = row;
    }
    if (lane == 0) board[warp] = highest, board[32 + warp] = __int_as_float(place);
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 0; i < WARPS; i++) {
            int id = __float_as_int(board[32 + i]);
            if (board[i] > highest || (board[i] == highest && id < place)) highest = board[i], place = id;
        }
        a.best[blockIdx.x] = highest;
        a.best_at[blockIdx.x] = place;
    }
}

// The likeliest token of all blocks' shares.
__device__ inline int choose(const Given& a, int* chosen) {
    if (threadIdx.x < 32) {
        float highest = NOTHING;
        int place = V;
        for (int i = threadIdx.x; i < (int)gridDim.x; i += 32) {
            float z = fresh(a.best + i);
            int id = fresh(a.best_at + i);
            if (z > highest || (z == highest && id < place)) highest = z, place = id;
        }
        for (int step = 16; step > 0; step /= 2) {
            float z = __shfl_xor_sync(EVERYONE, highest, step);
            int id = __shfl_xor_sync(EVERYONE, place, step);
            if (z > highest || (z == highest && id < place)) highest = z, place = id;
        }
        if (threadIdx.x == 0) *chosen = place;
    }
    __syncthreads();
    int token = *chosen;
    __syncthreads();
    return token;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const Given a) {
    __shared__ __align__(16) float vector[WIDEST], query[2 * K + U];
    __shared__ float partial[PARTIALS], board[BOARD], moments[64];
    __shared__ int chosen;
    const Share of_qkv = share(QKV), of_stream = share(D), of_hidden = share(F), of_head = share(V);
    int met = 0, place = a.place, token = a.tokens[place];
    float x[EACH(D)], weight[EACH(D)], bias[EACH(D)], centre = 0;
    Begun begun;
    for (int step = 0; step < a.count; step++) {
#pragma unroll
        for (int n = 0; n < EACH(D); n++) {
            int i = threadIdx.x + n * THREADS;
            x[n] = i < D ? widened(a.table[(long long)token * D + i]) * a.embed_scale : 0.f;
            if (PLACED && i < D) x[n] += a.places[(long long)place * D + i];
        }
        for (int layer = 0; layer < L; layer++) {
            if (layer) leave(a.counter);
            Work w = work(a.w_qkv + (long long)layer * QKV * D, a.b_qkv + layer * QKV, D, of_qkv, 0);
            begin(begun, w);
            gain(weight, bias, a.norm_a + layer * D, a.norm_a_bias + layer * D);
            if (layer) {
                wait(a.counter, ++met);
                add(x, a.fed);
            }
            normalise(x, weight, bias, a.eps, 1, vector, moments, centre);
            multiply(begun, w, vector, partial, [&](int r, float y, float) { a.qkv[w.first + r] = y; });

            leave(a.counter);
            const int window = a.windows[layer];
            Part p = part(blockIdx.x, place, window, a.splits);
            const Stored* layer_keys = a.keys + (long long)layer * G * a.capacity * K;
            const Stored* layer_values = a.values + (long long)layer * G * a.capacity * U;
            const Stored *keys = of_group(layer_keys, p, K, a.capacity), *values = of_group(layer_values, p, U, a.capacity);
            Kept kept[ROUNDS];
            if (p.split < p.active) recall_first(kept, keys, values, p.first, p.last);
            wait(a.counter, ++met);
            for (int unit = blockIdx.x; unit < H * p.active; unit += gridDim.x) {
                if (unit != (int)blockIdx.x) {
                    p = part(unit, place, window, a.splits);
                    keys = of_group(layer_keys, p, K, a.capacity);
                    values = of_group(layer_values, p, U, a.capacity);
                    recall_first(kept, keys, values, p.first, p.last);
                    __syncthreads();  // the shared query and board are free again
                }
                attend(a, p, kept, keys, values, place, query, board);
            }

            leave(a.counter);
            Work o = work(a.w_out + (long long)layer * D * H * U, a.b_out + layer * D, H * U, of_stream, 0);
            begin(begun, o);
            wait(a.counter, ++met);
            combine(a, p.active, vector);
            multiply(begun, o, vector, partial, [&](int r, float y, float) { a.mix[o.first + r] = y; });

            leave(a.counter);
            const Stored* ups = a.w_up + (long long)layer * F * D * (1 + GATED);
            Work u = work(ups, a.b_up + layer * F, D, of_hidden, GATED ? F : 0);
            begin(begun, u);
            gain(weight, bias, a.norm_f + layer * D, a.norm_f_bias + layer * D);
            wait(a.counter, ++met);
            add(x, a.mix);
            normalise(x, weight, bias, a.eps, 1, vector, moments, centre);
            multiply(begun, u, vector, partial, [&](int r, float up, float gate) {
                a.hidden[u.first + r] = GATED ? up * activated(gate) : activated(up);
            });

            leave(a.counter);
            Work n = work(a.w_down + (long long)layer * D * F, a.b_down + layer * D, F, of_stream, 0);
            begin(begun, n);
            wait(a.counter, ++met);
            for (int i = threadIdx.x; i < F; i += THREADS) vector[i] = fresh(a.hidden + i);
            __syncthreads();
            multiply(begun, n, vector, partial, [&](int r, float y, float) { a.fed[n.first + r] = y; });
        }
        leave(a.counter);
        Held held;
        int first = of_head.first + (threadIdx.x >> 5);
        if (first < of_head.last) fetch(held, a.head + (long long)first * D, D, 0);
        gain(weight, bias, a.last_norm, a.last_norm_bias);
        wait(a.counter, ++met);
        add(x, a.fed);
        normalise(x, weight, bias, a.eps, a.head_scale, vector, moments, centre);
        judge(a, held, of_head, vector, board);
        leave(a.counter);
        wait(a.counter, ++met);
        token = choose(a, &chosen);
        place++;
        if (blockIdx.x == 0 && threadIdx.x == 0) a.tokens[place] = token;
    }
}
