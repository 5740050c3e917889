// The structs of a model as the kernels read it. structures.py mirrors them, and library.load compares the sizes.
#pragma once
#include "pointwise.h"

namespace glass {

enum Placement : int32_t { PRE, POST, PARALLEL };
enum Position : int32_t { NONE, TABLE, ROTARY_HALF, ROTARY_PAIRS, ALIBI };

struct Layer {
    Norm attention, feedforward, q, k;  // q.weight null: no QK-norm
    Matrix q_of, k_of, v_of, out, gate, up, down;
    int32_t window;                     // 0: no window
};

struct Model {
    int32_t layers, d_model, heads, kv_heads, d_head, d_value, d_ff, vocabulary;
    int32_t placement, activation, gated, position, rotated;
    float scale, embed_scale, head_scale;
    const float *tokens, *position_table, *cosines, *sines, *slopes;  // (V,D), (N,D), (N,rotated/2) twice, (H)
    Norm embedded, last;  // weight null: no norm
    Matrix head;
    const Layer* layer;
};

struct Cache {        // keys and values: (layers, sequences, kv_heads, capacity, d_head or d_value)
    float *keys, *values;
    int32_t sequences, capacity;
};

struct Entry {  // a token to be read: its sequence in the cache, and its position there
    int32_t token, sequence, position;
};

}  // namespace glass
