// A pass of some tokens through all layers of a decoder or an encoder.
//
// All threads go through the layers together. With few tokens, each thread has its own copy of the residual stream of
// every token and computes some rows of each matrix; results are exchanged through one shared buffer and a barrier. With
// many tokens, and in an encoder, each thread has the residual stream of its share of the tokens (`split`). The definition is
// glassformer.model; tests/kernels/cpu/decode compares the two.
//
// A block is a sequence of phases with a barrier after each. What a thread writes in a phase, no other reads before the barrier:
//   norm       the norm of the residual stream: of every token in a copy of its own, or of its share (then a barrier)
//   convert    the input of a matmul in the form of its matrix: a copy of its own, or its tiles of a shared one (then a barrier)
//   Q, K, V    chunks of rows of the three matrices: columns of qkv, of all tokens
//   keys       norm, rotation, and copy to the cache: of its key/value heads, or of its share of the tokens
//   heads      attention of its query heads over all keys: columns of mixed
//   out        chunks of rows of the output projection: columns of first
//   residual   adds first to its copy, or to its share; no barrier, unless the next phase reads other shares (enter)
// then the same for cross-attention and the feed-forward (columns of hidden, then of second). A parallel block adds first and
// second at its end. A mixture of experts has other phases in place of a feed-forward's (experts.h).
#pragma once
#include "attention.h"
#include "experts.h"

namespace glass {

// The scratch buffers of a step. They are reused by the next: new memory costs a prompt of hundreds of tokens 5 %.
struct Scratch {
    static constexpr long MOST = 256 << 20;  // bytes that are kept
    Rows qkv, mixed, first, second, hidden, gates, stream, normed, low, queries;
    Prepared narrow, mixes, head_input, router, lows;  // residual stream, output of attention, input of the head, routers, latent queries
    std::vector<Prepared> wide;                  // hidden layers, by their width
    Mixture mixture;
    long used = 0;

    float* need(Rows& rows, long n) {
        rows.need(n), used += rows.held.size() * sizeof(float);
        return rows.at;
    }
    Prepared& wide_of(const Matrix& down) {
        for (Prepared& one : wide)
            if (one.columns == down.columns) return one;
        return wide.emplace_back();
    }
    static Scratch& kept() {  // guarded by the lock of the pool
        static Scratch* made = new Scratch;
        return *made;
    }
};

struct Step {
    static constexpr int SPREAD = 16;  // from this many entries on, each thread has the residual stream of some of them only
    enum { Q, K, V, Q_DOWN, OUT, CROSS_Q, CROSS_OUT, UP, DOWN, ROUTER, GATHER, CONVERT, WORKS };  // what threads take chunks of
    const Model& m;
    Cache& cache;
    const Entry* entries;
    const int count, threads;
    const bool rounds;     // true: queries, keys and values of 16 tokens and more are rounded to bf16, as their matmuls round activations
    const bool split;      // true: each thread has the residual stream of its share of the entries; false: of all entries
    const float* given = nullptr;      // embeddings (count, D) in place of those of the tokens, or null
    float* states = nullptr;           // where the last hidden states (count, D) are written, or null
    const int32_t* wanted = nullptr;   // indices of the entries whose logits are computed
    int asked = 0;
    float* logits = nullptr;
    Barrier barrier;
    std::vector<std::atomic<int>> taken;  // (works, shares): chunks that were taken (for_chunks)
    std::vector<int> ends;                // by entry: where its run ends, consecutive entries of one sequence
    Scratch& scratch;
    const long model_pitch, qkv_pitch, mixed_pitch;
    long hidden_pitch = 0;  // of dense feed-forwards
    long low_pitch = 0, query_pitch = 0;  // of latent attention
    float *low = nullptr, *queries = nullptr;
    float *qkv, *mixed, *first, *second, *hidden = nullptr, *gates = nullptr, *stream = nullptr, *normed = nullptr;

