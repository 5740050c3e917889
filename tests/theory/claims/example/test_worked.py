"""The worked example."""

from glassformer.model import attention
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.example import worked
from glassformer.theory.claims.registry import find


def test_outputs_to_ten_digits_are_in_the_evidence_and_in_the_statement():
    found = {p.id: p.evidence for p in worked.worked_example(Lab())}
    for name in ("without scaling", "with 1/sqrt(2)"):
        for row in found[f"weights and outputs {name}"]["output"]:
            assert all(number in find("worked-example-qkv").statement for number in row)
    assert len(found["18 inconsistencies"]["slips"]) == 18


def test_an_engine_that_normalises_columns_fails(monkeypatch):
    def columns(q, k, v, scale, mask=None, is_causal=False, dropout=0.0, tap=None):
        scores = tap("scores", q @ k.transpose(-1, -2) * scale)
        return tap("pattern", scores.softmax(-2)) @ v

    monkeypatch.setattr(attention, "explicit_attention", columns)
    assert not all(p.passed for p in worked._on_the_engine(Lab(), worked.doc.W_Q))
