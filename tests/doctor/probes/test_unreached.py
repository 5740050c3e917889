"""A parameter without a gradient is explained by an input that reaches it, or else it is cut off."""

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import gradients, unreached
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import Copycat


class Sparse(Copycat):
    """Attention over the two keys that an indexer selects; the selection has no derivative."""

    def __init__(self):
        super().__init__()
        self.indexer, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, idx):
        x = self.table(idx)
        scores = (self.indexer(x) @ x.transpose(1, 2)).masked_fill(_later(idx), -torch.inf)
        chosen = scores.topk(min(2, idx.shape[1]), -1).indices
        seen = torch.full_like(scores, -torch.inf).scatter(-1, chosen, 0.0).masked_fill(_later(idx), -torch.inf)
        return self.head(x + seen.softmax(-1) @ self.value(x))


class Segments(Copycat):
    """Rows that only an optional argument brings in."""

    def __init__(self):
        super().__init__()
        self.segments = nn.Embedding(2, 16)

    def forward(self, idx, token_type_ids=None):
        x = self.table(idx)
        return self.head(x if token_type_ids is None else x + self.segments(token_type_ids))


class Pooled(Copycat):
    """A second output of the same call."""

    def __init__(self):
        super().__init__()
        self.pooler = nn.Linear(16, 4)

    def forward(self, idx):
        x = self.table(idx)
        return {"logits": self.head(x), "pooled": self.pooler(x[:, 0])}


class Memory(Copycat):
    """A part that reads only what is more than 100 positions back."""

    def __init__(self):
        super().__init__()
        self.memory = nn.Linear(16, 16)

    def forward(self, idx):
        x = self.table(idx)
        return self.head(
            x if idx.shape[1] <= 100 else torch.cat([x[:, :100], x[:, 100:] + self.memory(x[:, :-100])], 1)
        )


class Contacts(Copycat):
    """A head for another task, used by a method of its own."""

    def __init__(self):
        super().__init__()
        self.contact_head = nn.Linear(16, 1)

    def predict_contacts(self, idx):
        return self.contact_head(self.table(idx))


class CutOff(Copycat):
    """A part whose result is detached, one that is never called, and one that is rounded to a choice of classes."""

    def __init__(self):
        super().__init__()
        self.detached, self.unused, self.choosing = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, idx):
        x = self.table(idx)
        chosen = nn.functional.one_hot(self.choosing(x).argmax(-1), 16).to(x)
        return self.head(x + self.detached(x).detach() + chosen)


def _later(idx):
    return torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool, device=idx.device).triu(1)


@pytest.mark.parametrize(
    ("model", "parameters", "words"),
    [
        (Sparse, {"indexer.weight", "indexer.bias"}, "selects positions by top-k"),
        (Segments, {"segments.weight"}, "only token_type_ids= brings it in"),
        (Pooled, {"pooler.weight", "pooler.bias"}, "another output of the same call"),
        (Memory, {"memory.weight", "memory.bias"}, "an input of 129 tokens reaches it"),
        (Contacts, {"contact_head.weight", "contact_head.bias"}, "only Contacts.predict_contacts uses it"),
    ],
)
def test_what_another_input_or_use_reaches_is_explained(model, parameters, words):
    note, finding = gradients.reach_every_parameter(subject_of(model(), expect={"max_len": 400}))
    assert finding.verdict is Verdict.PASS
    assert note.verdict is Verdict.SKIP
    assert set(note.evidence["parameters"]) == parameters
    assert words in note.why


def test_what_is_cut_off_is_not_explained():
    subject = subject_of(CutOff())
    every = [n for n, _ in CutOff().named_parameters() if not n.startswith(("table", "head"))]
    assert unreached.explain(subject, every) == {}
    (finding,) = gradients.reach_every_parameter(subject)
    assert (finding.id, finding.verdict) == ("dead_gradient/flow", Verdict.FAIL)
    assert finding.evidence["parameters"] == every


def test_only_what_is_cut_off_is_named_next_to_what_is_explained():
    class Both(Segments):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(16, 16)

    note, finding = gradients.reach_every_parameter(subject_of(Both()))
    assert note.evidence["parameters"] == ["segments.weight"]
    assert finding.evidence["parameters"] == ["unused.weight", "unused.bias"]
