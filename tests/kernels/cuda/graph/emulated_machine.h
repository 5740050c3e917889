// In place of machine.cuh: the same functions on a CPU (tests/emulated_cuda/cuda.h). A warp multiplies through `factors`.
#include <chrono>
#include <mutex>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
struct alignas(16) Pack { u32 word[4]; };

static inline void wait_for_previous_kernel() {}
static inline Pack load16(const void* at) {
    if ((size_t)at % 16) abort();  // as the machine would
    Pack p;
    memcpy(&p, at, 16);
    return p;
}
static inline Pack load_weights(const void* at) { return load16(at); }
static inline Pack load_fresh16(const void* at) { return load16(at); }
template <typename Number>
static inline Number load_fresh(const Number* at) { return *(const volatile Number*)at; }
#define __expf std::exp
static inline u32 pick_bytes(u32 x, u32 y, u32 selector) {
    u64 both = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
static inline float half_to_float(u16 h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float f = exponent == 31 ? (fraction ? NAN : INFINITY)
              : exponent ? std::ldexp(1024.f + fraction, exponent - 25) : std::ldexp((float)fraction, -24);
    return h & 0x8000 ? -f : f;
}
static inline u16 float_to_half(float f) {  // to nearest, ties to even; too large becomes the largest
    u16 sign = f < 0 || (f == 0 && std::signbit(f)) ? 0x8000 : 0;
    float x = std::fabs(f);
    if (x != x) return 0x7e00;
    if (x >= 65504.f) return sign | 0x7bff;
    int exponent;
    std::frexp(x, &exponent);
    int shift = std::max(exponent - 11, -24);
    u32 n = (u32)std::nearbyint(std::ldexp(x, -shift));
    if (n == 0) return sign;
    if (n == 2048) n = 1024, shift++;
    return n < 1024 ? sign | n : sign | (u16)((shift + 25) << 10) | (n & 1023);
}
static inline u32 subtract_half(u32 a, u32 b) {
    u32 low = float_to_half(half_to_float((u16)a) - half_to_float((u16)b));
    u32 high = float_to_half(half_to_float((u16)(a >> 16)) - half_to_float((u16)(b >> 16)));
    return high << 16 | low;
}
static inline u32 float8_to_half(u32 two) {
    u32 out = 0;
    for (int i = 0; i < 2; i++) {
        int byte = two >> 8 * i & 255, exponent = byte >> 3 & 15, fraction = byte & 7;
        float f = exponent ? std::ldexp(8.f + fraction, exponent - 10) : std::ldexp((float)fraction, -9);
        out |= (u32)float_to_half(byte & 128 ? -f : f) << 16 * i;
    }
    return out;
}
template <typename T>
static inline T __shfl_sync(unsigned, T value, int lane) {
    int warp = threadIdx.x / 32;
    memcpy(&slots[threadIdx.x], &value, 4);
    wait_for(warp_count[warp], warp_turn[warp], 32);
    T other;
    memcpy(&other, &slots[warp * 32 + lane], 4);
    wait_for(warp_count[warp], warp_turn[warp], 32);
    return other;
}
template <bool IS_BF16>
static inline float operand_to_float(u32 two, int which) {
    u16 h = (u16)(two >> 16 * which);
    return IS_BF16 ? __uint_as_float((u32)h << 16) : half_to_float(h);
}
static thread_local const void* row_of[1024];
static inline void load_transposed(u32* out, const void* row) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if ((size_t)row % 16) abort();
    row_of[threadIdx.x] = row;
    wait_for(warp_count[warp], warp_turn[warp], 32);
    for (int m = 0; m < 4; m++)
        out[m] = ((const u16*)row_of[warp * 32 + m * 8 + 2 * t])[g] | (u32)((const u16*)row_of[warp * 32 + m * 8 + 2 * t + 1])[g] << 16;
    wait_for(warp_count[warp], warp_turn[warp], 32);
}
static thread_local u32 factors[1024][6];
template <bool IS_BF16 = OPERAND_IS_BF16>
static inline void multiply_add(float* c, const u32* a, u32 b0, u32 b1) {
    const int me = threadIdx.x, warp = me / 32, lane = me % 32, g = lane / 4, t = lane % 4;
    const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    memcpy(factors[me], mine, sizeof mine);
    wait_for(warp_count[warp], warp_turn[warp], 32);
    for (int j = 0; j < 4; j++)
        for (int k = 0; k < 16; k++) {
            const u32* left = factors[warp * 32 + g * 4 + k % 8 / 2];
            const u32* right = factors[warp * 32 + (2 * t + j % 2) * 4 + k % 8 / 2];
            c[j] += operand_to_float<IS_BF16>(left[j / 2 + k / 8 * 2], k % 2) * operand_to_float<IS_BF16>(right[4 + k / 8], k % 2);
        }
    wait_for(warp_count[warp], warp_turn[warp], 32);
}
static inline void sync_warps(int barrier, int count) {
    static thread_local int arrived[16], turns[16];
    wait_for(arrived[barrier], turns[barrier], 32 * count);
}
static std::mutex one_at_a_time;
static inline u64 atomicMax(u64* at, u64 value) {
    std::lock_guard<std::mutex> guard(one_at_a_time);
    u64 old = *at;
    if (value > old) *at = value;
    return old;
}

#ifdef SPLITS
#define CLUSTER SPLITS
#endif
#ifdef CLUSTER
static char* memory_of[4096];  // by block: where its `Shared` is
static inline int rank_in_cluster() { return blockIdx.x % CLUSTER; }
static inline void sync_cluster(const void* shared) {
    static std::atomic<int> arrived[4096];
    memory_of[blockIdx.x] = (char*)shared;
    const int cluster = blockIdx.x / CLUSTER, all = CLUSTER * blockDim.x;
    const int until = (arrived[cluster].fetch_add(1) / all + 1) * all;
    while (arrived[cluster].load() < until) give_way();
}
static inline float read_remote(const float* at, int rank) {
    char* other = memory_of[blockIdx.x / CLUSTER * CLUSTER + rank];
    return *(float*)(other + ((char*)at - memory_of[blockIdx.x]));
}
#endif

#ifdef DYNAMIC_BYTES
static inline u8* dynamic_memory() {
    alignas(128) static thread_local u8 memory[DYNAMIC_BYTES];
    return memory;
}
static inline void copy_fresh16(void* to, const void* from, bool exists = true) {
    if ((size_t)from % 16 || (size_t)to % 16) abort();
    if (exists) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
static inline void copy_weights16(void* to, const void* from) { copy_fresh16(to, from); }
static inline void end_group() {}
template <int N>
static inline void await_copies() {}
static inline void arrive_at(u32* counter) { ((std::atomic<u32>*)counter)->fetch_add(1); }
static inline void await_count(const u32* counter, u32 count) {
    while (((const std::atomic<u32>*)counter)->load() < count) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));  // there may be more blocks than cores
        give_way();
    }
}
#endif
