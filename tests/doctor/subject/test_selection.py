"""A selection of keys by top-k is found, with the length up to which it keeps them all."""

import torch
from torch import nn

from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.selection import continuous_length
from tests.doctor.probes.subjects import rotary


class Sparse(nn.Module):
    """One causal attention that keeps the `kept` best keys of each query; experts are chosen by top-k, too."""

    def __init__(self, kept, experts=4):
        super().__init__()
        self.embed, self.q, self.k = nn.Embedding(31, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.router, self.head, self.kept = nn.Linear(16, experts), nn.Linear(16, 31), kept

    def forward(self, idx):
        x = self.embed(idx)
        length = idx.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).masked_fill(future, -torch.inf)
        best = scores.topk(min(self.kept, length), dim=-1).indices
        mask = torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
        x = x + (scores + mask).softmax(-1).nan_to_num() @ x
        weight, _ = self.router(x).topk(2, dim=-1)
        return self.head(x * weight.sum(-1, keepdim=True))


def test_a_selection_of_keys_is_distinguished_from_one_of_experts():
    torch.manual_seed(0)
    assert continuous_length(subject_of(Sparse(7), "decoder", 31)) == 7
    assert continuous_length(subject_of(Sparse(1000), "decoder", 31)) is None
    assert continuous_length(rotary()) is None


def test_a_capacity_of_experts_limits_what_is_compared():
    assert continuous_length(subject_of(Sparse(1000), "decoder", 31, {"expert_capacity": 64})) == 16
    assert continuous_length(subject_of(Sparse(1000), "decoder", 31, {"capacity_factor": 1.25})) is None
