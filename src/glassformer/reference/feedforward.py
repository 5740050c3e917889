"""The feed-forward layer, which is applied to every position independently.

A dense or gated layer applies one small network to all tokens. A mixture of experts has E of them and routes each token
to A of them.
"""

from typing import assert_never

import numpy as np

from glassformer.config import Dense, Gated, MoE
from glassformer.reference.arrays import Array, Mask, Params, Saved, add_prefix, select_prefix
from glassformer.reference.ops import activate, linear, softmax


def feedforward(part: Dense | Gated | MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply the feed-forward layer that the config describes: (B,T,D) -> (B,T,D)."""
    if isinstance(part, MoE):
        return mixture(part, weights, x)
    return expert(part, weights, x)


def expert(part: Dense | Gated, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply a dense or gated feed-forward layer: (B,T,D) -> (B,T,F) -> (B,T,D).

    dense   out = down(activation(up(x)))               Vaswani et al. 2017, section 3.3
    gated   out = down(activation(gate(x)) * up(x))     Shazeer 2020; SwiGLU with silu, GEGLU with gelu
    """
    up = linear(weights, "up", x)
    saved = {"x": x, "up": up}
    match part:
        case Gated():
            saved["gate"] = linear(weights, "gate", x)
            hidden = activate(part.activation, saved["gate"]) * up
        case Dense():
            hidden = activate(part.activation, up)
        case _:
            assert_never(part)
    out = linear(weights, "down", hidden)
    return out, saved | {"hidden": hidden, "out": out}


def chosen_experts(probabilities: Array, A: int) -> Mask:
    """Select the A most probable experts: (..., E) -> (..., E), True if selected. Ties go to the lower index."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    chosen = np.zeros(probabilities.shape, dtype=np.bool_)
    np.put_along_axis(chosen, order[..., :A], True, axis=-1)
    return chosen


def mixture(part: MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Apply a mixture of experts: (B,T,D) -> (B,T,D).

        p = softmax(router(x)) over all E experts
        g_e = p_e for the A experts with the largest p, otherwise 0;   g = g / sum(g) with `normalize`
        out = sum_e g_e expert_e(x)

    Every expert is computed for every token and multiplied by its gate, which is 0 if it was not selected. A fast
    implementation skips those experts; the result is the same. No token is dropped: there is no expert capacity.

    Fedus et al. 2021, section 2.1; Jiang et al. 2024, section 2.1.
    """
    probabilities = softmax(linear(weights, "router", x))  # (B, T, E)
    chosen = chosen_experts(probabilities, part.n_active)
    gates = np.where(chosen, probabilities, 0.0)
    if part.normalize:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    saved: Saved = {"x": x, "probabilities": probabilities, "gates": gates}
    out = np.zeros_like(x)
    for e in range(part.n_experts):
        y, saved_expert = expert(part.expert, select_prefix(weights, f"experts.{e}"), x)
        saved |= add_prefix(saved_expert, f"experts.{e}")
        out = out + gates[..., e, None] * y
    return out, saved | {"out": out}
