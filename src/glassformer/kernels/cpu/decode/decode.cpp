// One decoding step of a decoder-only Transformer in one call: one token per sequence in, logits per sequence out.
//
// All threads go through the layers together. With few tokens, each thread has its own copy of the residual stream of
// every token and computes some rows of each matrix; results are exchanged through one shared buffer and a barrier. The
// definition is glassformer.model; tests/kernels/cpu/decode compares the two.
#include "checksum.h"
#include "model.h"
#include "schedule.h"

using namespace glass;

namespace {

void rotate(const Model& m, float* x, int position) {
    const int half = m.rotated / 2;
    const float *c = m.cosines + (long)position * half, *s = m.sines + (long)position * half;
    for (int i = 0; i < half; i++) {
        int a = m.position == ROTARY_HALF ? i : 2 * i, b = m.position == ROTARY_HALF ? i + half : 2 * i + 1;
        float first = x[a], second = x[b];
        x[a] = first * c[i] - second * s[i];
        x[b] = second * c[i] + first * s[i];
    }
}

// out[0..16 N) = factor * sum over s of w[s] values[s][0..16 N); as much of `next` is prefetched into the L2 cache.
template <int N>
void weighted_sum(const float* w, const float* values, int pitch, int from, int end, float factor, float* out,
           const float* next = nullptr) {
    floats sums[N] = {};
    for (long s = from; s < end; s++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            sums[n] = multiply_add(sums[n], load(values + s * pitch + n * LANES), w[s]);
            if (next) __builtin_prefetch(next + s * pitch + n * LANES, 0, 2);
        }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) *(floats*)(out + n * LANES) = sums[n] * factor;
}

struct Step {
    static constexpr int SPREAD = 16;  // from this many entries on, each thread has the residual stream of some of them only
    enum { Q, K, V, OUT, UP, DOWN, PRODUCTS };
    const Model& m;
    Cache& cache;
    const Entry* entries;
    const int32_t* wanted;  // indices of the entries whose logits are computed
    int count, asked, threads;
    float* logits;
    bool split;  // true: each thread has the residual stream of its share of the entries; false: of all entries
    Barrier barrier;
    std::vector<std::atomic<int>> taken;  // number of chunks of each matmul that threads have taken, beyond the first chunk of each
    Scratch& scratch;
    const long model_pitch, qkv_pitch, mixed_pitch, hidden_pitch;
    float *qkv, *mixed, *first, *second, *hidden, *gates = nullptr, *stream = nullptr, *normed = nullptr;

    Step(const Model& m, Cache& cache, const Entry* entries, int count, const int32_t* wanted, int asked, int threads,
         float* logits, Scratch& scratch)
        : m(m), cache(cache), entries(entries), wanted(wanted), count(count), asked(asked), threads(threads),
          logits(logits), split(count >= SPREAD), taken(m.layers * PRODUCTS + 1), scratch(scratch),
          model_pitch(padded_stride(m.d_model)), qkv_pitch(padded_stride(width())), mixed_pitch(padded_stride(m.heads * m.d_value)),
          hidden_pitch(padded_stride(m.d_ff)) {
        barrier.n = threads;
        scratch.used = 0;
        qkv = scratch.need(scratch.qkv, count * qkv_pitch);
        mixed = scratch.need(scratch.mixed, count * mixed_pitch);
        first = scratch.need(scratch.first, count * model_pitch), second = scratch.need(scratch.second, count * model_pitch);
        hidden = scratch.need(scratch.hidden, count * hidden_pitch);
        if (m.gated) gates = scratch.need(scratch.gates, count * hidden_pitch);
        if (split) stream = scratch.need(scratch.stream, count * model_pitch);
        if (split) normed = scratch.need(scratch.normed, count * model_pitch);
        if (m.layers) {  // matrices with the same number of columns have the same kind
            const Layer& layer = m.layer[0];
            scratch.narrow.shape(layer.q_of, count, threads), scratch.mixes.shape(layer.out, count, threads);
            scratch.wide.shape(layer.down, count, threads);
        }
        scratch.head_input.shape(m.head, asked, threads);
    }
    int width() const { return m.heads * m.d_head + m.kv_heads * (m.d_head + m.d_value); }

    void matmul(int t, int product, const Matrix& w, const float* x, long pitch, const Vectors& v, float* y, long stride) {
        for_row_chunks(t, threads, taken[product], w, count, [&](int first, int last, int next_row) {
            multiply(w, first, last, x, pitch, v, y, stride, next_row);
        });
    }
    const Vectors& take(int t, Prepared& prepared, const float* x, long pitch) {
        return prepared.take(t, threads, x, pitch, barrier);
    }

