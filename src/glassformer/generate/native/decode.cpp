// One decoding step of a decoder-only Transformer: a token per row in, logits per row out, in one call.
//
// All threads walk through the layers together. Each keeps the residual stream of every row for itself and computes
// its share of the rows of each matrix; shares are exchanged through one buffer and a barrier. The definition is
// glassformer.model; tests/generate/native holds the two together.
#include "pairs.h"
#include "pool.h"

using namespace glass;

enum Activation : int32_t { RELU, GELU, GELU_TANH, SILU, RELU2, TANH };
enum Placement : int32_t { PRE, POST, PARALLEL };
enum Position : int32_t { NONE, TABLE, ROTARY_HALF, ROTARY_PAIRS, ALIBI };

struct Norm {
    const float *weight, *bias;
    float eps;
    int32_t centred;
};

struct Layer {
    Norm attention, feedforward, q, k;  // q.weight null: no QK-norm
    Matrix q_of, k_of, v_of, out, gate, up, down;
    int32_t window;                     // 0: all
};

struct Model {
    int32_t layers, d_model, heads, kv_heads, d_head, d_value, d_ff, vocabulary;
    int32_t placement, activation, gated, position, rotated;
    float scale, embed_scale, head_scale;
    const float *tokens, *places, *cosines, *sines, *slopes;  // (V,D), (N,D), (N,rotated/2) twice, (H)
    Norm embedded, last;  // weight null: none
    Matrix head;
    const Layer* layer;
};

struct Cache {        // (layers, rows, kv_heads, capacity, width)
    float *keys, *values;
    int32_t rows, capacity;
};

namespace {

void normalise(const Norm& norm, const float* x, int n, float* y) {
    const float mean = norm.centred ? sum_of(x, n) / n : 0.0f;
    for (int i = 0; i < n; i++) y[i] = x[i] - mean;
    const float inverse = 1 / std::sqrt(dot(y, y, n) / n + norm.eps);
    if (norm.bias)
        for (int i = 0; i < n; i++) y[i] = y[i] * inverse * norm.weight[i] + norm.bias[i];
    else
        for (int i = 0; i < n; i++) y[i] = y[i] * inverse * norm.weight[i];
}

template <class F>
void apply(float* x, int n, F f) {
    for (int i = 0; i < n; i++) x[i] = f(x[i]);
}

void activate(int kind, float* x, int n) {
    switch (kind) {
        case RELU: apply(x, n, [](float v) { return v > 0 ? v : 0.0f; }); break;
        case GELU: apply(x, n, [](float v) { return 0.5f * v * (1 + erf_of(v * 0.70710678f)); }); break;
        case GELU_TANH:
            apply(x, n, [](float v) { return 0.5f * v * (1 + tanh_of(0.79788456f * (v + 0.044715f * v * v * v))); });
            break;
        case SILU: apply(x, n, [](float v) { return v / (1 + exp_of(-v)); }); break;
        case RELU2: apply(x, n, [](float v) { return v > 0 ? v * v : 0.0f; }); break;
        default: apply(x, n, [](float v) { return tanh_of(v); });
    }
}

void rotate(const Model& m, float* x, int place) {
    const int half = m.rotated / 2;
    const float *c = m.cosines + (long)place * half, *s = m.sines + (long)place * half;
    for (int i = 0; i < half; i++) {
        int a = m.position == ROTARY_HALF ? i : 2 * i, b = m.position == ROTARY_HALF ? i + half : 2 * i + 1;
        float first = x[a], second = x[b];
        x[a] = first * c[i] - second * s[i];
        x[b] = second * c[i] + first * s[i];
    }
}

int cut_rows(int rows, int t, int threads) {
    return t == threads ? rows : (int)((long)rows * t / threads) / WIDE * WIDE;
}

struct Entry {  // a token to be read: of which row of the cache, at which place of it
    int32_t token, row, place;
};

struct Step {
    enum { Q, K, V, OUT, UP, DOWN, PRODUCTS };
    const Model& m;
    Cache& cache;
    const Entry* entries;
    const int32_t* wanted;  // entries whose logits are asked for
    int count, asked, threads;
    float* logits;
    bool split;  // many entries: each thread keeps the stream of its share of them; few: each thread that of all
    Barrier barrier;
    std::vector<std::atomic<int>> taken;  // rows of each product that somebody has
    std::vector<float> qkv, mixed, delta, hidden, gates, shared, shared_normed;

