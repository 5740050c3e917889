// Weights in a ring buffer in shared memory, and matrix-vector products with them. Part 6.
//
// All weights that a block needs for one token are contiguous in global memory, in the order of use, divided into stages
// of STAGE bytes (stream.py). One warp only copies the next stages as slots become free: weights do not depend on any
// result, so memory is read all the time, whatever the computing warps wait for.
//
// Synchronisation of a slot: full[slot] completes when its bytes have arrived; the computing warps wait for it. empty[slot]
// completes when all WARPS computing warps have released the stage; the fetching warp waits for it.

#define STREAM_ROWS (D / NEIGHBOURS)  // rows of the output and down projections that one block computes
#define LINES ((STREAM_ROWS + 2) / 3)

// Barriers, and the buffers that other blocks of the cluster write to. The address is the same in every block.
// qkv: (heads, 2 K + U). partial_heads: (heads, ranks, largest score, sum, U values). hidden: the hidden units of the
// cluster. residual_update: (from heads or from hidden units, D).
struct Shared {
    u64 full[RING], empty[RING], arrived[5];
    float qkv[HEADS_EACH * (2 * K + U)], partial_heads[HEADS_EACH * NEIGHBOURS * (2 + U)];
    alignas(16) float hidden[HIDDEN_EACH * NEIGHBOURS];
    float residual_update[2][D];
};
enum { OF_QKV, OF_PARTIAL_HEADS, OF_HIDDEN, OF_RESIDUAL };  // index into `arrived`: which buffer the barrier guards

// The stages as one computing warp sees them, numbered through the whole launch.
struct Stream {
    Shared* shared;
    unsigned char* ring;
    int next;      // first stage of the present matrix
    int released;  // this warp has released all stages before this one

    __device__ inline const unsigned char* at(int stage) const { return ring + stage % RING * STAGE; }
    __device__ inline void need(int stage) const { await(&shared->full[stage % RING], stage / RING & 1); }
    // Release all stages before `stage`. A warp waits for a stage before it releases it, even if it had no row there:
    // otherwise its arrival could count for the previous phase of the barrier.
    __device__ inline void release(int stage, bool combine_warps) {
        __syncwarp();
        for (; released < stage; released++) {
            if (!combine_warps) need(released);
            if ((threadIdx.x & 31) == 0) arrive(&shared->empty[released % RING]);
        }
    }
};

// Run by one thread of the fetching warp: copy every stage in order, for `count` tokens. `heads`: this cluster has any.
__device__ inline void fetch_all(Shared* shared, const unsigned char* mine, int count, bool heads) {
    unsigned char* ring = ring_memory();
    int number = 0;
    for (int step = 0; step < count; step++) {
        for (int stage = 0; stage < L * LAYER_STAGES + HEAD_STAGES; stage++) {
            if (!heads && stage < L * LAYER_STAGES && stage % LAYER_STAGES < QKV_STAGES + OUT_STAGES) continue;
            int slot = number % RING;
            if (number >= RING) await(&shared->empty[slot], number / RING - 1 & 1);
            arrive_expecting(&shared->full[slot], STAGE);
            copy_in(ring + slot * STAGE, mine + (long long)stage * STAGE, STAGE, &shared->full[slot]);
            number++;
        }
    }
}

// Dot product of 16 bytes of weights with the elements of a vector from e on.
__device__ inline float dot(const unsigned char* weights, const float* vector, int e, int width) {
    float w[PACK];
    unpack(*(const Pack*)weights, w);
    float total = 0;
#pragma unroll
    for (int half = 0; half < PACK; half += 4) {
        Four v = *(const Four*)(vector + shared_index(e + half, width));
#pragma unroll
        for (int i = 0; i < 4; i++) total += w[half + i] * v.number[i];
    }
    return total;
}

// One row of D weights of a stage times the vector. A stage starts with the biases of its rows (HEADER bytes).
__device__ inline float wide_row(const unsigned char* stage, int row, const float* vector) {
    const unsigned char* weights = stage + HEADER + row * D * (int)sizeof(Stored);
    float total = 0;
#pragma unroll
    for (int n = 0; n < (D + 32 * PACK - 1) / (32 * PACK); n++) {
        int e = (n * 32 + (threadIdx.x & 31)) * PACK;
        if (e < D) total += dot(weights + e * (int)sizeof(Stored), vector, e, D);
    }
    return total;
}

