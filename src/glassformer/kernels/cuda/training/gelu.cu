// Products of a feed-forward's training step with its GELU, on Hopper GPUs; gelu.py says what they are for.
//
// gelu_product: with x = left right^T + bias, out = gelu(x) and slope = gelu'(x), both while x is in registers.
// slope_product: out = (left right^T) slope.
//
// Macro: BIASED; after the text of tiles.cuh. tests/train compiles the same text for a CPU.

struct Given {
    Map left, right, out, slope;
    const u16* bias;  // of columns, if BIASED
    int rows, columns;
};

#define ONCE 1.5957691216057308f  // 2 sqrt(2 / pi)
#define CUBED (0.044715f * ONCE)

// gelu(x) = x s, s = sigmoid(ONCE x + CUBED x^3), which is its form with tanh; and its slope.
__device__ inline float gelu(float x, float& slope) {
    const float square = x * x, s = reciprocal(1 + power(x * (-TO_BITS * ONCE - TO_BITS * CUBED * square)));
    const float y = x * s;
    slope = s + (y - y * s) * (ONCE + 3 * CUBED * square);
    return y;
}

// A tile, 64 rows of 64 at a time: through two places on a group's board to memory.
__device__ inline void give_gelu(const float (&d)[2][64], const Given& a, int row, int column, u32 board, u32 group) {
    const int t = threadIdx.x & 127, pair = 2 * (t & 3);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int r = row + 64 * (q >> 1), c = column + 64 * (q & 1);
        const u32 at = board + (q & 1) * 2 * BOX, mine = at + (t >> 5) * 16 * 128;
        if (t == 0) groups_were_read<1>();
        meet<128>(group);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            u32 results[4], slopes[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* two = d[q >> 1] + 32 * (q & 1) + 8 * s + 2 * i;
                const int place = c + 16 * s + 8 * (i >> 1) + pair;
                const u32 bias = BIASED && place < a.columns ? *(const u32*)(a.bias + place) : 0;
                float first, second;
                const float x = gelu(BIASED ? two[0] + low(bias) : two[0], first);
                const float y = gelu(BIASED ? two[1] + high(bias) : two[1], second);
                results[i] = narrowed(x, y), slopes[i] = narrowed(first, second);
            }
            put_four(mine, BOX, s, results);
            put_four(mine + BOX, BOX, s, slopes);
        }
        puts_are_seen();
        meet<128>(group);
        if (t > 0) continue;
        store(&a.out, at, c, r);
        store(&a.slope, at + BOX, c, r);
        stores_are_a_group();
    }
}

// A tile times the slopes on a group's board, in their place and from there to memory.
__device__ inline void give_times_slopes(const float (&d)[2][64], const Given& a, int row, int column, u32 board,
                                         u32 group) {
    const int t = threadIdx.x & 127;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const u32 mine = board + q * BOX + (t >> 5) * 16 * 128;
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const float* numbers = d[q >> 1] + 32 * (q & 1) + 8 * s;
            u32 words[4];
            take_four(mine, BOX, s, words);
#pragma unroll
            for (int i = 0; i < 4; i++)
                words[i] = narrowed(numbers[2 * i] * low(words[i]), numbers[2 * i + 1] * high(words[i]));
            put_four(mine, BOX, s, words);
        }
    }
    puts_are_seen();
    meet<128>(group);
    if (t > 0) return;
    for (int q = 0; q < 4; q++) store(&a.out, board + q * BOX, column + 64 * (q & 1), row + 64 * (q >> 1));
    stores_are_a_group();
    groups_were_read<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gelu_product(const __grid_constant__ Given a) {
    MEMORY(RING + 2 * BOARD);
    __shared__ u64 barriers[2 * STAGES + 2];
    const u32 group = threadIdx.x >> 7, base = address(memory);
    const Tiles tiles(base, address(barriers), a.rows, a.columns);
    if (threadIdx.x == 0) tiles.begin_barriers(), barriers_begun();
    meet_cluster();
    if (group == 0) {
        FEWER_REGISTERS(40);
        if (threadIdx.x < 32 && chosen()) tiles.fetch_all(&a.left, &a.right, [](int, int, u32) {});
    } else {
        MORE_REGISTERS(232);
        tiles.multiply_all(group, [&](const float (&d)[2][64], int row, int column, u32) {
            give_gelu(d, a, row, column, base + RING + (group - 1) * BOARD, group);
        });
    }
    meet_cluster();  // nobody leaves while others still arrive at its barriers
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) slope_product(const __grid_constant__ Given a) {
    MEMORY(RING + 2 * BOARD);
    __shared__ u64 barriers[2 * STAGES + 6];
    const u32 group = threadIdx.x >> 7, base = address(memory), boards = base + RING;
    const Tiles tiles(base, address(barriers), a.rows, a.columns);
    const u32 came = tiles.turns + 16, went = came + 16;  // slopes, for each group; and its results
    if (threadIdx.x == 0) {
        tiles.begin_barriers();
        for (int i = 0; i < 4; i++) begin_barrier(came + 8 * i, 1);
        barriers_begun();
    }
    meet_cluster();
    if (group == 0) {
        FEWER_REGISTERS(40);
        if (threadIdx.x < 32 && chosen())
            tiles.fetch_all(&a.left, &a.right, [&](int row, int column, u32 before) {
                const u32 next = before & 1, bar = came + 8 * next;
                if (before > 1) await(went + 8 * next, before / 2 - 1);
                expect(bar, BOARD);
                for (int q = 0; q < 4; q++)
                    fetch(boards + next * BOARD + q * BOX, &a.slope, column + 64 * (q & 1), row + 64 * (q >> 1), bar);
            });
    } else {
        MORE_REGISTERS(232);
        tiles.multiply_all(group, [&](const float (&d)[2][64], int row, int column, u32 round) {
            await(came + 8 * (group - 1), round / 2);
            give_times_slopes(d, a, row, column, boards + (group - 1) * BOARD, group);
            if ((threadIdx.x & 127) == 0) arrive(went + 8 * (group - 1));
        });
    }
    meet_cluster();
}
