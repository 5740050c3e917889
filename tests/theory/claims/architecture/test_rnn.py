"""Recurrence and attention: paths in graphs that can be drawn by hand."""

import pytest
import torch

from glassformer.theory.claims.architecture import rnn
from glassformer.theory.claims.claim import Lab


def test_paths_by_hand():
    chain = {(0, 1), (1, 2), (2, 3)}
    assert rnn.shortest(chain, 0, 3) == 3
    assert rnn.shortest(chain | {(0, 3)}, 0, 3) == 1
    assert rnn.shortest(chain, 3, 0) is None
    assert rnn.shortest(chain, 2, 2) == 0
    assert rnn.longest(chain | {(0, 3)}, 4) == 4
    assert rnn.longest({(0, 1), (0, 2)}, 3) == 2


def test_the_recurrent_network_is_torchs():
    cell = rnn.Recurrent(3, 4, torch.Generator().manual_seed(0))
    theirs = torch.nn.RNN(3, 4, dtype=torch.float64)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(cell.read.weight)
        theirs.bias_ih_l0.copy_(cell.read.bias)
        theirs.weight_hh_l0.copy_(cell.recur.weight)
        theirs.bias_hh_l0.zero_()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(cell(x), theirs(x)[0])


@pytest.mark.parametrize("n", [2, 5])
def test_edges_of_one_step(n):
    reads, recurs = rnn.recurrent_edges(Lab(), n)
    assert reads == {(t, t) for t in range(n)}
    assert recurs == {(t, t + 1) for t in range(n - 1)}
    assert len(rnn.attention_edges(Lab(), n)) == n * (n + 1) // 2
    assert len(rnn.attention_edges(Lab(broken=True), n)) == 2 * n - 1


def test_a_fading_state_is_not_linear_attention():
    assert rnn._linear_attention(Lab()).passed
    assert not rnn._linear_attention(Lab(broken=True)).passed


def test_counts_are_those_stated():
    counts, _ = rnn._counts(Lab())
    assert counts.evidence["counted"] == {"RNN": (2, 524_800), "GRU": (6, 1_574_400), "LSTM": (8, 2_099_200)}