    bool is_rotary() const { return m.position == ROTARY_HALF || m.position == ROTARY_PAIRS; }
    float* row_of(int i) { return qkv + i * qkv_pitch; }
    float* cache_of(float* cached, int layer, int row, int g, int wide) {
        return cached + (((long)layer * cache.sequences + row) * m.kv_heads + g) * cache.capacity * wide;
    }

    void store(int i, int g, int index) {  // write the key and value of entry i to the cache
        const Layer& layer = m.layer[index];
        const int dk = m.d_head, dv = m.d_value, position = entries[i].position;
        float *row = row_of(i), *k = row + m.heads * dk + g * dk;
        if (layer.k.weight) normalize(layer.k, k, dk, k);
        if (is_rotary()) rotate(m, k, position);
        std::memcpy(cache_of(cache.keys, index, entries[i].sequence, g, dk) + (long)position * dk, k, dk * sizeof(float));
        std::memcpy(cache_of(cache.values, index, entries[i].sequence, g, dv) + (long)position * dv,
                    row + (m.heads + m.kv_heads) * dk + g * dv, dv * sizeof(float));
    }

    void query(int i, int h, int index) {
        const Layer& layer = m.layer[index];
        float* q = row_of(i) + h * m.d_head;
        if (layer.q.weight) normalize(layer.q, q, m.d_head, q);
        if (is_rotary()) rotate(m, q, entries[i].position);
    }

    int first_visible(int position, int index) const {
        const int window = m.layer[index].window;
        return window && position + 1 > window ? position + 1 - window : 0;
    }

    const float* next_keys(int t, int i, int g, int index) {  // the keys that thread t reads after those of entry i and group g, for prefetching
        if (++g == m.kv_heads * (t + 1) / threads) g = m.kv_heads * t / threads, i++;
        return i < count ? cache_of(cache.keys, index, entries[i].sequence, g, m.d_head) : nullptr;
    }

    void attend(int t, int index) {  // few entries: the thread that stores a key is also the one that reads it, so no barrier is needed
        const int group = m.heads / m.kv_heads, dv = m.d_value;
        std::vector<float> weights(cache.capacity);
        for (int i = 0; i < count; i++)
            for (int g = m.kv_heads * t / threads; g < m.kv_heads * (t + 1) / threads; g++) {
                store(i, g, index);
                const float* next = next_keys(t, i, g, index);
                for (int h = g * group; h < (g + 1) * group; h++) {
                    query(i, h, index);
                    float* out = mixed + i * mixed_pitch + h * dv;
                    head(i, h, index, weights.data(), out, next);
                }
            }
    }

    void attend_many(int t, int index) {
        for (int i = share_of(t); i < share_of(t + 1); i++)
            for (int g = 0; g < m.kv_heads; g++) store(i, g, index);
        barrier.wait();
        std::vector<float> weights(cache.capacity + WIDE), keys, scores;
        for (int i = 0; i < count;) {  // a run: consecutive entries of one sequence
            int end = i + 1;
            while (end < count && entries[end].sequence == entries[i].sequence && entries[end].position == entries[end - 1].position + 1)
                end++;
            for (int h = t; h < m.heads; h += threads) {
                for (int j = i; j < end; j++) query(j, h, index);
                if (m.d_value % WIDE == 0 && end - i >= 4) run_of(i, end, h, index, keys, scores);
                else
                    for (int j = i; j < end; j++)
                        head(j, h, index, weights.data(), mixed + j * mixed_pitch + h * m.d_value);
            }
            i = end;
        }
    }

    // One head of a run: scores of a block of queries (keys as panels), their softmax, and the weighted sum of values, whose
    // rows already are a panel.
    void run_of(int first, int end, int h, int index, std::vector<float>& keys, std::vector<float>& scores) {
        constexpr int BLOCK = 28;
        const int g = h / (m.heads / m.kv_heads), dk = m.d_head, dv = m.d_value, row = entries[first].sequence;
        const int last = entries[end - 1].position + 1, begin = first_visible(entries[first].position, index) / WIDE * WIDE;
        const long pitch = padded_stride((last - begin + WIDE - 1) / WIDE * WIDE);
        const Matrix all{cache_of(cache.keys, index, row, g, dk), nullptr, nullptr, last, dk, 0, F32};
        const float* values = cache_of(cache.values, index, row, g, dv);
        keys.resize(pitch * dk + LANES), scores.resize(BLOCK * pitch + LANES);
        for (int s = begin; s < last; s += WIDE) fill_panel(all, s, 0, dk, &keys[(long)(s - begin) * dk]);
        for (int i = first; i < end; i += BLOCK) {
            const int n = std::min(BLOCK, end - i), most = entries[i + n - 1].position + 1;
            const int from = first_visible(entries[i].position, index) / WIDE * WIDE;
            float inverse[BLOCK];
            for (int s = from; s < most; s += WIDE)
                multiply_tiles(&keys[(long)(s - begin) * dk], WIDE, dk, row_of(i) + h * dk, qkv_pitch, n, &scores[s - begin],
                         pitch, WIDE, true, nullptr);
            for (int j = 0; j < n; j++) {
                const int position = entries[i + j].position, seen = first_visible(position, index);
                float* w = &scores[j * pitch] - begin;
                inverse[j] = 1 / exponentiate(w, seen, position + 1, h);
                for (int s = from; s < seen; s++) w[s] = 0;
                for (int s = position + 1; s < most; s++) w[s] = 0;
            }
            float* out = mixed + i * mixed_pitch + h * dv;
            for (int c = 0; c < dv; c += WIDE)
                multiply_tiles(values + (long)from * dv + c, dv, most - from, &scores[from - begin], pitch, n, out + c,
                         mixed_pitch, WIDE, true, nullptr);
            for (int j = 0; j < n; j++)
                for (int c = 0; c < dv; c++) out[j * mixed_pitch + c] *= inverse[j];
        }
    }

