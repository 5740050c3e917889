// down(gelu(up(x))) and its gradients in one pass each: the hidden layer stays in the cache between the two matmuls.
//
// The hidden width is cut into slices. In the forward pass a thread processes tokens, and only the input of the activation
// (N,F) is kept for the backward pass. In the backward pass a thread processes slices: it owns their weight gradients. Each
// thread has its own dx; after a barrier these are added in the order of the threads.
#pragma once
#include <omp.h>

#include <vector>

#include "matmul.h"

// Hidden columns and tokens at a time: TOKENS x SLICE floats are 192 KB, and stay in the second-level cache between the two
// matmuls. The forward pass takes half as many tokens.
constexpr int64_t SLICE = 256, TOKENS = 192;

struct FeedForward {
    const float *x, *up, *down, *up_bias, *down_bias;  // (N,D), (F,D), (D,F), (F) and (D) or null
    float *pre, *out;                                  // (N,F), (N,D)
    const float* gradient;                             // (N,D)
    float *d_x, *d_up, *d_down, *d_up_bias;
    int64_t n, width, hidden;
    int32_t tanh;
};

// Pack the transpose of (n,m) into panels of columns: (d, j) of the (m,n) at panel j / PANEL, row d, column j % PANEL.
static void pack_transposed_panels(const float* from, int64_t n, int64_t m, float* to) {
#pragma omp for schedule(static)
    for (int64_t p = 0; p < (n + PANEL - 1) / PANEL; ++p)
        for (int64_t d = 0; d < m; d += WIDE)
            for (int64_t j = p * PANEL; j < n && j < (p + 1) * PANEL; ++j)
                for (int64_t i = 0; i < WIDE; ++i) to[p * PANEL * m + (d + i) * PANEL + j % PANEL] = from[j * m + d + i];
}

// The threads first pack both weights together (each `omp for` ends with a barrier), then each takes chunks of tokens.
static void feed_forward(const FeedForward& f) {
    const int64_t D = f.width, F = f.hidden, chunks = (f.n + TOKENS / 2 - 1) / (TOKENS / 2);
    float* up = scratch((F + PANEL) * D + (D + PANEL) * F);
    float* down = up + (F + PANEL) * D;
#pragma omp parallel
    {
        pack_transposed_panels(f.up, F, D, up);
        pack_transposed_panels(f.down, D, F, down);
        const int64_t row = SLICE + WIDE;  // not a power of two: rows would map to the same cache sets
        static thread_local std::vector<float> hidden(TOKENS / 2 * row);
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t first = chunk * TOKENS / 2, n = first + TOKENS / 2 < f.n ? TOKENS / 2 : f.n - first;
            for (int64_t s = 0; s < F; s += SLICE) {
                const int64_t wide = s + SLICE < F ? SLICE : F - s;
                float* pre = f.pre + first * F + s;
                multiply_large({f.x + first * D, D, 1}, {up + s * D, PANEL, PANEL * D}, pre, F, n, wide, D);
                for (int64_t t = 0; t < n; ++t)
                    for (int64_t j = 0; j < wide; j += WIDE) {
                        floats at = load(pre + t * F + j);
                        if (f.up_bias) store(pre + t * F + j, at = at + load(f.up_bias + s + j));
                        store(hidden.data() + t * row + j, at * (f.tanh ? tanh_gate(at) : exact_gate(at)).value);
                    }
                multiply_large({hidden.data(), row, 1}, {down + s * PANEL, PANEL, PANEL * F}, f.out + first * D, D, n, D, wide, s > 0);
            }
            if (f.down_bias)
                for (int64_t t = first; t < first + n; ++t)
                    for (int64_t j = 0; j < D; j += WIDE) store(f.out + t * D + j, load(f.out + t * D + j) + load(f.down_bias + j));
        }
    }
}

// The gradients of hidden columns s..s + wide: all of their d_up, d_down and d_up_bias, and their contribution to d_x, which is
// added to what is there if `add`. `memory`: 2 x TOKENS rows of wide + WIDE floats.
static void feed_slice(const FeedForward& f, int64_t s, int64_t wide, float* d_x, bool add, float* memory) {
    const int64_t D = f.width, F = f.hidden, row = wide + WIDE;
    float *hidden = memory, *d_pre = hidden + TOKENS * row;
    for (int64_t first = 0; first < f.n; first += TOKENS) {
        const int64_t n = first + TOKENS < f.n ? TOKENS : f.n - first;
        const float *x = f.x + first * D, *gradient = f.gradient + first * D, *pre = f.pre + first * F + s;
        multiply_large({gradient, D, 1}, {f.down + s, F}, d_pre, row, n, wide, D);
        for (int64_t t = 0; t < n; ++t)
            for (int64_t j = 0; j < wide; j += WIDE) {
                floats at = load(pre + t * F + j);
                Gate gate = f.tanh ? tanh_gate(at) : exact_gate(at);
                floats d = load(d_pre + t * row + j) * gate.slope;
                store(hidden + t * row + j, at * gate.value);
                store(d_pre + t * row + j, d);
                float* total = f.d_up_bias + s + j;
                if (f.d_up_bias) store(total, first + t ? load(total) + d : d);
            }
        multiply_large({d_pre, row, 1}, {f.up + s * D, D}, d_x + first * D, D, n, D, wide, add);
        multiply_large({d_pre, 1, row}, {x, D}, f.d_up + s * D, D, wide, D, n, first > 0);
        multiply_large({gradient, 1, D}, {hidden, row}, f.d_down + s, F, D, wide, n, first > 0);
    }
}

static void feed_backward(const FeedForward& f) {
    const int64_t D = f.width, F = f.hidden;
    std::vector<float*> parts(omp_get_max_threads());
#pragma omp parallel
    {
        const int64_t us = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t slices = (F + SLICE - 1) / SLICE;
        slices = (slices + threads - 1) / threads * threads;  // the same number for every thread
        const int64_t wide = ((F + slices - 1) / slices + PANEL - 1) / PANEL * PANEL;
        float* memory = scratch(2 * TOKENS * (wide + WIDE) + (us > 0 ? f.n * D : 0));
        float* d_x = us > 0 ? memory + 2 * TOKENS * (wide + WIDE) : f.d_x;
        bool add = false;
        for (int64_t s = us * wide; s < F; s += threads * wide, add = true)
            feed_slice(f, s, s + wide < F ? wide : F - s, d_x, add, memory);
        parts[us] = add ? d_x : nullptr;
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t i = 0; i < f.n * D / WIDE; ++i) {
            floats total = load(f.d_x + i * WIDE);
            for (int64_t p = 1; p < threads; ++p)
                if (parts[p]) total += load(parts[p] + i * WIDE);
            store(f.d_x + i * WIDE, total);
        }
    }
}
