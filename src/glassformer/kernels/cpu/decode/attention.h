// Attention of one head: one query over its keys, or a run of consecutive queries of one sequence at once.
#pragma once
#include <type_traits>
#include "model.h"
#include "packed.h"

namespace glass {

template <class T>
struct View {  // the keys and values of one sequence and one key/value head: those of token s are `pitch` numbers apart
    const T *keys, *values;
    long key_pitch, value_pitch;
};

constexpr int TOGETHER = 8;  // heads with the same keys that are computed together
constexpr int KEYS = 128;    // keys that all these heads read before the next ones, so that only the first reads them from memory

struct Head {  // one query head
    int d_head, d_value;
    float scale, softcap, sink;  // sink: one more score, which takes its share of the softmax; -INFINITY: none
};

// Scores w[0..n) become exp(score - largest), with score = softcap(scale * w) + biases; returns their sum.
inline float weigh(float* w, int n, const Head& head, const float* biases) {
    float scale = head.scale;
    if (head.softcap > 0) {
        const float inverse = 2 * scale / head.softcap, cap = head.softcap;
        apply(w, n, [=](floats v) { return cap - 2 * cap / (1 + exponential(v * inverse)); });
        scale = 1;
    }
    if (biases) {
        for (int s = 0; s < n; s++) w[s] = w[s] * scale + biases[s];
        scale = 1;
    }
    return softmax_numerators(w, n, scale, head.sink);
}

// w[n][s] = q[n] . keys[s] for N queries and the keys from..end. The order of each sum does not depend on N.
template <int N, class T>
void scores_of(const T* keys, long pitch, int dk, const float* q, long q_pitch, int from, int end, float* w, long w_pitch) {
    const int whole = dk / LANES * LANES;
    for (long s = from; s < end; s++) {
        const T* key = keys + s * pitch;
        floats sums[N] = {};
        for (int c = 0; c < whole; c += LANES) {
            const floats here = load(key + c);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[n] = multiply_add(sums[n], load(q + n * q_pitch + c), here);
        }
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) w[n * w_pitch + s] = sum_lanes(sums[n]);
        if constexpr (std::is_same_v<T, float>)
            for (int n = 0; whole < dk && n < N; n++)
                for (int c = whole; c < dk; c++) w[n * w_pitch + s] += q[n * q_pitch + c] * key[c];
    }
}

// out[n][0..C LANES) (+)= sum over s in from..end of w[n][s] values[s][0..C LANES) for N heads.
template <int N, int C, class T>
void weighted_sums(const float* w, long w_pitch, const T* values, long pitch, int from, int end, bool more, float* out, long out_pitch) {
    floats sums[N][C];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[n][c] = more ? load(out + n * out_pitch + c * LANES) : floats{};
    for (long s = from; s < end; s++) {
        floats here[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) here[c] = load(values + s * pitch + c * LANES);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) sums[n][c] = multiply_add(sums[n][c], here[c], w[n * w_pitch + s]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out + n * out_pitch + c * LANES, sums[n][c]);
}

// f(N, first) for N = 4, 2 or 1 of `count` heads from `first` on, until all have been taken.
template <class F>
inline void by_fours(int count, F f) {
    int h = 0;
    for (; h + 4 <= count; h += 4) f(std::integral_constant<int, 4>(), h);
    if (h + 2 <= count) f(std::integral_constant<int, 2>(), h), h += 2;
    if (h < count) f(std::integral_constant<int, 1>(), h);
}

