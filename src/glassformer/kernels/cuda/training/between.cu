// What lies between the matmuls of a training step, forward and backward: norms with the additions to the residual stream
// around them, activations, and rotations. A thread reads and writes eight numbers at a time.
//
// The residual stream is bfloat16 or, with WIDE, float32. Everything else is bfloat16, but for weights of norms and for sums.
// This text follows floats.cuh; tests/kernels/cuda/training compiles the same text for a CPU.
//
// Macros: PART (which kernel), WIDE, WIDTH (of a norm, a head or an activation), STEP, CENTRED (LayerNorm, not RMSNorm), ADD (something is added to
// the stream before the norm), BIASED (with a bias), RESIDUAL (there is a gradient of the stream), KIND and GATED (of the
// activation), SUMMED (column sums of its gradients are wanted), ROTATED and HALVES (numbers of a head that are rotated;
// partners are in two halves, not neighbours), WIDE_WAVES (cosines in float32), MATRICES (whose columns are summed).

#define FULL_MASK 0xffffffffu

typedef unsigned short u16;
struct alignas(16) Pack { u32 word[4]; };

struct Arguments {
    const void *stream, *d_sum;   // the stream; the gradient of the stream after the norm's input
    void *sum, *d_stream;         // stream + branch; the gradient of the stream before the norm
    const u16 *branch, *d_out;    // what is added; the gradient of the result
    const float *weight, *bias;   // of a norm, or null
    const float* branch_bias;     // is added with the branch
    float *statistics, *parts;    // mean and 1 / deviation of each row; shares of sums over all rows
    u16 *out, *d_branch;          // the result; the gradient of what was added, where it has another dtype than the stream
    const u16 *gate, *up;         // input of the activation, and the factor next to it
    u16 *d_gate, *d_up;
    const void *cosines, *sines;  // (tokens, ROTATED / 2), or for each sequence its own
    long long count;              // rows; groups of eight numbers (or pairs) where a kernel does not divide its work by rows
    long long row_step;           // numbers from one token to the next, of heads that are rotated
    float eps, offset, sign;      // `offset` is added to the weight; the sign of the sines
    int columns;                  // of a matrix whose columns are summed
    int tokens, heads, own_waves; // of a sequence; of a token; 1 if sequences have their own cosines and sines
};

__device__ inline void unpack8(float* x, const Pack& p) {
#pragma unroll
    for (int j = 0; j < 4; j++) x[2 * j] = low(p.word[j]), x[2 * j + 1] = high(p.word[j]);
}
__device__ inline Pack pack8(const float* x) {
    Pack p;
#pragma unroll
    for (int j = 0; j < 4; j++) p.word[j] = pack_bf16(x[2 * j], x[2 * j + 1]);
    return p;
}
__device__ inline void load8(float* x, const u16* at) { unpack8(x, *(const Pack*)at); }
__device__ inline void store8(u16* at, const float* x) { *(Pack*)at = pack8(x); }
__device__ inline void load8_floats(float* x, const float* at) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const Pack four = ((const Pack*)at)[p];
#pragma unroll
        for (int j = 0; j < 4; j++) x[4 * p + j] = __uint_as_float(four.word[j]);
    }
}

#if PART < 2
#define LANES (WIDTH / 8)                        // threads of a row
#define ROWS (WIDTH <= 256 ? 256 / LANES : 1)    // rows that a block computes at a time; LANES is then a power of two
#define WARPS ((LANES * ROWS + 31) / 32)
#define THREADS (32 * WARPS)

// Eight numbers of the stream as they are in memory, so that the next row can be requested before this one is computed.
struct Raw { Pack part[WIDE ? 2 : 1]; };
__device__ inline Raw load_stream(const void* at, long long i) {
    Raw r;
#if WIDE
    r.part[0] = ((const Pack*)((const float*)at + i))[0], r.part[1] = ((const Pack*)((const float*)at + i))[1];
#else
    r.part[0] = *(const Pack*)((const u16*)at + i);
#endif
    return r;
}
__device__ inline void unpack_stream(float* x, const Raw& r) {
#if WIDE
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = __uint_as_float(r.part[j / 4].word[j % 4]);
#else
    unpack8(x, r.part[0]);
#endif
}
__device__ inline void store_stream(void* at, long long i, const float* x) {
#if WIDE
#pragma unroll
    for (int p = 0; p < 2; p++) {
        Pack four;
#pragma unroll
        for (int j = 0; j < 4; j++) four.word[j] = __float_as_uint(x[4 * p + j]);
        ((Pack*)((float*)at + i))[p] = four;
    }
#else
    store8((u16*)at + i, x);
#endif
}

