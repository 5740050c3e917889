// Linear layers of one input, y_i = x W_i^T + b_i, and their gradients: dx = sum_i dy_i W_i, dW_i = dy_i^T x.
//
// Weights are first packed into panels of PANEL columns, the layout that tiles read. In the forward pass and for dx, each
// thread processes chunks of tokens. For weight gradients it processes rows of the weight, so threads share no sums.
#pragma once
#include "feedforward.h"

constexpr int64_t MOST_LAYERS = 3, CHUNK = 96;  // layers of a call; tokens, or rows of a weight, of a chunk

struct Layers {
    const float* x;  // (N,D)
    const float *weight[MOST_LAYERS], *bias[MOST_LAYERS];  // (O,D), (O) or null
    float* out[MOST_LAYERS];                               // (N,O)
    const float* gradient[MOST_LAYERS];                    // (N,O)
    float *d_x, *d_weight[MOST_LAYERS];
    int64_t n, width, size[MOST_LAYERS];  // N, D, O
    int32_t count;
};

// Pack (m,n) into panels of columns: (d, j) at panel j / PANEL, row d, column j % PANEL.
static void pack_panels(const float* from, int64_t m, int64_t n, float* to) {
#pragma omp for schedule(static)
    for (int64_t d = 0; d < m; ++d)
        for (int64_t j = 0; j < n; j += WIDE) store(to + (j / PANEL * m + d) * PANEL + j % PANEL, load(from + d * n + j));
}

static void linear_forward(const Layers& a) {
    const int64_t D = a.width, chunks = (a.n + CHUNK - 1) / CHUNK;
    int64_t all = 0;
    float* panels[MOST_LAYERS];
    for (int i = 0; i < a.count; ++i) all += (a.size[i] + PANEL) * D;
    float* held = scratch(all);
    for (int i = 0; i < a.count; ++i) panels[i] = held, held += (a.size[i] + PANEL) * D;
#pragma omp parallel
    {
        for (int i = 0; i < a.count; ++i) pack_transposed_panels(a.weight[i], a.size[i], D, panels[i]);
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t first = chunk * CHUNK, n = first + CHUNK < a.n ? CHUNK : a.n - first;
            for (int i = 0; i < a.count; ++i) {
                const int64_t O = a.size[i];
                float* out = a.out[i] + first * O;
                multiply_large({a.x + first * D, D, 1}, {panels[i], PANEL, PANEL * D}, out, O, n, O, D);
                for (int64_t t = 0; a.bias[i] && t < n; ++t)
                    for (int64_t j = 0; j < O; j += WIDE) store(out + t * O + j, load(out + t * O + j) + load(a.bias[i] + j));
            }
        }
    }
}

static void linear_backward(const Layers& a) {
    const int64_t D = a.width, chunks = (a.n + CHUNK - 1) / CHUNK;
    int64_t all = 0, slices[MOST_LAYERS + 1] = {};
    float* panels[MOST_LAYERS];
    for (int i = 0; i < a.count; ++i) all += (D + PANEL) * a.size[i], slices[i + 1] = slices[i] + (a.size[i] + CHUNK - 1) / CHUNK;
    float* held = scratch(all);
    for (int i = 0; i < a.count; ++i) panels[i] = held, held += (D + PANEL) * a.size[i];
#pragma omp parallel
    {
        for (int i = 0; i < a.count; ++i) pack_panels(a.weight[i], a.size[i], D, panels[i]);
#pragma omp for schedule(static) nowait
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t first = chunk * CHUNK, n = first + CHUNK < a.n ? CHUNK : a.n - first;
            for (int i = 0; i < a.count; ++i) {
                const int64_t O = a.size[i];
                multiply_large({a.gradient[i] + first * O, O, 1}, {panels[i], PANEL, PANEL * O}, a.d_x + first * D, D, n, D, O, i > 0);
            }
        }
#pragma omp for schedule(static)
        for (int64_t slice = 0; slice < slices[a.count]; ++slice) {
            int i = 0;
            while (slice >= slices[i + 1]) ++i;
            const int64_t O = a.size[i], row = (slice - slices[i]) * CHUNK, rows = row + CHUNK < O ? CHUNK : O - row;
            for (int64_t first = 0; first < a.n; first += TOKENS) {
                const int64_t n = first + TOKENS < a.n ? TOKENS : a.n - first;
                const float* gradient = a.gradient[i] + first * O + row;
                multiply_large({gradient, 1, O}, {a.x + first * D, D}, a.d_weight[i] + row * D, D, rows, D, n, first > 0);
            }
        }
    }
}
