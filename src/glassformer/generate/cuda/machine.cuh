// What the kernel asks of the machine. Second of the parts; tests have another for CPUs.

// Weights are read once and never change; what others write is read from where all of them write.
__device__ inline Pack read16(const Stored* at) {
    Pack p;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at));  // volatile: before the barrier, where it stands
    return p;
}
__device__ inline Pack read16_fresh(const Stored* at) {
    Pack p;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])
                 : "l"(at)
                 : "memory");
    return p;
}
template <typename T>
__device__ inline T fresh(const T* at) { return __ldcg(at); }
// An arrival makes known what its block wrote before; who sees all arrivals sees all of it.
__device__ inline void arrive(int* counter) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ inline int arrived(const int* counter) {
    int seen;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}
// Until what was launched before is done, where this kernel was allowed to start before that.
__device__ inline void await_former() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