// Sums of a and b over the threads of a row. `room` has two halves, which calls use in turns: a call needs one barrier then.
struct Room { float sums[2][2][32]; };
__device__ inline void row_sums(float& a, float& b, Room& room, int turn) {
    const int most = LANES < 32 ? LANES : 32;
#pragma unroll
    for (int step = most / 2; step > 0; step /= 2)
        a += __shfl_xor_sync(FULL_MASK, a, step), b += __shfl_xor_sync(FULL_MASK, b, step);
    if (ROWS > 1 || WARPS == 1) return;
    if (threadIdx.x % 32 == 0) room.sums[turn][0][threadIdx.x / 32] = a, room.sums[turn][1][threadIdx.x / 32] = b;
    __syncthreads();
    a = b = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) a += room.sums[turn][0][w], b += room.sums[turn][1][w];
}

// Where a thread works: its columns, and its first row. Threads without columns take part in sums and barriers.
struct Place {
    int first;        // of eight columns
    bool has_columns;
    long long row, step;
};
__device__ inline Place place() {
    const int lane = ROWS > 1 ? threadIdx.x % LANES : threadIdx.x, group = ROWS > 1 ? threadIdx.x / LANES : 0;
    return {lane * 8, lane < LANES, (long long)blockIdx.x * ROWS + group, (long long)gridDim.x * ROWS};
}
__device__ inline bool has_row(const Place& p, long long row, const Arguments& a) { return p.has_columns && row < a.count; }
#endif

#if PART == 0
// sum = stream + branch (+ branch_bias); out = (sum - mean) / deviation * (weight + offset) + bias.
extern "C" __global__ void __launch_bounds__(THREADS) norm_forward(const Arguments a) {
    __shared__ Room room;
    const Place p = place();
    float factor[8], shift[8], more[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        factor[j] = p.has_columns && a.weight ? a.weight[p.first + j] + a.offset : 1.f;
        shift[j] = p.has_columns && a.bias ? a.bias[p.first + j] : 0.f;
        more[j] = p.has_columns && BIASED ? a.branch_bias[p.first + j] : 0.f;
    }
    Raw next = {};
    Pack next_branch = {};
    if (has_row(p, p.row, a)) {
        next = load_stream(a.stream, p.row * WIDTH + p.first);
        if (ADD) next_branch = *(const Pack*)(a.branch + p.row * WIDTH + p.first);
    }
    int turn = 0;
    // all threads of a block take as many turns: the first row of the block decides
    for (long long row = p.row; row / ROWS * ROWS < a.count; row += p.step, turn ^= 1) {
        float x[8], branch[8], mean = 0, square = 0;
        unpack_stream(x, next), unpack8(branch, next_branch);
        if (has_row(p, row + p.step, a)) {
            next = load_stream(a.stream, (row + p.step) * WIDTH + p.first);
            if (ADD) next_branch = *(const Pack*)(a.branch + (row + p.step) * WIDTH + p.first);
        }
        const bool mine = has_row(p, row, a);
        const long long at = row * WIDTH + p.first;
        if (ADD && mine) {
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] += branch[j] + more[j];
            store_stream(a.sum, at, x);
#if !WIDE
            unpack8(x, pack8(x));  // the norm is of what the stream holds
#endif
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (!mine) x[j] = 0;
            mean += x[j], square += x[j] * x[j];
        }
        row_sums(mean, square, room, turn);
        mean = CENTRED ? mean / WIDTH : 0.f;
        if (CENTRED) {  // a second pass over the registers: x - mean keeps its digits where the mean is large
            float unused = 0;
            square = 0;
            turn ^= 1;
#pragma unroll
            for (int j = 0; j < 8; j++) square += mine ? (x[j] - mean) * (x[j] - mean) : 0.f;
            row_sums(square, unused, room, turn);
        }
        const float inverse = rsqrtf(square / WIDTH + a.eps);
        if (!mine) continue;
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] = (x[j] - mean) * inverse * factor[j] + shift[j];
        store8(a.out + at, x);
        if (p.first == 0) a.statistics[2 * row] = mean, a.statistics[2 * row + 1] = inverse;
    }
}
#elif PART == 1
// With y = (x - mean) / deviation and g = d_out (weight + offset): d_stream = d_sum + (g - mean(g) - y mean(g y)) / deviation,
// where mean(g) is 0 for an RMS norm. Each group of threads of a row has a share of the gradients of weight, bias and
// branch_bias: parts (groups, 2 or 3, WIDTH), the sums of d_out y, of d_out and of d_stream over its rows.
extern "C" __global__ void __launch_bounds__(THREADS) norm_backward(const Arguments a) {
    __shared__ Room room;
    const Place p = place();
    float factor[8], d_weight[8] = {}, d_bias[8] = {}, d_more[8] = {};
#pragma unroll
    for (int j = 0; j < 8; j++) factor[j] = p.has_columns && a.weight ? a.weight[p.first + j] + a.offset : 1.f;
    Raw next = {}, next_sum = {};
    Pack next_out = {};
    float next_mean = 0, next_inverse = 0;
#define REQUEST(ROW)                                                                                     \
    if (has_row(p, ROW, a)) {                                                                            \
        const long long from = (ROW) * WIDTH + p.first;                                                  \
        next = load_stream(a.stream, from), next_out = *(const Pack*)(a.d_out + from);                   \
        if (RESIDUAL) next_sum = load_stream(a.d_sum, from);                                             \
        next_mean = a.statistics[2 * (ROW)], next_inverse = a.statistics[2 * (ROW) + 1];                 \
    }
    REQUEST(p.row)
    int turn = 0;
    for (long long row = p.row; row / ROWS * ROWS < a.count; row += p.step, turn ^= 1) {
        float x[8], g[8], old[8] = {}, sum = 0, sum_y = 0;
        const float mean = next_mean, inverse = next_inverse;
        unpack_stream(x, next), unpack8(g, next_out);
        if (RESIDUAL) unpack_stream(old, next_sum);
        REQUEST(row + p.step)
        const bool mine = has_row(p, row, a);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (!mine) x[j] = g[j] = 0;
            x[j] = mine ? (x[j] - mean) * inverse : 0.f;
            d_weight[j] += g[j] * x[j], d_bias[j] += g[j];
            g[j] *= factor[j];
            sum += g[j], sum_y += g[j] * x[j];
        }
        row_sums(sum, sum_y, room, turn);
        if (!mine) continue;
        sum = CENTRED ? sum / WIDTH : 0.f, sum_y /= WIDTH;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = old[j] + (g[j] - sum - x[j] * sum_y) * inverse;
            d_more[j] += x[j];
        }
        store_stream(a.d_stream, row * WIDTH + p.first, x);
        if (WIDE && ADD) store8(a.d_branch + row * WIDTH + p.first, x);
    }
    if (!p.has_columns) return;
    float* part = a.parts + p.row * (2 + BIASED) * WIDTH + p.first;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        part[j] = d_weight[j], part[WIDTH + j] = d_bias[j];
        if (BIASED) part[2 * WIDTH + j] = d_more[j];
    }
}
#elif PART == 2 || PART == 3
__device__ inline float sigmoid(float x) { return 1 / (1 + exp2_approx(-LOG2_E * x)); }

