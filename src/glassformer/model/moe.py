"""Mixture of experts: a router sends each token to the A feed-forwards it likes best."""

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.context import NO_TAP, Tap
from glassformer.model.layers import build_dense
from glassformer.shapes import Float, Int


class MoE(nn.Module):
    """sum over the A best experts of p_e expert_e(x), plus the shared expert. No capacity: no token is dropped."""

    def __init__(self, d_model: int, spec: c.MoE):
        super().__init__()
        self.n_active, self.normalize, self.scale = spec.n_active, spec.normalize, spec.router.scale
        self.router = Router(d_model, spec.n_experts, spec.router)
        self.experts = nn.ModuleList(build_dense(d_model, spec.expert) for _ in range(spec.n_experts))
        self.shared = None if spec.shared is None else build_dense(d_model, spec.shared)
        self.shared_gate = nn.Linear(d_model, 1, bias=False) if spec.shared_gate else None

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        probabilities = tap("router", self.router.scores(x))
        gates, choice = self.router.choose(probabilities, self.n_active)
        choice = tap("choice", choice)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = (gates if self.scale == 1 else gates * self.scale).to(x.dtype)
        out = self.mix(x, gates, choice)
        return out if self.shared is None else out + self.share(x)

    def mix(
        self, x: Float[Tensor, "*n D"], gates: Float[Tensor, "*n A"], choice: Int[Tensor, "*n A"]
    ) -> Float[Tensor, "*n D"]:
        """The sum of the chosen experts' outputs, times their gates. An expert computes only its own tokens."""
        flat, out = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)  # (n, D)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(choice.flatten(0, -2) == e)
            if len(token):
                value = expert(flat[token], NO_TAP) * gates.flatten(0, -2)[token, slot, None]
                out = out.index_add(0, token, value)
        return out.view_as(x)

    def share(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        """The output of the shared expert, times its gate if it has one."""
        assert self.shared is not None
        out = self.shared(x, NO_TAP)
        return out if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * out


class Router(nn.Linear):
    """Logits of the E experts, their scores in float32 or better, and the choice of the best ones."""

    def __init__(self, d_model: int, n_experts: int, spec: c.Router):
        super().__init__(d_model, n_experts, bias=spec.bias)
        self.spec = spec
        self.correction: Tensor | None
        self.register_buffer("correction", torch.empty(n_experts) if spec.correction else None)

    def scores(self, x: Float[Tensor, "*n D"]) -> Float[Tensor, "*n E"]:
        """softmax of the logits, or the sigmoid of each."""
        logits = self(x)
        exact = torch.promote_types(logits.dtype, torch.float32)
        return logits.softmax(-1, dtype=exact) if self.spec.score == "softmax" else logits.to(exact).sigmoid()

    def choose(self, scores: Float[Tensor, "*n E"], n_active: int) -> tuple[Float[Tensor, "*n A"], Int[Tensor, "*n A"]]:
        """The A experts with the largest corrected scores, from the best groups, and their scores."""
        if self.correction is None and self.spec.groups == 1:
            return self.largest(scores, n_active)
        ranking = scores.detach() if self.correction is None else scores.detach() + self.correction
        if self.spec.groups > 1:
            ranking = self._best_groups(ranking)
        choice = self.largest(ranking, n_active)[1]
        return scores.gather(-1, choice), choice

    def largest(self, scores: Float[Tensor, "*n E"], count: int) -> tuple[Float[Tensor, "*n A"], Int[Tensor, "*n A"]]:
        """The largest scores and their indices; ties go to the lowest index."""
        return top_experts(scores, count)

    def _best_groups(self, ranking: Float[Tensor, "*n E"]) -> Float[Tensor, "*n E"]:
        """Set the scores of experts outside the best groups to -inf."""
        grouped = ranking.unflatten(-1, (self.spec.groups, -1))  # (..., groups, E / groups)
        best = 2 if self.spec.group_score == "sum_of_two" else 1
        kept = self.largest(grouped.topk(best, -1).values.sum(-1), self.spec.top_groups)[1]
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=ranking.device).scatter(-1, kept, True)
        return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)


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
    one = torch.ones((), dtype=probabilities.dtype, device=choice.device).expand(choice.numel())
    counts = torch.zeros(n_experts, dtype=one.dtype, device=one.device).scatter_add(0, choice.flatten(), one)
    share = counts / choice.numel()
    return n_experts * (share * probabilities.flatten(0, -2).mean(0)).sum()