    // scores of keys from..count become exp(scale * score - slope * distance - largest); returns their sum
    float exponentiate(float* w, int from, int count, int h) {
        if (m.position == ALIBI)
            for (int s = from; s < count; s++) w[s] = w[s] * m.scale - m.slopes[h] * (count - 1 - s);
        return softmax_numerators(w + from, count - from, m.position == ALIBI ? 1.0f : m.scale);
    }

    // One head of one query. Values are prefetched while keys are read, and the `next` keys while values are read.
    void head(int i, int h, int index, float* w, float* out, const float* next = nullptr) {
        const int g = h / (m.heads / m.kv_heads), dk = m.d_head, dv = m.d_value, row = entries[i].sequence;
        const float *keys = cache_of(cache.keys, index, row, g, dk), *values = cache_of(cache.values, index, row, g, dv);
        const float* q = row_of(i) + h * dk;
        const int end = entries[i].position + 1, from = first_visible(entries[i].position, index);
        for (long s = from; s < end; s++) {
            for (int c = 0; c < dv; c += LANES) __builtin_prefetch(values + s * dv + c, 0, 2);
            w[s] = dot(q, keys + s * dk, dk);
        }
        const float sum = exponentiate(w, from, end, h);
        int c = 0;
        for (; c + 4 * LANES <= dv; c += 4 * LANES)
            weighted_sum<4>(w, values + c, dv, from, end, 1 / sum, out + c, next ? next + c : nullptr);
        for (; c + LANES <= dv; c += LANES) weighted_sum<1>(w, values + c, dv, from, end, 1 / sum, out + c);
        for (; c < dv; c++) {
            out[c] = 0;
            for (int s = from; s < end; s++) out[c] += w[s] * values[(long)s * dv + c];
            out[c] /= sum;
        }
    }

    // the entries whose residual stream thread t has
    int share_of(int t) const { return (int)((long)count * t / threads); }
    int begin(int t) const { return split ? share_of(t) : 0; }
    int end(int t) const { return split ? share_of(t + 1) : count; }
    void sync_if_split() { if (split) barrier.wait(); }

    void add(int t, float* x, const float* from) {
        for (int b = begin(t); b < end(t); b++)
            for (long i = b * model_pitch; i < b * model_pitch + m.d_model; i++) x[i] += from[i];
    }

    void norm_rows(int t, const Norm& norm, const float* x, float* y) {
        for (int b = begin(t); b < end(t); b++) normalize(norm, x + b * model_pitch, m.d_model, y + b * model_pitch);
    }

    void project(int t, int l, const float* in, const Vectors& v) {  // queries, keys and values, one after the other in one row of the buffer
        const Layer& layer = m.layer[l];
        float *k = qkv + m.heads * m.d_head, *value = k + m.kv_heads * m.d_head;
        matmul(t, l * PRODUCTS + Q, layer.q_of, in, model_pitch, v, qkv, qkv_pitch);
        matmul(t, l * PRODUCTS + K, layer.k_of, in, model_pitch, v, k, qkv_pitch);
        matmul(t, l * PRODUCTS + V, layer.v_of, in, model_pitch, v, value, qkv_pitch);
    }

    void feed(int t, int l, const float* in, const Vectors& v) {  // up projection, gate and activation
        const Layer& layer = m.layer[l];
        for_row_chunks(t, threads, taken[l * PRODUCTS + UP], layer.up, count, [&](int a, int z, int next_row) {
            multiply(layer.up, a, z, in, model_pitch, v, hidden, hidden_pitch, next_row);
            if (m.gated) multiply(layer.gate, a, z, in, model_pitch, v, gates, hidden_pitch, next_row);
            for (int b = 0; b < count; b++) {
                float *row = hidden + b * hidden_pitch, *gate = m.gated ? gates + b * hidden_pitch : row;
                activate(m.activation, gate + a, z - a);
                if (m.gated)
                    for (int i = a; i < z; i++) row[i] *= gate[i];
            }
        });
    }