// An activation and its derivative. The order is that of ACTIVATION_NAMES in between.py.
__device__ inline void activated(float y, float& value, float& slope) {
    if (KIND == 0) {
        value = y <= 0 ? 0.f : y;  // not fmaxf: NaN must stay NaN
        slope = y > 0 ? 1.f : 0.f;
    } else if (KIND == 1) {
        const float share = 0.5f * (1 + erff(y * 0.7071067811865476f));
        value = y * share, slope = share + y * exp2_approx(-0.5f * LOG2_E * y * y) * 0.3989422804014327f;
    } else if (KIND == 2) {
        const float steep = 1.5957691216057308f, cubic = 0.044715f, s = sigmoid(steep * (y + cubic * y * y * y));
        value = y * s, slope = s + value * (1 - s) * (steep + 3 * steep * cubic * y * y);
    } else if (KIND == 3) {
        const float s = sigmoid(y);
        value = y * s, slope = s * (1 + y * (1 - s));
    } else if (KIND == 4) {
        const float r = y <= 0 ? 0.f : y;
        value = r * r, slope = 2 * r;
    } else if (KIND == 5) {
        value = tanhf(y), slope = 1 - value * value;
    } else {
        const float s = sigmoid(1.702f * y);
        value = y * s, slope = s * (1 + 1.702f * y * (1 - s));
    }
}

#define THREADS 256
// Where group i of eight numbers is, if rows are STEP numbers apart.
__device__ inline long long apart(long long i) { return i / (WIDTH / 8) * STEP + i % (WIDTH / 8) * 8; }

