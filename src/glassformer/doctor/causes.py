"""From failed probes to causes: which failure explains which, and in what order causes are named.

The id of a finding begins with the diagnosis it speaks for. A table says what each cause brings with it; what is
explained by another failure is listed as its consequence and not as a finding of its own.
"""

from glassformer.finding import Finding, Verdict

RANK = (
    "eval_stochastic", "constant_logits", "state_leak", "layer_reuse", "low_precision",
    "norm_axis", "softmax_axis", "attention_weights", "head_layout", "mask_value",
    "causal_leak", "position_twice",
    "position_missing", "batch_variance", "position_train_infer", "rope_values", "rope_pairing", "rope_relative",
    "window",
    "over_mask", "attn_scale", "norm_placement", "residual_growth", "norm_eps", "activation", "decode_position",
    "cache_mask", "cache_mismatch", "cache_rollback", "cache_reorder", "mask_nan", "pad_leak", "left_pad_position",
    "decode_select", "weight_tying", "label_shift", "loss_padding", "dead_gradient", "init_loss",
)  # fmt: skip
"""The 39 diagnoses, causes before what they cause."""

CACHE = ("cache_mask", "cache_mismatch", "cache_rollback", "cache_reorder", "decode_position")
DECODING = (*CACHE, "decode_select", "pad_leak/with-cache", "left_pad_position/with-cache")
POSITIONS = ("position_missing", "rope_values", "rope_pairing", "rope_relative")
PADDING = ("pad_leak", "left_pad_position", "loss_padding/padded", "loss_padding/pad-content", "decode_select/padded")
MIXING = ("causal_leak", "batch_variance", *DECODING, *PADDING, *POSITIONS, "position_train_infer", "over_mask",
          "window",
          "state_leak", "mask_value")  # fmt: skip

BRINGS: dict[str, tuple[str, ...]] = {
    "eval_stochastic/repeat": tuple(name for name in RANK if name != "eval_stochastic"),
    "state_leak/repeat": tuple(n for n in RANK if n not in ("state_leak", "weight_tying", "attn_scale", "norm_eps")),
    "state_leak": ("causal_leak", "batch_variance", *DECODING, *PADDING, "position_train_infer", "rope_relative"),
    "constant_logits": tuple(name for name in RANK if name != "constant_logits"),
    "layer_reuse": ("state_leak", *DECODING, "residual_growth", "norm_placement", "dead_gradient", "position_missing"),
    "low_precision": (*DECODING, *PADDING, "mask_nan", "batch_variance", "position_train_infer", "rope_relative"),
    "norm_axis": (*MIXING, "norm_placement", "residual_growth", "norm_eps"),
    "softmax_axis": (*MIXING, "attn_scale", "residual_growth", "head_layout"),
    "attention_weights": (*MIXING, "head_layout", "residual_growth"),
    "head_layout": MIXING,
    "mask_value": ("causal_leak", "over_mask", "window", *DECODING, *PADDING, "position_train_infer", "rope_relative"),
    "causal_leak": (*DECODING, "pad_leak", "loss_padding/padded", "loss_padding/pad-content", "init_loss", "over_mask",
                    "window", "left_pad_position",
                    "position_train_infer", *POSITIONS, "batch_variance/mixed-padding"),
    "position_missing": ("batch_variance", "dead_gradient", "left_pad_position", "rope_relative", *DECODING,
                         "pad_leak/amount"),
    "batch_variance": (*DECODING, *PADDING, "loss_padding"),
    "position_train_infer": (),
    "rope_values": ("rope_relative", "rope_pairing", "left_pad_position", *DECODING),
    "rope_pairing": ("rope_relative", "left_pad_position", "pad_leak/amount"),
    "rope_relative": ("left_pad_position", "pad_leak/amount", "decode_position"),
    "window": ("over_mask", *DECODING),
    "over_mask": (*DECODING, *PADDING, "window", "mask_value"),
    "norm_placement": ("residual_growth", "dead_gradient", "init_loss"),
    "residual_growth": ("init_loss",),
    "decode_position": ("cache_mask", "cache_mismatch", "cache_rollback", "cache_reorder", "decode_select",
                        "pad_leak/with-cache", "left_pad_position/with-cache"),
    "cache_mask": ("cache_mismatch", "cache_rollback", "cache_reorder", "decode_select", "pad_leak/with-cache",
                   "left_pad_position/with-cache"),
    "cache_mismatch": ("cache_rollback", "cache_reorder", "decode_select", "pad_leak/with-cache",
                       "left_pad_position/with-cache"),
    "cache_rollback": ("decode_select",),
    "mask_nan/plain": tuple(name for name in RANK if name not in ("mask_nan", "weight_tying")),
    "mask_nan": (*PADDING, "cache_reorder/padded"),
    "pad_leak": ("left_pad_position", "loss_padding/padded", "loss_padding/pad-content", "decode_select/padded",
                 "cache_reorder/padded"),
    "left_pad_position": ("loss_padding/padded", "decode_select/padded", "cache_reorder/padded"),
    "label_shift": ("loss_padding",),
    "dead_gradient/registered": ("over_mask/gradient", "attn_scale", "residual_growth", "low_precision"),
    "dead_gradient": ("over_mask/gradient",),
}  # fmt: skip
"""cause (a diagnosis, or one probe of it) -> what it brings with it (diagnoses, or probes by the start of their id)."""


