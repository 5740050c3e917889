"""The position embedding is added to the token embedding once.

The probe follows the vectors from the token table to the first residual connection and counts how often the same
position vectors are added on the way, through sums, factors, norms and layout; in the first layer too.

Assumption: position vectors are added (learned or sinusoidal), and seen as (T,D). Vectors that only queries and keys
get, and positions that later layers add again (a Universal Transformer), are designs and not counted.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glassformer.anatomy.record import LAYOUT, Node
from glassformer.anatomy.trace import NORMS
from glassformer.doctor.probes.structure.recording import Recording
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID = "position_twice/sum"
PASSES = (LAYOUT - {"slice", "select", "index_select", "split", "split_with_sizes", "chunk", "unbind", "narrow"}) | {
    "dropout", "native_dropout", "alias",
}  # fmt: skip
"""Operations after which the same numbers are there."""
SAME = 1e-5


@dataclass
class Sum:
    """What a vector was added up from: token vectors or not, and how often each kind of position vectors."""

    tokens: bool = False
    counts: dict[int, int] = field(default_factory=dict)


class _Reader:
    def __init__(self, recording: Recording):
        self.recording = recording
        self.known: list[Tensor] = []
        """Position vectors (T,D) met so far."""
        self.sums: dict[int, Sum] = {}
        embedded = next((n for n in recording.graph.nodes if n.op == "embedding" and n.live), None)
        self.width = 0 if embedded is None else embedded.value.shape[-1]

    def read(self) -> tuple[int, Node] | None:
        """(times, the sum that joins the first branch) for positions that were added more than once."""
        for node in self.recording.graph.nodes:
            if node.index in self.recording.after_attention:
                if node.op == "add" and (found := self._joined(node)) is not None:
                    return found
                continue
            made = self._sum(node)
            if made is not None:
                self.sums[node.index] = made
        return None

    def _joined(self, node: Node) -> tuple[int, Node] | None:
        for operand in node.inputs:
            made = self.sums.get(operand.index)
            if made is not None and made.tokens and operand.value.shape == node.value.shape:
                times = max(made.counts.values(), default=0)
                if times > 1:
                    return times, node
        return None

    def _sum(self, node: Node) -> Sum | None:
        parts = [self.sums.get(n.index) for n in node.inputs]
        if node.op == "embedding" and node.live:
            return self._position(node) or Sum(tokens=True)
        if node.op in PASSES and parts and parts[0] is not None:
            return parts[0]
        if node.op in NORMS or node.op in ("mul", "div"):
            kept = next((p for p in parts if p is not None and p.tokens), None)
            return kept or self._position(node)
        if node.op in ("add", "sub", "overwritten") and any(p is not None for p in parts):
            return _added([p for p in parts if p is not None])
        return self._position(node)

    def _position(self, node: Node) -> Sum | None:
        vectors = self._vectors(node.value)
        if vectors is None:
            return None
        for i, other in enumerate(self.known):
            if other.shape == vectors.shape and torch.allclose(other, vectors, rtol=SAME, atol=0):
                return Sum(counts={i: 1})
        self.known.append(vectors)
        return Sum(counts={len(self.known) - 1: 1})

    def _vectors(self, value: Tensor) -> Tensor | None:
        """(T,D) where the value is one vector per position, the same in every batch element and not everywhere."""
        lengths = self.recording.lengths
        if not value.is_floating_point() or not self.width or value.shape[-1:] != (self.width,) or value.dim() > 3:
            return None
        rows = value
        if value.dim() == 3:
            rows = value if value.shape[1] in lengths.known else value.transpose(0, 1)
            if rows.shape[0] not in (1, lengths.B) or not bool((rows == rows[:1]).all()):
                return None
            rows = rows[0]
        if rows.dim() != 2 or rows.shape[0] not in lengths.known or rows.shape[0] < 2:
            return None
        return None if bool((rows == rows[:1]).all()) else rows.detach().double()


def _added(parts: list[Sum]) -> Sum:
    counts: dict[int, int] = {}
    for part in parts:
        for key, times in part.counts.items():
            counts[key] = counts.get(key, 0) + times
    return Sum(any(p.tokens for p in parts), counts)


def positions_added_once(subject: Subject, recording: Recording) -> Finding:
    """No position vector is added twice to the residual stream before the first attention."""
    reader = _Reader(recording)
    found = reader.read()
    if found is not None:
        times, _ = found
        why = f"the same position vectors are added {times} times to the token vectors before the first attention"
        remedy = "Add the position embedding once, where the tokens are embedded."
        return Finding(ID, Verdict.FAIL, float(times), 1.0, why, remedy)
    counted = [max(s.counts.values(), default=0) for s in reader.sums.values() if s.tokens]
    if max(counted, default=0) == 0:
        return Finding.skip(ID, "no position vectors are added to token vectors (rotary, ALiBi, none, another layout)")
    return Finding(ID, Verdict.PASS, 1.0, 1.0, "position vectors are added to the token vectors once")
