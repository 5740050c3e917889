"""Blocks compiled one at a time: one compilation for all layers of a kind, and the numbers of plain torch."""

import copy
import dataclasses
import functools

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache, check_cacheable

from glassformer import config as c
from glassformer.lens import trace
from glassformer.training import blocks, objective
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss, read_run
from tests.variants import lively

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's compiler looks at it
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
BASE = c.DecoderConfig(
    vocab_size=32, d_model=16, n_layers=4, attention=c.Attention(2), feedforward=c.Gated(16), position=c.Rotary(),
    max_len=16, norm=c.RMSNorm(), head=c.Head(),
)  # fmt: skip
MOE = c.MoE(3, 2, c.Gated(16))


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were compiled. They run without the last, slow part of the compiler."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    made = functools.cache(functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(blocks, "_compiled", made)
    yield seen
    torch._dynamo.reset()


def pair(config, recompute="no"):
    plain = lively(config, seed=3)[0].float().train()
    compiled = copy.deepcopy(plain)
    blocks.compile_blocks(compiled, recompute)
    return plain, compiled


def results(model, stream=None, finish=None, backward=True):
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (2, 13), generator=draw)
    source = torch.randint(0, 32, (2, 9), generator=draw) if isinstance(model.config, c.Seq2SeqConfig) else None
    torch.manual_seed(7)  # dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=stream is not None):
        given = Batch(ids[:, :-1], ids[:, 1:], source), Loss(balance=0.1)
        total, _ = summed_loss(model, *given, backward, stream, finish=finish)
    if backward:
        total.backward()
    return total.detach(), {name: p.grad for name, p in model.named_parameters()}


def agree(plain, compiled, stream=None):
    wanted, found = results(plain, stream), results(compiled, stream)
    assert torch.allclose(wanted[0], found[0], rtol=1e-5)
    for name, gradient in wanted[1].items():
        same = gradient is None and found[1][name] is None
        assert same or torch.allclose(gradient, found[1][name], rtol=1e-3, atol=1e-5), name


VARIANTS = {
    "all layers alike": (BASE, 1),
    "dropout": (dataclasses.replace(BASE, dropout=0.2), 1),
    "a window in two layers": (c.replace(BASE, attention__window=4, attention__window_layers=(1, 3)), 2),
    "another feed-forward in two layers": (
        dataclasses.replace(BASE, layer_kinds=(c.LayerKind((0, 2), feedforward=c.Dense(16)),)),
        2,
    ),
    "shared blocks": (dataclasses.replace(BASE, shared_blocks=(0, 0, 1, 1)), 1),
    "encoder-decoder": (
        c.Seq2SeqConfig(**{f.name: getattr(BASE, f.name) for f in dataclasses.fields(BASE)}, n_encoder_layers=2),
        3,  # blocks of two kinds, and the last norm for two lengths
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_layers_of_a_kind_are_compiled_once(name, graphs):
    config, kinds = VARIANTS[name]
    agree(*pair(config))
    assert len(graphs) == kinds + 1  # and the last norm


def test_a_narrow_stream(graphs):
    agree(*pair(BASE), stream=torch.bfloat16)
    assert len(graphs) == 2


@pytest.mark.slow
def test_the_balance_of_experts_is_part_of_the_loss(graphs):
    """Experts that are called one by one leave the compiled function, and the numbers are the same."""
    agree(*pair(dataclasses.replace(BASE, feedforward=MOE)))
    assert graphs


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation(recompute, graphs):
    agree(*pair(dataclasses.replace(BASE, dropout=0.2), recompute))
    assert len(graphs) == 2


def test_the_loss_of_a_large_vocabulary(graphs, monkeypatch):
    monkeypatch.setattr(objective, "CHUNKED_FROM", 1)
    plain, compiled = pair(BASE)
    finish = blocks.compiled_finish()
    wanted, found = results(plain), results(compiled, finish=finish)
    assert torch.allclose(wanted[0], found[0], rtol=1e-5)
    assert all(torch.allclose(wanted[1][name], found[1][name], rtol=1e-3, atol=1e-5) for name in wanted[1])
    assert len(graphs) == 3
    with torch.no_grad():
        results(compiled.eval(), finish=finish, backward=False)
    assert len(graphs) == 3


def test_later_processes_find_every_compiled_function_again(graphs, monkeypatch):
    """torch keeps no compiled function that contains an autograd function or switches autocast off, unless asked."""
    monkeypatch.setattr(objective, "CHUNKED_FROM", 1)
    monkeypatch.setattr(torch._functorch.config, "autograd_cache_allow_custom_autograd_functions", False)
    monkeypatch.setattr(torch._inductor.config, "unsafe_marked_cacheable_functions", {})
    results(pair(BASE)[1], torch.bfloat16, blocks.compiled_finish())
    assert len(graphs) == 3
    with pytest.raises(BypassAOTAutogradCache, match="autocast"):
        check_cacheable(graphs[-1])
    blocks._keep_compiled()
    for graph in graphs:
        check_cacheable(graph)


def test_evaluation_and_taps_are_not_compiled(graphs):
    plain, compiled = pair(BASE)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        compiled(ids)
    compiled.eval()(ids)
    assert torch.equal(
        trace(plain.eval(), ids)["blocks.2.attention.pattern"], trace(compiled, ids)["blocks.2.attention.pattern"]
    )
    assert not graphs


def test_only_a_long_run_compiles_the_whole_step(monkeypatch):
    whole = []
    monkeypatch.setattr(torch, "compile", lambda function: whole.append(function) or function)
    monkeypatch.setattr(blocks, "compile_blocks", lambda model, recompute: None)
    monkeypatch.setattr(blocks, "compiled_finish", lambda: None)
    long = ("model.preset=gpt2", "loop.steps=100000", "loop.batch=64")  # 124M parameters, 6.6e9 tokens: 5e18
    for changes, compiled, sharded, wanted in [
        (long, True, False, 1),
        (long, True, True, 0),
        (long, False, False, 0),
        ((*long, "loop.steps=500"), True, False, 0),
        ((), True, False, 0),
    ]:
        whole.clear()
        model = lively(BASE)[0]
        blocks.prepare_blocks(model, objective.summed_loss, read_run("", changes), compiled, sharded)
        assert len(whole) == wanted, changes
