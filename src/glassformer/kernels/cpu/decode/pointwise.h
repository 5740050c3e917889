// Elementwise functions of a vector, W elements at a time: norms, activations, the softmax's exponential.
#pragma once
#include "kernels.h"

namespace glass {

enum Activation : int32_t { RELU, GELU, GELU_TANH, SILU, RELU2, TANH };

struct Norm {
    const float *weight, *bias;
    float eps;
    int32_t centred;
};

// exp to about 2 ulp: x = n ln 2 + r, a polynomial on |r| <= ln(2)/2, and 2^n by its bits.
inline vf exp_of(vf x) {
    x = x < -87.0f ? vf{} - 87.0f : x > 88.0f ? vf{} + 88.0f : x;
    const vf scaled = x * 1.44269504f;
    const vi n = __builtin_convertvector(scaled + (scaled < 0 ? vf{} - 0.5f : vf{} + 0.5f), vi);
    const vf whole = __builtin_convertvector(n, vf), r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    const vf p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666667f + r * (0.0416666418f + r * (0.00833336748f +
                 r * (0.00138870882f + r * 0.000198412698f))))));
    return p * (vf)((n + 127) << 23);
}

inline vf tanh_of(vf x) {
    const vf t = 1 - 2 / (exp_of(2 * (x < 0 ? -x : x)) + 1);
    return x < 0 ? -t : t;
}

// Abramowitz and Stegun 7.1.26: |error| <= 1.5e-7, a rounding of float32.
inline vf erf_of(vf x) {
    const vf a = x < 0 ? -x : x, t = 1 / (1 + 0.3275911f * a);
    const vf p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const vf y = 1 - p * exp_of(-a * a);
    return x < 0 ? -y : y;
}

template <class F>
inline void apply(float* x, int n, F f) {
    int i = 0;
    for (; i + W <= n; i += W) store(x + i, f(load(x + i)));
    if (i < n) store_some(x + i, n - i, f(load_some(x + i, n - i, 0)));
}

inline void activate(int kind, float* x, int n) {
    switch (kind) {
        case RELU: return apply(x, n, [](vf v) { return v > 0 ? v : vf{}; });
        case GELU: return apply(x, n, [](vf v) { return 0.5f * v * (1 + erf_of(v * 0.70710678f)); });
        case GELU_TANH:  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
            return apply(x, n, [](vf v) { return v / (1 + exp_of(-1.59576912f * (v + 0.044715f * v * v * v))); });
        case SILU: return apply(x, n, [](vf v) { return v / (1 + exp_of(-v)); });
        case RELU2: return apply(x, n, [](vf v) { return v > 0 ? v * v : vf{}; });
        default: return apply(x, n, [](vf v) { return tanh_of(v); });
    }
}

inline void normalize(const Norm& norm, const float* x, int n, float* y) {
    const float mean = norm.centred ? sum_of(x, n) / n : 0.0f;
    for (int i = 0; i < n; i++) y[i] = x[i] - mean;
    const float inverse = 1 / std::sqrt(dot(y, y, n) / n + norm.eps);
    if (norm.bias)
        for (int i = 0; i < n; i++) y[i] = y[i] * inverse * norm.weight[i] + norm.bias[i];
    else
        for (int i = 0; i < n; i++) y[i] = y[i] * inverse * norm.weight[i];
}

// w[0..n) become exp(scale * w - largest); returns their sum.
inline float soften(float* w, int n, float scale) {
    const int whole = n / W * W;
    const vf last = whole < n ? load_some(w + whole, n - whole, -INFINITY) * scale : vf{} - INFINITY;
    vf top = last;
    for (int i = 0; i < whole; i += W) {
        const vf here = load(w + i) * scale;
        top = here > top ? here : top;
    }
    float highest = -INFINITY;
    for (int k = 0; k < W; k++) highest = top[k] > highest ? top[k] : highest;
    vf sum = {};
    for (int i = 0; i < whole; i += W) {
        const vf here = exp_of(load(w + i) * scale - highest);
        store(w + i, here), sum += here;
    }
    float rest = total(sum);
    if (whole < n) {
        store_some(w + whole, n - whole, exp_of(last - highest));
        for (int i = whole; i < n; i++) rest += w[i];
    }
    return rest;
}

}  // namespace glass
