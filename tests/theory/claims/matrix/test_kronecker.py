"""The large matrix, and engines whose values are not what it says."""

import torch

from glassformer.model.attention import Attention
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.matrix import kronecker


def found_by(check, **lab):
    return {f.id: f for f in check(Lab(**lab))}


def test_an_engine_with_a_transposed_value_matrix_is_caught(monkeypatch):
    original = Attention.project_kv

    def transposed(self, x, *rest):
        with torch.no_grad():
            self.v.weight.copy_(self.v.weight.T.clone())
        keys = original(self, x, *rest)
        with torch.no_grad():
            self.v.weight.copy_(self.v.weight.T.clone())
        return keys

    monkeypatch.setattr(Attention, "project_kv", transposed)
    found = found_by(kronecker.kronecker_form)
    assert not found["engine, output"].passed
    assert not found["engine, projections"].passed


def test_the_dense_full_rank_example_is_in_the_evidence():
    found = found_by(kronecker.kronecker_form)
    assert found["ranks"].evidence["example"] == 4
    assert found["engine, output"].evidence["difference"] < 1e-14


def test_numbers_of_the_comparison():
    found = found_by(kronecker.dense_against_attention)
    evidence = found["the example"].evidence
    assert (evidence["dense"], evidence["attention"]) == (2_621_440_000, 786_432)
    assert round(evidence["ratio"], 2) == 3333.33
    assert found["counted layers"].evidence["counted"] == {"N=3, D=4": [144, 48, 64], "N=5, D=8": [1600, 192, 256]}


def test_jacobian_by_differences_agrees_with_autograd():
    from glassformer.theory.claims.weights.layer import normal, random_layer

    generator = torch.Generator().manual_seed(0)
    attention, x = random_layer(generator, 4, 1, 4, 4), normal(generator, 3, 4)
    exact = torch.autograd.functional.jacobian(lambda z: attention(z[None])[0], x)
    torch.testing.assert_close(kronecker._jacobian(attention, x), exact.reshape(12, 12), atol=1e-8, rtol=0)
