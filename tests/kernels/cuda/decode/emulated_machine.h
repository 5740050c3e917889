// In place of machine.cuh (tests/emulated_cuda/cuda.h).
static inline Pack read16_fresh(const Stored* at) {
    if ((size_t)at % 16) abort();  // as the machine would
    Pack p;
    memcpy(&p, at, 16);
    return p;
}
static thread_local int meeting, meetings;
static inline void sync_compute_threads() { wait_for(meeting, meetings, THREADS); }
