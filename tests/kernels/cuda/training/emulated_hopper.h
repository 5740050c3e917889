// The primitives of hopper.cuh on a CPU (tests/emulated_cuda/cuda.h).
//
// Asynchronous operations run at the worst moment that is allowed: copies into shared memory immediately, matmuls and
// copies out of it only when they are waited for. So a missing wait changes the result.
#include <cstdio>
#include <functional>
#include <mutex>

#define __grid_constant__
#define DYNAMIC_SHARED(bytes) static thread_local __align__(1024) unsigned char memory[bytes]
#define FEWER_REGISTERS(n)
#define MORE_REGISTERS(n)

struct __align__(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <typename T> static inline T __ldcg(const T* at) { return *at; }
static inline void reduce_add(float4* at, float4 v) { at->x += v.x, at->y += v.y, at->z += v.z, at->w += v.w; }
static inline void __stcg(float4* at, float4 value) { *at = value; }

// Addresses are offsets from an anchor of each block.
static thread_local char anchor[16];
static inline u32 address(const void* p) {
    return (u32)((const char*)p - anchor);
}
static inline char* here(u32 at) { return anchor + (int)at; }

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
static inline void init_barrier(u32 at, u32 arrivals) {
    *(Barrier*)here(at) = {(unsigned char)arrivals, (signed char)arrivals, 0, 0};
}
static inline void fence_barrier_init() {}
static inline void arrive_expecting(u32 at, u32 bytes) { count(here(at), 1, (int)bytes); }
static inline void arrive(u32 at) { count(here(at), 1, 0); }
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
static inline void tma_load(u32 to, const Map* from, int column, int row, u32 filled) {
    copy(here(to), from, column, row, here(filled));
}
static inline void bulk_load(u32 to, const void* from, u32 bytes, u32 filled) {
    memcpy(here(to), from, bytes);
    count(here(filled), 0, -(int)bytes);
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
static thread_local Later stores[384], products[384];
static inline void tma_store(const Map* to, u32 from, int column, int row) {
    char* kept = here(from);
    stores[threadIdx.x].open.push_back([=] {
        const Matrix& m = *(const Matrix*)to;
        for (int r = 0; r < (int)m.box; r++)
            for (int c = 0; c < 64; c++)
                if (row + r < (int)m.rows && column + c < (int)m.columns)
                    m.numbers[(row + r) * m.step + column + c] = *(u16*)swapped(kept + r * 128 + c * 2);
    });
}
static inline void commit_stores() { stores[threadIdx.x].close(); }
template <int LATER> static inline void wait_until_stores_have_read() { stores[threadIdx.x].run(LATER); }
static inline void wait_for_stores() { stores[threadIdx.x].run(0); }
static inline void put(u32 at, u32 word) { memcpy(here(at), &word, 4); }
static inline float2 load_shared_pair(u32 at) {
    float2 two;
    memcpy(&two, here(at), 8);
    return two;
}
static inline void store_fragment(u32 at, u32 high, int step, const u32* words) {
    const int lane = threadIdx.x & 31;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i & 1), unit = 2 * step + i / 2;
        put(at + unit / 8 * high + row * 128 + ((unit % 8) ^ (row % 8)) * 16 + lane % 4 * 4, words[i]);
    }
}
static inline void fence_async_proxy() {}

static thread_local int meeting[4], meetings[4];
template <int COUNT> static inline void sync_threads(u32 barrier) { wait_for(meeting[barrier], meetings[barrier], COUNT); }
static inline bool elect_one() { return threadIdx.x % 32 == 0; }

static inline void wgmma_fence() {}
static inline void wgmma_commit() { products[threadIdx.x].close(); }
template <int LATER> static inline void wgmma_wait() {
    products[threadIdx.x].run(LATER);
    __syncwarp();  // a warp multiplies as one
}
template <int N> static inline void wgmma_result_fence(float (&)[N]) {}
static inline u32 descriptor_word(u32 at) { return (u32)((int)at >> 4); }
static inline int warp_uniform(int x) { return x; }
static inline float number(char* at) { return __uint_as_float((u32) * (u16*)swapped(at) << 16); }
// d, 64 by `columns`, from factors of which `left` gives (row, k) and `right` (column, k).
template <typename LEFT, typename RIGHT>
static inline void multiply_later(float* d, int columns, bool grows, LEFT left, RIGHT right) {
    const int t = threadIdx.x & 127, row = 16 * (t / 32) + t % 32 / 4, column = 2 * (t % 4);
    products[threadIdx.x].open.push_back([=] {
        for (int i = 0; i < columns / 2; i++) {
            const int r = row + 8 * (i / 2 % 2), c = 8 * (i / 4) + column + i % 2;
            float sum = grows ? d[i] : 0;
            for (int k = 0; k < 16; k++) sum += left(r, k) * right(c, k);
            d[i] = sum;
        }
    });
}
static inline void multiply(float* d, u32 left, u32 right, bool grows = false) {
    char *a = here(left << 4), *b = here(right << 4);
    multiply_later(d, 128, grows, [=](int r, int k) { return number(a + r * 128 + 2 * k); },
                   [=](int c, int k) { return number(b + c * 128 + 2 * k); });
}
// A row of 16 is spread over the four threads that have it; others are asked for theirs.
static thread_local const u32* kept[384];
static inline void multiply_registers(float* d, const u32* left, u32 right, bool grows) {
    char* b = here(right << 4);
    const int first = threadIdx.x & ~3;
    auto all = std::make_shared<std::vector<const u32*>>(4);
    kept[threadIdx.x] = left;
    __syncwarp();
    for (int i = 0; i < 4; i++) (*all)[i] = kept[first + i];
    __syncwarp();
    multiply_later(d, 64, grows,
                   [=](int r, int k) {
                       const u32 both = (*all)[k % 8 / 2][(r % 16) / 8 + 2 * (k / 8)];
                       return __uint_as_float(k % 2 ? both & 0xffff0000u : both << 16);
                   },
                   [=](int c, int k) { return number(b + k * 128 + 2 * c); });
}
static inline void multiply_transposed(float* d, u32 left, u32 right, bool grows = false) {
    char *a = here(left << 4), *b = here(right << 4);
    multiply_later(d, 64, grows, [=](int r, int k) { return number(a + k * 128 + 2 * r); },
                   [=](int c, int k) { return number(b + k * 128 + 2 * c); });
}
