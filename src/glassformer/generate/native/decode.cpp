// One decoding step of a decoder-only Transformer: a token per row in, logits per row out, in one call.
//
// All threads walk through the layers together. Each keeps the residual stream of every row for itself and computes
// its share of the rows of each matrix; shares are exchanged through one buffer and a barrier. The definition is
// glassformer.model; tests/generate/native holds the two together.
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "integers.h"

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

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

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
        // a thread that is not running cannot arrive: give the processor away when it takes long
        for (long spins = 0; round.load(std::memory_order_acquire) == now; spins++)
            spins < 20000 ? pause() : std::this_thread::yield();
    }
};

// Threads that wait for work: awake for a moment after each call, because a decoder calls again at once, then asleep.
class Pool {
    std::mutex mutex;
    std::condition_variable wake;
    std::vector<std::thread> workers;
    std::atomic<long> round{0}, done{0};
    std::atomic<int> asked{0};
    const std::function<void(int)>* work = nullptr;

    void serve(int t, long seen) {
        for (;;) {
            for (long spins = 0; round.load(std::memory_order_acquire) == seen && spins < 40000; spins++) pause();
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
    std::mutex turn;
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
        for (long spins = 0; done.load(std::memory_order_acquire) < (long)workers.size(); spins++)
            spins < 20000 ? pause() : std::this_thread::yield();
    }
};

Pool& pool() {  // never destroyed: its threads outlive the interpreter's end
    static Pool* made = new Pool;
    return *made;
}

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

struct Step {
    const Model& m;
    Cache& cache;
    const int32_t *tokens, *lengths;  // lengths: tokens of each row already in the cache
    int batch, threads;
    float* logits;
    Barrier barrier;
    std::vector<float> qkv, mixed, delta, hidden, gates;

    Step(const Model& m, Cache& cache, const int32_t* tokens, const int32_t* lengths, int threads, float* logits)
        : m(m), cache(cache), tokens(tokens), lengths(lengths), batch(cache.rows), threads(threads), logits(logits) {
        barrier.n = threads;
        qkv.resize((long)batch * width());
        mixed.resize((long)batch * m.heads * m.d_value);
        delta.resize((long)batch * m.d_model * 2);
        hidden.resize((long)batch * m.d_ff);
        if (m.gated) gates.resize(hidden.size());
    }
    int width() const { return m.heads * m.d_head + m.kv_heads * (m.d_head + m.d_value); }

    // rows of a matrix that belong to thread t, in multiples of 4
    int cut(int rows, int t) const { return t == threads ? rows : (int)((long)rows * t / threads) / 4 * 4; }

    void share(int t, const Matrix& w, const float* x, float* y, long stride) {
        multiply(w, cut(w.rows, t), cut(w.rows, t + 1), x, batch, y, stride);
    }

    void attend(int t, int index) {
        const Layer& layer = m.layer[index];
        const int group = m.heads / m.kv_heads, dk = m.d_head, dv = m.d_value;
        std::vector<float> weights(cache.capacity);
        const int first = m.kv_heads * t / threads, last = m.kv_heads * (t + 1) / threads;
        for (int b = 0; b < batch; b++) {
            const int place = lengths[b], count = place + 1;
            const int from = layer.window && count > layer.window ? count - layer.window : 0;
            for (int g = first; g < last; g++) {
                const long at = (((long)index * batch + b) * m.kv_heads + g) * cache.capacity;
                float *keys = cache.keys + at * dk, *values = cache.values + at * dv;
                float *row = qkv.data() + (long)b * width(), *k = row + m.heads * dk + g * dk;
                if (layer.k.weight) normalise(layer.k, k, dk, k);
                if (m.position == ROTARY_HALF || m.position == ROTARY_PAIRS) rotate(m, k, place);
                std::memcpy(keys + (long)place * dk, k, dk * sizeof(float));
                std::memcpy(values + (long)place * dv, row + (m.heads + m.kv_heads) * dk + g * dv, dv * sizeof(float));
                for (int h = g * group; h < (g + 1) * group; h++) {
                    float* q = row + h * dk;
                    if (layer.q.weight) normalise(layer.q, q, dk, q);
                    if (m.position == ROTARY_HALF || m.position == ROTARY_PAIRS) rotate(m, q, place);
                    head(q, keys, values, from, count, h, weights.data(), mixed.data() + ((long)b * m.heads + h) * dv);
                }
            }
        }
    }

