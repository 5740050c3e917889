// The functions that Python calls: one pass of some tokens, one step of all sequences, one matmul.
#include "checksum.h"
#include "step.h"

using namespace glass;

namespace {

// Run a pass by all threads; `before` sets what it reads and writes.
template <class F>
void pass(const Model& model, Cache& cache, const Entry* entries, int count, int threads, F before) {
    std::lock_guard<std::mutex> lock(pool().exclusive);
    Scratch& scratch = Scratch::kept();
    Step step(model, cache, entries, count, threads, scratch);
    before(step);
    pool().run(threads, [&step](int t) { step.run(t); });
    if (scratch.used + scratch.mixture.bytes() > Scratch::MOST) scratch = Scratch();
}

}  // namespace

extern "C" {

// Read `count` tokens and write the logits (asked, vocabulary) of the wanted entries.
void glass_step(const Model* model, Cache* cache, const Entry* entries, int32_t count, const int32_t* wanted,
                int32_t asked, int32_t threads, float* logits) {
    pass(*model, *cache, entries, count, threads, [=](Step& step) { step.ask(wanted, asked, logits); });
}

// Whole sequences through an encoder: embeddings (count, D) in, the last hidden states (count, D) out.
void glass_encode(const Model* model, const Entry* entries, int32_t count, const float* given, int32_t threads, float* states) {
    Cache none{};
    pass(*model, none, entries, count, threads, [=](Step& step) { step.given = given, step.states = states; });
}

// Read one more token per sequence, at the position given by its length, and write logits (sequences, vocabulary). Returns
// 1, without any change, if a sequence is full.
int32_t glass_next(const Model* model, Cache* cache, const int64_t* tokens, int32_t* lengths, int32_t threads,
                   float* logits) {
    const int rows = cache->sequences;
    std::vector<Entry> entries(rows);
    std::vector<int32_t> wanted(rows);
    for (int i = 0; i < rows; i++) {
        if (lengths[i] >= cache->capacity) return 1;
        entries[i] = {(int32_t)tokens[i], i, lengths[i]}, wanted[i] = i;
    }
    glass_step(model, cache, entries.data(), rows, wanted.data(), rows, threads, logits);
    for (int i = 0; i < rows; i++) lengths[i]++;
    return 0;
}

// y (batch, rows) = matrix x (batch, columns), for benchmarks and tests.
void glass_multiply(const Matrix* matrix, const float* x, int32_t batch, int32_t threads, float* y) {
    std::lock_guard<std::mutex> lock(pool().exclusive);
    Barrier barrier;
    barrier.n = threads;
    Prepared prepared;
    prepared.shape(*matrix, batch, threads);
    std::vector<std::atomic<int>> taken(threads);
    pool().run(threads, [&](int t) {
        const Vectors& v = prepared.take(t, threads, x, matrix->columns, barrier);
        for_chunks(t, threads, taken.data(), *matrix, v, [&](const Chunk& chunk) {
            multiply(*matrix, chunk, x, matrix->columns, v, y, matrix->rows);
        });
    });
}

// A checksum of the memory (checksum.h).
uint64_t glass_checksum(const MemoryRange* pieces, int32_t count, int32_t threads) {
    std::lock_guard<std::mutex> lock(pool().exclusive);
    return checksum_all(pieces, count, threads);
}

int32_t glass_has_halves() { return HAS_HALVES; }  // whether a cache may be float16

int64_t glass_sizes(int32_t what) {  // library.load compares these with the sizes of the Python structures
    switch (what) {
        case 0: return sizeof(Matrix);
        case 1: return sizeof(Norm);
        case 2: return sizeof(Layer);
        case 3: return sizeof(Model);
        default: return sizeof(Cache);
    }
}
}
