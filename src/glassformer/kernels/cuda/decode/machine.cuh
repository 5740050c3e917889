// Memory access and synchronisation of all kernels. Part 2; the tests replace it by an emulation on the CPU.

// Load 16 bytes of cached keys or values. Earlier kernels or other steps wrote them, so the load bypasses L1 (.cg).
__device__ inline Pack read16_fresh(const Stored* at) {
    Pack p;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at)
                 : "memory");
    return p;
}
// Barrier of the threads of a block that compute: all except the warp that fetches weights (decode.cu). Named barrier 1,
// because __syncthreads would include that warp.
__device__ inline void sync_compute_threads() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