    Step(const Model& m, Cache& cache, const Entry* entries, int count, int threads, Scratch& scratch)
        : m(m), cache(cache), entries(entries), count(count), threads(threads),
          rounds(HAS_PAIRS && m.layers && m.layer[0].out.kind != F32 && m.d_head % 16 == 0), split(count >= SPREAD || !m.causal),
          taken((m.layers * WORKS + 1) * threads), ends(count), scratch(scratch), model_pitch(padded_stride(m.d_model)),
          qkv_pitch(padded_stride(m.heads * m.d_head + m.kv_heads * (m.d_head + m.d_value))),
          mixed_pitch(padded_stride(m.layers ? m.layer[0].out.columns : 0)) {
        barrier.n = threads;
        scratch.used = 0;
        for (int i = count - 1; i >= 0; i--) {
            const bool more = i + 1 < count && entries[i + 1].sequence == entries[i].sequence &&
                              entries[i + 1].position == entries[i].position + 1;
            ends[i] = more ? ends[i + 1] : i + 1;
        }
        qkv = scratch.need(scratch.qkv, count * qkv_pitch);
        mixed = scratch.need(scratch.mixed, count * mixed_pitch);
        first = scratch.need(scratch.first, count * model_pitch), second = scratch.need(scratch.second, count * model_pitch);
        if (split) stream = scratch.need(scratch.stream, count * model_pitch);
        if (split) normed = scratch.need(scratch.normed, count * model_pitch);
        if (m.layers) {  // matrices with the same number of columns have the same kind
            const Layer& layer = m.layer[0];
            scratch.narrow.shape(layer.v_of, count, threads), scratch.mixes.shape(layer.out, count, threads);
            if (layer.latent.rank) shape_latent(layer);
        }
        shape_feedforwards();
    }

    void ask(const int32_t* entries_, int n, float* to) {  // the logits of n entries are wanted
        wanted = entries_, asked = n, logits = to;
        scratch.head_input.shape(m.head, n, threads);
    }

    void run(int t) {
        std::vector<float> own((split ? 0 : count * model_pitch * 2) + LANES);
        float *x = split ? stream : cache_aligned(own.data()), *normed = split ? this->normed : x + count * model_pitch;
        embed(t, x);
        for (int l = 0; l < m.layers; l++) block(t, l, x, normed);
        if (states)
            for (int b = share_of(t); b < share_of(t + 1); b++) {
                float* to = states + (long)b * m.d_model;
                std::memcpy(to, x + b * model_pitch, m.d_model * sizeof(float));
                if (m.last.weight) normalize(m.last, to, m.d_model, to);
            }
        if (asked) sync_if_split(), predict(t, x);
    }

private:
    void shape_latent(const Layer& layer) {
        low_pitch = padded_stride(layer.latent.q_down.rows), query_pitch = padded_stride(layer.q_of.rows);
        low = scratch.need(scratch.low, count * low_pitch), queries = scratch.need(scratch.queries, count * query_pitch);
        scratch.lows.shape(layer.q_of, count, threads);
    }

    void shape_feedforwards() {
        bool gated = false;
        scratch.mixture.hidden_pitch = 0;
        for (int l = 0; l < m.layers; l++) {
            const FeedForward& feed = m.layer[l].feed;
            const Experts& e = m.layer[l].experts;
            if (feed.up.rows) {
                hidden_pitch = std::max(hidden_pitch, padded_stride(feed.up.rows)), gated |= feed.gate.rows > 0;
                scratch.wide_of(feed.down).shape(feed.down, count, threads);
            } else if (e.count) {
                scratch.mixture.shape(e, count, model_pitch), scratch.router.shape(e.router, count, threads);
            }
        }
        hidden = scratch.need(scratch.hidden, count * hidden_pitch);
        if (gated) gates = scratch.need(scratch.gates, count * hidden_pitch);
    }

    void matmul(int t, int which, const Matrix& w, const float* x, long pitch, const Vectors& v, float* y, long stride) {
        for_chunks(t, threads, &taken[which * threads], w, v, [&](const Chunk& c) { multiply(w, c, x, pitch, v, y, stride); });
    }
    const Vectors& take(int t, Prepared& prepared, const float* x, long pitch) {
        return prepared.take(t, threads, x, pitch, barrier);
    }

    // the entries whose residual stream thread t has
    int share_of(int t) const { return (int)((long)count * t / threads); }
    int begin(int t) const { return split ? share_of(t) : 0; }
    int end(int t) const { return split ? share_of(t + 1) : count; }
    void sync_if_split() { if (split) barrier.wait(); }

    float* q_of(int i) { return qkv + i * qkv_pitch; }
    float* k_of(int i) { return q_of(i) + m.heads * m.d_head; }
    float* v_of(int i) { return k_of(i) + m.kv_heads * m.d_head; }
    // Tokens before the first of a sequence and key/value head, in a cache (layers, sequences, kv_heads, capacity, width).
    long cache_offset(int layer, int sequence, int g, int capacity) const {
        return (((long)layer * cache.sequences + sequence) * m.kv_heads + g) * capacity;
    }

