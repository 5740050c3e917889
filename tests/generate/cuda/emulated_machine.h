// In place of machine.cuh (tests/emulated_cuda/cuda.h).
static inline Pack read16(const Stored* at) {
    if ((size_t)at % 16) abort();  // as the machine would
    Pack p;
    memcpy(&p, at, 16);
    return p;
}
static inline Pack read16_fresh(const Stored* at) { return read16(at); }
template <typename T>
static inline T fresh(const T* at) { return *(const volatile T*)at; }
static inline void arrive(int* counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELEASE); }
static inline int arrived(const int* counter) {
    give_way();
    return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
static inline void await_former() {}
