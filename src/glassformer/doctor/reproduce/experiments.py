"""Which experiment shows which finding, as lines of a script that set `measured` and `bound`."""

import functools
from collections.abc import Callable

from glassformer.doctor.reproduce import generating, inside, outside, parts, weights
from glassformer.doctor.reproduce.experiment import Experiment

Write = Callable[[Experiment], list[str]]
EXPERIMENTS: dict[str, Write | None] = {
    "causal_leak/attentions-returned": None,
    "causal_leak/below-entropy": None,
    "causal_leak": outside.future,
    "mask_value/large-scores": None,
    "mask_value": inside.mask_constant,
    "cache_mask": outside.pieces,
    "cache_mismatch": outside.pieces,
    "decode_position": outside.pieces,
    "window/steps": outside.pieces,
    "window/count": inside.window,
    "over_mask/pattern": inside.visible,
    "cache_rollback": outside.rollback,
    "cache_reorder/rows": outside.reorder,
    "pad_leak/content": outside.padding_content,
    "pad_leak/amount": outside.padding_amount,
    "left_pad_position/amount": outside.padding_amount,
    "pad_leak/source-content": outside.source_content,
    "mask_nan": outside.not_finite,
    "batch_variance/neighbour": outside.neighbour,
    "eval_stochastic/repeat": outside.twice,
    "eval_stochastic/dropout": outside.twice,
    "state_leak/repeat": outside.twice,
    "state_leak/calls": outside.after_others,
    "state_leak/generate": generating.kept,
    "pad_leak/generate": generating.padding_content,
    "norm_placement/start": inside.starts,
    "position_missing/source": outside.source_order,
    "label_shift/arguments": weights.arguments,
    "position_train_infer/modes": outside.modes,
    "weight_tying": weights.tables,
    "label_shift": weights.shift,
    "loss_padding/ids": weights.ids,
    "dead_gradient/flow": weights.gradients,
    "dead_gradient/fused": weights.gradients,
    "position_missing/gradient": weights.gradients,
    "norm_placement/unused-norm": weights.gradients,
    "init_loss/ln-V": weights.first_loss,
    "constant_logits": outside.constant,
    "layer_reuse/weights": weights.shared,
    "low_precision": inside.dtype,
    "norm_axis": parts.norm_axis,
    "norm_eps": parts.norm_formula,
    "softmax_axis": parts.softmax_axis,
    "attention_weights": parts.weights_as_they_are,
    "residual_growth/rms": parts.growth,
    "residual_growth/init": parts.init_deviation,
    "init_loss/head": parts.init_deviation,
    "rope_relative/shift": parts.shifted,
    "rope_relative/distance": parts.shifted,
    "rope_relative/one-sided": parts.shifted,
    "decode_select/plain": generating.greedy,
    "decode_select/cached": generating.greedy,
}
"""Finding id, or the start of one -> its experiment. Others, and those with None, have no stand-alone script."""
REASONS = {
    "head_layout": "the order of heads and tokens is read from the recorded steps between attention and its output map",
    "position_twice": "the sum of token and position vectors is read from recorded additions, under whatever name",
    "rope_values": "the values are compared between positions with a constant input, inside attention",
    "rope_pairing": "the rotation is solved for from recorded queries and keys",
    "attn_scale": "the factor may be applied to q, to k or to the scores: it is solved for from the recorded matmuls",
    "activation": "the function is identified from what goes into and comes out of the recorded feed-forward",
}
"""Diagnoses whose evidence lies inside the computation -> why there is no stand-alone script."""


@functools.cache
def experiment_for(id: str) -> Write | None:
    """The experiment whose name is the longest start of a finding's id."""
    known = [n for n in EXPERIMENTS if id == n or id.startswith((n + "/", n + "-"))]
    return EXPERIMENTS[max(known, key=len)] if known else None


def why_not(diagnosis: str) -> str:
    """Why there is no script for a diagnosis, or for this finding of one."""
    if reason := REASONS.get(diagnosis):
        return f"There is no stand-alone script for this diagnosis: {reason}."
    return "There is no stand-alone script for this diagnosis: none was found that shows it on this model from outside."