VANISHES = -500.0
"""A score so far below the others gets a weight of exactly 0 in float32 (e^-104), with room for large scores."""


def name_of(finding: Finding) -> str:
    return finding.id.split("/")[0]


def _brings(cause: Finding, effect: Finding) -> bool:
    listed = BRINGS.get(cause.id, BRINGS.get(name_of(cause), ()))
    hit = any(effect.id == item or effect.id.startswith((item + "/", item + "-")) for item in listed)
    return hit and _holds(cause, effect)


def _holds(cause: Finding, effect: Finding) -> bool:
    """Second experiments that decide between two names."""
    if name_of(cause) == "mask_value" and name_of(effect) == "causal_leak":
        # a layer in which the future competes openly is no matter of the constant
        return not cause.evidence.get("open")
    if cause.id in ("mask_value/constant", "mask_value/padding") and effect.evidence.get("weights") == "as given":
        # with the model's own weights a score so far below the others has a weight of exactly 0
        return cause.measured is None or cause.measured > VANISHES
    if name_of(cause) == "norm_axis" and name_of(effect) in ("causal_leak", "batch_variance"):
        over = cause.evidence.get("over")
        return over == ("time" if name_of(effect) == "causal_leak" else "batch") or over == "time"
    # a leak in training alone leaves inference as it is
    return cause.id != "causal_leak/train-mode" or name_of(effect) == "position_train_infer"


def sort_out(findings: list[Finding]) -> list[tuple[list[Finding], list[Finding]]]:
    """(findings of one diagnosis, what they explain), most likely cause first."""
    failed = [f for f in findings if f.verdict is Verdict.FAIL]
    causes: dict[str, list[Finding]] = {}
    for finding in failed:
        explained = any(
            _brings(other, finding) and not _brings_back(finding, other) for other in failed if other is not finding
        )
        if not explained:
            causes.setdefault(name_of(finding), []).append(finding)
    if not causes and failed:  # a circle: the first by rank is named
        first = min(failed, key=lambda f: RANK.index(name_of(f)))
        causes = {name_of(first): [first]}
    ordered = sorted(
        causes.items(), key=lambda item: (not _compared(item[1]), _of_initial_sizes(item[1]), RANK.index(item[0]))
    )
    known = {id(f) for _, group in ordered for f in group}
    rest = [f for f in failed if id(f) not in known]
    return [(group, [f for f in rest if any(_brings(cause, f) for cause in group)]) for _, group in ordered]


def _compared(group: list[Finding]) -> bool:
    """Whether a trusted model shows this as the first difference of the forward pass: it is named before all others."""
    return any(f.evidence.get("first_difference") for f in group)


def _of_initial_sizes(group: list[Finding]) -> bool:
    """Whether only sizes of fresh weights are unusual: whatever computes something wrong is named before."""
    return all(f.id in ("residual_growth/init", "init_loss/head") for f in group)


def _brings_back(effect: Finding, cause: Finding) -> bool:
    """Two that explain one another: the earlier in rank is the cause."""
    return _brings(effect, cause) and RANK.index(name_of(effect)) < RANK.index(name_of(cause))