    int rotation(int i) const {  // the row of the rotary tables for entry i
        return entries[i].position + (cache.rotations ? cache.rotations[entries[i].sequence] : 0);
    }

    // What entry i attends to: its sequence in the cache, whose numbers are T, or in this pass.
    template <class T>
    View<T> view_of(int i, int g, int layer) {
        const Latent& latent = m.layer[layer].latent;
        const bool is_latent = latent.rank > 0;
        if constexpr (std::is_same_v<T, float>)
            if (!cache.keys) {
                const int start = i - entries[i].position;
                const float* keys = k_of(start) + g * m.d_head;
                return {keys, is_latent ? keys + latent.d_shared : v_of(start) + g * m.d_value, qkv_pitch, qkv_pitch};
            }
        const long at = cache_offset(layer, entries[i].sequence, g, cache.capacity);
        const T* keys = (const T*)cache.keys + at * m.d_head;
        if (is_latent) return {keys, keys + latent.d_shared, m.d_head, m.d_head};
        return {keys, (const T*)cache.values + at * m.d_value, m.d_head, m.d_value};
    }

    void visible(int i, const Layer& layer, int& from, int& end) const {  // the keys that entry i attends to
        const int position = entries[i].position, window = layer.window;
        const int length = m.causal ? position + 1 : position + ends[i] - i;
        from = window ? std::max(0, position + 1 - window) : 0;
        end = window ? std::min(length, position + window) : length;
    }

    void norm_whole(int t, const Norm& q, const Norm* k) {  // norms over all heads of an entry
        if (!q.weight || m.qk_over != ALL) return;
        for (int i = t; i < count; i += threads) {
            normalize(q, q_of(i), m.heads * m.d_head, q_of(i));
            if (k) normalize(*k, k_of(i), m.kv_heads * m.d_head, k_of(i));
        }
        barrier.wait();
    }

    void keep(int i, int g, int index) {  // the key and value of entry i, written to the cache if there is one
        const Layer& layer = m.layer[index];
        float *k = k_of(i) + g * m.d_head, *v = v_of(i) + g * m.d_value;
        prepare_head(m, layer, layer.k, g, k, rotation(i), true);
        clip(v, m.d_value, m.clip);
        if (!cache.keys) return;
        const long at = cache_offset(index, entries[i].sequence, g, cache.capacity) + entries[i].position;
        write(cache.keys, at, k, m.d_head), write(cache.values, at, v, m.d_value);
    }

    void write(void* numbers, long at, const float* from, int width) {  // a key or a value of token `at` of the cache
        if (!cache.halves) {
            std::memcpy((float*)numbers + at * width, from, width * sizeof(float));
            return;
        }
        const float most = 65504, infinite = INFINITY;  // the largest float16: a larger number must not become infinite
        for (int c = 0; c < width; c += LANES) {
            const floats x = load(from + c);
            const floats low = x > most && x < infinite ? broadcast(most) : x;
            store((half*)numbers + at * width + c, low < -most && low > -infinite ? broadcast(-most) : low);
        }
    }

    Head head_of(int h, const float* sinks) const {
        return {m.d_head, m.d_value, m.scale, m.softcap, sinks ? sinks[h] : -INFINITY};
    }

    void attend(int t, int index) {
        const Layer& layer = m.layer[index];
        norm_whole(t, layer.q, &layer.k);
        const int G = m.kv_heads;
        for (int i = begin(t); i < end(t); i++)
            for (int g = split ? 0 : G * t / threads; g < (split ? G : G * (t + 1) / threads); g++) keep(i, g, index);
        barrier.wait();
        cache.halves ? attend_cached<half>(t, index) : attend_cached<float>(t, index);
    }

    template <class T>
    void attend_cached(int t, int index) {
        const Layer& layer = m.layer[index];
        const int last_head = m.heads * (t + 1) / threads;
        for (int i = 0; i < count;) {
            const int end = split ? ends[i] : i + 1;
            for (int h = m.heads * t / threads, n; h < last_head; h += n) {
                n = heads_together(h, last_head);
                for (int j = i; j < end; j++)
                    for (int k = h; k < h + n; k++)
                        prepare_head(m, layer, layer.q, k, q_of(j) + k * m.d_head, rotation(j), true);
                attend_heads<T>(i, end, h, n, index, mixed + i * mixed_pitch + h * m.d_value, mixed_pitch, m.d_value);
            }
            i = end;
        }
    }

