// Primitives of decode.cu for thread block clusters (compute capability 9): mbarriers in shared memory that count bytes,
// copies and remote stores that complete on them, and 16-byte lines in global memory through which blocks of different
// clusters exchange results. Part 5; the tests replace it by an emulation on the CPU.

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// The ring buffer of weights: RING stages of STAGE bytes of dynamic shared memory.
__device__ inline unsigned char* ring_memory() {
    extern __shared__ __align__(128) unsigned char ring[];
    return ring;
}

// A phase of a barrier ends when `count` threads have arrived and all expected bytes have been written. Waiting threads
// distinguish consecutive phases by their parity.
__device__ inline void make_barrier(u64* barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ inline void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive_expecting(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
__device__ inline void await(u64* barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}
// Bulk copy of bytes from global memory to the shared memory of this block; completes on `barrier`.
__device__ inline void copy_in(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ inline int rank_in_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// Store a float at the address `to` in the shared memory of the block of that rank in the cluster; completes on the
// barrier of that block.
__device__ inline void send(float* to, float number, u64* barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .u32 there, arrived;\n"
        "mapa.shared::cluster.u32 there, %0, %3;\n"
        "mapa.shared::cluster.u32 arrived, %2, %3;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [arrived];\n"
        "}" ::"r"(shared_address(to)), "f"(number), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}
// Barrier of all threads of all blocks of a cluster. The fence makes initialised mbarriers visible to the other blocks.
__device__ inline void sync_cluster(const void*) {
    __syncwarp();
    asm volatile(
        "fence.mbarrier_init.release.cluster;\n"
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Three floats and a tag, written and read with one 16-byte access: a reader that sees the tag also sees the floats, so no
// fence or flag is needed.
struct alignas(16) Line {
    float number[3];
    u32 tag;
};
__device__ inline void publish_line(Line* at, float a, float b, float c, u32 tag) {
    u64 low = (u64)__float_as_uint(b) << 32 | __float_as_uint(a), high = (u64)tag << 32 | __float_as_uint(c);
    asm volatile("{\n.reg .b128 line;\nmov.b128 line, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], line;\n}" ::"l"(at),
                 "l"(low), "l"(high)
                 : "memory");
}
__device__ inline Line read_line(const Line* at) {
    u64 low, high;
    asm volatile("{\n.reg .b128 line;\nld.relaxed.gpu.global.b128 line, [%2];\nmov.b128 {%0, %1}, line;\n}"
                 : "=l"(low), "=l"(high)
                 : "l"(at)
                 : "memory");
    return {{__uint_as_float((u32)low), __uint_as_float((u32)(low >> 32)), __uint_as_float((u32)high)}, (u32)(high >> 32)};
}
