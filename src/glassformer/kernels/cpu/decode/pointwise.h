// Functions of a vector, LANES elements at a time: norms, activations, the exponentials of a softmax.
#pragma once
#include "rows.h"

namespace glass {

enum Activation : int32_t { RELU, GELU, GELU_TANH, SILU, RELU2, TANH, QUICK_GELU };

struct Norm {
    const float *weight, *bias;
    float eps;
    int32_t centred;
};

template <class F>
inline void apply(float* x, int n, F f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, f(load(x + i)));
    if (i < n) store_some(x + i, n - i, f(load_some(x + i, n - i, 0)));
}

inline void activate(int kind, float* x, int n) {
    switch (kind) {
        case RELU: return apply(x, n, [](floats v) { return v > 0 ? v : floats{}; });
        case GELU: return apply(x, n, [](floats v) { return v * exact_gate(v).value; });
        case GELU_TANH: return apply(x, n, [](floats v) { return v * tanh_gate(v).value; });
        case SILU: return apply(x, n, [](floats v) { return v / (1 + exponential(-v)); });
        case RELU2: return apply(x, n, [](floats v) { return v > 0 ? v * v : floats{}; });
        case TANH: return apply(x, n, [](floats v) { return 2 / (1 + exponential(-2 * v)) - 1; });
        default: return apply(x, n, [](floats v) { return v / (1 + exponential(-1.702f * v)); });
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

// w[0..n) become exp(scale * w - largest); returns their sum. `sink` is one more score in the largest and in the sum.
inline float softmax_numerators(float* w, int n, float scale, float sink = -INFINITY) {
    const int whole = n / LANES * LANES;
    const floats last = whole < n ? load_some(w + whole, n - whole, -INFINITY) * scale : floats{} - INFINITY;
    floats top = last;
    for (int i = 0; i < whole; i += LANES) {
        const floats here = load(w + i) * scale;
        top = here > top ? here : top;
    }
    const float highest = std::max(max_lanes(top), sink);
    floats sum = {};
    for (int i = 0; i < whole; i += LANES) {
        const floats here = exponential(load(w + i) * scale - highest);
        store(w + i, here), sum += here;
    }
    float rest = sum_lanes(sum) + (sink > -INFINITY ? std::exp(sink - highest) : 0.0f);
    if (whole < n) {
        store_some(w + whole, n - whole, exponential(last - highest));
        for (int i = whole; i < n; i++) rest += w[i];
    }
    return rest;
}

}  // namespace glass
