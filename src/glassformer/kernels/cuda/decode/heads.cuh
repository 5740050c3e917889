// The arguments of decode.cu, the exchange of results between clusters, and the attention of one token. Part 7.

// library.py mirrors this struct. keys and values: (L, G, capacity, K or U). lines: (from heads or from hidden units, 2
// sets, CLUSTERS, NEIGHBOURS, LINES). best: one line per block. tokens: (capacity + 1).
struct Arguments {
    int* tokens;
    const int* windows;
    const unsigned char* weights;
    const Stored* table;
    const float *position_table, *cosines, *sines, *norm_a, *norm_a_bias, *norm_f, *norm_f_bias, *last_norm, *last_norm_bias;
    const float *b_out, *b_down;
    Stored *keys, *values;
    Line *lines, *best;
    float* logits;
    float embed_scale, scale, head_scale, eps;
    int position, count, capacity;
    u32 tag;
};

#define ATTENDING (H < CLUSTERS ? H : CLUSTERS)  // clusters that have at least one head

// Which block this is: its cluster, its rank there, and the number of heads of the cluster.
struct Self { int cluster, rank, heads; };

__device__ inline Self self() {
    int cluster = blockIdx.x / NEIGHBOURS;
    return {cluster, rank_in_cluster(), (H - cluster + CLUSTERS - 1) / CLUSTERS};
}

// The lines in which a block publishes its sums over the heads or hidden units of its cluster, to be read by the blocks of
// the same rank in all clusters. Each kind has two sets, used alternately. Overwriting a set is safe: the writer has read
// all of the other set, which its writers wrote only after they had read this one.
__device__ inline Line* lines_of(const Arguments& a, int kind, int layer, int cluster, int rank) {
    return a.lines + (((kind * 2 + (layer & 1)) * CLUSTERS + cluster) * NEIGHBOURS + rank) * LINES;
}

__device__ inline void publish_sums(const Arguments& a, const Self& me, int kind, int layer, const float* sums, u32 tag) {
    sync_compute_threads();
    Line* lines = lines_of(a, kind, layer, me.cluster, me.rank);
    for (int i = threadIdx.x; i < LINES; i += THREADS) {
        float last[2] = {0, 0};
        for (int n = 0; n < 2; n++)
            if (3 * i + 1 + n < STREAM_ROWS) last[n] = sums[3 * i + 1 + n];
        publish_line(lines + i, sums[3 * i], last[0], last[1], tag);
    }
}

// Add the sums of `clusters` clusters and a bias to the residual stream. Each block of a cluster collects its own rows (each
// warp reads some of the clusters) and sends the totals to the other blocks: if every block read all rows, this would be
// most of the memory traffic. Each kind has a buffer and a barrier of its own, because a cluster without heads takes part
// in one of the two updates of a layer only as a reader.
__device__ inline void update_residual(
    float* x, const float* bias, const Arguments& a, const Self& me, Shared* s, float* scratch, int kind, int layer,
    int clusters, int round, u32 tag
) {
    constexpr int each = (CLUSTERS + WARPS - 1) / WARPS;
    const int warp = threadIdx.x >> 5;
    for (int line = threadIdx.x & 31; line < LINES; line += 32) {
        Line found[each];
        for (bool all = false; !all;) {
            all = true;
#pragma unroll
            for (int n = 0; n < each; n++)
                if (warp + n * WARPS < clusters)
                    found[n] = read_line(lines_of(a, kind, layer, warp + n * WARPS, me.rank) + line);
#pragma unroll
            for (int n = 0; n < each; n++)
                if (warp + n * WARPS < clusters) all = all && found[n].tag == tag;
        }
        for (int i = 0; i < 3; i++) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < each; n++)
                if (warp + n * WARPS < clusters) sum += found[n].number[i];
            scratch[(warp * LINES + line) * 3 + i] = sum;
        }
    }
    sync_compute_threads();
    for (int task = threadIdx.x; task < NEIGHBOURS * STREAM_ROWS; task += THREADS) {
        int row = task % STREAM_ROWS;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += scratch[w * LINES * 3 + row];
        send(&s->residual_update[kind][me.rank * STREAM_ROWS + row], sum, &s->arrived[OF_RESIDUAL + kind], task / STREAM_ROWS);
    }
    if (threadIdx.x == 0) arrive_expecting(&s->arrived[OF_RESIDUAL + kind], D * 4);
    await(&s->arrived[OF_RESIDUAL + kind], round & 1);
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (column(n) < D) x[n] += s->residual_update[kind][column(n)] + bias[n];
}

