// Attention of bf16 by AVX512-BF16 instructions, which multiply pairs of bf16 and sum in float32: twice the throughput.
//
// Formulas and blocks are those of attention.h. The operands of matmuls are bf16, so the pattern and the gradient of the
// scores are rounded to bf16 once, as in torch's kernels; scores, sums and gradients are summed in float32. Every matmul
// reads pairs along its summed dimension: pairs of columns for the scores, of keys for the values, of queries for the
// gradients of keys and values.
#pragma once
#include "attention.h"

#if defined(__AVX512BF16__)

struct Arena {  // hands out pieces of the scratch buffer
    float* at;
    template <typename T>
    T* take(int64_t n) {
        T* piece = (T*)at;
        at += n * (int64_t)sizeof(T) / (int64_t)sizeof(float);
        return piece;
    }
};

// Copy n rows of a head, followed by rows of zeros up to `padded`.
static void copy(const Heads& from, int64_t b, int64_t h, int64_t first, int64_t n, int64_t padded, int64_t width,
                 bf16* to) {
    for (int64_t t = 0; t < n; ++t) memcpy(to + t * width, row_of<bf16>(from, b, h, first + t), width * sizeof(bf16));
    memset(to + n * width, 0, (padded - n) * width * sizeof(bf16));
}

// (n,width) to (width/2,n) pairs of columns; n and width are multiples of 16. Where width / 2 is not, the last block of 16 x 16
// pairs reads 8 pairs of the next row too, or what follows the last row in the buffer, and they are not copied.
static void transpose_pairs(const bf16* from, int64_t n, int64_t width, pair* to) {
    const float* rows = (const float*)from;  // a pair is moved as the bits of a float
    pair block[WIDE * WIDE];
    for (int64_t t = 0; t < n; t += WIDE)
        for (int64_t d = 0; d < width / 2; d += WIDE) {
            transpose_square(rows + t * (width / 2) + d, width / 2, (float*)block, WIDE);
            for (int i = 0; i < WIDE && d + i < width / 2; ++i) memcpy(to + (d + i) * n + t, block + i * WIDE, WIDE * sizeof(pair));
        }
}

// (n,width) to (n/2,width): interleave rows 2i and 2i + 1 to pairs; n is even.
static void pair_rows(const bf16* from, int64_t n, int64_t width, pair* to) {
    for (int64_t t = 0; t < n; t += 2)
        for (int64_t d = 0; d < width; d += WIDE) {
            const bf16* at = from + t * width + d;
            *(uints*)(to + t / 2 * width + d) = (uints)load(at) >> 16 | (uints)load(at + width);
        }
}

template <>
void forward_head<bf16>(const Task& t, int64_t b, int64_t h) {
    const int64_t W = t.width, U = t.value_width, S = up_to(t.n_keys, WIDE), kv = h / (t.n_heads / t.n_kv_heads);
    Arena room{scratch(BLOCK * (U + S + W) + S * (W + U))};
    float *out = room.take<float>(BLOCK * U), *score = room.take<float>(BLOCK * S);
    pair *k_t = room.take<pair>(S * W / 2), *v = room.take<pair>(S * U / 2);
    bf16 *q = room.take<bf16>(BLOCK * W), *rows = room.take<bf16>(S * (W + U));
    copy(t.k, b, kv, 0, t.n_keys, S, W, rows);
    transpose_pairs(rows, S, W, k_t);
    copy(t.v, b, kv, 0, t.n_keys, S, U, rows);
    pair_rows(rows, S, U, v);
    for (int64_t first = 0; first < t.n_queries; first += BLOCK) {
        const Span span(t, first);
        copy(t.q, b, h, first, span.rows, span.rows, W, q);
        multiply<pair>({(pair*)q, W / 2, 1}, {k_t, S}, score, S, span.rows, span.keys, W / 2);
        float sums[BLOCK];
        for (int64_t i = 0; i < span.rows; ++i) {
            float most, *row = score + i * S;
            sums[i] = softmax_row(row, span.seen(t, first + i), span.keys, t.scale, &most);
            t.lse[(b * t.n_heads + h) * t.n_queries + first + i] = most + std::log(sums[i]);
            for (int64_t j = 0; j < span.keys; j += WIDE) narrow((bf16*)row + j, load(row + j));  // in place
        }
        multiply<pair>({(pair*)score, S, 1}, {v, U}, out, U, span.rows, U, span.keys / 2);
        for (int64_t i = 0; i < span.rows; ++i) unpack<bf16>(out + i * U, 1, U, 1 / sums[i], t.o, b, h, first + i);
    }
}

// Buffers of a block of queries in the backward pass.
struct Blocks {
    bf16 *q, *d_o;                              // row-major copies
    pair *q_pairs, *d_o_pairs, *pattern, *d_s;  // pairs of queries
    float *scores, *d_scores, *d_q;             // rows of d_scores are narrowed to bf16 in place
};

