"""Whole steps in one launch, emulated on a CPU, give what the kernels of a step give one by one."""

import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.kernels.cuda.graph import fused, launches, program, steps
from glassformer.kernels.cuda.graph.cache import CapturedCache
from glassformer.model import build
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.graph.emulated import PROCESSORS, on_cpu  # noqa: F401

V, T, NEW = 67, 5, 3
pytestmark = [needs_compiler, pytest.mark.usefixtures("on_cpu")]
WIDE = c.DecoderConfig(
    vocab_size=V, d_model=320, n_layers=1, attention=c.Attention(4, 2, d_head=16), feedforward=c.Gated(576),
    norm=c.RMSNorm(), position=c.Rotary(), head=c.Head(tied=False), init_std=0.1,
)  # fmt: skip
"""Rows of several pieces, the last one shorter; more units than a block has warps; fewer rows than whole tiles.

With four warps, the nine units of the head are shared by two warps each, in two rounds.
"""


def made_steps(model, precision: str, slots: int = 32, processors: int = PROCESSORS) -> steps.CapturedSteps:
    cache = model.new_cache("static", capacity=slots)
    with torch.no_grad():
        model(torch.arange(T)[None], cache=cache)
    return steps.build_steps(model, CapturedCache(cache, slots, 1), precision, None, processors)


def greedy_both(monkeypatch, cfg, precision: str, processors: int = PROCESSORS) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after NEW greedy tokens, of one launch for all steps and of one launch for each kernel."""
    model = build(cfg, seed=3).to(torch.float16)
    whole = made_steps(model, precision, processors=processors)
    assert whole.body.program is not None
    tokens, logits = whole.greedy(torch.tensor([7]), NEW)
    monkeypatch.setattr(fused, "make_program", lambda *given: None)
    single = made_steps(model, precision)
    assert single.body.program is None
    wanted = torch.tensor([7])
    for found in tokens.tolist():
        expected = single.step(wanted)
        wanted = torch.tensor(found)
        top = expected.topk(2).values[0]
        assert found == expected.argmax(-1).tolist() or top[0] - top[1] < 1e-2 * top[0].abs()
    return logits, expected


@pytest.mark.sample(1)  # each precision compiles kernels of its own
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_many_steps_in_one_launch(monkeypatch, precision):
    monkeypatch.setattr(launches, "WARPS", 4)
    found, wanted = greedy_both(monkeypatch, WIDE, precision)
    assert (found - wanted).abs().max() < 3e-3 * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["0", "1", "2"])
def test_warps_that_are_late(monkeypatch, order):
    monkeypatch.setenv("EMULATED_ORDER", order)
    found, wanted = greedy_both(monkeypatch, WIDE, "int8")
    assert (found - wanted).abs().max() < 3e-3 * wanted.abs().max()


def test_blocks_without_work(monkeypatch):
    """Five blocks for four heads, while some warps are late."""
    monkeypatch.setenv("EMULATED_ORDER", "1")
    cfg = dataclasses.replace(WIDE, d_model=64, feedforward=c.Gated(64))
    found, wanted = greedy_both(monkeypatch, cfg, "int8", processors=5)
    assert (found - wanted).abs().max() < 3e-3 * wanted.abs().max()


@pytest.mark.slow
def test_a_ring_of_two_stages(monkeypatch):
    monkeypatch.setattr(program, "SHARED_MEMORY", 28_000)
    model = build(WIDE, seed=3).to(torch.float16)
    assert made_steps(model, "int8").body.program.macros["STAGES"] == 2
    found, wanted = greedy_both(monkeypatch, WIDE, "int8")
    assert (found - wanted).abs().max() < 3e-3 * wanted.abs().max()


def test_no_program_for_small_matrices(monkeypatch):
    """A graph is faster then. Of the instructions of one layer, five are matmuls and three are not."""
    model = build(WIDE, seed=3).to(torch.float16)
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2) - 2 * V * 320  # no embedding, no head
    monkeypatch.setattr(program, "FEWEST_BYTES", weights // 8)
    assert made_steps(model, "int8").body.program is not None
    monkeypatch.setattr(program, "FEWEST_BYTES", weights // 8 + 1)
    assert made_steps(model, "int8").body.program is None


def test_no_program_for_weights_in_16_bits():
    """A graph is faster then."""
    assert made_steps(build(WIDE, seed=3).to(torch.float16), "float16").body.program is None


def test_no_program_without_room(monkeypatch):
    monkeypatch.setattr(program, "SHARED_MEMORY", 16_000)
    assert made_steps(build(WIDE, seed=3).to(torch.float16), "int8").body.program is None


@pytest.mark.parametrize(
    "changes",
    [{"feedforward": c.MoE(4, 2, c.Gated(64))}, {"position": c.T5Bias(buckets=8, max_distance=20)}],
    ids=["experts", "a T5 bias"],
)
def test_no_program_for_what_torch_computes(changes):
    cfg = dataclasses.replace(WIDE, d_model=64, **changes)
    assert made_steps(build(cfg, seed=3).to(torch.float16), "int8").body.program is None