    Step(const Model& m, Cache& cache, const Entry* entries, int count, const int32_t* wanted, int asked, int threads,
         float* logits)
        : m(m), cache(cache), entries(entries), wanted(wanted), count(count), asked(asked), threads(threads),
          logits(logits), split(count >= MANY), taken(m.layers * PRODUCTS + 1) {
        barrier.n = threads;
        qkv.resize((long)count * width());
        mixed.resize((long)count * m.heads * m.d_value);
        delta.resize((long)count * m.d_model * 2);
        hidden.resize((long)count * m.d_ff);
        if (m.gated) gates.resize(hidden.size());
        if (split) shared.resize((long)count * m.d_model), shared_normed.resize(shared.size());
    }
    int width() const { return m.heads * m.d_head + m.kv_heads * (m.d_head + m.d_value); }

    // rows of a matrix that belong to thread t, in whole panels
    int cut(int rows, int t) const { return cut_rows(rows, t, threads); }

    // Rows of one product, shared out: of many vectors each thread its part, so that a panel is turned once; of few
    // whoever is free takes the next 128 rows, because memory serves threads unevenly. Who sums a row changes no bit.
    // 128 rows of whole numbers are too little to take (measured: 0.84 of the speed), so there each has its half again.
    template <class F>
    void share_out(int t, int product, const Matrix& w, F work) {
        const int rows = w.rows;
        if (split || w.kind == INT8 || w.kind == INT4) return work(cut(rows, t), cut(rows, t + 1), true);
        bool fresh = true;
        for (int first; (first = taken[product].fetch_add(128, std::memory_order_relaxed)) < rows; fresh = false)
            work(first, std::min(first + 128, rows), fresh);
    }

    void share(int t, int product, const Matrix& w, const float* x, float* y, long stride) {
        share_out(t, product, w, [&](int first, int last, bool fresh) {
            multiply(w, first, last, x, count, y, stride, fresh);
        });
    }

    bool turns() const { return m.position == ROTARY_HALF || m.position == ROTARY_PAIRS; }
    float* row_of(int i) { return qkv.data() + (long)i * width(); }
    float* kept(float* cached, int layer, int row, int g, int wide) {
        return cached + (((long)layer * cache.rows + row) * m.kv_heads + g) * cache.capacity * wide;
    }

    void store(int i, int g, int index) {  // the key and value of entry i, in the cache
        const Layer& layer = m.layer[index];
        const int dk = m.d_head, dv = m.d_value, place = entries[i].place;
        float *row = row_of(i), *k = row + m.heads * dk + g * dk;
        if (layer.k.weight) normalise(layer.k, k, dk, k);
        if (turns()) rotate(m, k, place);
        std::memcpy(kept(cache.keys, index, entries[i].row, g, dk) + (long)place * dk, k, dk * sizeof(float));
        std::memcpy(kept(cache.values, index, entries[i].row, g, dv) + (long)place * dv,
                    row + (m.heads + m.kv_heads) * dk + g * dv, dv * sizeof(float));
    }

    void query(int i, int h, int index) {
        const Layer& layer = m.layer[index];
        float* q = row_of(i) + h * m.d_head;
        if (layer.q.weight) normalise(layer.q, q, m.d_head, q);
        if (turns()) rotate(m, q, entries[i].place);
    }

    int seen_from(int place, int index) const {
        const int window = m.layer[index].window;
        return window && place + 1 > window ? place + 1 - window : 0;
    }

    void attend(int t, int index) {  // few entries: the thread that stores a key is the one that reads it
        const int group = m.heads / m.kv_heads, dv = m.d_value;
        std::vector<float> weights(cache.capacity);
        for (int i = 0; i < count; i++)
            for (int g = m.kv_heads * t / threads; g < m.kv_heads * (t + 1) / threads; g++) {
                store(i, g, index);
                for (int h = g * group; h < (g + 1) * group; h++) {
                    query(i, h, index);
                    float* out = mixed.data() + ((long)i * m.heads + h) * dv;
                    head(i, h, index, weights.data(), out);
                }
            }
    }

    void attend_many(int t, int index) {
        for (int i = share_of(t); i < share_of(t + 1); i++)
            for (int g = 0; g < m.kv_heads; g++) store(i, g, index);
        barrier.wait();
        std::vector<float> weights(cache.capacity + WIDE), keys, scores;
        for (int i = 0; i < count;) {  // a run: entries of one row that follow each other
            int end = i + 1;
            while (end < count && entries[end].row == entries[i].row && entries[end].place == entries[end - 1].place + 1)
                end++;
            for (int h = t; h < m.heads; h += threads) {
                for (int j = i; j < end; j++) query(j, h, index);
                if (m.d_value % WIDE == 0 && end - i >= 4) run_of(i, end, h, index, keys, scores);
                else
                    for (int j = i; j < end; j++)
                        head(j, h, index, weights.data(), mixed.data() + ((long)j * m.heads + h) * m.d_value);
            }
            i = end;
        }
    }