    int heads_together(int h, int last) const {  // head h and how many of those before `last` have the same keys
        const int sharing = m.heads / m.kv_heads;
        return std::min({(h / sharing + 1) * sharing - h, last - h, TOGETHER});
    }

    // n heads of entries i..end that share their keys, from head h on. The results, of entries `pitch` and of heads `head_pitch` apart, may
    // take the place of the queries.
    template <class T>
    void attend_heads(int i, int end, int h, int n, int index, float* out, long pitch, long head_pitch) {
        const Layer& layer = m.layer[index];
        const View<T> view = view_of<T>(i, h / (m.heads / m.kv_heads), index);
        const float* q = q_of(i) + h * m.d_head;
        if (m.d_value % WIDE == 0 && end - i >= 4) {
            const auto seen = [&](int j, int& from, int& last) { visible(i + j, layer, from, last); };
            for (int k = 0; k < n; k++) {
                const Head head = head_of(h + k, layer.sinks);
                const auto biases = [&](int j) { return m.biases_of(h + k, entries[i + j].position); };
                const auto run = rounds && end - i >= SPREAD ? attend_run<Narrow, T, decltype(seen), decltype(biases)>
                                                             : attend_run<float, T, decltype(seen), decltype(biases)>;
                run(head, view, end - i, q + k * m.d_head, qkv_pitch, seen, biases, out + k * head_pitch, pitch);
            }
            return;
        }
        const auto heads = [&](int k) { return head_of(h + k, layer.sinks); };
        for (int j = 0; j < end - i; j++) {
            int from, last;
            visible(i + j, layer, from, last);
            const auto biases = [&](int k) { return m.biases_of(h + k, entries[i + j].position); };
            attend_few(n, heads, view, q + j * qkv_pitch, m.d_head, from, last, biases, out + j * pitch, head_pitch);
        }
    }

    // Queries, and what the cache keeps, of latent attention; then attention, whose results take the place of its queries.
    void attend_latent(int t, int index, const float* in) {
        const Layer& layer = m.layer[index];
        const Latent& latent = layer.latent;
        const int at = index * WORKS, R = latent.d_shared, first = m.heads * t / threads, last = m.heads * (t + 1) / threads;
        const Vectors& v = take(t, scratch.narrow, in, model_pitch);
        matmul(t, at + K, layer.k_of, in, model_pitch, v, k_of(0), qkv_pitch);
        matmul(t, at + V, layer.v_of, in, model_pitch, v, k_of(0) + R, qkv_pitch);
        if (latent.q_down.rows) {
            matmul(t, at + Q_DOWN, latent.q_down, in, model_pitch, v, low, low_pitch);
            barrier.wait();
            for (int i = share_of(t); i < share_of(t + 1); i++)
                normalize(latent.q_down_norm, low + i * low_pitch, latent.q_down.rows, low + i * low_pitch);
            barrier.wait();
            matmul(t, at + Q, layer.q_of, low, low_pitch, take(t, scratch.lows, low, low_pitch), queries, query_pitch);
        } else {
            matmul(t, at + Q, layer.q_of, in, model_pitch, v, queries, query_pitch);
        }
        barrier.wait();
        for (int i = share_of(t); i < share_of(t + 1); i++) {
            float* k = k_of(i);
            if (layer.rotated) rotate(layer, k, rotation(i));
            normalize(latent.c_norm, k + R, latent.rank, k + R);
            if (!cache.keys) continue;
            const long to = cache_offset(index, entries[i].sequence, 0, cache.capacity) + entries[i].position;
            write(cache.keys, to, k, m.d_head);
        }
        for (int h = first; h < last; h++) {
            float* q = queries + h * latent.d_query;
            for (int i = 0; i < count; i++) {
                if (layer.rotated) rotate(layer, q + i * query_pitch, rotation(i));
                std::memcpy(q_of(i) + h * m.d_head, q + i * query_pitch, R * sizeof(float));
            }
            multiply_alone(latent.absorb[h], count, q + R, query_pitch, q_of(0) + h * m.d_head + R, qkv_pitch);
        }
        barrier.wait();
        const bool together = last - first >= 4 && m.d_value % WIDE == 0 && !layer.sinks && !m.biases;
        for (int i = 0; i < count;) {
            const int end = split ? ends[i] : i + 1;
            if (together && end - i < 4)
                for (; i < end; i++) attend_together(i, index, first, last);
            else
                for (int h = first, n; h < last; h += n) {
                    n = heads_together(h, last);
                    attend_heads<float>(i, end, h, n, index, q_of(i) + h * m.d_head, qkv_pitch, m.d_head);
                }
            i = end;
        }
        for (int h = first; h < last; h++)
            multiply_alone(latent.value[h], count, q_of(0) + h * m.d_head, qkv_pitch, mixed + h * latent.d_value, mixed_pitch);
    }

