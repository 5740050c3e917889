// Primitives of kernels for Hopper GPUs: mbarriers in shared memory, TMA copies (the tensor memory accelerator), and wgmma
// (matmuls of a warp group on the tensor cores). Shared memory is addressed by 32-bit addresses.
//
// The text of floats.cuh precedes this one; tests/kernels/cuda/training/emulated_hopper.h implements the same on a CPU.

typedef unsigned long long u64;
typedef unsigned short u16;

struct alignas(64) Map { u64 word[16]; };  // CUtensorMap: the description of a matrix for TMA

#define BOX (64 * 128)  // bytes of 64 rows of 64 numbers

#ifdef __CUDACC__
#define DYNAMIC_SHARED(bytes) extern __shared__ __align__(1024) unsigned char memory[]  // dynamic, sized by the launch
__device__ inline u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ inline void init_barrier(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals));
}
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive_expecting(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ inline void arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ inline bool try_wait(u32 at, u32 round) {
    u32 over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(over)
                 : "r"(at), "r"(round & 1)
                 : "memory");
    return over;
}
__device__ inline void await(u32 at, u32 round) {
    while (!try_wait(at, round)) {}
}
__device__ inline void tma_load(u32 to, const Map* from, int column, int row, u32 filled) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"((u64)from), "r"(column), "r"(row), "r"(filled)
        : "memory");
}
__device__ inline void bulk_load(u32 to, const void* from, u32 bytes, u32 filled) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"((u64)from), "r"(bytes), "r"(filled)
                 : "memory");
}
__device__ inline void tma_store(const Map* to, u32 from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"((u64)to),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
}
__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LATER> __device__ inline void wait_until_stores_have_read() {  // wait until all but the last LATER stores have read
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LATER) : "memory");
}
__device__ inline void wait_for_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ inline float2 load_shared_pair(u32 at) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(at));
    return two;
}
// Store 16 rows of 16 numbers, in the fragment layout of a warp, to columns 16 `step` and following, in boxes of 64 columns
// and `high` bytes each. `at` is the first row in the first box. TMA's 128-byte swizzle puts the 16 bytes with index u of
// row r at index u ^ (r % 8).
__device__ inline void store_fragment(u32 at, u32 high, int step, const u32* words) {
    const int lane = threadIdx.x & 31, row = lane & 15, unit = 2 * step + (lane >> 4);
    const u32 mine = at + (unit >> 3) * high + row * 128 + (((unit & 7) ^ (row & 7)) << 4);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mine), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ inline void reduce_add(float4* at, float4 x) {
    asm volatile("red.global.v4.f32.add [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
}
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int COUNT> __device__ inline void sync_threads(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}
__device__ inline bool elect_one() {  // true in one lane; the compiler knows that it is one
    u32 it;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(it));
    return it;
}
#define FEWER_REGISTERS(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))
#define MORE_REGISTERS(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
}
template <int N> __device__ inline void wgmma_result_fence(float (&d)[N]) {  // a compiler barrier: no read of d moves before it
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// The wgmma descriptor of a matrix in shared memory: rows of 128 bytes with 128-byte swizzle, groups of eight rows at a
// stride of 1024 bytes. The part that varies fits one word; 16 bytes further on adds 1 to it.
__device__ inline u32 descriptor_word(u32 at) { return (at & 0x3ffff) >> 4 | 1 << 16; }
__device__ inline u64 descriptor(u32 descriptor_word) { return 0x4000004000000000ull | descriptor_word; }
__device__ inline int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }  // broadcast from lane 0; the compiler knows that it is uniform in a warp
#define D4(how, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define D16(how, i) D4(how, i), D4(how, i + 4), D4(how, i + 8), D4(how, i + 12)
#define NAMES_32                                                                                                       \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"  \
    "%30,%31"
#define NAMES_64                                                                                                       \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"   \
             "%57,%58,%59,%60,%61,%62,%63"
#define WGMMA(shape, names, rest) "wgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 " names "}, " rest
#define IF(number, text) "{\n.reg .pred p;\nsetp.ne.b32 p, " number ", 0;\n" text "\n}"
// d = or += (64 x 16)(128 x 16)^T, both in shared memory. A thread has 64 of the 64 x 128 numbers of d.
__device__ inline void multiply(float* d, u32 left, u32 right, bool grows) {
    asm volatile(IF("%66", WGMMA("m64n128k16", NAMES_64, "%64, %65, p, 1, 1, 0, 0;"))
                 : D16("+f", 0), D16("+f", 16), D16("+f", 32), D16("+f", 48)
                 : "l"(descriptor(left)), "l"(descriptor(right)), "r"((int)grows));
}
// d = the same, without reading d.
__device__ inline void multiply(float* d, u32 left, u32 right) {
    asm volatile(WGMMA("m64n128k16", NAMES_64, "%64, %65, 0, 1, 1, 0, 0;")
                 : D16("=f", 0), D16("=f", 16), D16("=f", 32), D16("=f", 48)
                 : "l"(descriptor(left)), "l"(descriptor(right)));
}
// d = or += (64 x 16, in registers)(16 x 64, in shared memory). A thread has 32 of the 64 x 64 numbers of d.
__device__ inline void multiply_registers(float* d, const u32* left, u32 right, bool grows) {
    asm volatile(IF("%37", WGMMA("m64n64k16", NAMES_32, "{%32, %33, %34, %35}, %36, p, 1, 1, 1;"))
                 : D16("+f", 0), D16("+f", 16)
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(descriptor(right)), "r"((int)grows));
}
// d = or += (16 x 64)^T (16 x 64), both in shared memory.
__device__ inline void multiply_transposed(float* d, u32 left, u32 right, bool grows) {
    asm volatile(IF("%34", WGMMA("m64n64k16", NAMES_32, "%32, %33, p, 1, 1, 1, 1;"))
                 : D16("+f", 0), D16("+f", 16)
                 : "l"(descriptor(left)), "l"(descriptor(right)), "r"((int)grows));
}
__device__ inline void multiply_transposed(float* d, u32 left, u32 right) {
    asm volatile(WGMMA("m64n64k16", NAMES_32, "%32, %33, 0, 1, 1, 1, 1;")
                 : D16("=f", 0), D16("=f", 16)
                 : "l"(descriptor(left)), "l"(descriptor(right)));
}
#else
#include "emulated_hopper.h"
#endif
