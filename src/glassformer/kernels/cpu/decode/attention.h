// Attention of one head: one query over its keys, or a run of consecutive queries of one sequence at once.
#pragma once
#include "model.h"
#include "packed.h"

namespace glass {

struct View {  // the keys and values of one sequence and one key/value head: those of token s are `pitch` floats apart
    const float *keys, *values;
    long key_pitch, value_pitch;
};

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

// out[0..16 N) = factor * sum over s of w[s] values[s][0..16 N).
template <int N>
void weighted_sum(const float* w, const float* values, long pitch, int from, int end, float factor, float* out) {
    floats sums[N] = {};
    for (long s = from; s < end; s++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[n] = multiply_add(sums[n], load(values + s * pitch + n * LANES), w[s]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(out + n * LANES, sums[n] * factor);
}

// One query over keys from..end. Memory for the weights of keys 0..end is given (w).
inline void attend_one(const Head& head, const View& view, const float* q, int from, int end, const float* biases, float* w,
                       float* out) {
    const int dk = head.d_head, dv = head.d_value;
    for (long s = from; s < end; s++) w[s] = dot(q, view.keys + s * view.key_pitch, dk);
    const float factor = 1 / weigh(w + from, end - from, head, biases ? biases + from : nullptr);
    int c = 0;
    for (; c + 4 * LANES <= dv; c += 4 * LANES)
        weighted_sum<4>(w, view.values + c, view.value_pitch, from, end, factor, out + c);
    for (; c + LANES <= dv; c += LANES) weighted_sum<1>(w, view.values + c, view.value_pitch, from, end, factor, out + c);
    for (; c < dv; c++) {
        out[c] = 0;
        for (int s = from; s < end; s++) out[c] += w[s] * view.values[s * view.value_pitch + c];
        out[c] *= factor;
    }
}

// Queries i of a run, `q_pitch` apart: scores of a block of them (keys as panels), their softmax, and the weighted sums of
// values, whose rows already are a panel. visible(i, from, end) sets the keys of query i; d_value is a multiple of 32.
template <class V, class B>
inline void attend_run(const Head& head, const View& view, int queries, const float* q, long q_pitch, V visible, B biases_of,
                       float* out, long out_pitch) {
    // whole tiles, two of 14 vectors with AVX-512, which read a panel of keys while it is in the L1 cache
    constexpr int BLOCK = 28 / TALL * TALL;
    static thread_local Rows key_panels, score_rows;
    const int dk = head.d_head, dv = head.d_value;
    int begin, last, unused;
    visible(0, begin, unused), visible(queries - 1, unused, last);
    begin = begin / WIDE * WIDE;
    const long pitch = padded_stride((last - begin + WIDE - 1) / WIDE * WIDE);
    const Matrix all{view.keys, nullptr, nullptr, last, dk, 0, F32};
    float* const keys = key_panels.need(pitch * dk);       // panels (d_head, 32) of 32 keys each
    float* const scores = score_rows.need(BLOCK * pitch);  // (BLOCK, pitch), by key - begin
    for (int s = begin; s < last; s += WIDE) fill_panel(all, s, 0, dk, &keys[(long)(s - begin) * dk], view.key_pitch);
    for (int i = 0; i < queries; i += BLOCK) {
        const int n = std::min(BLOCK, queries - i);
        int from, most;
        visible(i, from, unused), visible(i + n - 1, unused, most);
        from = from / WIDE * WIDE;
        float inverse[BLOCK];
        for (int s = from; s < most; s += WIDE)
            multiply_tiles(&keys[(long)(s - begin) * dk], WIDE, dk, q + i * q_pitch, q_pitch, n, &scores[s - begin], pitch);
        for (int j = 0; j < n; j++) {
            int first, end;
            visible(i + j, first, end);
            float* w = &scores[j * pitch] - begin;
            const float* biases = biases_of(i + j);
            inverse[j] = 1 / weigh(w + first, end - first, head, biases ? biases + first : nullptr);
            for (int s = from; s < first; s++) w[s] = 0;
            for (int s = end; s < most; s++) w[s] = 0;
        }
        float* to = out + i * out_pitch;
        for (int c = 0; c < dv; c += WIDE)
            multiply_tiles(view.values + from * view.value_pitch + c, view.value_pitch, most - from, &scores[from - begin], pitch,
                           n, to + c, out_pitch);
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
