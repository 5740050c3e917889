// The threads that compute one step together.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace glass {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// One round of waiting. A thread that is not running cannot arrive: the processor is yielded if the wait is long, which
// it is only where other programs compete for the cores (2,000 rounds are some 40 microseconds).
inline void relax(long spins) { spins < 2000 ? pause() : std::this_thread::yield(); }

// The last of n threads to arrive starts a new round, which releases the others. Its release store and their acquire loads
// make everything visible that any thread wrote before the barrier.
struct Barrier {
    int n;
    std::atomic<int> waiting{0}, round{0};
    void wait() {
        if (n == 1) return;
        int now = round.load(std::memory_order_relaxed);
        if (waiting.fetch_add(1, std::memory_order_acq_rel) + 1 == n) {
            waiting.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (long spins = 0; round.load(std::memory_order_acquire) == now; spins++) relax(spins);
    }
};

// Threads that wait for work: they spin for a moment after each call, because a decoder calls again at once, then sleep.
//
// `run` writes work, asked and done, then increments `round` (release); a worker that sees the new round (acquire) sees them.
// Every worker increments `done` once per round, those that were not asked included, so that none can still be in an old
// round when `run` returns. `round` changes under the mutex, or a worker could go to sleep just after the notification.
class Pool {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> workers;
    std::atomic<long> round{0}, done{0};
    std::atomic<int> asked{0};
    const std::function<void(int)>* work = nullptr;

    void serve(int t, long seen) {
        for (;;) {
            for (long spins = 0; round.load(std::memory_order_acquire) == seen && spins < 20000; spins++) relax(spins);
            if (round.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return round.load() != seen; });
            }
            seen++;
            if (t < asked) (*work)(t);
            done.fetch_add(1, std::memory_order_release);
        }
    }

public:
    // one call at a time: a second caller waits for the first
    std::mutex exclusive;
    void run(int threads, const std::function<void(int)>& body) {
        while ((int)workers.size() < threads - 1) {
            int t = (int)workers.size() + 1;
            workers.emplace_back([this, t, seen = round.load()] { serve(t, seen); });
            workers.back().detach();
        }
        work = &body, asked = threads, done = 0;
        {
            std::lock_guard<std::mutex> lock(mutex);
            round.fetch_add(1, std::memory_order_release);
        }
        wake.notify_all();
        body(0);
        for (long spins = 0; done.load(std::memory_order_acquire) < (long)workers.size(); spins++) relax(spins);
    }
};

inline Pool& pool() {  // never destroyed: its threads outlive the interpreter's end
    static Pool* made = new Pool;
    return *made;
}

}  // namespace glass
