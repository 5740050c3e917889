// Persistent kernel: decodes several tokens of one sequence in one launch.
//
// At batch size 1 a step reads every weight once and computes very little, so the time is the memory traffic plus the
// latency of passing results between blocks. Each block holds the whole residual stream in registers. The blocks of a
// cluster write to each other's shared memory:
// - A cluster has some of the heads. Its blocks divide the rows of the query, key and value projections, then the cached
//   keys, then the rows of the output projection, of which they use the columns of their heads.
// - A cluster also has a part of the hidden units. Its blocks divide the rows of the up projection, then all rows of the
//   down projection.
// Clusters therefore exchange results only twice per layer: sums in 16-byte lines, each with a tag that marks it as new.
// There is no grid-wide barrier. Weights pass through a ring buffer (stream.cuh).
//
// Compiled at run time for one model: its sizes are macros (decoder.py, stream.py). The definition is glassformer.model;
// tests/kernels/cuda/decode compares the two, also on a CPU, where blocks are threads and CUDA threads are fibers.

enum { FROM_HEADS, FROM_HIDDEN };

__device__ inline void attention(
    const Arguments& a, const Self& me, Stream& stream, int layer, int position, CachedKV* cached, Part p, float* vector, float* query,
    float* partials, float* sums, int round, u32 tag
) {
    Shared* s = stream.shared;
    const int rows = me.heads * (2 * K + U), first = me.rank * QKV_ROWS;
    multiply_wide<QKV_STAGES, 1>(stream, vector, max(0, min(QKV_ROWS, rows - first)), [&](int row, const float* y) {
        int lane = threadIdx.x & 31;
        if (lane < NEIGHBOURS) send(s->qkv + first + row, *y, &s->arrived[OF_QKV], lane);
    });
    if (threadIdx.x == 0) arrive_expecting(&s->arrived[OF_QKV], rows * 4);
    await(&s->arrived[OF_QKV], round & 1);
    for (int which = 0; which < me.heads; which++) {
        if (which) {
            p = part(a, me, layer, position, which);
            load_first_kv(cached, p.keys, p.values, p.first, p.last, NEIGHBOURS);
            sync_compute_threads();  // all threads have finished with the shared query and partials
        }
        attend(a, me, p, cached, which, position, s, query, partials);
    }
    if (threadIdx.x == 0) arrive_expecting(&s->arrived[OF_PARTIAL_HEADS], me.heads * NEIGHBOURS * (2 + U) * 4);
    await(&s->arrived[OF_PARTIAL_HEADS], round & 1);
    combine(me, s, vector);
    multiply_narrow<OUT_STAGES, HEADS_EACH * U>(stream, vector, sums);
    publish_sums(a, me, FROM_HEADS, layer, sums, tag);
}

__device__ inline void feed_forward(
    const Arguments& a, const Self& me, Stream& stream, int layer, const float* vector, float* sums, int round, u32 tag
) {
    Shared* s = stream.shared;
    multiply_wide<UP_STAGES, 1 + GATED>(stream, vector, HIDDEN_EACH, [&](int item, const float* y) {
        int lane = threadIdx.x & 31, at = me.rank * HIDDEN_EACH + item;
        float h = GATED ? y[0] * activate(y[GATED]) : activate(y[0]);
        if (lane < NEIGHBOURS) send(s->hidden + shared_index(at, HIDDEN_EACH * NEIGHBOURS), h, &s->arrived[OF_HIDDEN], lane);
    });
    if (threadIdx.x == 0) arrive_expecting(&s->arrived[OF_HIDDEN], HIDDEN_EACH * NEIGHBOURS * 4);
    await(&s->arrived[OF_HIDDEN], round & 1);
    multiply_narrow<DOWN_STAGES, HIDDEN_EACH * NEIGHBOURS>(stream, s->hidden, sums);
    publish_sums(a, me, FROM_HIDDEN, layer, sums, tag);
}

// Compute the logits of this block's rows of the head, and publish the largest and its token id (lowest id of equals).
__device__ inline void compute_logits(const Arguments& a, Stream& stream, const float* vector, float* partials, u32 tag) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * HEAD_ROWS;
    float highest = MINUS_INFINITY;
    int best_id = V;
    multiply_wide<HEAD_STAGES, 1>(stream, vector, max(0, min(HEAD_ROWS, V - first)), [&](int row, const float* y) {
        if (lane == 0) a.logits[first + row] = *y;
        if (*y > highest) highest = *y, best_id = first + row;
    });
    if (lane == 0) partials[warp] = highest, partials[32 + warp] = __int_as_float(best_id);
    sync_compute_threads();
    if (threadIdx.x) return;
    for (int i = 0; i < WARPS; i++) {
        int id = __float_as_int(partials[32 + i]);
        if (partials[i] > highest || (partials[i] == highest && id < best_id)) highest = partials[i], best_id = id;
    }
    publish_line(a.best + blockIdx.x, highest, __int_as_float(best_id), 0, tag);
}

