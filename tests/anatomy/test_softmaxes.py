"""Softmaxes that are written out become one node of the graph, with the scores as its input."""

import pytest
import torch

from glassformer.anatomy.record import record
from glassformer.anatomy.softmaxes import fold_softmaxes
from tests.bugs.idioms.by_hand import SOFTMAXES, over_queries

HIDDEN = torch.ones(7, 7, dtype=torch.bool).triu(1)


def recorded(softmax, exact=False):
    scores = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    return record(lambda: softmax(scores, HIDDEN), [scores], exact=exact)


@pytest.mark.parametrize("softmax", SOFTMAXES.values())
def test_each_way_to_write_a_softmax_is_one(softmax):
    graph, weights = recorded(softmax)
    (node,) = (n for n in graph.nodes if n.op == "_softmax")
    assert node.args[1] % 4 == 3
    assert torch.equal(node.value, weights)
    read = node.args[0].value
    torch.testing.assert_close(read.softmax(-1), weights)
    assert bool((read[..., HIDDEN] < -1e30).all())
    assert node in node.args[0].users


def test_the_axis_is_the_one_that_sums_to_one():
    graph, _ = recorded(over_queries)
    (node,) = (n for n in graph.nodes if n.op == "_softmax")
    assert node.args[1] == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda s, hidden: s.exp(),
        lambda s, hidden: s.exp() / s.exp().sum(),
        lambda s, hidden: (2 * s).exp() / s.exp().sum(-1, keepdim=True),
        lambda s, hidden: torch.exp(-s.abs()) * s,
    ],
)
def test_other_exponentials_stay(other):
    graph, _ = recorded(other)
    assert not [n for n in graph.nodes if n.op == "_softmax"]
    assert fold_softmaxes(graph.nodes) is graph.nodes