#if PART == 2
// out = activation(gate) * up, or activation(gate). Rows of WIDTH numbers; those of gate and up are STEP numbers apart.
extern "C" __global__ void __launch_bounds__(THREADS) activation_forward(const Arguments a) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x, at = STEP == WIDTH ? 8 * i : apart(i);
    if (i >= a.count) return;
    float gate[8], up[8], slope;
    load8(gate, a.gate + at);
    if (GATED) load8(up, a.up + at);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        activated(gate[j], gate[j], slope);
        if (GATED) gate[j] *= up[j];
    }
    store8(a.out + 8 * i, gate);
}
#else
// The gradients of gate and up, whose rows are STEP numbers apart, too. With SUMMED, a block has 2,048 columns of every STRIPS-th
// row, and parts (STRIPS, 1 or 2, columns) are shares of the column sums of both.
extern "C" __global__ void __launch_bounds__(THREADS) activation_backward(const Arguments a) {
#if SUMMED
    const int across = (a.columns + 8 * THREADS - 1) / (8 * THREADS), strip = blockIdx.x / across;
    const int first = ((int)blockIdx.x % across * THREADS + threadIdx.x) * 8, strips = gridDim.x / across;
    float sums[1 + GATED][8] = {};
    if (first >= a.columns) return;
    for (long long row = strip; row < a.count; row += strips) {
        const long long at = row * STEP + first, from = row * a.columns + first;
#else
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x, from = 8 * i, at = STEP == WIDTH ? from : apart(i);
    if (i >= a.count) return;
    {
#endif
        float gate[8], up[8], d_out[8];
        load8(gate, a.gate + at), load8(d_out, a.d_out + from);
        if (GATED) load8(up, a.up + at);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float value, slope;
            activated(gate[j], value, slope);
            gate[j] = d_out[j] * slope * (GATED ? up[j] : 1.f);
            up[j] = d_out[j] * value;
#if SUMMED
            sums[0][j] += gate[j];
            if (GATED) sums[GATED][j] += up[j];
#endif
        }
        store8(a.d_gate + at, gate);
        if (GATED) store8(a.d_up + at, up);
    }
#if SUMMED
#pragma unroll
    for (int m = 0; m <= GATED; m++)
#pragma unroll
        for (int j = 0; j < 8; j++) a.parts[((long long)strip * (1 + GATED) + m) * a.columns + first + j] = sums[m][j];
#endif
}
#endif
#elif PART == 5
#define THREADS 256
// Column sums of MATRICES matrices (rows, columns), of bfloat16, divided among blocks as in activation_backward.
extern "C" __global__ void __launch_bounds__(THREADS) column_sums(const Arguments a) {
    const int across = (a.columns + 8 * THREADS - 1) / (8 * THREADS), strips = gridDim.x / (across * MATRICES);
    const int which = (int)blockIdx.x % MATRICES, strip = (int)blockIdx.x / MATRICES / across;
    const int first = ((int)blockIdx.x / MATRICES % across * THREADS + threadIdx.x) * 8;
    const u16* x = which == 0 ? a.gate : which == 1 ? a.up : a.branch;
    if (first >= a.columns) return;
    float sums[8] = {};
#pragma unroll 4
    for (long long row = strip; row < a.count; row += strips) {
        float value[8];
        load8(value, x + row * a.columns + first);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] += value[j];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) a.parts[((long long)strip * MATRICES + which) * a.columns + first + j] = sums[j];
}
#elif PART == 6
// The sums of `count` shares (count, columns) of float32, in a fixed order. A block has 32 columns, and each of its warps a part
// of the shares.
#define WARPS 16
#define THREADS (32 * WARPS)
extern "C" __global__ void __launch_bounds__(THREADS) add_shares(const Arguments a) {
    __shared__ float room[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = (int)blockIdx.x * 32 + lane;
    float sum = 0;
    if (column < a.columns) {
#pragma unroll 8
        for (long long i = warp; i < a.count; i += WARPS) sum += a.parts[i * a.columns + column];
    }
    room[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= a.columns) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += room[w][lane];
    a.statistics[column] = sum;
}
#else
#define THREADS 256
__device__ inline void load_waves(float* x, const void* at, long long i) {
#if WIDE_WAVES
    load8_floats(x, (const float*)at + i);
#else
    load8(x, (const u16*)at + i);
#endif
}

// Pair (x, y) of a head becomes (x cos - sign y sin, y cos + sign x sin); with sign -1 it is rotated back. A thread has eight
// pairs. Of each token, `row_step` numbers apart, the first `heads` heads of WIDTH numbers are rotated; `out` may be `stream`.
extern "C" __global__ void __launch_bounds__(THREADS) rotate(const Arguments a) {
    const long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    const int pair = (int)(i % (ROTATED / 16)) * 8;
    const long long head = i / (ROTATED / 16), token = head / a.heads;
    const long long wave = (a.own_waves ? token : token % a.tokens) * (ROTATED / 2) + pair;
    const long long first = token * a.row_step + head % a.heads * WIDTH + (HALVES ? pair : 2 * pair);
    const long long second = first + (HALVES ? ROTATED / 2 : 8);
    float x[16], y[16], cosine[8], sine[8];  // without HALVES, partners are neighbours
    load8(x, (const u16*)a.stream + first), load8(x + 8, (const u16*)a.stream + second);
    load_waves(cosine, a.cosines, wave), load_waves(sine, a.sines, wave);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int one = HALVES ? j : 2 * j, other = HALVES ? j + 8 : 2 * j + 1;
        y[one] = x[one] * cosine[j] - x[other] * a.sign * sine[j];
        y[other] = x[other] * cosine[j] + x[one] * a.sign * sine[j];
    }
    store8(a.out + first, y), store8(a.out + second, y + 8);
}
#endif