    // One head of a run: keys as panels, scores of a block of queries, their softmax, and values, which are panels.
    void run_of(int first, int end, int h, int index, std::vector<float>& keys, std::vector<float>& scores) {
        constexpr int BLOCK = 28;
        const int g = h / (m.heads / m.kv_heads), dk = m.d_head, dv = m.d_value, row = entries[first].row;
        const int last = entries[end - 1].place + 1, begin = seen_from(entries[first].place, index) / WIDE * WIDE;
        const long pitch = (last - begin + WIDE - 1) / WIDE * WIDE;
        const Matrix all{kept(cache.keys, index, row, g, dk), nullptr, nullptr, last, dk, 0, F32};
        const float* values = kept(cache.values, index, row, g, dv);
        keys.resize(pitch * dk + W), scores.resize(BLOCK * pitch + W);
        for (int s = begin; s < last; s += WIDE) fill_panel(all, s, 0, dk, &keys[(long)(s - begin) * dk]);
        for (int i = first; i < end; i += BLOCK) {
            const int n = std::min(BLOCK, end - i), most = entries[i + n - 1].place + 1;
            const int from = seen_from(entries[i].place, index) / WIDE * WIDE;
            for (int s = from; s < most; s += WIDE)
                meet_all(&keys[(long)(s - begin) * dk], WIDE, dk, row_of(i) + h * dk, width(), n, &scores[s - begin],
                         pitch, WIDE, true, nullptr);
            for (int j = 0; j < n; j++) {
                const int place = entries[i + j].place, seen = seen_from(place, index);
                float *w = &scores[j * pitch] - begin, sum = soften(w, seen, place + 1, h);
                for (int s = from; s < seen; s++) w[s] = 0;
                for (int s = place + 1; s < most; s++) w[s] = 0;
                for (int s = seen; s <= place; s++) w[s] /= sum;
            }
            float* out = mixed.data() + ((long)i * m.heads + h) * dv;
            for (int c = 0; c < dv; c += WIDE)
                meet_all(values + (long)from * dv + c, dv, most - from, &scores[from - begin], pitch, n, out + c,
                         (long)m.heads * dv, WIDE, true, nullptr);
        }
    }

    // scores of keys from..count become exp(scale · score - slope · distance - highest); returns their sum
    float soften(float* w, int from, int count, int h) {
        for (int s = from; s < count; s++) w[s] *= m.scale;
        if (m.position == ALIBI)
            for (int s = from; s < count; s++) w[s] -= m.slopes[h] * (count - 1 - s);
        const float highest = largest_of(w + from, count - from);
        for (int s = from; s < count; s++) w[s] = exp_of(w[s] - highest);
        return sum_of(w + from, count - from);
    }

    void head(int i, int h, int index, float* w, float* out) {
        const int g = h / (m.heads / m.kv_heads), dk = m.d_head, dv = m.d_value, row = entries[i].row;
        const float *keys = kept(cache.keys, index, row, g, dk), *values = kept(cache.values, index, row, g, dv);
        const float* q = row_of(i) + h * dk;
        const int end = entries[i].place + 1, from = seen_from(entries[i].place, index);
        for (int s = from; s < end; s++) w[s] = dot(q, keys + (long)s * dk, dk);
        const float sum = soften(w, from, end, h);
        for (int c = 0; c < dv; c++) out[c] = 0;
        for (int s = from; s < end; s++)
            for (int c = 0; c < dv; c++) out[c] += w[s] * values[(long)s * dv + c];
        for (int c = 0; c < dv; c++) out[c] /= sum;
    }

    // entries whose stream thread t keeps
    int share_of(int t) const { return (int)((long)count * t / threads); }
    int begin(int t) const { return split ? share_of(t) : 0; }
    int end(int t) const { return split ? share_of(t + 1) : count; }
    void together() { if (split) barrier.wait(); }

    void add(int t, float* x, const float* from) {
        for (long i = (long)begin(t) * m.d_model; i < (long)end(t) * m.d_model; i++) x[i] += from[i];
    }

    void norm_rows(int t, const Norm& norm, const float* x, float* y) {
        for (long i = begin(t); i < end(t); i++) normalise(norm, x + i * m.d_model, m.d_model, y + i * m.d_model);
    }

    void project(int t, int l, const float* in) {  // queries, keys, values: side by side in a row
        const Layer& layer = m.layer[l];
        float *q = qkv.data(), *k = q + m.heads * m.d_head, *v = k + m.kv_heads * m.d_head;
        share(t, l * PRODUCTS + Q, layer.q_of, in, q, width());
        share(t, l * PRODUCTS + K, layer.k_of, in, k, width());
        share(t, l * PRODUCTS + V, layer.v_of, in, v, width());
    }