// `items` groups of TOGETHER rows of D weights times a vector. One warp computes an item, and all its lanes then call
// finish(item, sums). A warp computes two rows at once, unless they could be further apart than the ring is long.
template <int STAGES, int TOGETHER, typename Finish>
__device__ inline void multiply_wide(Stream& stream, const float* vector, int items, Finish finish) {
    constexpr bool whole = STAGES <= RING;
    constexpr int at_once = TOGETHER > 1 || !(whole || RING > WARPS / WIDE_ROWS + 2) ? 1 : 2;
    if (whole)
        for (int n = 0; n < STAGES; n++) stream.need(stream.next + n);
    for (int base = threadIdx.x >> 5; base < items; base += at_once * WARPS) {
        float y[at_once * TOGETHER];
#pragma unroll
        for (int n = 0; n < at_once * TOGETHER; n++) {
            int item = base + n / TOGETHER * WARPS, row = item * TOGETHER + n % TOGETHER;
            y[n] = 0;
            if (item >= items) continue;
            int stage = stream.next + row / WIDE_ROWS;
            if (!whole) {
                if (n == 0) stream.release(stage, false);
                stream.need(stage);
            }
            y[n] = wide_row(stream.at(stage), row % WIDE_ROWS, vector);
        }
#pragma unroll
        for (int n = 0; n < at_once * TOGETHER; n++) y[n] = warp_sum(y[n]);
#pragma unroll
        for (int n = 0; n < at_once; n++) {
            int item = base + n * WARPS;
            if (item >= items) break;
#pragma unroll
            for (int i = 0; i < TOGETHER; i++) {
                int row = item * TOGETHER + i;
                y[n * TOGETHER + i] += ((const float*)stream.at(stream.next + row / WIDE_ROWS))[row % WIDE_ROWS];
            }
            finish(item, y + n * TOGETHER);
        }
    }
    stream.next += STAGES;
    stream.release(stream.next, whole);
}

__device__ constexpr int lanes_for(int packs, int lanes = 32) { return packs % lanes ? lanes_for(packs, lanes / 2) : lanes; }

// The STREAM_ROWS rows of this block, of WIDTH weights each, times a vector, written to shared `sums`. `lanes` lanes
// share a row.
template <int STAGES, int WIDTH>
__device__ inline void multiply_narrow(Stream& stream, const float* vector, float* sums) {
    constexpr int packs = WIDTH / PACK, lanes = lanes_for(packs), rows = 32 / lanes;
    constexpr int row_bytes = WIDTH * (int)sizeof(Stored), in_stage = STAGE / row_bytes;
    constexpr bool whole = STAGES <= RING;
    const int lane = threadIdx.x % lanes;
    if (whole)
        for (int n = 0; n < STAGES; n++) stream.need(stream.next + n);
#pragma unroll 2
    for (int base = (threadIdx.x >> 5) * rows; base < STREAM_ROWS; base += WARPS * rows) {
        int row = base + (threadIdx.x & 31) / lanes, held = min(row, STREAM_ROWS - 1);
        if (!whole) {
            stream.release(stream.next + base / in_stage, false);
            for (int stage = base / in_stage; stage <= min(base + rows, STREAM_ROWS) / in_stage && stage < STAGES; stage++)
                stream.need(stream.next + stage);
        }
        const unsigned char* weights = stream.at(stream.next + held / in_stage) + held % in_stage * row_bytes;
        float y = 0;
#pragma unroll
        for (int n = 0; n < packs / lanes; n++) {
            int e = (n * lanes + lane) * PACK;
            y += dot(weights + e * (int)sizeof(Stored), vector, e, WIDTH);
        }
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) y += __shfl_xor_sync(FULL_MASK, y, step);
        if (lane == 0 && row < STREAM_ROWS) sums[row] = y;
    }
    stream.next += STAGES;
    stream.release(stream.next, whole);
}
