// Tokens of one sequence, one after another, in a single kernel that stays on the GPU: nothing is launched per layer.
//
// At batch 1 a step reads every weight once and computes almost nothing, so all that counts is to keep the memory busy
// and to hand results on quickly. Each block keeps the whole residual stream. Blocks are neighbours in clusters, which
// write into each other's shared memory:
// - a cluster has some of the heads. Its blocks share the rows of its queries, keys and values, then the kept keys, then
//   the rows of the output projection, of which they take the columns of their heads;
// - likewise it has a part of the hidden layer: its blocks share the rows that go up, then all rows that go down.
// So a layer is handed on among clusters only twice: as sums, each line of which carries a tag that says it is there. No
// block waits for all others to arrive anywhere. Weights come through a ring (stream.cuh).
//
// Compiled at run time for one model: its sizes are macros (decoder.py, stream.py). The definition is glassformer.model;
// tests/generate/cuda holds the two together, on a CPU too, where blocks are threads and their threads fibers.

enum { FROM_HEADS, FROM_HIDDEN };

__device__ inline void attention(
    const Given& a, const Self& me, Stream& stream, int layer, int place, Kept* kept, Part p, float* vector, float* query,
    float* board, float* sums, int round, u32 tag
) {
    Shared* s = stream.shared;
    const int rows = me.heads * (2 * K + U), first = me.rank * QKV_ROWS;
    multiply_wide<QKV_STAGES, 1>(stream, vector, max(0, min(QKV_ROWS, rows - first)), [&](int row, const float* y) {
        int lane = threadIdx.x & 31;
        if (lane < NEIGHBOURS) send(s->qkv + first + row, *y, &s->told[OF_QKV], lane);
    });
    if (threadIdx.x == 0) arrive_expecting(&s->told[OF_QKV], rows * 4);
    await(&s->told[OF_QKV], round & 1);
    for (int which = 0; which < me.heads; which++) {
        if (which) {
            p = part(a, me, layer, place, which);
            recall_first(kept, p.keys, p.values, p.first, p.last, NEIGHBOURS);
            meet();  // the shared query and board are free again
        }
        attend(a, me, p, kept, which, place, s, query, board);
    }
    if (threadIdx.x == 0) arrive_expecting(&s->told[OF_MIXTURES], me.heads * NEIGHBOURS * (2 + U) * 4);
    await(&s->told[OF_MIXTURES], round & 1);
    combine(me, s, vector);
    multiply_narrow<OUT_STAGES, HEADS_EACH * U>(stream, vector, sums);
    leave_sums(a, me, FROM_HEADS, layer, sums, tag);
}

__device__ inline void feed_forward(
    const Given& a, const Self& me, Stream& stream, int layer, const float* vector, float* sums, int round, u32 tag
) {
    Shared* s = stream.shared;
    multiply_wide<UP_STAGES, 1 + GATED>(stream, vector, HIDDEN_EACH, [&](int item, const float* y) {
        int lane = threadIdx.x & 31, at = me.rank * HIDDEN_EACH + item;
        float h = GATED ? y[0] * activated(y[GATED]) : activated(y[0]);
        if (lane < NEIGHBOURS) send(s->hidden + spot(at, HIDDEN_EACH * NEIGHBOURS), h, &s->told[OF_HIDDEN], lane);
    });
    if (threadIdx.x == 0) arrive_expecting(&s->told[OF_HIDDEN], HIDDEN_EACH * NEIGHBOURS * 4);
    await(&s->told[OF_HIDDEN], round & 1);
    multiply_narrow<DOWN_STAGES, HIDDEN_EACH * NEIGHBOURS>(stream, s->hidden, sums);
    leave_sums(a, me, FROM_HIDDEN, layer, sums, tag);
}

// This block's share of the logits; the highest of them and where it stands, the first of equals, is left for all.
__device__ inline void judge(const Given& a, Stream& stream, const float* vector, float* board, u32 tag) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * HEAD_ROWS;
    float highest = NOTHING;
    int place = V;
    multiply_wide<HEAD_STAGES, 1>(stream, vector, max(0, min(HEAD_ROWS, V - first)), [&](int row, const float* y) {
        if (lane == 0) a.logits[first + row] = *y;
        if (*y > highest) highest = *y, place = first + row;
    });
    if (lane == 0) board[warp] = highest, board[32 + warp] = __int_as_float(place);
    meet();
    if (threadIdx.x) return;
    for (int i = 0; i < WARPS; i++) {
        int id = __float_as_int(board[32 + i]);
        if (board[i] > highest || (board[i] == highest && id < place)) highest = board[i], place = id;
    }
    leave_line(a.best + blockIdx.x, highest, __int_as_float(place), 0, tag);
}

