"""The conventions in which two implementations of one model can differ, each with one identifier.

Where a convention is one of the doctor's diagnoses, both have the same identifier. The others are finer: `diagnosis` is
the doctor's diagnosis for a model that breaks the convention of a trusted one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Convention:
    """`words` is the usual name, `diagnosis` the doctor's identifier; None if no fault follows from a difference."""

    words: str
    diagnosis: str | None


CONVENTIONS: dict[str, Convention] = {
    "embedding_scale": Convention("embedding scale", "residual_growth"),
    "embedding_norm": Convention("embedding norm", "norm_placement"),
    "position_offset": Convention("position offset", "position_train_infer"),
    "position_missing": Convention("missing positions", "position_missing"),
    "position_twice": Convention("how often positions are added", "position_twice"),
    "position_layout": Convention("layout of the position vectors", "position_train_infer"),
    "norm_eps": Convention("eps of the norm", "norm_eps"),
    "norm_variance": Convention("variance divided by D or D - 1", "norm_eps"),
    "norm_kind": Convention("kind of norm", "norm_placement"),
    "norm_placement": Convention("placement of the norm", "norm_placement"),
    "final_norm": Convention("final norm missing", "norm_placement"),
    "qkv_order": Convention("order of q, k and v", "head_layout"),
    "head_order": Convention("order of heads or of their components", "head_layout"),
    "gqa_order": Convention("which key/value head a query head reads", "head_layout"),
    "head_layout": Convention("layout of the heads", "head_layout"),
    "transposed_weight": Convention("transposed weight", "head_layout"),
    "column_order": Convention("order of columns", "head_layout"),
    "bias": Convention("missing bias", "norm_placement"),
    "factor": Convention("a constant factor", "residual_growth"),
    "weights": Convention("different weights", None),
    "rope_missing": Convention("rotation missing", "position_missing"),
    "rope_pairing": Convention("RoPE pairing", "rope_pairing"),
    "rope_fraction": Convention("rotated part of a head", "rope_relative"),
    "rope_direction": Convention("direction of rotation", "rope_relative"),
    "rope_base": Convention("RoPE frequencies", "rope_relative"),
    "rope_values": Convention("rotation of the values", "rope_values"),
    "qk_norm": Convention("norm of queries and keys", "norm_placement"),
    "mask": Convention("mask", "over_mask"),
    "attn_scale": Convention("attention scale", "attn_scale"),
    "softmax_dtype": Convention("dtype of the softmax", "low_precision"),
    "softcap": Convention("soft cap", "attn_scale"),
    "position_bias": Convention("position bias on the scores", "position_missing"),
    "softmax_axis": Convention("axis of the softmax", "softmax_axis"),
    "attention_weights": Convention("operation on the attention weights after softmax", "attention_weights"),
    "gelu_variant": Convention("GELU variant", "activation"),
    "activation": Convention("activation", "activation"),
    "gate_order": Convention("gate and up exchanged", "activation"),
    "residual": Convention("residual connection", "norm_placement"),
    "residual_factor": Convention("factor on the branch", "residual_growth"),
    "weight_tying": Convention("tied head", "weight_tying"),
    "shape": Convention("different shapes", "head_layout"),
    "unknown": Convention("unexplained", None),
}
