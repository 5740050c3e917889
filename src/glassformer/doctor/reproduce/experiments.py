"""Which experiment shows which finding, as lines of a script that set `measured` and `bound`."""

import functools
from collections.abc import Callable

from glassformer.doctor.reproduce import generating, inside, outside, weights
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
}
"""Finding id, or the start of one -> its experiment. Others, and those with None, have no stand-alone script."""


@functools.cache
def experiment_for(id: str) -> Write | None:
    """The experiment whose name is the longest start of a finding's id."""
    known = [n for n in EXPERIMENTS if id == n or id.startswith((n + "/", n + "-"))]
    return EXPERIMENTS[max(known, key=len)] if known else None