    void down(int t, int l) {
        const Vectors& v = take(t, scratch.wide, hidden, hidden_pitch);
        matmul(t, l * PRODUCTS + DOWN, m.layer[l].down, hidden, hidden_pitch, v, second, model_pitch);
    }

    void embed(int t, float* x) {
        const int D = m.d_model;
        for (int b = begin(t); b < end(t); b++)
            for (int i = 0; i < D; i++)
                x[b * model_pitch + i] = m.tokens[(long)entries[b].token * D + i] * m.embed_scale +
                                     (m.position == TABLE ? m.position_table[(long)entries[b].position * D + i] : 0.0f);
        if (m.embedded.weight) norm_rows(t, m.embedded, x, x);
    }

    void block(int t, int l, float* x, float* normed) {
        const Layer& layer = m.layer[l];
        const bool post = m.placement == POST, has_feed = m.d_ff > 0;
        float* in = post ? x : normed;
        if (!post) norm_rows(t, layer.attention, x, normed);
        sync_if_split();
        const Vectors& v = take(t, scratch.narrow, in, model_pitch);
        project(t, l, in, v);
        if (m.placement == PARALLEL && has_feed) feed(t, l, in, v);
        barrier.wait();
        split ? attend_many(t, l) : attend(t, l);
        if (m.placement == PARALLEL && has_feed) down(t, l);
        barrier.wait();
        const Vectors& mix = take(t, scratch.mixes, mixed, mixed_pitch);
        matmul(t, l * PRODUCTS + OUT, layer.out, mixed, mixed_pitch, mix, first, model_pitch);
        barrier.wait();
        add(t, x, first);
        if (m.placement == PARALLEL && has_feed) add(t, x, second);
        if (post) norm_rows(t, layer.attention, x, x);
        if (m.placement == PARALLEL || !has_feed) return;
        if (!post) norm_rows(t, layer.feedforward, x, normed);
        sync_if_split();
        feed(t, l, in, take(t, scratch.narrow, in, model_pitch));
        barrier.wait();
        down(t, l);
        barrier.wait();
        add(t, x, second);
        if (post) norm_rows(t, layer.feedforward, x, x);
    }

    void run(int t) {
        const long D = m.d_model;
        std::vector<float> own((split ? 0 : count * model_pitch * 2) + LANES), head_input(asked * D + LANES);
        float *x = split ? stream : cache_aligned(own.data()), *normed = split ? this->normed : x + count * model_pitch;
        float* last = cache_aligned(head_input.data());
        embed(t, x);
        for (int l = 0; l < m.layers; l++) block(t, l, x, normed);
        if (!asked) return;
        sync_if_split();
        for (int i = 0; i < asked; i++) {
            float* one = last + i * D;
            std::memcpy(one, x + wanted[i] * model_pitch, D * sizeof(float));
            if (m.last.weight) normalize(m.last, one, D, one);
            for (long c = 0; c < D; c++) one[c] *= m.head_scale;
        }
        const Vectors& v = take(t, scratch.head_input, last, D);
        for_row_chunks(t, threads, taken[m.layers * PRODUCTS], m.head, asked, [&](int first, int end, int next_row) {
            multiply(m.head, first, end, last, D, v, logits, m.vocabulary, next_row);
        });
        barrier.wait();
    }
};

}  // namespace

extern "C" {

// Read `count` tokens and write the logits (asked, vocabulary) of the wanted entries.
void glass_step(const Model* model, Cache* cache, const Entry* entries, int32_t count, const int32_t* wanted,
                int32_t asked, int32_t threads, float* logits) {
    std::lock_guard<std::mutex> lock(pool().exclusive);
    Scratch& scratch = Scratch::kept();
    Step step(*model, *cache, entries, count, wanted, asked, threads, logits, scratch);
    pool().run(threads, [&step](int t) { step.run(t); });
    if (scratch.used > Scratch::MOST) scratch = Scratch();
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
    std::atomic<int> taken{0};
    pool().run(threads, [&](int t) {
        const Vectors& v = prepared.take(t, threads, x, matrix->columns, barrier);
        for_row_chunks(t, threads, taken, *matrix, batch, [&](int first, int last, int next_row) {
            multiply(*matrix, first, last, x, matrix->columns, v, y, matrix->rows, next_row);
        });
    });
}

// A checksum of the memory (checksum.h).
uint64_t glass_checksum(const MemoryRange* pieces, int32_t count, int32_t threads) {
    std::lock_guard<std::mutex> lock(pool().exclusive);
    return checksum_all(pieces, count, threads);
}

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
