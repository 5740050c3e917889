// What loss.cu asks of the machine, on a CPU (tests/emulated_cuda/cuda.h).
#if KEPT
#define ROW static thread_local Pack row[PACKS]
#else
#define ROW const Pack* row = a.logits + (long long)blockIdx.x * PACKS
#endif
static inline void ask(Pack* kept, const Pack* at) { *kept = *at; }
static inline void asked() {}
static inline void put(Made* at, const Made& p) { *at = p; }