// The likeliest token of all blocks' shares.
__device__ inline int choose(const Given& a, int* chosen, u32 tag) {
    if (threadIdx.x < 32) {
        float highest = NOTHING;
        int place = V;
        for (int i = threadIdx.x; i < CLUSTERS * NEIGHBOURS; i += 32) {
            Line line = look_at(a.best + i);
            while (line.tag != tag) line = look_at(a.best + i);
            float z = line.number[0];
            int id = __float_as_int(line.number[1]);
            if (z > highest || (z == highest && id < place)) highest = z, place = id;
        }
        for (int step = 16; step > 0; step /= 2) {
            float z = __shfl_xor_sync(EVERYONE, highest, step);
            int id = __shfl_xor_sync(EVERYONE, place, step);
            if (z > highest || (z == highest && id < place)) highest = z, place = id;
        }
        if (threadIdx.x == 0) *chosen = min(place, V - 1);  // of no number at all: any
    }
    meet();
    return *chosen;
}

__device__ inline void begin(float* x, const Given& a, int token, int place) {
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        int i = column(n);
        x[n] = i < D ? widened(a.table[(long long)token * D + i]) * a.embed_scale : 0.f;
        if (PLACED && i < D) x[n] += a.places[(long long)place * D + i];
    }
}

// A bias of the stream, asked for before it is needed.
__device__ inline void prepare(float* bias, const float* given) {
#pragma unroll
    for (int n = 0; n < HELD; n++) bias[n] = BIASED && column(n) < D ? given[column(n)] : 0.f;
}

__device__ inline void walk(const Given& a, Shared* shared) {
    __shared__ __align__(16) float vector[D > HEADS_EACH * U ? D : HEADS_EACH * U], query[2 * K + U];
    __shared__ float sums[STREAM_ROWS], scratch[WARPS * LINES * 3], board[BOARD], moments[64];
    __shared__ int chosen;
    const Self me = self();
    Stream stream = {shared, ring_memory(), 0, 0};
    int place = a.place, token = a.tokens[place], round = 0, fed = 0;
    u32 tag = a.tag;
    float x[HELD], bias[HELD];
    const auto into_vector = [&](int i, float number) { vector[spot(i, D)] = number; };
    for (int step = 0; step < a.count; step++) {
        float centre = 0;  // not the mean of the last layer, from which embeddings may be far
        begin(x, a, token, place);
        for (int layer = 0; layer < L; layer++, round++) {
            Gain g = gain(a.norm_a + layer * D, a.norm_a_bias + layer * D);
            Part p;
            Kept kept[ROUNDS];
            if (me.heads > 0) {
                p = part(a, me, layer, place, 0);
                recall_first(kept, p.keys, p.values, p.first, p.last, NEIGHBOURS);
            }
            if (layer) {
                prepare(bias, a.b_down + (layer - 1) * D);
                move_on(x, bias, a, me, shared, scratch, FROM_HIDDEN, layer - 1, CLUSTERS, fed++, tag);
            }
            normalise(x, g, a.eps, 1, moments, centre, into_vector);
            meet();
            tag++;
            if (me.heads > 0)
                attention(a, me, stream, layer, place, kept, p, vector, query, board, sums, round, tag);
            g = gain(a.norm_f + layer * D, a.norm_f_bias + layer * D);
            prepare(bias, a.b_out + layer * D);
            move_on(x, bias, a, me, shared, scratch, FROM_HEADS, layer, ATTENDING, round, tag);
            normalise(x, g, a.eps, 1, moments, centre, into_vector);
            meet();
            tag++;
            feed_forward(a, me, stream, layer, vector, sums, round, tag);
        }
        Gain g = gain(a.last_norm, a.last_norm_bias);
        prepare(bias, a.b_down + (L - 1) * D);
        move_on(x, bias, a, me, shared, scratch, FROM_HIDDEN, L - 1, CLUSTERS, fed++, tag);
        normalise(x, g, a.eps, a.head_scale, moments, centre, into_vector);
        meet();
        judge(a, stream, vector, board, ++tag);
        token = choose(a, &chosen, tag);
        place++;
        if (blockIdx.x == 0 && threadIdx.x == 0) a.tokens[place] = token;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode(const Given a) {
    __shared__ Shared shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; i++) make_barrier(&shared.full[i], 1), make_barrier(&shared.empty[i], WARPS);
        for (int i = 0; i < 5; i++) make_barrier(&shared.told[i], 1);
    }
    meet_neighbours(&shared);
    if (threadIdx.x < THREADS) {
        walk(a, &shared);
    } else if (threadIdx.x == THREADS) {
        const unsigned char* mine = a.weights + (long long)blockIdx.x * (L * LAYER_STAGES + HEAD_STAGES) * STAGE;
        fetch_all(&shared, mine, a.count, self().heads > 0);
    }
    meet_neighbours(&shared);  // who goes first would take away the memory that others may still write to
}
