// The structs of a model as the kernels read it. library.py mirrors them, and library.load compares the sizes.
#pragma once
#include "pointwise.h"

namespace glass {

enum NormedPart : int32_t { HEAD, HEADS, ALL };  // what the norm of queries and keys runs over
enum Pairing : int32_t { HALVES, NEIGHBOURS };   // which components are rotated together

struct Branch {  // x becomes after(x + residual_scale * out(f(before(x)))); a norm with weight null is left out
    Norm before, out, after;
};

struct FeedForward {  // down(activation(gate(x)) * (up(x) + up_offset)); gate.rows 0: down(activation(up(x)))
    Matrix gate, up, down;
    float limit, up_offset;  // limit of gate(x) from above and of up(x) on both sides, 0: none
    int32_t activation;
};

enum RouterScore : int32_t { SOFTMAX, SIGMOID };
enum GroupScore : int32_t { SUM_OF_TWO, LARGEST };

struct Experts {  // a mixture: the `active` best of `count` experts compute a token, and the shared one if there is one
    Matrix router, shared_gate;  // float32; shared_gate.rows 0: the shared expert has no gate
    const float* correction;     // added to the scores when experts are chosen, or null
    const FeedForward* expert;   // `count` of them; the shared expert is the next one
    float scale;
    int32_t count, active, has_shared, score, normalize, groups, top_groups, group_score;  // count 0: no mixture
};

// Latent attention in the absorbed form (glassformer.model.latent). A token has one vector c, and components `shared` that are
// rotated. The key of head h is [shared ; own_h c] and its value value_h c. As q . key = q_shared . shared + (own_h^T q_own) . c, a query
// becomes [q_shared ; own_h^T q_own]. Then all heads have the same keys [shared ; c] and the same values c, and value_h is applied
// to the weighted sum of them. The cache holds [shared ; c]; the values are read from there too.
struct Latent {
    Matrix q_down;  // to the vector that queries are computed from; rows 0: they are computed from x
    Norm q_down_norm, c_norm;
    const Matrix *absorb, *value;              // of each head: own^T (rank, d_query - d_shared), and (d_value, rank)
    int32_t rank, d_shared, d_query, d_value;  // rank 0: no latent attention
};

struct Layer {
    Branch attention, cross, feedforward;
    Norm q, k, cross_q;  // of queries and keys
    Matrix q_of, k_of, v_of, out, cross_q_of, cross_out;  // cross_q_of.rows 0: no cross-attention
    Latent latent;                                        // its `shared` is computed by k_of, its c by v_of
    FeedForward feed;                                     // up.rows 0: none
    Experts experts;
    const float *cosines, *sines, *sinks, *cross_sinks;  // (N, rotated / 2) twice, (H) twice, or null
    int32_t window, rotated, pairing;                    // 0: no window, no rotation
};

struct Model {
    int32_t layers, d_model, heads, kv_heads, d_head, d_value, vocabulary;
    int32_t causal, parallel, qk_over, qk_last, reach;
    float scale, embed_scale, head_scale, residual_scale;
    float softcap, head_softcap, clip;  // 0: none
    const float *tokens, *position_table;                 // (V,D), (N,D)
    const float* biases;  // by head and distance (key - query): causal from 1 - reach to 0, otherwise to reach - 1
    Norm embedded, last;  // weight null: no norm
    Matrix head;
    const Layer* layer;

    const float* biases_of(int h, int position) const {  // of head h, by key, for the query at a position; or null
        return biases ? biases + (long)h * (causal ? reach : 2 * reach - 1) + reach - 1 - position : nullptr;
    }
};

struct Cache {  // keys and values (layers, sequences, kv_heads, capacity, width); null in an encoder, which keeps none
    void *keys, *values;  // float16 if `halves`, otherwise float32
    const float *cross_keys, *cross_values;  // the same with room for `cross_capacity`: of an encoder's output
    const int32_t *cross_lengths, *rotations;  // rotations: by sequence, the row of the rotary tables for its first token; null: 0
    int32_t sequences, capacity, cross_capacity, halves;
};

struct Entry {  // a token to be read: its sequence in the cache, and its position there
    int32_t token, sequence, position;
};

}  // namespace glass
