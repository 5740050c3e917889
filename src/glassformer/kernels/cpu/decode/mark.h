// A checksum of memory that changes with any change of it, computed at memory bandwidth.
//
// 8 x 8 lanes of 64 bits take the words in turn: lane = mix((lane ^ word) * ODD). Each step is a bijection of the lane for a
// given word and of the word for a given lane, so one changed word always changes the checksum. Several changes at once,
// such as two swapped words, leave it the same with a probability of 2^-64.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include "pool.h"

namespace glass {

struct Piece {  // a range of memory
    const uint8_t* at;
    int64_t bytes;
};

typedef uint64_t vw __attribute__((vector_size(64), aligned(1), may_alias));
constexpr uint64_t ODD = 0x9e3779b97f4a7c15u;
constexpr long PORTION = 1 << 20, LINE = 64, TURN = 8 * LINE;  // bytes per thread and turn, per vector, per eight vectors

template <class V> inline V mixed(V state, V word) {
    state = (state ^ word) * ODD;
    return state ^ (state >> 32);
}

inline uint64_t mark_of(const uint8_t* at, long bytes) {
    vw lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = vw{0, 1, 2, 3, 4, 5, 6, 7} + 8 * i;
    auto take = [&](const uint8_t* from) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) lanes[i] = mixed(lanes[i], *(const vw*)(from + i * LINE));
    };
    long done = 0;
    for (; done + TURN <= bytes; done += TURN) take(at + done);
    uint8_t rest[TURN] = {};
    std::memcpy(rest, at + done, bytes - done);
    take(rest);
    uint64_t mark = bytes;
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) mark = mixed<uint64_t>(mark, lanes[i][k]);
    return mark;
}

// The combined checksum of all pieces, the same for any number of threads.
inline uint64_t mark_of_all(const Piece* pieces, int count, int threads) {
    std::vector<Piece> portions;
    for (int i = 0; i < count; i++)
        for (long from = 0; from < pieces[i].bytes; from += PORTION)
            portions.push_back({pieces[i].at + from, std::min(PORTION, pieces[i].bytes - from)});
    std::vector<uint64_t> marks(portions.size());
    std::atomic<size_t> next{0};
    pool().run(threads, [&](int) {
        for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < marks.size();)
            marks[i] = mark_of(portions[i].at, portions[i].bytes);
    });
    uint64_t mark = count;
    for (uint64_t one : marks) mark = mixed(mark, one);
    return mark;
}

}  // namespace glass
