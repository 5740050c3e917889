"""Gradient of the feed-forward layer, derived by hand: dense, gated and mixture of experts."""

import numpy as np

from glassformer.config import Dense, Gated, MoE
from glassformer.reference.arrays import Array, Params, Saved, add_prefix, select_prefix
from glassformer.reference.backward_ops import activation_derivative, linear_backward, softmax_backward
from glassformer.reference.feedforward import limited
from glassformer.reference.ops import activate


def feedforward_backward(
    part: Dense | Gated | MoE, weights: Params, saved: Saved, d_out: Array
) -> tuple[Array, Params]:
    """Backward pass of `feedforward`: d_out (B,T,D) -> d_x (B,T,D) and the gradients of the parameters."""
    if isinstance(part, MoE):
        return mixture_backward(part, weights, saved, d_out)
    return expert_backward(part, weights, saved, d_out)


def expert_backward(part: Dense | Gated, weights: Params, saved: Saved, d_out: Array) -> tuple[Array, Params]:
    """Backward pass of `expert`, with d_hidden = W_down^T d_out.

        dense   hidden = f(u),     u = W_up x                    d_u = d_hidden f'(u)
        gated   hidden = f(g) u,   u = W_up x,  g = W_gate x     d_u = d_hidden f(g),  d_g = d_hidden u f'(g)

    In the gated layer x is the input of both projections, so its gradient is the sum over both. A limit stops the
    gradient of a component that it changed.
    """
    d_hidden, gradients = linear_backward(weights, "down", saved["hidden"], d_out)
    if isinstance(part, Dense):
        d_up = d_hidden * activation_derivative(part.activation, saved["up"])
        d_x, up_gradients = linear_backward(weights, "up", saved["x"], d_up)
        return d_x, gradients | up_gradients
    gate, factor = limited(part, saved["gate"], saved["up"])
    d_up = d_hidden * activate(part.activation, gate)
    d_gate = d_hidden * factor * activation_derivative(part.activation, gate)
    if part.limit is not None:
        d_up = np.where(np.abs(saved["up"]) <= part.limit, d_up, 0.0)
        d_gate = np.where(saved["gate"] <= part.limit, d_gate, 0.0)
    d_from_up, up_gradients = linear_backward(weights, "up", saved["x"], d_up)
    d_from_gate, gate_gradients = linear_backward(weights, "gate", saved["x"], d_gate)
    return d_from_up + d_from_gate, gradients | up_gradients | gate_gradients


def mixture_backward(part: MoE, weights: Params, saved: Saved, d_out: Array) -> tuple[Array, Params]:
    """Backward pass of `mixture`: out = c sum_e g_e y_e, so d_y_e = c g_e d_out and d_g_e = c d_out . y_e.

    The selection of experts is piecewise constant in x, so it has derivative 0 almost everywhere and is treated as a
    constant. The gate of a selected expert is g_e = p_e, hence d_p_e = d_g_e. With `normalize` it is g_e = p_e / Z,
    where Z is the sum of p over the selected experts:

        dg_f/dp_e = ([e = f] - g_f) / Z,   so   d_p_e = (d_g_e - sum_f g_f d_g_f) / Z

    d_p_e is 0 for experts that were not selected. Their router weights still get a gradient, through the softmax over
    all E experts. With a sigmoid p = s(z), d_z = d_p p (1 - p), which is 0 for experts that were not selected. The
    correction only takes part in the selection, so its gradient is 0. The shared expert adds s(w.x) y:

        d_y = s d_out,   d_s = d_out . y,   d_(w.x) = d_s s (1 - s)
    """
    x, p, gates = saved["x"], saved["probabilities"], saved["gates"]
    d_x, gradients = np.zeros_like(x), Params()
    d_gates = np.zeros_like(gates)
    for e in range(part.n_experts):
        saved_expert = select_prefix(saved, f"experts.{e}")
        d_gates[..., e] = part.router.scale * (d_out * saved_expert["out"]).sum(axis=-1)
        d_y = part.router.scale * gates[..., e, None] * d_out
        d_from_expert, expert_gradients = expert_backward(
            part.expert, select_prefix(weights, f"experts.{e}"), saved_expert, d_y
        )
        d_x = d_x + d_from_expert
        gradients |= add_prefix(expert_gradients, f"experts.{e}")
    chosen = gates > 0
    d_p = np.where(chosen, d_gates, 0.0)
    if part.normalize:
        total = np.where(chosen, p, 0.0).sum(axis=-1, keepdims=True)
        d_p = np.where(chosen, (d_gates - (gates * d_gates).sum(axis=-1, keepdims=True)) / total, 0.0)
    d_logits = softmax_backward(p, d_p) if part.router.score == "softmax" else d_p * p * (1 - p)
    d_from_router, router_gradients = linear_backward(weights, "router", x, d_logits)
    if part.router.correction:
        router_gradients["router.correction"] = np.zeros(part.n_experts)
    if part.shared is not None:
        d_from_shared, shared_gradients = shared_backward(part, part.shared, weights, saved, d_out)
        d_x, gradients = d_x + d_from_shared, gradients | shared_gradients
    return d_x + d_from_router, gradients | router_gradients


def shared_backward(
    part: MoE, shared: Dense | Gated, weights: Params, saved: Saved, d_out: Array
) -> tuple[Array, Params]:
    """Backward pass of the shared expert and its gate: d_out (B,T,D) -> d_x (B,T,D) and the gradients."""
    gate, inside = saved["shared_gate"], select_prefix(saved, "shared")
    d_x, gradients = expert_backward(shared, select_prefix(weights, "shared"), inside, gate * d_out)
    gradients = add_prefix(gradients, "shared")
    if part.shared_gate:
        d_gate = (d_out * inside["out"]).sum(axis=-1, keepdims=True) * gate * (1 - gate)
        d_from_gate, gate_gradients = linear_backward(weights, "shared_gate", saved["x"], d_gate)
        d_x, gradients = d_x + d_from_gate, gradients | gate_gradients
    return d_x, gradients
