"""The feed-forward: what each token does on its own, between two looks at the others.

Dense and gated are one small network for all tokens; a mixture of experts keeps E of them and sends each token to A.
"""

from typing import assert_never

import numpy as np

from glassformer.config import Dense, Gated, MoE
from glassformer.reference.arrays import Array, Mask, Params, Saved, over, under
from glassformer.reference.ops import activate, linear, softmax


def feedforward(part: Dense | Gated | MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """x (B,T,D) -> (B,T,D) by the kind that the config names."""
    match part:
        case MoE():
            return mixture(part, weights, x)
        case Dense() | Gated():
            return expert(part, weights, x)
        case _:
            assert_never(part)


def expert(part: Dense | Gated, weights: Params, x: Array) -> tuple[Array, Saved]:
    """Dense: down(activation(up(x))), Vaswani et al. 2017, 3.3. Gated: down(activation(gate(x)) * up(x)), Shazeer 2020.

    (B,T,D) -> (B,T,F) -> (B,T,D). SwiGLU is gated with silu, GEGLU gated with gelu.
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
    """(..., E) -> (..., E): True at the A largest of each row; of equal ones the lowest index wins."""
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    chosen = np.zeros(probabilities.shape, dtype=np.bool_)
    np.put_along_axis(chosen, order[..., :A], True, axis=-1)
    return chosen


def mixture(part: MoE, weights: Params, x: Array) -> tuple[Array, Saved]:
    """sum over the chosen e of g_e expert_e(x). Fedus et al. 2021, 2.1; Jiang et al. 2024, 2.1.

    p = softmax(router(x)) over all E; the A largest are chosen; g = p on those and 0 elsewhere, divided by its sum when
    `normalize`. Here every expert reads every token and the unchosen ones are multiplied by 0: a fast implementation
    leaves out that work, not that meaning. No token is dropped.
    """
    probabilities = softmax(linear(weights, "router", x))  # (B, T, E)
    chosen = chosen_experts(probabilities, part.n_active)
    gates = np.where(chosen, probabilities, 0.0)
    if part.normalize:
        gates = gates / gates.sum(axis=-1, keepdims=True)
    saved: Saved = {"x": x, "probabilities": probabilities, "gates": gates}
    out = np.zeros_like(x)
    for e in range(part.n_experts):
        y, saved_expert = expert(part.expert, under(weights, f"experts.{e}"), x)
        saved |= over(saved_expert, f"experts.{e}")
        out = out + gates[..., e, None] * y
    return out, saved | {"out": out}
