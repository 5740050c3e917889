// A checksum of memory that changes with any change of it, computed at memory bandwidth.
//
// Lanes of 64 bits, eight registers of them, take the words in turn: lane = mix((lane ^ word) * ODD). Each step is a bijection
// of the lane for a given word and of the word for a given lane, so one changed word always changes the checksum. Several
// changes at once, such as two swapped words, leave it the same with a probability of 2^-64.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include "../vectors.h"
#include "pool.h"

namespace glass {

struct MemoryRange {  // a range of memory
    const uint8_t* at;
    int64_t bytes;
};

typedef uint64_t vw __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
constexpr uint64_t ODD = 0x9e3779b97f4a7c15u;
constexpr long UNIT = 1 << 20, VECTOR = sizeof(vw), ROUND = 8 * VECTOR;  // bytes of a unit of work, of a vector, of eight vectors

template <class V> inline V mixed(V state, V word) {
    state = (state ^ word) * ODD;
    return state ^ (state >> 32);
}

inline uint64_t checksum_of(const uint8_t* at, long bytes) {
    vw lanes[8];
    for (int i = 0; i < 8 * LANES / 2; i++) lanes[i / (LANES / 2)][i % (LANES / 2)] = i;
    auto take = [&](const uint8_t* from) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) lanes[i] = mixed(lanes[i], *(const vw*)(from + i * VECTOR));
    };
    long done = 0;
    for (; done + ROUND <= bytes; done += ROUND) take(at + done);
    uint8_t rest[ROUND] = {};
    std::memcpy(rest, at + done, bytes - done);
    take(rest);
    uint64_t sum = bytes;
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < LANES / 2; k++) sum = mixed<uint64_t>(sum, lanes[i][k]);
    return sum;
}

// The combined checksum of all ranges, the same for any number of threads.
inline uint64_t checksum_all(const MemoryRange* ranges, int count, int threads) {
    std::vector<MemoryRange> units;
    for (int i = 0; i < count; i++)
        for (long from = 0; from < ranges[i].bytes; from += UNIT)
            units.push_back({ranges[i].at + from, std::min(UNIT, ranges[i].bytes - from)});
    std::vector<uint64_t> sums(units.size());
    std::atomic<size_t> next{0};
    pool().run(threads, [&](int) {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < sums.size();)
            sums[i] = checksum_of(units[i].at, units[i].bytes);
    });
    uint64_t sum = count;
    for (uint64_t one : sums) sum = mixed(sum, one);
    return sum;
}

}  // namespace glass
