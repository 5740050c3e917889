// softmax(scale q k^T) v and its gradients, for one (sequence, head) at a time, in float32 for every input dtype. pairs.h
// is a faster version for bf16.
//
// The keys and values of a head fit a core's cache, so complete rows of scores are computed for one block of queries after
// the other. A block of a causal pattern reads only the keys up to its last query. The backward pass computes the pattern
// again from the logsumexp of each row: P = exp(scale q k^T - lse), dP = do v^T, D_i = sum_k P_ik dP_ik (in pairs.h
// do_i . o_i, which is equal but for rounding), dS = P (dP - D) scale.
// The work of a head and the order of its sums do not depend on the number of threads.
#pragma once
#include "matmul.h"

constexpr int64_t BLOCK = 48;  // queries at a time: whole tiles (4 x 12 or 8 x 6), and 192 bytes of scores per key

struct Heads {  // (batch, head, time, width): strides in elements, the last one 1
    void* data;
    int64_t batch, head, time;
};

struct Task {
    Heads q, k, v, o, d_o, d_q, d_k, d_v;
    float* lse;  // (batch, head, query)
    int64_t n_batch, n_heads, n_kv_heads, n_queries, n_keys, width, value_width;
    float scale;
    int32_t causal, is_bf16;
};

template <typename T>
static inline T* row_of(const Heads& heads, int64_t b, int64_t h, int64_t t) {
    return (T*)heads.data + b * heads.batch + h * heads.head + t * heads.time;
}

static inline int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Convert n rows of a head to floats (n,width) at a stride of `pitch`; rows up to `padded` become zero.
template <typename T>
static void pack(const Heads& from, int64_t b, int64_t h, int64_t first, int64_t n, int64_t padded, int64_t width, int64_t pitch, float scale, float* to) {
    for (int64_t t = 0; t < n; ++t) {
        const T* row = row_of<T>(from, b, h, first + t);
        for (int64_t d = 0; d < width; d += WIDE) store(to + t * pitch + d, load(row + d) * scale);
    }
    memset(to + n * pitch, 0, (padded - n) * pitch * sizeof(float));
}

// (n,width) to (width,n), both multiples of WIDE, with strides padded_stride(width) and padded_stride(n).
static void transpose(const float* from, int64_t n, int64_t width, float* to) {
    const int64_t from_row = padded_stride(width), to_row = padded_stride(n);
    for (int64_t t = 0; t < n; t += WIDE)
        for (int64_t d = 0; d < width; d += WIDE) transpose_square(from + t * from_row + d, from_row, to + d * to_row + t, to_row);
}

template <typename T>
static void unpack(const float* from, int64_t n, int64_t width, float scale, const Heads& to, int64_t b, int64_t h,
                   int64_t first) {
    for (int64_t t = 0; t < n; ++t) {
        T* row = row_of<T>(to, b, h, first + t);
        for (int64_t d = 0; d < width; d += WIDE) store(row + d, load(from + t * width + d) * scale);
    }
}

static inline ints lanes() {
    ints at;
    for (int i = 0; i < WIDE; ++i) at[i] = i;
    return at;
}

// Replace a row of scores s by e^(scale s - max), and by zero from `seen` on. Returns the sum and the maximum.
static inline float softmax_row(float* row, int64_t seen, int64_t padded, float scale, float* highest) {
    floats top = broadcast(-INFINITY);
    for (int64_t j = 0; j < seen; j += WIDE) {
        floats x = load(row + j) * scale;
        x = lanes() + (int32_t)j < (int32_t)seen ? x : broadcast(-INFINITY);
        top = x > top ? x : top;
    }
    const float most = max_lanes(top);
    floats total = {};
    for (int64_t j = 0; j < padded; j += WIDE) {
        floats y = lanes() + (int32_t)j < (int32_t)seen ? exponential(load(row + j) * scale - most) : floats{};
        store(row + j, y);
        total += y;
    }
    *highest = most;
    return sum_lanes(total);
}

struct Span {  // the keys that a block of queries reads
    int64_t rows, keys;
    Span(const Task& t, int64_t first)
        : rows(first + BLOCK < t.n_queries ? BLOCK : t.n_queries - first),
          keys(up_to(t.causal && first + rows < t.n_keys ? first + rows : t.n_keys, WIDE)) {}
    int64_t seen(const Task& t, int64_t query) const { return t.causal && query + 1 < t.n_keys ? query + 1 : t.n_keys; }
};

