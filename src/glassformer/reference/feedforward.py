"""The feed-forward layer, which is applied to every position independently.

A dense or gated layer applies one small network to all tokens. A mixture of experts has E of them and routes each token
to A of them.
"""

from typing import assert_never

import numpy as np

from glassformer.config import Dense, Gated, MoE, Router
from glassformer.reference.arrays import Array, Mask, Params, Saved, add_prefix, select_prefix
from glassformer.reference.ops import activate, linear, sigmoid, softmax


def feedforward(part: Dense | Gated | MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply the feed-forward layer that the config describes: (B,T,D) -> (B,T,D)."""
    if isinstance(part, MoE):
        return mixture(part, weights, x)
    return expert(part, weights, x)


def expert(part: Dense | Gated, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply a dense or gated feed-forward layer: (B,T,D) -> (B,T,F) -> (B,T,D).

    dense   out = down(activation(up(x)))               Vaswani et al. 2017, section 3.3
    gated   out = down(activation(gate(x)) * up(x))     Shazeer 2020; SwiGLU with silu, GEGLU with gelu

    A gated layer with limit l replaces gate by min(gate, l) and up by its value clipped to [-l, l]. Then it adds its
    offset to up.
    """
    up = linear(weights, "up", x)
    saved = {"x": x, "up": up}
    match part:
        case Gated():
            saved["gate"] = linear(weights, "gate", x)
            gate, factor = limited(part, saved["gate"], up)
            hidden = activate(part.activation, gate) * factor
        case Dense():
            hidden = activate(part.activation, up)
        case _:
            assert_never(part)
    out = linear(weights, "down", hidden)
    return out, saved | {"hidden": hidden, "out": out}


def limited(part: Gated, gate: Array, up: Array) -> tuple[Array, Array]:
    """Return the input of the activation and the factor of a gated layer: gate and up, limited and with the offset."""
    if part.limit is not None:
        gate, up = np.minimum(gate, part.limit), np.clip(up, -part.limit, part.limit)
    return gate, up + part.up_offset


def router_scores(router: Router, weights: Params, x: Array) -> Array:
    """Return the scores of all experts, (B,T,D) -> (B,T,E): softmax over the experts, or a sigmoid for each."""
    logits = linear(weights, "router", x)
    return softmax(logits) if router.score == "softmax" else sigmoid(logits)


def ranking(router: Router, weights: Params, scores: Array) -> Array:
    """Return the scores by which experts are chosen, (..., E) -> (..., E).

    They are the scores plus the stored correction, if there is one. With groups, experts outside the best groups get
    -inf. The score of a group is the sum of its two largest scores, or its largest.
    """
    ranked = scores + weights["router.correction"] if router.correction else scores
    if router.groups == 1:
        return ranked
    grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
    best = 2 if router.group_score == "sum_of_two" else 1
    group_scores = np.sort(grouped, axis=-1)[..., -best:].sum(axis=-1)  # (..., groups)
    kept = chosen_experts(group_scores, router.top_groups)
    return np.where(kept[..., None], grouped, -np.inf).reshape(ranked.shape)


def chosen_experts(probabilities: Array, A: int) -> Mask:
    """Select the A most probable experts: (..., E) -> (..., E), True if selected. Ties go to the lower index."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    chosen = np.zeros(probabilities.shape, dtype=np.bool_)
    np.put_along_axis(chosen, order[..., :A], True, axis=-1)
    return chosen


def mixture(part: MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply a mixture of experts: (B,T,D) -> (B,T,D).

        p = softmax(router(x)) over all E experts, or sigmoid(router(x))
        g_e = p_e for the A experts with the largest p, otherwise 0;   g = g / sum(g) with `normalize`
        out = scale sum_e g_e expert_e(x) + shared(x),   the last term times sigmoid(w.x) with `shared_gate`

    The A experts are those with the largest p_e, or with the largest p_e + correction_e among the best groups.

    Every expert is computed for every token and multiplied by its gate, which is 0 if it was not selected. A fast
    implementation skips those experts; the result is the same. No token is dropped: there is no expert capacity.

    Fedus et al. 2021, section 2.1; Jiang et al. 2024, section 2.1.
    """
    probabilities = router_scores(part.router, weights, x)  # (B, T, E)
    chosen = chosen_experts(ranking(part.router, weights, probabilities), part.n_active)
    gates = np.where(chosen, probabilities, 0.0)
    if part.normalize:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    saved: Saved = {"x": x, "probabilities": probabilities, "gates": gates}
    out = np.zeros_like(x)
    for e in range(part.n_experts):
        y, saved_expert = expert(part.expert, select_prefix(weights, f"experts.{e}"), x)
        saved |= add_prefix(saved_expert, f"experts.{e}")
        out = out + part.router.scale * gates[..., e, None] * y
    if part.shared is not None:
        y, saved_shared = expert(part.shared, select_prefix(weights, "shared"), x)
        saved |= add_prefix(saved_shared, "shared")
        saved["shared_gate"] = sigmoid(linear(weights, "shared_gate", x)) if part.shared_gate else np.ones(1)
        out = out + saved["shared_gate"] * y
    return out, saved | {"out": out}
