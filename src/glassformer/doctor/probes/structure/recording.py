"""One forward pass of a subject, recorded once for all probes of this folder."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from glassformer.anatomy.parts import Anatomy, Lengths, read_anatomy
from glassformer.anatomy.record import Graph, Node, storage_of
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.isolate import cast
from glassformer.doctor.subject.subject import Subject
from glassformer.doctor.subject.trace import record_call

ROWS, LENGTH, SOURCE = 2, 23, 11
"""Different from one another and from usual numbers of heads, so that an axis is not taken for another."""


@dataclass
class Recording:
    """A graph, the logits it ends in, and every name that a parameter goes by."""

    graph: Graph
    logits: Tensor
    lengths: Lengths
    names: dict[int, list[str]]
    """Storage of a parameter -> all its names: a shared one has several."""

    @property
    def token_rows(self) -> set[int]:
        """Numbers of rows that a matmul over all tokens has."""
        return {self.lengths.B * length for length in self.lengths.known}

    @cached_property
    def anatomy(self) -> Anatomy:
        return read_anatomy(self.graph, self.lengths, self.logits.detach())

    @cached_property
    def after_attention(self) -> set[int]:
        """Indices of the nodes that depend on a matmul of two tensors that both depend on the tokens."""
        found: set[int] = set()
        for node in self.graph.nodes:
            if node.is_mixing or any(n.index in found for n in node.inputs):
                found.add(node.index)
        return found

    def weight(self, linear: Node) -> Node | None:
        """The parameter, or the view of one, in a matmul with something that depends on the tokens."""
        still = linear.factors[1] if linear.factors[0].live else linear.factors[0]
        return still if self.graph.is_parameter(still) else None


def recorded(subject: Subject, exact: bool = False) -> Recording:
    """Record a plain forward pass. Raises Unsupported for a subject that is not a module."""
    if subject.module is None:
        raise Unsupported("not a module, so its weights are not known")
    with subject.isolated(own=exact) as isolated:
        assert isolated.module is not None
        if exact:
            cast(isolated.module, torch.float64)
        length = isolated.length(LENGTH)
        source = {"source": isolated.source(ROWS, SOURCE)} if isolated.kind == "seq2seq" else {}
        graph, logits = record_call(isolated, isolated.tokens(ROWS, length, seed=5), exact, **source)
        names: dict[int, list[str]] = {}
        for name, parameter in isolated.module.named_parameters(remove_duplicate=False):
            names.setdefault(storage_of(parameter), []).append(name)
    return Recording(graph, logits, Lengths(ROWS, length, SOURCE if source else None), names)
