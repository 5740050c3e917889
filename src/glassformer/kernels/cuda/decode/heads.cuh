// What decode.cu is given, what its blocks leave for all others, and attention of one token. Seventh of the parts.

struct Given {
    int* tokens;
    const int* windows;
    const unsigned char* weights;
    const Stored* table;
    const float *places, *cosines, *sines, *norm_a, *norm_a_bias, *norm_f, *norm_f_bias, *last_norm, *last_norm_bias;
    const float *b_out, *b_down;
    Stored *keys, *values;
    Line *lines, *best;
    float* logits;
    float embed_scale, scale, head_scale, eps;
    int place, count, capacity;
    u32 tag;
};

#define ATTENDING (H < CLUSTERS ? H : CLUSTERS)  // clusters that have heads

// A block's place among the others.
struct Self { int cluster, rank, heads; };

__device__ inline Self self() {
    int cluster = blockIdx.x / NEIGHBOURS;
    return {cluster, rank_in_cluster(), (H - cluster + CLUSTERS - 1) / CLUSTERS};
}

// A block's sums over its cluster's heads or hidden units, for the blocks of its rank in all clusters. There are two sets
// of lines for each kind, used in turn: who writes a set again has seen all of the other, and that was written by blocks
// that had read this one.
__device__ inline Line* lines_of(const Given& a, int kind, int layer, int cluster, int rank) {
    return a.lines + (((kind * 2 + (layer & 1)) * CLUSTERS + cluster) * NEIGHBOURS + rank) * LINES;
}

__device__ inline void leave_sums(const Given& a, const Self& me, int kind, int layer, const float* sums, u32 tag) {
    meet();
    Line* lines = lines_of(a, kind, layer, me.cluster, me.rank);
    for (int i = threadIdx.x; i < LINES; i += THREADS) {
        float last[2] = {0, 0};
        for (int n = 0; n < 2; n++)
            if (3 * i + 1 + n < STREAM_ROWS) last[n] = sums[3 * i + 1 + n];
        leave_line(lines + i, sums[3 * i], last[0], last[1], tag);
    }
}

// The stream moved on by the sums of `clusters` clusters and a bias. Each neighbour gathers its rows of them, a warp some
// clusters', and sends their totals to all neighbours: were every block to read all, that would be most of what moves.
// A kind has a place and a barrier of its own: a cluster without heads meets its neighbours only once a layer.
__device__ inline void move_on(
    float* x, const float* bias, const Given& a, const Self& me, Shared* s, float* scratch, int kind, int layer,
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
                    found[n] = look_at(lines_of(a, kind, layer, warp + n * WARPS, me.rank) + line);
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
    meet();
    for (int task = threadIdx.x; task < NEIGHBOURS * STREAM_ROWS; task += THREADS) {
        int row = task % STREAM_ROWS;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += scratch[w * LINES * 3 + row];
        send(&s->moved[kind][me.rank * STREAM_ROWS + row], sum, &s->told[OF_MOVED + kind], task / STREAM_ROWS);
    }
    if (threadIdx.x == 0) arrive_expecting(&s->told[OF_MOVED + kind], D * 4);
    await(&s->told[OF_MOVED + kind], round & 1);
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (column(n) < D) x[n] += s->moved[kind][column(n)] + bias[n];
}

// Kept keys of a head that this block looks at: those whose place leaves its rank when divided by the neighbours, so
// that a block looks only at keys that it has kept itself.
struct Part {
    Stored *keys, *values;
    int first, last, count;
    bool own;
};

__device__ inline Part part(const Given& a, const Self& me, int layer, int place, int which) {
    int head = me.cluster + which * CLUSTERS, start = max(place + 1 - a.windows[layer], 0);
    int first = start + (me.rank - start % NEIGHBOURS + NEIGHBOURS) % NEIGHBOURS;
    long long group = (long long)layer * G + head / (H / G);
    int count = max(0, (place - first + NEIGHBOURS - 1) / NEIGHBOURS);
    return {a.keys + group * a.capacity * K, a.values + group * a.capacity * U, first, place, count,
            place % NEIGHBOURS == me.rank};
}

// All clusters that share a group of keys keep them, each the same: none waits for what another has written.
__device__ inline void attend(
    const Given& a, const Self& me, const Part& p, Kept* kept, int which, int place, Shared* s, float* query, float* board
) {
    const float* qkv = s->qkv + which * (2 * K + U);
    arrange(query, qkv, qkv + K, qkv + 2 * K, a.scale, a.cosines, a.sines, place);
    look(kept, p.keys, p.values, p.first, p.last, NEIGHBOURS, p.own, query, board);
    if (p.own) keep(query, p.keys, p.values, place);
    int i = threadIdx.x % U;
    if ((int)threadIdx.x >= THREADS / U * U) return;
    Seen all = seen(board, busy_warps(p.count), i);
    float* mine = s->mixtures + (which * NEIGHBOURS + me.rank) * (2 + U);
    for (int rank = threadIdx.x / U; rank < NEIGHBOURS; rank += THREADS / U) {
        send(mine + 2 + i, all.value, &s->told[OF_MIXTURES], rank);
        if (i == 0) send(mine, all.peak, &s->told[OF_MIXTURES], rank);
        if (i == U - 1) send(mine + 1, all.sum, &s->told[OF_MIXTURES], rank);
    }
}

// The heads of this cluster side by side, their parts put together, into a shared vector; zeros where it has fewer.
__device__ inline void combine(const Self& me, const Shared* s, float* vector) {
    for (int j = threadIdx.x; j < HEADS_EACH * U; j += THREADS) {
        const float* of_head = s->mixtures + j / U * NEIGHBOURS * (2 + U);
        float peak = NOTHING, sum = 0, value = 0;
        if (j / U < me.heads) {
#pragma unroll
            for (int rank = 0; rank < NEIGHBOURS; rank++) peak = fmaxf(peak, of_head[rank * (2 + U)]);
#pragma unroll
            for (int rank = 0; rank < NEIGHBOURS; rank++) {
                const float* from = of_head + rank * (2 + U);
                float share = from[0] == NOTHING ? 0.f : exp2f(from[0] - peak);
                sum += from[1] * share;
                value += from[2 + j % U] * share;
            }
        }
        vector[spot(j, HEADS_EACH * U)] = j / U < me.heads ? value / sum : 0.f;
    }
    meet();
}
