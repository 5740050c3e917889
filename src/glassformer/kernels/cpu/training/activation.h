// GELU and its derivative: exact, x Phi(x), and by the tanh formula.
#pragma once
#include "vectors.h"

struct Gate {
    floats value, slope;  // value = gelu(x) / x, slope = d gelu(x) / dx
};

// Phi(-|x|) = P(t) e^(-x^2/2) with t = 1 / (1 + 0.28 |x|): P is fitted to within 1.3e-8, below float rounding.
static inline Gate exact_gate(floats x) {
    floats size = x < 0.0f ? -x : x;
    floats bell = exponential(-0.5f * x * x);
    floats t = 1.0f / (1.0f + 0.28f * size);
    floats p = -0.10656837373971939f * t + 0.39305901527404785f;
    p = ((((p * t - 0.24229998886585236f) * t + 0.2733031213283539f) * t + 0.06569038331508636f) * t + 0.11681583523750305f) * t;
    floats tail = p * bell;
    floats phi = x < 0.0f ? tail : 1.0f - tail;
    return {phi, phi + x * bell * 0.3989422804f};
}

// 0.5 (1 + tanh u) = 1 / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
static inline Gate tanh_gate(floats x) {
    floats square = x * x;
    floats twice = 1.5957691216f * x * (1.0f + 0.044715f * square);
    floats gate = 1.0f / (1.0f + exponential(-twice));
    floats slope = 1.5957691216f * (1.0f + 0.134145f * square);
    return {gate, gate + x * gate * (1.0f - gate) * slope};
}
