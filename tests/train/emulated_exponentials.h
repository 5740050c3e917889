// What exponentials.cu asks of a Hopper GPU, on a CPU (tests/emulated_cuda/cuda.h).
//
// What runs beside the threads there happens here at the worst moment that is allowed: copies into shared memory at
// once, products and copies out of it only when they are waited for. So what is not waited for is seen.
#include <cstdio>
#include <functional>
#include <mutex>

#define __grid_constant__
#define MEMORY static thread_local __align__(1024) unsigned char memory[STAGES * 2 * BYTES + BOARD]
#define FEWER_REGISTERS
#define MORE_REGISTERS

// Addresses count from a place that each block has; the same one means the same variable in another block.
static thread_local char anchor[16];
static char* anchors[64];
static inline u32 address(const void* p) {
    anchors[blockIdx.x] = anchor;
    return (u32)((const char*)p - anchor);
}
static inline char* here(u32 at) { return anchor + (int)at; }
static inline char* there(u32 at, u32 member) { return anchors[blockIdx.x / CLUSTER * CLUSTER + member] + (int)at; }

// Bits 4 to 6 of an address are added, without carry, to bits 7 to 9; memory is aligned to 1024 bytes.
static inline char* swapped(char* at) { return (char*)((uintptr_t)at ^ (((uintptr_t)at >> 7) & 7) << 4); }

struct Barrier { unsigned char arrivals; signed char pending; u16 round; int bytes; };
static_assert(sizeof(Barrier) == sizeof(u64), "");
static std::mutex lock;
static void count(char* at, int arrivals, int bytes) {
    std::lock_guard<std::mutex> guard(lock);
    Barrier* b = (Barrier*)at;
    b->pending -= arrivals, b->bytes += bytes;
    if (b->pending < 0) fprintf(stderr, "more arrivals than a barrier counts\n"), abort();
    if (b->pending == 0 && b->bytes == 0) b->pending = b->arrivals, b->round++;
}
static inline void begin_barrier(u32 at, u32 arrivals) {
    *(Barrier*)here(at) = {(unsigned char)arrivals, (signed char)arrivals, 0, 0};
}
static inline void barriers_begun() {}
static inline void expect(u32 at, u32 bytes) { count(here(at), 1, (int)bytes); }
static inline void arrive(u32 at) { count(here(at), 1, 0); }
static inline void arrive_in(u32 at, u32 member) { count(there(at, member), 1, 0); }
static inline void await(u32 at, u32 round) {
    for (long tries = 0;; tries++) {
        {
            std::lock_guard<std::mutex> guard(lock);
            if ((((Barrier*)here(at))->round & 1) != (round & 1)) return;
        }
        if (tries > 300000) fprintf(stderr, "thread %d waits for ever\n", threadIdx.x), abort();
        give_way();
    }
}

struct Matrix { u16* numbers; u64 rows, columns, step, box; };  // what a Map holds here
static void copy(char* to, const Map* from, int column, int row, char* filled) {
    const Matrix& m = *(const Matrix*)from;
    for (int r = 0; r < (int)m.box; r++)
        for (int c = 0; c < 64; c++) {
            const bool inside = row + r < (int)m.rows && column + c < (int)m.columns;
            *(u16*)swapped(to + r * 128 + c * 2) = inside ? m.numbers[(row + r) * m.step + column + c] : 0;
        }
    count(filled, 0, -(int)m.box * 128);
}
static inline void fetch(u32 to, const Map* from, int column, int row, u32 filled) {
    copy(here(to), from, column, row, here(filled));
}
static inline void fetch_for_all(u32 to, const Map* from, int column, int row, u32 filled) {
    for (int b = 0; b < CLUSTER; b++) copy(there(to, b), from, column, row, there(filled, b));
}

// What is done later, in groups: of each thread.
struct Later {
    std::vector<std::function<void()>> open;
    std::vector<std::vector<std::function<void()>>> groups;
    void close() { groups.push_back(std::move(open)), open.clear(); }
    void run(int left) {
        for (; (int)groups.size() > left; groups.erase(groups.begin()))
            for (auto& act : groups[0]) act();
    }
};
static thread_local Later stores[THREADS], products[THREADS];
static inline void store(const Map* to, u32 from, int column, int row) {
    char* kept = here(from);
    stores[threadIdx.x].open.push_back([=] {
        const Matrix& m = *(const Matrix*)to;
        for (int r = 0; r < (int)m.box; r++)
            for (int c = 0; c < 64; c++)
                if (row + r < (int)m.rows && column + c < (int)m.columns)
                    m.numbers[(row + r) * m.step + column + c] = *(u16*)swapped(kept + r * 128 + c * 2);
    });
}
static inline void stores_are_a_group() { stores[threadIdx.x].close(); }
template <int LATER> static inline void groups_were_read() { stores[threadIdx.x].run(LATER); }
static inline void all_is_stored() { stores[threadIdx.x].run(0); }
static inline void put(u32 at, u32 word) { memcpy(here(at), &word, 4); }
static inline void puts_are_seen_by_stores() {}

static thread_local int meeting[4], meetings[4];
static inline void meet(u32 group) { wait_for(meeting[group], meetings[group], 128); }
static std::atomic<long> met[64];
static inline void meet_cluster() {
    const int cluster = blockIdx.x / CLUSTER, all = CLUSTER * blockDim.x;
    const long until = (met[cluster].fetch_add(1) / all + 1) * all;
    while (met[cluster].load() < until) give_way();
}
static inline u32 place_in_cluster() { return blockIdx.x % CLUSTER; }
static inline bool chosen() { return threadIdx.x % 32 == 0; }

static inline void products_begin() {}
static inline void products_are_a_group() { products[threadIdx.x].close(); }
template <int LATER> static inline void products_are_made() {
    products[threadIdx.x].run(LATER);
    __syncwarp();  // a warp multiplies as one
}
static inline float number(char* at) { return __uint_as_float((u32) * (u16*)swapped(at) << 16); }
static inline void multiply(float* d, u32 left, u32 right, bool grows) {
    char *a = here(left), *b = here(right);
    const int t = threadIdx.x & 127, row = 16 * (t / 32) + t % 32 / 4, column = 2 * (t % 4);
    products[threadIdx.x].open.push_back([=] {
        for (int i = 0; i < 64; i++) {
            const int r = row + 8 * (i / 2 % 2), c = 8 * (i / 4) + column + i % 2;
            float sum = grows ? d[i] : 0;
            for (int k = 0; k < 16; k++) sum += number(a + r * 128 + 2 * k) * number(b + c * 128 + 2 * k);
            d[i] = sum;
        }
    });
}