    void attend_together(int i, int index, int first, int last) {  // heads of one entry that have the same keys, as a run of queries
        float* q = q_of(i) + first * m.d_head;
        const auto seen = [&](int, int& from, int& end) { visible(i, m.layer[index], from, end); };
        attend_run<float>(head_of(first, nullptr), view_of<float>(i, 0, index), last - first, q, m.d_head, seen,
                   [](int) -> const float* { return nullptr; }, q, m.d_head);
    }

    void attend_memory(int t, int index) {  // over the output of an encoder
        const Layer& layer = m.layer[index];
        norm_whole(t, layer.cross_q, nullptr);
        const int last_head = m.heads * (t + 1) / threads;
        for (int i = 0; i < count; i++)
            for (int h = m.heads * t / threads, n; h < last_head; h += n) {
                n = heads_together(h, last_head);
                const int sequence = entries[i].sequence;
                const long at = cache_offset(index, sequence, h / (m.heads / m.kv_heads), cache.cross_capacity);
                const View<float> view{cache.cross_keys + at * m.d_head, cache.cross_values + at * m.d_value, m.d_head, m.d_value};
                float* q = q_of(i) + h * m.d_head;
                for (int k = 0; k < n; k++) prepare_head(m, layer, layer.cross_q, h + k, q + k * m.d_head, 0, false);
                attend_few(n, [&](int k) { return head_of(h + k, layer.cross_sinks); }, view, q, m.d_head, 0,
                           cache.cross_lengths[sequence], [](int) -> const float* { return nullptr; },
                           mixed + i * mixed_pitch + h * m.d_value, m.d_value);
            }
    }

    void norm_rows(int t, const Norm& norm, const float* x, float* y) {
        for (int b = begin(t); b < end(t); b++) normalize(norm, x + b * model_pitch, m.d_model, y + b * model_pitch);
    }

    // The input of a branch: the stream, or its norm.
    const float* enter(int t, const Branch& branch, float* x, float* normed) {
        if (branch.before.weight) norm_rows(t, branch.before, x, normed);
        sync_if_split();
        return branch.before.weight ? normed : x;
    }

    void leave(int t, const Branch& branch, float* x, float* normed, const float* from) {  // add the result of a branch
        if (branch.out.weight) norm_rows(t, branch.out, from, normed), from = normed;
        for (int b = begin(t); b < end(t); b++)
            for (long i = b * model_pitch; i < b * model_pitch + m.d_model; i++) x[i] += m.residual_scale * from[i];
        if (branch.after.weight) norm_rows(t, branch.after, x, x);
    }

    void feed(int t, int l, const float* in) {  // a dense feed-forward
        const FeedForward& feed = m.layer[l].feed;
        const Vectors& v = take(t, scratch.narrow, in, model_pitch);
        for_chunks(t, threads, &taken[(l * WORKS + UP) * threads], feed.up, v, [&](const Chunk& chunk) {
            multiply_up(feed, chunk, in, model_pitch, v, hidden, gates, hidden_pitch);
        });
        barrier.wait();
        const Vectors& wide = take(t, scratch.wide_of(feed.down), hidden, hidden_pitch);
        matmul(t, l * WORKS + DOWN, feed.down, hidden, hidden_pitch, wide, second, model_pitch);
        barrier.wait();
    }

    void mix(int t, int l, const float* in) {  // a mixture of experts
        const Experts& e = m.layer[l].experts;
        Mixture& mixture = scratch.mixture;
        const auto counter = [&](int work) -> std::atomic<int>& { return taken[(l * WORKS + work) * threads]; };
        matmul(t, l * WORKS + ROUTER, e.router, in, model_pitch, take(t, scratch.router, in, model_pitch), mixture.scores.data(), e.count);
        barrier.wait();
        for (int b = share_of(t); b < share_of(t + 1); b++) mixture.choose(e, b, in + b * model_pitch, m.d_model);
        barrier.wait();
        if (!t) mixture.distribute(e, count, threads);
        barrier.wait();
        mixture.gather(e, counter(GATHER), in, m.d_model);
        barrier.wait();
        mixture.multiply_first(e, counter(UP), threads);
        barrier.wait();
        mixture.convert_hidden(e, counter(CONVERT));
        barrier.wait();
        mixture.multiply_second(e, counter(DOWN), threads);
        barrier.wait();
        const int from = split ? 0 : m.d_model * t / threads, to = split ? m.d_model : m.d_model * (t + 1) / threads;
        for (int b = begin(t); b < end(t); b++) mixture.sum(e, b, from, to, second + b * model_pitch);
        if (!split) barrier.wait();
    }