// The cached keys of a head that this block processes: those with position % NEIGHBOURS == rank. A block therefore reads
// only keys that it has written itself, and no block waits for another.
struct Part {
    Stored *keys, *values;
    int first, last, count;
    bool own;
};

__device__ inline Part part(const Arguments& a, const Self& me, int layer, int position, int which) {
    int head = me.cluster + which * CLUSTERS, start = max(position + 1 - a.windows[layer], 0);
    int first = start + (me.rank - start % NEIGHBOURS + NEIGHBOURS) % NEIGHBOURS;
    long long group = (long long)layer * G + head / (H / G);
    int count = max(0, (position - first + NEIGHBOURS - 1) / NEIGHBOURS);
    return {a.keys + group * a.capacity * K, a.values + group * a.capacity * U, first, position, count,
            position % NEIGHBOURS == me.rank};
}

// All clusters that share a key/value head write the same keys and values to the cache: none waits for another.
__device__ inline void attend(
    const Arguments& a, const Self& me, const Part& p, CachedKV* cached, int which, int position, Shared* s, float* query, float* partials
) {
    const float* qkv = s->qkv + which * (2 * K + U);
    load_qkv(query, qkv, qkv + K, qkv + 2 * K, a.scale, a.cosines, a.sines, position);
    attend_cached(cached, p.keys, p.values, p.first, p.last, NEIGHBOURS, p.own, query, partials);
    if (p.own) store_kv(query, p.keys, p.values, position);
    int i = threadIdx.x % U;
    if ((int)threadIdx.x >= THREADS / U * U) return;
    Combined all = combine_warps(partials, busy_warps(p.count), i);
    float* mine = s->partial_heads + (which * NEIGHBOURS + me.rank) * (2 + U);
    for (int rank = threadIdx.x / U; rank < NEIGHBOURS; rank += THREADS / U) {
        send(mine + 2 + i, all.value, &s->arrived[OF_PARTIAL_HEADS], rank);
        if (i == 0) send(mine, all.peak, &s->arrived[OF_PARTIAL_HEADS], rank);
        if (i == U - 1) send(mine + 1, all.sum, &s->arrived[OF_PARTIAL_HEADS], rank);
    }
}

// Merge the partial results of all ranks and write the heads of this cluster to a shared vector; zeros for missing heads.
__device__ inline void combine(const Self& me, const Shared* s, float* vector) {
    for (int j = threadIdx.x; j < HEADS_EACH * U; j += THREADS) {
        const float* of_head = s->partial_heads + j / U * NEIGHBOURS * (2 + U);
        float peak = MINUS_INFINITY, sum = 0, value = 0;
        if (j / U < me.heads) {
#pragma unroll
            for (int rank = 0; rank < NEIGHBOURS; rank++) peak = fmaxf(peak, of_head[rank * (2 + U)]);
#pragma unroll
            for (int rank = 0; rank < NEIGHBOURS; rank++) {
                const float* from = of_head + rank * (2 + U);
                float share = from[0] == MINUS_INFINITY ? 0.f : exp2f(from[0] - peak);
                sum += from[1] * share;
                value += from[2 + j % U] * share;
            }
        }
        vector[shared_index(j, HEADS_EACH * U)] = j / U < me.heads ? value / sum : 0.f;
    }
    sync_compute_threads();
}
