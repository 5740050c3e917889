"""Rounding errors of two sides in their own precision."""

import copy

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.compare.devices import RoundingErrors, Side
from glassformer.doctor.subject.errors import CannotExamineError

SIZES = {"n_layers": 2, "d_model": 32, "n_heads": 2, "vocab_size": 31, "max_len": 64}


@pytest.fixture(scope="module")
def model():
    return gf.build(gf.presets.nano(**SIZES), seed=0)


class Short(nn.Module):
    """A linear layer whose float32 matmul reads 10 bits of each number, as TF32 does."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if x.dtype is not torch.float32:
            return self.inner(x)
        bits = (x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF
        return self.inner(bits.view(torch.float32))


def test_the_same_model_on_the_same_device_is_the_same(model):
    result = gf.compare(model, model, devices=("cpu", "cpu"))
    assert result.same
    assert result.rounding.sound
    assert result.findings[-1].id == "rounding-error"
    assert "rounding error: A " in result.text()


def test_without_devices_no_rounding_error_is_measured(model):
    assert gf.compare(model, model).rounding is None


def test_dtypes_are_judged_by_their_own_units(model):
    result = gf.compare(model, model, dtype=("float32", "bfloat16"), devices=("cpu", "cpu"))
    one, two = result.rounding.sides
    assert result.same
    assert two.error > 1000 * one.error
    assert two.units < 16 * one.units


def test_a_matmul_in_a_shorter_format_is_found_although_float64_agrees(model):
    wrong = copy.deepcopy(model)
    block = wrong.decoder.blocks[1].feedforward
    name = next(n for n, m in block.named_children() if isinstance(m, nn.Linear))
    setattr(block, name, Short(getattr(block, name)))
    result = gf.compare(model, wrong, devices=("cpu", "cpu"))
    assert not result.same
    assert not result.rounding.sound
    assert all(m.agrees for m in result.measured)
    assert "B computes less exactly than its dtype allows" in result.text()
    assert "TF32" in result.to_dict()["findings"][-1]["remedy"]
    assert gf.compare(model, wrong).same


def test_one_side_may_be_exact_by_chance():
    exact, usual = (Side("cpu", torch.float32, e) for e in (0.0, 3 * 2**-23))
    assert RoundingErrors((exact, usual)).sound
    assert not RoundingErrors((exact, Side("cuda:0", torch.float32, 2**-11))).sound


def test_what_cannot_be_measured_is_reported(model):
    result = gf.compare(model, copy.deepcopy(model).double(), devices=("cpu", "cpu"))
    assert result.rounding.finding.verdict is gf.Verdict.SKIP
    assert "float64" in result.rounding.text()
    called = gf.compare(model, lambda tokens: model(tokens), devices=("cpu", "cpu"))
    assert "is no module" in called.rounding.text()


def test_an_unknown_device_is_refused(model):
    with pytest.raises((CannotExamineError, gf.GlassformerError), match="'gpu' is not known"):
        gf.compare(model, model, devices=("cpu", "gpu"))
