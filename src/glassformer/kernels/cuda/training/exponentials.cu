// The product of a head with the exponentials that its cross-entropy needs, taken while the logits are in registers.
//
// out[r, c] = exp(z[r, c] - z[r, target]), z = hidden weight^T; exponentials.py says what they are for. Logits never
// reach memory, and what does is written once and not read again before the products of the gradients read it.
//
// A kernel for Hopper, after the text of tiles.cuh. tests/train compiles the same text for a CPU.

struct Given {
    Map left, right, out;  // hidden and weight, and
    const u16 *hiddens, *weights;  // the same matrices
    u16* exponentials;
    const long long* targets;
    float *offsets, *sums;  // of each row: the logit of its target, in bits; (column tiles, rows): sums of exponentials
    float *totals, *plains, *shares;
    long long ignored;
    float z_loss;
    int rows, stride, columns;  // stride: of `out`; from `columns` on there are no logits
};

#define FAR 1e30f  // a sum of exponentials from there on is taken anew, from the highest logit

// Of two rows, by a warp.
__device__ inline float dot(const u16* x, const u16* y, int lane) {
    float sum = 0;
    for (int i = 2 * lane; i < DEPTH; i += 64) {
        const u32 a = *(const u32*)(x + i), b = *(const u32*)(y + i);
        sum += low(a) * low(b) + high(a) * high(b);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
}

// Of each row, by a warp, the logit of its target. A row that does not count gets infinity, and exponentials of 0.
extern "C" __global__ void __launch_bounds__(256) find_offsets(const __grid_constant__ Given a) {
    const int lane = threadIdx.x & 31, r = blockIdx.x * 8 + (threadIdx.x >> 5);
    if (r >= a.rows) return;
    const long long target = a.targets[r];
    const bool counts = target != a.ignored;
    const float z = dot(a.hiddens + (long long)r * DEPTH, a.weights + (counts ? target : 0) * DEPTH, lane);
    if (lane == 0) a.offsets[r] = counts ? z * TO_BITS : __uint_as_float(0x7f800000u);
}

// One number of each of eight warps, to all.
__device__ inline void share(float (*board)[32], float mine, float (&all)[8]) {
    __syncthreads();
    if ((threadIdx.x & 31) == 0) board[threadIdx.x >> 5][0] = mine;
    __syncthreads();
    for (int i = 0; i < 8; i++) all[i] = board[i][0];
}

// The exponentials of a row from its highest logit, which `top` becomes, by a block; their sum. Slow, and rare: where the
// target is so far below the highest that exponentials from there are no numbers.
__device__ inline float taken_anew(const Given& a, int r, float (*board)[32], float& top) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u16* h = a.hiddens + (long long)r * DEPTH;
    float all[8], sum = 0;
    top = __uint_as_float(0xff800000u);
    for (int c = warp; c < a.columns; c += 8) top = fmaxf(top, dot(h, a.weights + (long long)c * DEPTH, lane) * TO_BITS);
    share(board, top, all);
    for (int i = 0; i < 8; i++) top = fmaxf(top, all[i]);
    for (int c = warp; c < a.columns; c += 8) {
        const float e = power(dot(h, a.weights + (long long)c * DEPTH, lane) * TO_BITS - top);
        if (lane == 0) a.exponentials[(long long)r * a.stride + c] = (u16)narrowed(e, 0);
        sum += e;
    }
    share(board, sum, all);
    sum = 0;
    for (int i = 0; i < 8; i++) sum += all[i];
    return sum;
}