// One query of each of some heads that share their keys, `count` <= TOGETHER, over the keys from..end. head_of(n) and biases_of(n) are
// those of head n. The results may take the place of the queries.
template <class T, class H, class B>
inline void attend_few(int count, H head_of, const View<T>& view, const float* q, long q_pitch, int from, int end, B biases_of,
                       float* out, long out_pitch) {
    static thread_local Rows held;
    const Head shape = head_of(0);
    const int dv = shape.d_value;
    const long pitch = padded_stride(end - from);
    float* const w = held.need(count * pitch) - from;
    float factors[TOGETHER];
    for (int first = from; first < end; first += KEYS)
        by_fours(count, [&](auto n, int h) {
            scores_of<decltype(n)::value>(view.keys, view.key_pitch, shape.d_head, q + h * q_pitch, q_pitch, first,
                                          std::min(first + KEYS, end), w + h * pitch, pitch);
        });
    for (int h = 0; h < count; h++) {
        const float* biases = biases_of(h);
        factors[h] = 1 / weigh(w + h * pitch + from, end - from, head_of(h), biases ? biases + from : nullptr);
    }
    for (int first = from; first < end; first += KEYS) {
        const int last = std::min(first + KEYS, end);
        const bool more = first > from;
        by_fours(count, [&](auto n, int h) {
            constexpr int N = decltype(n)::value;
            const float* mine = w + h * pitch;
            float* to = out + h * out_pitch;
            int c = 0;
            for (; c + 4 * LANES <= dv; c += 4 * LANES)
                weighted_sums<N, 4>(mine, pitch, view.values + c, view.value_pitch, first, last, more, to + c, out_pitch);
            for (; c + LANES <= dv; c += LANES)
                weighted_sums<N, 1>(mine, pitch, view.values + c, view.value_pitch, first, last, more, to + c, out_pitch);
            if constexpr (std::is_same_v<T, float>)
                for (; c < dv; c++)
                    for (int i = 0; i < N; i++) {
                        float sum = more ? to[i * out_pitch + c] : 0;
                        for (int s = first; s < last; s++) sum += mine[i * pitch + s] * view.values[s * view.value_pitch + c];
                        to[i * out_pitch + c] = sum;
                    }
        });
    }
    for (int h = 0; h < count; h++)
        for (int c = 0; c < dv; c++) out[h * out_pitch + c] *= factors[h];
}

// A run of queries is multiplied in float32, or in pairs of bf16 if the processor can.
typedef std::conditional_t<HAS_PAIRS, pair, float> Narrow;
template <class N> constexpr int PER_WORD = std::is_same_v<N, float> ? 1 : 2;

// Rows of numbers in words of N: themselves, or a copy whose rows are `stride` words apart. `width` is a multiple of 16 for a copy.
template <class N, class T>
inline const N* as_words(const T* rows, long pitch, long count, int width, Rows& held, long& stride) {
    if constexpr (std::is_same_v<N, T>) return stride = pitch, rows;
    else {
        stride = width / PER_WORD<N>;
        N* const to = (N*)held.need(count * stride);
        for (long i = 0; i < count; i++)
            for (int c = 0; c < width; c += LANES) {
                const floats x = load(rows + i * pitch + c);
                if constexpr (std::is_same_v<N, float>) store(to + i * stride + c, x);
                else narrow(to + i * stride + c / 2, x);
            }
        return to;
    }
}

// Rows of values as a panel, in which pairs are of neighbouring rows. The second of the last pair may be missing: it is 0.
template <class N, class T>
inline const N* as_panel(const T* rows, long pitch, long count, int width, Rows& held, long& stride) {
    if constexpr (std::is_same_v<N, float>) return as_words<N>(rows, pitch, count, width, held, stride);
    else {
        stride = width;
        N* const to = (N*)held.need((count + 1) / 2 * stride);
        for (long i = 0; i < count; i += 2)
            for (int c = 0; c < width; c += LANES) {
                const floats second = i + 1 < count ? load(rows + (i + 1) * pitch + c) : floats{};
                *(uints*)(to + i / 2 * stride + c) = both(load(rows + i * pitch + c), second);
            }
        return to;
    }
}