template <typename T>
static void forward_head(const Task& t, int64_t b, int64_t h) {
    const int64_t W = t.width, U = t.value_width, S = up_to(t.n_keys, WIDE), S_row = padded_stride(S), kv = h / (t.n_heads / t.n_kv_heads);
    const int64_t W_row = padded_stride(W), U_row = padded_stride(U);
    float* k = scratch(S * (W_row + U_row) + S_row * W + BLOCK * (W + U + S_row));
    float *k_t = k + S * W_row, *v = k_t + S_row * W, *q = v + S * U_row, *out = q + BLOCK * W, *score = out + BLOCK * U;
    pack<T>(t.k, b, kv, 0, t.n_keys, S, W, W_row, 1, k);
    transpose(k, S, W, k_t);
    pack<T>(t.v, b, kv, 0, t.n_keys, S, U, U_row, 1, v);
    for (int64_t first = 0; first < t.n_queries; first += BLOCK) {
        const Span span(t, first);
        pack<T>(t.q, b, h, first, span.rows, span.rows, W, W, t.scale, q);
        multiply({q, W, 1}, {k_t, S_row}, score, S_row, span.rows, span.keys, W);
        float sums[BLOCK];
        for (int64_t i = 0; i < span.rows; ++i) {
            float most;
            sums[i] = softmax_row(score + i * S_row, span.seen(t, first + i), span.keys, 1, &most);
            t.lse[(b * t.n_heads + h) * t.n_queries + first + i] = most + std::log(sums[i]);
        }
        multiply({score, S_row, 1}, {v, U_row}, out, U, span.rows, U, span.keys);
        for (int64_t i = 0; i < span.rows; ++i)
            for (int64_t d = 0; d < U; d += WIDE) store(out + i * U + d, load(out + i * U + d) * (1 / sums[i]));
        unpack<T>(out, span.rows, U, 1, t.o, b, h, first);
    }
}

// One call per key/value head: the gradients of all query heads that share it are summed here.
template <typename T>
static void backward_head(const Task& t, int64_t b, int64_t kv) {
    const int64_t W = t.width, U = t.value_width, S = up_to(t.n_keys, WIDE), S_row = padded_stride(S), sharing = t.n_heads / t.n_kv_heads;
    const int64_t W_row = padded_stride(W), U_row = padded_stride(U);
    float* k = scratch(S * (W_row + U_row + W + U) + S_row * (W + U) + BLOCK * (2 * W + U + 2 * S_row));
    float *k_t = k + S * W_row, *v = k_t + S_row * W, *v_t = v + S * U_row, *d_k = v_t + S_row * U, *d_v = d_k + S * W;
    memset(d_k, 0, S * (W + U) * sizeof(float));
    float *q = d_v + S * U, *d_q = q + BLOCK * W, *d_o = d_q + BLOCK * W;
    float *pattern = d_o + BLOCK * U, *d_s = pattern + BLOCK * S_row;
    pack<T>(t.k, b, kv, 0, t.n_keys, S, W, W_row, 1, k);
    transpose(k, S, W, k_t);
    pack<T>(t.v, b, kv, 0, t.n_keys, S, U, U_row, 1, v);
    transpose(v, S, U, v_t);
    for (int64_t h = kv * sharing; h < (kv + 1) * sharing; ++h)
        for (int64_t first = 0; first < t.n_queries; first += BLOCK) {
            const Span span(t, first);
            const int64_t n = span.keys;
            pack<T>(t.q, b, h, first, span.rows, span.rows, W, W, t.scale, q);
            pack<T>(t.d_o, b, h, first, span.rows, span.rows, U, U, 1, d_o);
            multiply({q, W, 1}, {k_t, S_row}, pattern, S_row, span.rows, n, W);
            multiply({d_o, U, 1}, {v_t, S_row}, d_s, S_row, span.rows, n, U);
            for (int64_t i = 0; i < span.rows; ++i) {
                const float lse = t.lse[(b * t.n_heads + h) * t.n_queries + first + i];
                const int32_t seen = (int32_t)span.seen(t, first + i);
                floats dot = {}, sum = {};
                for (int64_t j = 0; j < n; j += WIDE) {
                    floats p = lanes() + (int32_t)j < seen ? exponential(load(pattern + i * S_row + j) - lse) : floats{};
                    store(pattern + i * S_row + j, p);
                    dot += p * load(d_s + i * S_row + j);
                    sum += p;
                }
                // the mean of dP itself, not d_o . o: for a query that attends to one key both are equal but for rounding,
                // and dP - D would be rounding noise only
                const float mean = sum_lanes(dot) / sum_lanes(sum);
                for (int64_t j = 0; j < n; j += WIDE)
                    store(d_s + i * S_row + j, load(pattern + i * S_row + j) * (load(d_s + i * S_row + j) - mean));
            }
            multiply({d_s, S_row, 1}, {k, W_row}, d_q, W, span.rows, W, n);
            unpack<T>(d_q, span.rows, W, t.scale, t.d_q, b, h, first);
            multiply_large({d_s, 1, S_row}, {q, W}, d_k, W, n, W, span.rows, true);  // q carries the scale
            multiply_large({pattern, 1, S_row}, {d_o, U}, d_v, U, n, U, span.rows, true);
        }
    unpack<T>(d_k, t.n_keys, W, 1, t.d_k, b, kv, 0);
    unpack<T>(d_v, t.n_keys, U, 1, t.d_v, b, kv, 0);
}

template <typename T>
static void attention(const Task& t, bool backward) {
    const int64_t heads = backward ? t.n_kv_heads : t.n_heads, n = t.n_batch * heads;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
        if (backward) backward_head<T>(t, i / heads, i % heads);
        else forward_head<T>(t, i / heads, i % heads);
    }
}
