"""Our contenders say what the engine says, and tell of every token."""

import importlib.util
from typing import get_args

import pytest

import glassformer as gf
from glassformer.bench.peers import ours
from glassformer.config.choices import Precision
from tests.bench import tiny
from tests.cli.asking import has_compiler


def test_the_plain_engine(subject):
    order = tiny.order(subject, "glassformer-torch", "ours")
    marks = []
    assert ours.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1)) == tiny.engine_ids(
        subject, order
    )
    assert len(marks) == order.new


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_the_kernels_in_every_precision(subject, precision):
    order = tiny.order(subject, "glassformer", "ours", precision)
    made = ours.Peer(order).generate(order.prompts, order.new, tiny.nothing)
    assert [len(row) for row in made] == [order.new, order.new]
    if precision == "float32":
        assert made == tiny.engine_ids(subject, order)


def test_on_a_gpu_and_without_kernels_the_engine_is_the_one_that_a_user_finds(subject, monkeypatch):
    given = tiny.order(subject, "glassformer", "ours", "float8", device="cuda")
    assert (ours._engine(given), ours._stored(given)) == ("auto", "bfloat16")
    assert ours.PRECISION["float8"] in get_args(Precision)
    on_cpu = tiny.order(subject, "glassformer", "ours", "int8")
    if importlib.util.find_spec("glassformer.kernels"):
        assert (ours._engine(on_cpu), ours._stored(on_cpu)) == ("native", "float32")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    copy = tiny.order(subject, "glassformer", "ours", "bfloat16")  # in a copy without kernels
    assert (ours._engine(copy), ours._stored(copy)) == ("auto", "bfloat16")
    plain = tiny.order(subject, "glassformer-torch", "ours", "bfloat16", device="cuda")
    assert (ours._engine(plain), ours._stored(plain)) == ("torch", "bfloat16")


def test_bfloat16_of_the_engine_is_in_its_weights(subject):
    peer = ours.Peer(tiny.order(subject, "glassformer-torch", "ours", "bfloat16"))
    assert str(next(peer.model.parameters()).dtype) == "torch.bfloat16"


def test_hidden_states_come_from_a_device_in_one_transfer(monkeypatch):
    import torch

    states, calls, original = [torch.full((n, 4), n).half() for n in (3, 1, 2)], [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (calls.append(1), original(tensor))[1])
    found = ours.in_one_transfer(states)
    assert len(calls) == 1
    assert all(torch.equal(one, two.float()) for one, two in zip(found, states, strict=True))
    assert found[0].dtype is torch.float32


def test_it_draws_as_glass_sample_does(subject):
    order = tiny.order(subject, "glassformer-torch", "ours", new=40)
    peer = ours.Peer(order)
    tiny.check_draws(subject, order, peer.generate(order.prompts, order.new, tiny.nothing, sampled=True))
    assert peer.generate(order.prompts, order.new, tiny.nothing) == tiny.engine_ids(subject, order)


def test_its_beam_search_is_ours(subject):
    order = tiny.order(subject, "glassformer-torch", "ours", rows=1)
    found = ours.Peer(order).generate(order.prompts, order.new, tiny.nothing, beams=3)
    assert found == gf.generate(gf.load(subject.root / "hf"), order.prompts, order.new, beams=3, stop=[]).new
