// A product of matrices, left right^T, on Hopper GPUs, tile after tile: each is finished by those who have it in
// registers, while the next is multiplied.
//
// Blocks stay for all their tiles of 128 x 128 results. In a block
//   one thread has the copy engine fetch steps of 64 along the depth into a ring of STAGES places;
//   two groups of four warps take turns: while one multiplies its tile on the tensor cores, the other finishes its own.
// CLUSTER blocks work on tiles one below the other: each fetches a part of the right factor for all of them.
//
// Barriers in shared memory tell an even round from an odd one, no more. So nobody waits for a round before the round
// before it is known to be over, to each warp: each waits for every round of a barrier that it waits for at all.
//
// Macros: STAGES, CLUSTER, PANEL, DEPTH; after the text of hopper.cuh.

#define TILE 128
#define STEPS ((DEPTH + STEP - 1) / STEP)
#define BYTES (TILE * 2 * STEP)  // of one factor's part of a stage
#define RING (STAGES * 2 * BYTES)
#define BOARD (4 * BOX)  // a tile of results
#define THREADS 384

struct Place { int row, column; };  // in tiles; rows by CLUSTER
// PANEL columns of tiles at a time, row after row: blocks that are at work at once share what they read.
__device__ inline Place place(int work, int rows, int columns) {
    const int panel = work / (PANEL * rows), inside = work - panel * PANEL * rows;
    const int width = min(PANEL, columns - panel * PANEL);
    return {inside / width, panel * PANEL + inside % width};
}

struct Tiles {
    u32 stages, filled, emptied, turns, member;
    int high, wide, first, step;

    // 2 STAGES + 2 barriers.
    __device__ Tiles(u32 memory, u32 barriers, int rows, int columns)
        : stages(memory), filled(barriers), emptied(filled + 8 * STAGES), turns(emptied + 8 * STAGES),
          member(CLUSTER > 1 ? place_in_cluster() : 0), high((rows + TILE * CLUSTER - 1) / (TILE * CLUSTER)),
          wide((columns + TILE - 1) / TILE), first(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}
    __device__ void begin_barriers() const {  // by one thread
        for (int s = 0; s < STAGES; s++) begin_barrier(filled + 8 * s, 1), begin_barrier(emptied + 8 * s, 4 * CLUSTER);
        for (int i = 0; i < 2; i++) begin_barrier(turns + 8 * i, 4);
    }
    // By one thread. Half way through each tile also what else it needs: more(row, column, tiles before).
    template <typename MORE> __device__ void fetch_all(const Map* left, const Map* right, MORE more) const {
        u32 n = 0, before = 0;  // steps of all tiles
        for (int work = first; work < high * wide; work += step, before++) {
            const Place p = place(work, high, wide);
            const int row = (p.row * CLUSTER + member) * TILE, column = p.column * TILE;
            for (int k = 0; k < STEPS; k++, n++) {
                const u32 stage = n % STAGES, bar = filled + 8 * stage, at = stages + stage * 2 * BYTES;
                if (n >= STAGES) await(emptied + 8 * stage, n / STAGES - 1);
                expect(bar, 2 * BYTES);
                fetch(at, left, k * STEP, row, bar);
                const u32 part = at + BYTES + member * (BYTES / CLUSTER);
                const int from = column + member * (TILE / CLUSTER);
                if (CLUSTER > 1) fetch_for_all<CLUSTER>(part, right, k * STEP, from, bar);
                else fetch(part, right, k * STEP, from, bar);
                if (k == STEPS / 2) more(row, column, before);
            }
        }
    }
    // By group 1 and group 2 of threads; finish(d, row, column, tiles before). Of 8 columns a thread has two, in rows
    // 16 warp + lane / 4 and eight below; d holds 64 rows after 64 rows.
    template <typename FINISH> __device__ void multiply_all(u32 group, FINISH finish) const {
        const int lane = threadIdx.x & 31;
        u32 round = group - 1;  // tiles of both groups so far
        for (int work = first + (int)round * step; work < high * wide; work += 2 * step, round += 2) {
            const Place p = place(work, high, wide);
            float d[2][64];
            u32 n = round * STEPS;
            if (round > 0) await(turns + 8 * (group - 1), (round - 1) >> 1);
#pragma unroll 1
            for (int k = 0; k < STEPS; k++, n++) {
                const u32 stage = n % STAGES, left = handle(stages + stage * 2 * BYTES), right = left + BYTES / 16;
                await(filled + 8 * stage, n / STAGES);
                products_begin();
#pragma unroll
                for (int part = 0; part < 4; part++)
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        multiply(d[h], left + h * (BOX / 16) + 2 * part, right + 2 * part, (k | part) != 0);
                products_are_a_group();
                if (k > 0) {
                    products_are_made<1>();
                    if (lane < CLUSTER) arrive_in(emptied + 8 * ((n - 1) % STAGES), lane);
                }
            }
            if (lane == 0) arrive(turns + 8 * (2 - group));  // every stage of this tile is filled: the other group's turn
            products_are_made<0>();
            if (lane < CLUSTER) arrive_in(emptied + 8 * ((n - 1) % STAGES), lane);
            finish(d, (p.row * CLUSTER + (int)member) * TILE, p.column * TILE, round);
        }
        if ((threadIdx.x & 127) == 0) all_is_stored();
    }
};
