// What loss.cu asks of the machine, on a CPU (tests/emulated_cuda/cuda.h).
#if KEPT
#define ROW static thread_local Pack row[PACKS]
#else
#define ROW const Pack* row = a.logits + (long long)blockIdx.x * PACKS
#endif
static inline void copy_async(Pack* kept, const Pack* at) { *kept = *at; }
static inline void wait_for_copies() {}
static inline void store_streaming(Gradients* at, const Gradients& p) { *at = p; }