// Sums of rows, 32 a block, to losses; and the target's own gradient.
extern "C" __global__ void __launch_bounds__(256) find_losses(const __grid_constant__ Given a) {
    __shared__ float board[8][32], totals[32], tops[32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, first = blockIdx.x * 32, r = first + lane;
    const bool there = r < a.rows;
    float sum = 0;
    for (int tile = warp; tile < (a.stride + TILE - 1) / TILE; tile += 8)
        if (there) sum += a.sums[(long long)tile * a.rows + r];
    board[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        for (int i = 1; i < 8; i++) sum += board[i][lane];
        totals[lane] = there ? sum : 0.f, tops[lane] = there ? a.offsets[r] : 0.f;
    }
    __syncthreads();
    for (int i = 0; i < 32; i++)
        if (totals[i] >= FAR) {  // not if it is no number: then so is the loss
            float top;
            const float anew = taken_anew(a, first + i, board, top);
            if (threadIdx.x == 0) totals[i] = anew, tops[i] = top;
        }
    __syncthreads();
    if (warp > 0 || !there) return;
    const long long target = a.targets[r];
    const bool counts = target != a.ignored;
    const float total = totals[lane], top = tops[lane], offset = a.offsets[r];
    const float lse = counts ? logf(total) + top / TO_BITS : 0.f, plain = logf(total) + (top - offset) / TO_BITS;
    const float factor = 1 + 2 * a.z_loss * lse;
    a.plains[r] = counts ? plain : 0.f;
    a.totals[r] = counts ? plain + a.z_loss * lse * lse : 0.f;
    a.shares[r] = counts ? factor / total : 0.f;
    // share times this is factor p - 1
    if (counts) a.exponentials[(long long)r * a.stride + target] = (u16)narrowed(power(offset - top) - total / factor, 0);
}

// The exponentials of a tile: through the board to memory, their sums to `sums`. `t`: of 128 threads.
__device__ inline void finish(float (&d)[2][64], const Given& a, int row, int column, u32 board, u32 board_read, int t,
                              u32 group, u32 round) {
    const u32 mine_read = board_read + 16 * (group - 1), others = board_read + 16 * (2 - group);
    const int lane = t & 31, line = 16 * (t >> 5) + (lane >> 2), pair = 2 * (lane & 3);
    if (column + TILE > a.columns) {
#pragma unroll
        for (int i = 0; i < 128; i++)
            if (column + 8 * (i % 64 / 4) + pair + (i & 1) >= a.columns) d[i / 64][i % 64] = -1e30f;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (round > 0) await(others + 8 * h, (round - 1) >> 1);
        const u32 mine = board + h * 2 * BOX + line * 128 + 2 * pair;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + 64 * h + line + 8 * half;
            const float offset = r < a.rows ? a.offsets[r] : 0.f;
            float sums[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                float x[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x[i] = power(d[h][4 * (j + i / 2) + 2 * half + (i & 1)] * TO_BITS - offset);
                    sums[i & 3] += x[i];
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {  // the copy engine keeps the unit u of 16 bytes of row r at u ^ (r % 8)
                    const u32 unit = ((j + i) & 7) ^ (lane >> 2);
                    put(mine + half * 8 * 128 + ((j + i) >> 3) * BOX + unit * 16, narrowed(x[2 * i], x[2 * i + 1]));
                }
            }
            float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (pair == 0 && r < a.rows) a.sums[(long long)(column / TILE) * a.rows + r] = sum;
        }
        puts_are_seen();
        meet<128>(group);
        if (t == 0) {
            for (int b = 0; b < 2; b++) store(&a.out, board + (2 * h + b) * BOX, column + 64 * b, row + 64 * h);
            stores_are_a_group();
            if (h > 0) groups_were_read<1>(), arrive(mine_read), groups_were_read<0>(), arrive(mine_read + 8);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) exponentials(const __grid_constant__ Given a) {
    MEMORY(RING + BOARD);
    __shared__ u64 barriers[2 * STAGES + 6];
    const u32 group = threadIdx.x >> 7, board = address(memory) + RING;
    const Tiles tiles(address(memory), address(barriers), a.rows, a.stride);
    const u32 board_read = tiles.turns + 16;
    if (threadIdx.x == 0) {
        tiles.begin_barriers();
        for (int i = 0; i < 4; i++) begin_barrier(board_read + 8 * i, 1);  // halves of it, by each group
        barriers_begun();
    }
    meet_cluster();
    if (group == 0) {
        FEWER_REGISTERS(40);
        if (threadIdx.x < 32 && chosen()) tiles.fetch_all(&a.left, &a.right, [](int, int, u32) {});
    } else {
        MORE_REGISTERS(232);
        tiles.multiply_all(group, [&](float (&d)[2][64], int row, int column, u32 round) {
            finish(d, a, row, column, board, board_read, threadIdx.x & 127, group, round);
        });
    }
    meet_cluster();  // nobody leaves while others still arrive at its barriers
}
