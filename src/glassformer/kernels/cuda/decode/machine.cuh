// What the kernels ask of the machine. Second of the parts; tests have another for CPUs.

// Kept keys: written by this kernel or a former one, read from where all of them write.
__device__ inline Pack read16_fresh(const Stored* at) {
    Pack p;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at)
                 : "memory");
    return p;
}
// All threads that compute: those of a block but for the warp that fetches weights (decode.cu). A warp arrives as one.
__device__ inline void meet() {
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
