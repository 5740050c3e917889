"""Mixture of experts: a router sends each token to the A feed-forwards it likes best."""

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.feedforward import build_dense
from glassformer.model.tap import NO_TAP, Tap
from glassformer.shapes import Float, Int


class MoE(nn.Module):
    """sum over the A likeliest experts of p_e expert_e(x). No capacity: no token is dropped."""

    def __init__(self, d_model: int, spec: c.MoE):
        super().__init__()
        self.n_active, self.normalize = spec.n_active, spec.normalize
        self.router = nn.Linear(d_model, spec.n_experts, bias=False)
        self.experts = nn.ModuleList(build_dense(d_model, spec.expert) for _ in range(spec.n_experts))

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        logits = self.router(x)
        exact = torch.promote_types(logits.dtype, torch.float32)
        probabilities = tap("router", logits.softmax(-1, dtype=exact))
        gates, choice = top_experts(probabilities, self.n_active)
        choice = tap("choice", choice)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        flat, out = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)  # (n, D)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(choice.flatten(0, -2) == e)
            if len(token):
                value = expert(flat[token], NO_TAP) * gates.flatten(0, -2)[token, slot, None]
                out = out.index_add(0, token, value)
        return out.view_as(x)


def top_experts(
    probabilities: Float[Tensor, "*n E"], n_active: int
) -> tuple[Float[Tensor, "*n A"], Int[Tensor, "*n A"]]:
    """The A largest probabilities and their experts; ties go to the lowest index."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :n_active], order[..., :n_active]


def balance_loss(probabilities: Float[Tensor, "*n E"], choice: Int[Tensor, "*n A"]) -> Float[Tensor, ""]:
    """E * sum_e f_e P_e: 1 when experts are used evenly, E when one takes all. Fedus et al. 2021, eq. 4.

    f_e is the share of the n*A assignments that went to expert e (no gradient), P_e the mean probability of e.
    """
    n_experts = probabilities.shape[-1]
    counts = torch.bincount(choice.flatten(), minlength=n_experts).to(probabilities.dtype)
    share = counts / counts.sum()
    return n_experts * (share * probabilities.flatten(0, -2).mean(0)).sum()