    void head(const float* q, const float* keys, const float* values, int from, int count, int h, float* w, float* out) {
        const int dk = m.d_head, dv = m.d_value;
        float highest = -INFINITY, sum = 0;
        for (int s = from; s < count; s++) {
            w[s] = dot(q, keys + (long)s * dk, dk) * m.scale;
            if (m.position == ALIBI) w[s] -= m.slopes[h] * (count - 1 - s);
            highest = w[s] > highest ? w[s] : highest;
        }
        for (int s = from; s < count; s++) w[s] = exp_of(w[s] - highest);
        for (int s = from; s < count; s++) sum += w[s];
        for (int i = 0; i < dv; i++) out[i] = 0;
        for (int s = from; s < count; s++)
            for (int i = 0; i < dv; i++) out[i] += w[s] * values[(long)s * dv + i];
        for (int i = 0; i < dv; i++) out[i] /= sum;
    }

    void add(std::vector<float>& x, const float* from) {
        for (size_t i = 0; i < x.size(); i++) x[i] += from[i];
    }

    void norm_rows(const Norm& norm, const std::vector<float>& x, std::vector<float>& y) {
        for (int b = 0; b < batch; b++) normalise(norm, &x[(long)b * m.d_model], m.d_model, &y[(long)b * m.d_model]);
    }

    void project(int t, const Layer& layer, const float* in) {  // queries, keys, values: side by side in a row
        float *q = qkv.data(), *k = q + m.heads * m.d_head, *v = k + m.kv_heads * m.d_head;
        share(t, layer.q_of, in, q, width());
        share(t, layer.k_of, in, k, width());
        share(t, layer.v_of, in, v, width());
    }

    void feed(int t, const Layer& layer, const float* in) {  // up, gate and activation
        const int a = cut(m.d_ff, t), z = cut(m.d_ff, t + 1);
        multiply(layer.up, a, z, in, batch, hidden.data(), m.d_ff);
        if (m.gated) multiply(layer.gate, a, z, in, batch, gates.data(), m.d_ff);
        for (int b = 0; b < batch; b++) {
            float* row = &hidden[(long)b * m.d_ff];
            if (!m.gated) {
                activate(m.activation, row + a, z - a);
                continue;
            }
            float* gate = &gates[(long)b * m.d_ff];
            activate(m.activation, gate + a, z - a);
            for (int i = a; i < z; i++) row[i] *= gate[i];
        }
    }

    void down(int t, const Layer& layer, float* out) { share(t, layer.down, hidden.data(), out, m.d_model); }

    void run(int t) {
        const int D = m.d_model;
        std::vector<float> x((long)batch * D), normed((long)batch * D);
        float *first = delta.data(), *second = first + (long)batch * D;
        for (int b = 0; b < batch; b++)
            for (int i = 0; i < D; i++)
                x[(long)b * D + i] = m.tokens[(long)tokens[b] * D + i] * m.embed_scale +
                                     (m.position == TABLE ? m.places[(long)lengths[b] * D + i] : 0.0f);
        if (m.embedded.weight) norm_rows(m.embedded, x, x);
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
            const bool post = m.placement == POST, has_feed = m.d_ff > 0;
            if (!post) norm_rows(layer.attention, x, normed);
            const float* in = post ? x.data() : normed.data();
            project(t, layer, in);
            if (m.placement == PARALLEL) feed(t, layer, in);
            barrier.wait();
            attend(t, l);
            if (m.placement == PARALLEL) down(t, layer, second);
            barrier.wait();
            share(t, layer.out, mixed.data(), first, D);
            barrier.wait();
            add(x, first);
            if (m.placement == PARALLEL) add(x, second);
            if (post) norm_rows(layer.attention, x, x);
            if (m.placement == PARALLEL || !has_feed) continue;
            if (!post) norm_rows(layer.feedforward, x, normed);
            feed(t, layer, post ? x.data() : normed.data());
            barrier.wait();
            down(t, layer, second);
            barrier.wait();
            add(x, second);
            if (post) norm_rows(layer.feedforward, x, x);
        }
        if (m.last.weight) norm_rows(m.last, x, x);
        if (m.head_scale != 1)
            for (auto& value : x) value *= m.head_scale;
        share(t, m.head, x.data(), logits, m.vocabulary);
        barrier.wait();
    }
};

}  // namespace

extern "C" {

// Writes logits (rows, vocabulary) of the tokens; the caller advances the lengths.
void glass_step(const Model* model, Cache* cache, const int32_t* tokens, const int32_t* lengths, int32_t threads,
                float* logits) {
    std::lock_guard<std::mutex> turn(pool().turn);
    Step step(*model, *cache, tokens, lengths, threads, logits);
    pool().run(threads, [&step](int t) { step.run(t); });
}

// y (batch, rows) = matrix x (batch, columns): for measuring and for tests.
void glass_multiply(const Matrix* matrix, const float* x, int32_t batch, int32_t threads, float* y) {
    std::lock_guard<std::mutex> turn(pool().turn);
    pool().run(threads, [&](int t) {
        auto cut = [&](int i) { return i == threads ? matrix->rows : (int)((long)matrix->rows * i / threads) / 4 * 4; };
        multiply(*matrix, cut(t), cut(t + 1), x, batch, y, matrix->rows);
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
