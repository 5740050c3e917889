// CUDA on a CPU, for tests: a block is a thread of the system, its threads are fibers that take turns.
#pragma once
#undef _FORTIFY_SOURCE  // which takes a jump to another stack for a fault
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
using std::max;
using std::min;

struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim, blockDim;

constexpr int STACK = 1 << 17;
struct Fiber {
    ucontext_t begin;  // once begun, it is left and resumed by jumps: changing contexts is a call of the system
    jmp_buf left;
    std::unique_ptr<char[]> stack;
    bool begun = false, done = false;
};
static thread_local std::vector<Fiber>* fibers;
static thread_local jmp_buf scheduler;
static thread_local int barrier_count, barrier_turn;
static thread_local std::vector<int> warp_count, warp_turn;
static thread_local std::vector<unsigned> slots;

static void give_way() {
    int me = threadIdx.x;
    if (!_setjmp((*fibers)[me].left)) _longjmp(scheduler, 1);
    threadIdx.x = me;
}
static void resume(Fiber& fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.left, 1);
    fiber.begun = true;
    setcontext(&fiber.begin);
}
static void wait_for(int& count, int& turn, int all) {
    int mine = turn;
    if (++count == all) {
        count = 0;
        turn++;
    }
    while (turn == mine) give_way();
}
static inline void __syncthreads() { wait_for(barrier_count, barrier_turn, blockDim.x); }
template <typename T>
static inline T __shfl_xor_sync(unsigned, T value, int step) {
    int warp = threadIdx.x / 32;
    memcpy(&slots[threadIdx.x], &value, 4);
    wait_for(warp_count[warp], warp_turn[warp], 32);
    T other;
    memcpy(&other, &slots[threadIdx.x ^ step], 4);
    wait_for(warp_count[warp], warp_turn[warp], 32);
    return other;
}
static inline void __syncwarp() { wait_for(warp_count[threadIdx.x / 32], warp_turn[threadIdx.x / 32], 32); }
static inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static inline float __int_as_float(int u) { float f; memcpy(&f, &u, 4); return f; }
static inline int __float_as_int(float f) { int u; memcpy(&u, &f, 4); return u; }
static inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

// Which warps of a block sleep while others go on: none, or, where EMULATED_ORDER is a number, that one most of the time
// and others now and then. What is right only if all keep step fails then.
struct Sleep {
    int lazy = -1;
    unsigned state;
    std::vector<int> rounds;
    Sleep(int warps) : rounds(warps, 0) {
        const char* order = getenv("EMULATED_ORDER");
        if (order) lazy = atoi(order) % warps, state = 2654435761u * (1 + lazy) + 40503u * blockIdx.x;
    }
    bool takes(int warp) {
        if (lazy < 0) return false;
        if (rounds[warp] > 0) return rounds[warp]-- > 0;
        state = state * 1664525u + 1013904223u;
        if (warp == lazy) rounds[warp] = state >> 24;
        else if (state >> 26 == 0) rounds[warp] = 1 << (state >> 16) % 11;
        return false;
    }
};

// Runs `body` once for each thread of each block.
static inline void launch(void (*body)(), int blocks, int threads) {
    gridDim.x = blocks;
    blockDim.x = threads;
    std::vector<std::thread> running;
    for (int block = 0; block < blocks; block++)
        running.emplace_back([=] {
            std::vector<Fiber> mine(threads);
            fibers = &mine;
            blockIdx.x = block;
            barrier_count = barrier_turn = 0;
            warp_count.assign(threads / 32, 0);
            warp_turn.assign(threads / 32, 0);
            slots.assign(threads, 0);
            for (auto& fiber : mine) {
                fiber.stack.reset(new char[STACK]);
                getcontext(&fiber.begin);
                fiber.begin.uc_stack.ss_sp = fiber.stack.get();
                fiber.begin.uc_stack.ss_size = STACK;
                fiber.begin.uc_link = nullptr;  // it gives way when it is done, and is not resumed
                makecontext(&fiber.begin, body, 0);
            }
            Sleep sleep(threads / 32);
            for (bool left = true; left;) {
                left = false;
                bool sleeps = false;
                for (int i = 0; i < threads; i++) {
                    if (i % 32 == 0) sleeps = sleep.takes(i / 32);
                    if (mine[i].done) continue;
                    left = true;
                    if (sleeps) continue;
                    threadIdx.x = i;
                    resume(mine[i]);
                }
                std::this_thread::yield();  // there are more blocks than cores, and they wait for each other
            }
        });
    for (auto& thread : running) thread.join();
}