// The most likely token of all blocks: every block reads all published lines and reaches the same result.
__device__ inline int choose(const Arguments& a, int* chosen, u32 tag) {
    if (threadIdx.x < 32) {
        float highest = MINUS_INFINITY;
        int best_id = V;
        for (int i = threadIdx.x; i < CLUSTERS * NEIGHBOURS; i += 32) {
            Line line = read_line(a.best + i);
            while (line.tag != tag) line = read_line(a.best + i);
            float z = line.number[0];
            int id = __float_as_int(line.number[1]);
            if (z > highest || (z == highest && id < best_id)) highest = z, best_id = id;
        }
        for (int step = 16; step > 0; step /= 2) {
            float z = __shfl_xor_sync(FULL_MASK, highest, step);
            int id = __shfl_xor_sync(FULL_MASK, best_id, step);
            if (z > highest || (z == highest && id < best_id)) highest = z, best_id = id;
        }
        if (threadIdx.x == 0) *chosen = min(best_id, V - 1);  // if all logits are NaN: any token
    }
    sync_compute_threads();
    return *chosen;
}

__device__ inline void embed_token(float* x, const Arguments& a, int token, int position) {
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        x[n] = i < D ? to_float(a.table[(long long)token * D + i]) * a.embed_scale : 0.f;
        if (ADDS_POSITIONS && i < D) x[n] += a.position_table[(long long)position * D + i];
    }
}

// Load a bias of the residual stream before it is needed.
__device__ inline void load_bias(float* bias, const float* given) {
#pragma unroll
    for (int n = 0; n < HELD; n++) bias[n] = BIASED && column(n) < D ? given[column(n)] : 0.f;
}

__device__ inline void decode_tokens(const Arguments& a, Shared* shared) {
    __shared__ __align__(16) float vector[D > HEADS_EACH * U ? D : HEADS_EACH * U], query[2 * K + U];
    __shared__ float sums[STREAM_ROWS], scratch[WARPS * LINES * 3], partials[PARTIALS], moments[64];
    __shared__ int chosen;
    const Self me = self();
    Stream stream = {shared, ring_memory(), 0, 0};
    int position = a.position, token = a.tokens[position], round = 0, fed = 0;
    u32 tag = a.tag;
    float x[HELD], bias[HELD];
    const auto into_vector = [&](int i, float number) { vector[shared_index(i, D)] = number; };
    for (int step = 0; step < a.count; step++) {
        float centre = 0;  // not the mean after the last layer: the embedding may be far from it
        embed_token(x, a, token, position);
        for (int layer = 0; layer < L; layer++, round++) {
            NormWeights g = load_norm(a.norm_a + layer * D, a.norm_a_bias + layer * D);
            Part p;
            CachedKV cached[ROUNDS];
            if (me.heads > 0) {
                p = part(a, me, layer, position, 0);
                load_first_kv(cached, p.keys, p.values, p.first, p.last, NEIGHBOURS);
            }
            if (layer) {
                load_bias(bias, a.b_down + (layer - 1) * D);
                update_residual(x, bias, a, me, shared, scratch, FROM_HIDDEN, layer - 1, CLUSTERS, fed++, tag);
            }
            normalize(x, g, a.eps, 1, moments, centre, into_vector);
            sync_compute_threads();
            tag++;
            if (me.heads > 0)
                attention(a, me, stream, layer, position, cached, p, vector, query, partials, sums, round, tag);
            g = load_norm(a.norm_f + layer * D, a.norm_f_bias + layer * D);
            load_bias(bias, a.b_out + layer * D);
            update_residual(x, bias, a, me, shared, scratch, FROM_HEADS, layer, ATTENDING, round, tag);
            normalize(x, g, a.eps, 1, moments, centre, into_vector);
            sync_compute_threads();
            tag++;
            feed_forward(a, me, stream, layer, vector, sums, round, tag);
        }
        NormWeights g = load_norm(a.last_norm, a.last_norm_bias);
        load_bias(bias, a.b_down + (L - 1) * D);
        update_residual(x, bias, a, me, shared, scratch, FROM_HIDDEN, L - 1, CLUSTERS, fed++, tag);
        normalize(x, g, a.eps, a.head_scale, moments, centre, into_vector);
        sync_compute_threads();
        compute_logits(a, stream, vector, partials, ++tag);
        token = choose(a, &chosen, tag);
        position++;
        if (blockIdx.x == 0 && threadIdx.x == 0) a.tokens[position] = token;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode(const Arguments a) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) make_barrier(&shared.full[i], 1), make_barrier(&shared.empty[i], WARPS);
        for (int i = 0; i < 5; i++) make_barrier(&shared.arrived[i], 1);
    }
    sync_cluster(&shared);
    if (threadIdx.x < THREADS) {
        decode_tokens(a, &shared);
    } else if (threadIdx.x == THREADS) {
        const unsigned char* mine = a.weights + (long long)blockIdx.x * (L * LAYER_STAGES + HEAD_STAGES) * STAGE;
        fetch_all(&shared, mine, a.count, self().heads > 0);
    }
    sync_cluster(&shared);  // a block must not exit while others may still write to its shared memory
}