    void embed(int t, float* x) {
        const long D = m.d_model;
        for (int b = begin(t); b < end(t); b++) {
            float* to = x + b * model_pitch;
            if (given) {
                std::memcpy(to, given + b * D, D * sizeof(float));
                continue;
            }
            const float* token = m.tokens + entries[b].token * D;
            const float* position = m.position_table ? m.position_table + entries[b].position * D : nullptr;
            for (int i = 0; i < D; i++) to[i] = token[i] * m.embed_scale + (position ? position[i] : 0.0f);
            if (m.embedded.weight) normalize(m.embedded, to, D, to);
        }
    }

    void project_out(int t, int which, const Matrix& w) {  // the heads of attention, merged
        barrier.wait();
        const Vectors& v = take(t, scratch.mixes, mixed, mixed_pitch);
        matmul(t, which, w, mixed, mixed_pitch, v, first, model_pitch);
        barrier.wait();
    }

    void block(int t, int l, float* x, float* normed) {
        const Layer& layer = m.layer[l];
        const int at = l * WORKS;
        const float* in = enter(t, layer.attention, x, normed);
        if (layer.latent.rank) {
            attend_latent(t, l, in);
        } else {
            const Vectors& v = take(t, scratch.narrow, in, model_pitch);
            matmul(t, at + Q, layer.q_of, in, model_pitch, v, q_of(0), qkv_pitch);
            matmul(t, at + K, layer.k_of, in, model_pitch, v, k_of(0), qkv_pitch);
            matmul(t, at + V, layer.v_of, in, model_pitch, v, v_of(0), qkv_pitch);
            barrier.wait();
            attend(t, l);
        }
        project_out(t, at + OUT, layer.out);
        if (!m.parallel) leave(t, layer.attention, x, normed, first);
        if (layer.cross_q_of.rows) {
            in = enter(t, layer.cross, x, normed);
            matmul(t, at + CROSS_Q, layer.cross_q_of, in, model_pitch, take(t, scratch.narrow, in, model_pitch), q_of(0), qkv_pitch);
            barrier.wait();
            attend_memory(t, l);
            project_out(t, at + CROSS_OUT, layer.cross_out);
            leave(t, layer.cross, x, normed, first);
        }
        if (!layer.feed.up.rows && !layer.experts.count) return;
        in = enter(t, layer.feedforward, x, normed);
        layer.experts.count ? mix(t, l, in) : feed(t, l, in);
        if (m.parallel) leave(t, layer.attention, x, normed, first);
        leave(t, layer.feedforward, x, normed, second);
    }

    void predict(int t, const float* x) {  // the logits of the wanted entries
        const long D = m.d_model;
        std::vector<float> head_input(asked * D + LANES);
        float* last = cache_aligned(head_input.data());
        for (int i = 0; i < asked; i++) {
            float* one = last + i * D;
            std::memcpy(one, x + wanted[i] * model_pitch, D * sizeof(float));
            if (m.last.weight) normalize(m.last, one, D, one);
            for (long c = 0; c < D; c++) one[c] *= m.head_scale;
        }
        const Vectors& v = take(t, scratch.head_input, last, D);
        for_chunks(t, threads, &taken[m.layers * WORKS * threads], m.head, v, [&](const Chunk& chunk) {
            multiply(m.head, chunk, last, D, v, logits, m.vocabulary);
            const float cap = m.head_softcap, inverse = 2 / cap;
            for (int i = chunk.from * v.tile; cap > 0 && i < std::min(chunk.to * v.tile, asked); i++)
                apply(logits + (long)i * m.vocabulary + chunk.first, chunk.last - chunk.first,
                      [=](floats z) { return cap - 2 * cap / (1 + exponential(z * inverse)); });
        });
        barrier.wait();
    }
};

}  // namespace glass
