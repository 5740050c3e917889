// Instructions of the machine that C++ has no words for. Part 1 of every kernel of this folder; the tests replace it by an
// emulation on the CPU.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
struct alignas(16) Pack { u32 word[4]; };

// Programmatic dependent launch: a kernel starts while the one before it still runs. Everything before this call may read
// only what no kernel of the last two writes: weights, and what earlier kernels have finished. After it, all that the
// kernel before wrote is visible. Then the next kernel may start: what it reads early is two kernels away from this one.
__device__ inline void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// How weights use the L2 cache: a step reads each of them once, so they leave it before everything else does.
__device__ inline u64 evicted_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// 16 bytes of weights: read once, so they are not kept in L1. volatile: the loads stay before wait_for_previous_kernel.
__device__ inline Pack load_weights(const void* at) {
    Pack p;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at), "l"(evicted_first()));
    return p;
}
// What an earlier kernel or another block wrote, 16 bytes or a number: not from L1, which may be older.
__device__ inline Pack load_fresh16(const void* at) {
    Pack p;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at));
    return p;
}
template <typename Number>
__device__ inline Number load_fresh(const Number* at) { return __ldcg(at); }
// c (16 x 8, float32) += a (16 x 16) b (16 x 8), computed by a warp. With g = lane / 4 and t = lane % 4: a[0] holds row g and
// columns 2t, 2t + 1; a[1] row g + 8; a[2] and a[3] the same rows, columns 2t + 8, 2t + 9; b0 rows 2t, 2t + 1 and b1 rows
// 2t + 8, 2t + 9 of column g; c[0], c[1] row g and columns 2t, 2t + 1; c[2], c[3] row g + 8.
template <bool IS_BF16 = OPERAND_IS_BF16>
__device__ inline void multiply_add(float* c, const u32* a, u32 b0, u32 b1) {
#define MULTIPLY(kind)                                                                                                     \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "       \
        "{%0, %1, %2, %3};"                                                                                                \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (IS_BF16) MULTIPLY("bf16");
    else MULTIPLY("f16");
}
// Four matrices of 8 x 8 numbers of 16 bits in shared memory, transposed: lane i has the address of row i % 8 of matrix i / 8, and
// gets rows 2t, 2t + 1 of column g of each, as b0 and b1 above.
__device__ inline void load_transposed(u32* out, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
}
// Two float8 numbers (e4m3) in the low 16 bits become two float16 numbers.
__device__ inline u32 float8_to_half(u32 two) {
    u32 out;
    u16 low = (u16)two;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(low));
    return out;
}
__device__ inline u32 subtract_half(u32 a, u32 b) {
    u32 out;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
}
// The bytes of x and y (y first at 4) that `selector` names, four bits for each byte of the result.
__device__ inline u32 pick_bytes(u32 x, u32 y, u32 selector) { return __byte_perm(x, y, selector); }
__device__ inline u16 float_to_half(float f) {
    u16 out;
    asm("cvt.rn.satfinite.f16.f32 %0, %1;" : "=h"(out) : "f"(f));
    return out;
}
__device__ inline float half_to_float(u16 h) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(h));
    return out;
}

// Barrier of `count` warps of a block, by one of its 16 named barriers.
__device__ inline void sync_warps(int barrier, int count) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(32 * count) : "memory");
}

// Thread block clusters: the rank of this block, a barrier of all threads of the cluster, and a float in the shared memory
// of the block of another rank, at the address that `at` has in this one.
__device__ inline int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void sync_cluster(const void*) {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline float read_remote(const float* at, int rank) {
    float out;
    asm volatile("{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %1, %2;\nld.shared::cluster.f32 %0, [there];\n}"
                 : "=f"(out)
                 : "r"((u32)__cvta_generic_to_shared(at)), "r"(rank));
    return out;
}

// Copies of 16 bytes from global to shared memory that no register waits for, of weights or of what another kernel wrote. Each
// thread counts the groups of copies that it has ended: `await_copies<N>` waits until all but the last N have arrived. Other
// threads see them after a barrier. Without `exists`, zeros are written.
//
// blockIdx.y is 0, which the compiler does not know. Otherwise ptxas 13.0 writes some copies with a uniform register in the address
// (LDGSTS [R + UR]) that no instruction has set. One such kernel stopped on an H200 with an illegal instruction.
__device__ inline u32 copied_to(const void* to) { return (u32)__cvta_generic_to_shared(to) ^ blockIdx.y; }
__device__ inline void copy_fresh16(void* to, const void* from, bool exists = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(copied_to(to)), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}
__device__ inline void copy_weights16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2;"
                 ::"r"(copied_to(to)), "l"(from), "l"(evicted_first())
                 : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ inline void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ inline u8* dynamic_memory() {
    extern __shared__ __align__(128) u8 memory[];
    return memory;
}

// All blocks of a launch wait for each other by counting in global memory. One thread of a block calls these, between two
// barriers of the block: what the block wrote before `arrive_at` is visible to blocks that have left `await_count`. A thread that
// waits for copies of its own would wait for them here as well.
__device__ inline void arrive_at(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline void await_count(const u32* counter, u32 count) {
    u32 now;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while ((int)(now - count) < 0);
}