    void feed(int t, int l, const float* in) {  // up, gate and activation
        const Layer& layer = m.layer[l];
        share_out(t, l * PRODUCTS + UP, layer.up, [&](int a, int z, bool fresh) {
            multiply(layer.up, a, z, in, count, hidden.data(), m.d_ff, fresh);
            if (m.gated) multiply(layer.gate, a, z, in, count, gates.data(), m.d_ff, fresh);
            for (int b = 0; b < count; b++) {
                float *row = &hidden[(long)b * m.d_ff], *gate = m.gated ? &gates[(long)b * m.d_ff] : row;
                activate(m.activation, gate + a, z - a);
                if (m.gated)
                    for (int i = a; i < z; i++) row[i] *= gate[i];
            }
        });
    }

    void down(int t, int l, float* out) {
        share(t, l * PRODUCTS + DOWN, m.layer[l].down, hidden.data(), out, m.d_model);
    }

    void embed(int t, float* x) {
        const int D = m.d_model;
        for (int b = begin(t); b < end(t); b++)
            for (int i = 0; i < D; i++)
                x[(long)b * D + i] = m.tokens[(long)entries[b].token * D + i] * m.embed_scale +
                                     (m.position == TABLE ? m.places[(long)entries[b].place * D + i] : 0.0f);
        if (m.embedded.weight) norm_rows(t, m.embedded, x, x);
    }

    void block(int t, int l, float* x, float* normed) {
        const Layer& layer = m.layer[l];
        const bool post = m.placement == POST, has_feed = m.d_ff > 0;
        float *first = delta.data(), *second = first + (long)count * m.d_model, *in = post ? x : normed;
        if (!post) norm_rows(t, layer.attention, x, normed);
        together();
        project(t, l, in);
        if (m.placement == PARALLEL) feed(t, l, in);
        barrier.wait();
        split ? attend_many(t, l) : attend(t, l);
        if (m.placement == PARALLEL) down(t, l, second);
        barrier.wait();
        share(t, l * PRODUCTS + OUT, layer.out, mixed.data(), first, m.d_model);
        barrier.wait();
        add(t, x, first);
        if (m.placement == PARALLEL) add(t, x, second);
        if (post) norm_rows(t, layer.attention, x, x);
        if (m.placement == PARALLEL || !has_feed) return;
        if (!post) norm_rows(t, layer.feedforward, x, normed);
        together();
        feed(t, l, in);
        barrier.wait();
        down(t, l, second);
        barrier.wait();
        add(t, x, second);
        if (post) norm_rows(t, layer.feedforward, x, x);
    }

    void run(int t) {
        const long D = m.d_model;
        std::vector<float> own(split ? 0 : count * D), own_normed(own.size()), last(asked * D);
        float *x = split ? shared.data() : own.data(), *normed = split ? shared_normed.data() : own_normed.data();
        embed(t, x);
        for (int l = 0; l < m.layers; l++) block(t, l, x, normed);
        if (!asked) return;
        together();
        for (int i = 0; i < asked; i++) {
            float* one = &last[i * D];
            std::memcpy(one, x + wanted[i] * D, D * sizeof(float));
            if (m.last.weight) normalise(m.last, one, D, one);
            for (long c = 0; c < D; c++) one[c] *= m.head_scale;
        }
        auto judge = [&](int first, int end, bool fresh) {
            multiply(m.head, first, end, last.data(), asked, logits, m.vocabulary, fresh);
        };
        share_out(t, m.layers * PRODUCTS, m.head, judge);
        barrier.wait();
    }
};

}  // namespace

extern "C" {

// Reads `count` tokens; writes logits (asked, vocabulary) of those entries that are wanted.
void glass_step(const Model* model, Cache* cache, const Entry* entries, int32_t count, const int32_t* wanted,
                int32_t asked, int32_t threads, float* logits) {
    std::lock_guard<std::mutex> turn(pool().turn);
    Step step(*model, *cache, entries, count, wanted, asked, threads, logits);
    pool().run(threads, [&step](int t) { step.run(t); });
}

// y (batch, rows) = matrix x (batch, columns): for measuring and for tests.
void glass_multiply(const Matrix* matrix, const float* x, int32_t batch, int32_t threads, float* y) {
    std::lock_guard<std::mutex> turn(pool().turn);
    pool().run(threads, [&](int t) {
        const int first = cut_rows(matrix->rows, t, threads), last = cut_rows(matrix->rows, t + 1, threads);
        multiply(*matrix, first, last, x, batch, y, matrix->rows);
    });
}

int32_t glass_sizes(int32_t what) {  // so that Python's mirror of the structures cannot drift unnoticed
    switch (what) {
        case 0: return sizeof(Matrix);
        case 1: return sizeof(Norm);
        case 2: return sizeof(Layer);
        case 3: return sizeof(Model);
        default: return sizeof(Cache);
    }
}
}
