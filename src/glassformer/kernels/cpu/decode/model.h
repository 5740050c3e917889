// A model as the kernels read it. structures.py mirrors what is here, and library.load compares the sizes.
#pragma once
#include "pointwise.h"

namespace glass {

enum Placement : int32_t { PRE, POST, PARALLEL };
enum Position : int32_t { NONE, TABLE, ROTARY_HALF, ROTARY_PAIRS, ALIBI };

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

struct Entry {  // a token to be read: of which row of the cache, at which place of it
    int32_t token, row, place;
};

}  // namespace glass
