"""Gradient of the feed-forward, derived by hand: dense, gated and mixture of experts."""

import numpy as np

from glassformer.config import Dense, Gated, MoE
from glassformer.reference.arrays import Array, Params, Saved, over, under
from glassformer.reference.backward_ops import activation_slope, linear_backward, softmax_backward
from glassformer.reference.ops import activate


def feedforward_backward(
    part: Dense | Gated | MoE, weights: Params, saved: Saved, d_out: Array
) -> tuple[Array, Params]:
    if isinstance(part, MoE):
        return mixture_backward(part, weights, saved, d_out)
    return expert_backward(part, weights, saved, d_out)


def expert_backward(part: Dense | Gated, weights: Params, saved: Saved, d_out: Array) -> tuple[Array, Params]:
    """Dense: out = W_d f(u), u = W_u x, so d_u = f'(u) (W_d^T d_out). Gated: hidden = f(g) u, so by the product rule
    d_u = d_hidden f(g) and d_g = d_hidden u f'(g); x feeds both, so their gradients are added.
    """
    d_hidden, gradients = linear_backward(weights, "down", saved["hidden"], d_out)
    if isinstance(part, Dense):
        d_up = d_hidden * activation_slope(part.activation, saved["up"])
        d_x, up_gradients = linear_backward(weights, "up", saved["x"], d_up)
        return d_x, gradients | up_gradients
    d_up = d_hidden * activate(part.activation, saved["gate"])
    d_gate = d_hidden * saved["up"] * activation_slope(part.activation, saved["gate"])
    d_from_up, up_gradients = linear_backward(weights, "up", saved["x"], d_up)
    d_from_gate, gate_gradients = linear_backward(weights, "gate", saved["x"], d_gate)
    return d_from_up + d_from_gate, gradients | up_gradients | gate_gradients


def mixture_backward(part: MoE, weights: Params, saved: Saved, d_out: Array) -> tuple[Array, Params]:
    """out = sum_e g_e y_e. Expert e gets g_e d_out; its gate gets d_g_e = d_out . y_e.

    Which experts were chosen is a step function of x with slope 0 almost everywhere, so the choice is a constant here.
    Chosen gates are p_e, or p_e/Z with Z the sum over the chosen: then dg_f/dp_e = ([e = f] - g_f)/Z, so
    d_p_e = (d_g_e - sum_f g_f d_g_f)/Z. Unchosen p_e get 0, yet the softmax over all E still moves their router rows.
    """
    x, p, gates = saved["x"], saved["probabilities"], saved["gates"]
    d_x, gradients = np.zeros_like(x), Params()
    d_gates = np.zeros_like(gates)
    for e in range(part.n_experts):
        saved_expert = under(saved, f"experts.{e}")
        d_gates[..., e] = (d_out * saved_expert["out"]).sum(axis=-1)
        d_y = gates[..., e, None] * d_out
        d_from_expert, expert_gradients = expert_backward(
            part.expert, under(weights, f"experts.{e}"), saved_expert, d_y
        )
        d_x = d_x + d_from_expert
        gradients |= over(expert_gradients, f"experts.{e}")
    chosen = gates > 0
    d_p = np.where(chosen, d_gates, 0.0)
    if part.normalize:
        total = np.where(chosen, p, 0.0).sum(axis=-1, keepdims=True)
        d_p = np.where(chosen, (d_gates - (gates * d_gates).sum(axis=-1, keepdims=True)) / total, 0.0)
    d_from_router, router_gradients = linear_backward(weights, "router", x, softmax_backward(p, d_p))
    return d_x + d_from_router, gradients | router_gradients