// Compute the pattern and the gradient of the scores of queries i and i + 1 (if it exists).
static inline void softmax_backward(const Task& t, const Span& span, const Blocks& at, int64_t b, int64_t h, int64_t first,
                               int64_t i) {
    const int64_t U = t.value_width, S = up_to(t.n_keys, WIDE);
    float D[2] = {}, lse[2] = {};
    int32_t seen[2] = {};  // 0 keys for a query that does not exist
    for (int64_t k = 0; k < 2 && i + k < span.rows; ++k) {
        const bf16 *d_o = at.d_o + (i + k) * U, *o = row_of<bf16>(t.o, b, h, first + i + k);
        floats dot = {};
        for (int64_t d = 0; d < U; d += WIDE) dot += load(d_o + d) * load(o + d);
        D[k] = sum_lanes(dot), lse[k] = t.lse[(b * t.n_heads + h) * t.n_queries + first + i + k];
        seen[k] = (int32_t)span.seen(t, first + i + k);
    }
    float *score = at.scores + i * S, *d_score = at.d_scores + i * S;
    for (int64_t j = 0; j < span.keys; j += WIDE) {
        floats p[2], d_s[2];
#pragma GCC unroll 2
        for (int k = 0; k < 2; ++k) {
            const auto there = lanes() + (int32_t)j < seen[k];
            p[k] = there ? exponential(load(score + k * S + j) * t.scale - lse[k]) : floats{};
            d_s[k] = there ? p[k] * (load(d_score + k * S + j) - D[k]) : floats{};
            narrow((bf16*)(d_score + k * S) + j, d_s[k]);
        }
        *(uints*)(at.pattern + i / 2 * S + j) = both(p[0], p[1]);
        *(uints*)(at.d_s + i / 2 * S + j) = both(d_s[0], d_s[1]);
    }
}

template <>
void backward_head<bf16>(const Task& t, int64_t b, int64_t kv) {
    const int64_t W = t.width, U = t.value_width, S = up_to(t.n_keys, WIDE), sharing = t.n_heads / t.n_kv_heads;
    Arena room{scratch(S * (5 * W + 4 * U) / 2 + BLOCK * (2 * W + U + 3 * S))};
    float *d_k = room.take<float>(S * (W + U)), *d_v = d_k + S * W;
    pair *k_t = room.take<pair>(S * W / 2), *k_pairs = room.take<pair>(S * W / 2), *v_t = room.take<pair>(S * U / 2);
    bf16* rows = room.take<bf16>(S * (W + U));
    const Blocks at{room.take<bf16>(BLOCK * W), room.take<bf16>(BLOCK * U), room.take<pair>(BLOCK * W / 2),
                    room.take<pair>(BLOCK * U / 2), room.take<pair>(BLOCK * S / 2), room.take<pair>(BLOCK * S / 2),
                    room.take<float>(BLOCK * S), room.take<float>(BLOCK * S), room.take<float>(BLOCK * W)};
    memset(d_k, 0, S * (W + U) * sizeof(float));
    copy(t.k, b, kv, 0, t.n_keys, S, W, rows);
    transpose_pairs(rows, S, W, k_t);
    pair_rows(rows, S, W, k_pairs);
    copy(t.v, b, kv, 0, t.n_keys, S, U, rows);
    transpose_pairs(rows, S, U, v_t);
    for (int64_t h = kv * sharing; h < (kv + 1) * sharing; ++h)
        for (int64_t first = 0; first < t.n_queries; first += BLOCK) {
            const Span span(t, first);
            const int64_t m = span.rows, n = span.keys, even = up_to(m, 2);
            copy(t.q, b, h, first, m, even, W, at.q);
            copy(t.d_o, b, h, first, m, even, U, at.d_o);
            pair_rows(at.q, even, W, at.q_pairs);
            pair_rows(at.d_o, even, U, at.d_o_pairs);
            multiply<pair>({(pair*)at.q, W / 2, 1}, {k_t, S}, at.scores, S, m, n, W / 2);
            multiply<pair>({(pair*)at.d_o, U / 2, 1}, {v_t, S}, at.d_scores, S, m, n, U / 2);
            for (int64_t i = 0; i < m; i += 2) softmax_backward(t, span, at, b, h, first, i);
            multiply<pair>({(pair*)at.d_scores, S, 1}, {k_pairs, W}, at.d_q, W, m, W, n / 2);
            unpack<bf16>(at.d_q, m, W, t.scale, t.d_q, b, h, first);
            multiply<pair>({at.d_s, 1, S}, {at.q_pairs, W}, d_k, W, n, W, even / 2, true);
            multiply<pair>({at.pattern, 1, S}, {at.d_o_pairs, U}, d_v, U, n, U, even / 2, true);
        }
    unpack<bf16>(d_k, t.n_keys, W, t.scale, t.d_k, b, kv, 0);
    unpack<bf16>(d_v, t.n_keys, U, 1, t.d_v, b, kv, 0);
}
#endif
