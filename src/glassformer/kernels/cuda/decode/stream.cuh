// Weights on their way through a ring of shared memory, and rows of matrices times vectors. Sixth of the parts.
//
// All that a block multiplies for one token lies in one piece of memory in the order of use, cut into stages of STAGE
// bytes (stream.py). One warp does nothing but ask for the next stages as room becomes free: weights do not depend on
// anything that is computed, so the memory is read all the time, whatever the others wait for.

#define STREAM_ROWS (D / NEIGHBOURS)  // of a matrix that makes the stream, those of one block
#define LINES ((STREAM_ROWS + 2) / 3)

// What neighbours write into, and the barriers. At the same place in every block.
struct Shared {
    u64 full[RING], empty[RING], told[5];
    float qkv[HEADS_EACH * (2 * K + U)], mixtures[HEADS_EACH * NEIGHBOURS * (2 + U)];
    alignas(16) float hidden[HIDDEN_EACH * NEIGHBOURS];
    float moved[2][D];
};
enum { OF_QKV, OF_MIXTURES, OF_HIDDEN, OF_MOVED };  // which barrier tells of what

// The stages as one warp sees them, by their number in the whole run.
struct Stream {
    Shared* shared;
    unsigned char* ring;
    int next;      // first of the present matrix
    int released;  // those before it this warp has done with

    __device__ inline const unsigned char* at(int stage) const { return ring + stage % RING * STAGE; }
    __device__ inline void need(int stage) const { await(&shared->full[stage % RING], stage / RING & 1); }
    // Those before a stage. A warp must have seen a stage come to say that it has done with it, though it had no row there:
    // else it might say so in the round before.
    __device__ inline void release(int stage, bool seen) {
        __syncwarp();
        for (; released < stage; released++) {
            if (!seen) need(released);
            if ((threadIdx.x & 31) == 0) arrive(&shared->empty[released % RING]);
        }
    }
};

// Runs in one thread of the last warp: every stage in turn, `count` times over.
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

// 16 bytes of weights times the numbers of a vector from e on.
__device__ inline float dot(const unsigned char* weights, const float* vector, int e, int width) {
    float w[PACK];
    unpack(*(const Pack*)weights, w);
    float total = 0;
#pragma unroll
    for (int half = 0; half < PACK; half += 4) {
        Four v = *(const Four*)(vector + spot(e + half, width));
#pragma unroll
        for (int i = 0; i < 4; i++) total += w[half + i] * v.number[i];
    }
    return total;
}

// One of the rows of D in a stage, which begins with their biases.
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

// `items` of TOGETHER rows of D each times a vector; finish(item, sums) is called by the whole warp that has one. Two rows
// are under way at once, unless they could lie further apart than the ring is long.
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

// This block's rows of a matrix that makes the stream, each WIDTH numbers, times a vector, into shared sums: some lanes
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
        for (int step = lanes / 2; step > 0; step /= 2) y += __shfl_xor_sync(EVERYONE, y, step);
        if (lane == 0 && row < STREAM_ROWS) sums[row] = y;
    }
    stream.next += STAGES;
    stream.release(stream.next, whole);
}