// Queries i of a run, `q_pitch` apart: scores of a block of them (keys as panels), their softmax, and the weighted sums of
// values, whose rows already are a panel. visible(i, from, end) sets the keys of query i; d_value is a multiple of 32. Operands
// of both matmuls are words of N.
template <class N, class T, class V, class B>
inline void attend_run(const Head& head, const View<T>& view, int queries, const float* q, long q_pitch, V visible, B biases_of,
                       float* out, long out_pitch) {
    // whole tiles, two of 14 vectors with AVX-512, which read a panel of keys while it is in the L1 cache
    constexpr int BLOCK = 28 / TALL * TALL, PER = PER_WORD<N>;
    static thread_local Rows key_panels, score_rows, key_rows, value_rows, query_rows, weight_rows;
    const int dk = head.d_head, dv = head.d_value, depth = dk / PER;
    int begin, last, unused;
    visible(0, begin, unused), visible(queries - 1, unused, last);
    begin = begin / WIDE * WIDE;
    const long pitch = padded_stride((last - begin + WIDE - 1) / WIDE * WIDE);
    N* const keys = (N*)key_panels.need(pitch * depth);    // panels (depth, 32) of 32 keys each
    float* const scores = score_rows.need(BLOCK * pitch);  // (BLOCK, pitch), by key - begin
    long key_stride, value_stride, query_stride, weight_stride;
    for (int s = begin; s < last; s += WIDE) {
        const int rows = std::min(WIDE, last - s);
        const N* words = as_words<N>(view.keys + s * view.key_pitch, view.key_pitch, rows, dk, key_rows, key_stride);
        const Matrix some{words, nullptr, nullptr, rows, depth, 0, F32};  // pairs are only moved
        fill_panel(some, 0, 0, depth, (float*)keys + (long)(s - begin) * depth, key_stride);
    }
    const N* const values = as_panel<N>(view.values + begin * view.value_pitch, view.value_pitch, last - begin, dv, value_rows, value_stride);
    for (int i = 0; i < queries; i += BLOCK) {
        const int n = std::min(BLOCK, queries - i);
        int from, most;
        visible(i, from, unused), visible(i + n - 1, unused, most);
        from = from / WIDE * WIDE;
        const int end_of_panels = (most - from + WIDE - 1) / WIDE * WIDE + from;
        const N* some = as_words<N>(q + i * q_pitch, q_pitch, n, dk, query_rows, query_stride);
        float inverse[BLOCK];
        for (int s = from; s < most; s += WIDE)
            multiply_tiles(keys + (long)(s - begin) * depth, WIDE, depth, some, query_stride, n, &scores[s - begin], pitch);
        for (int j = 0; j < n; j++) {
            int first, end;
            visible(i + j, first, end);
            float* w = &scores[j * pitch] - begin;
            const float* biases = biases_of(i + j);
            inverse[j] = 1 / weigh(w + first, end - first, head, biases ? biases + first : nullptr);
            for (int s = from; s < first; s++) w[s] = 0;
            for (int s = end; s < end_of_panels; s++) w[s] = 0;
        }
        const N* weights = as_words<N>(&scores[from - begin], pitch, n, end_of_panels - from, weight_rows, weight_stride);
        float* to = out + i * out_pitch;
        for (int c = 0; c < dv; c += WIDE)
            multiply_tiles(values + (from - begin) / PER * value_stride + c, value_stride, (most - from + PER - 1) / PER, weights,
                           weight_stride, n, to + c, out_pitch);
        for (int j = 0; j < n; j++)
            for (int c = 0; c < dv; c++) to[j * out_pitch + c] *= inverse[j];
    }
}

inline void rotate(const Layer& layer, float* x, int row) {  // by the angles in a row of its tables
    const int half = layer.rotated / 2;
    const float *c = layer.cosines + (long)row * half, *s = layer.sines + (long)row * half;
    if (layer.pairing == HALVES)
        for (int i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            x[i] = first * c[i] - second * s[i], x[i + half] = second * c[i] + first * s[i];
        }
    else
        for (int i = 0; i < half; i++) {
            const float first = x[2 * i], second = x[2 * i + 1];
            x[2 * i] = first * c[i] - second * s[i], x[2 * i + 1] = second * c[i] + first * s[i];
        }
}

inline void clip(float* x, int n, float most) {
    if (most > 0)
        for (int i = 0; i < n; i++) x[i] = std::min(std::max(x[i], -most), most);
}

// A query or a key of head h: its norm, clipped and rotated, in the order of the model.
inline void prepare_head(const Model& m, const Layer& layer, Norm norm, int h, float* x, int row, bool rotates) {
    if (norm.weight && m.qk_over == HEADS) norm.weight += (long)h * m.d_head;
    const bool has_norm = norm.weight && m.qk_over != ALL;
    if (has_norm && !m.qk_last) normalize(norm, x, m.d_head, x);
    clip(x, m.d_head, m.clip);
    if (rotates && layer.rotated) rotate(layer, x, row);
    if (has_norm && m.qk_last) normalize(norm, x, m.d_head, x);
}

}  // namespace glass
