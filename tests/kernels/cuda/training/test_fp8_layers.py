"""Layers in 8 bits are near the exact ones, in value and gradient, and learn nearly the same.

Bounds are those that tests/kernels/cuda/training/test_fp8.py explains.
"""

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer import config as c
from glassformer.kernels.cuda.training import fp8, fp8_cuda, fp8_layers
from glassformer.model import build
from glassformer.model.attention import Attention
from glassformer.model.context import NO_TAP
from glassformer.model.layers import ACTIVATIONS, Dense, Gated, build_dense, build_norm
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import Batch, float8_head, summed_loss
from glassformer.training.run import Loss
from tests.kernels.cuda.training.installing import install
from tests.kernels.cuda.training.test_fp8 import U4, U5, off, random, rms
from tests.training import tiny
from tests.training.test_loop import batches
from tests.variants import decoder, lively


def parts(bias=True, rows=64, d=48, f=96, gain=1.0):
    """x, w_up, b_up, w_down, b_down of a lively feed-forward, in float32 with gradients."""
    shapes = ((rows, d), (f, d), (f,), (d, f), (d,))
    spreads = (1.0, gain / math.sqrt(d), 0.3, 1 / math.sqrt(f), 0.3)
    made = [
        random(*shape, seed=i, spread=s).requires_grad_()
        for i, (shape, s) in enumerate(zip(shapes, spreads, strict=True))
    ]
    made[0] = made[0].detach().bfloat16().float().requires_grad_()  # what it is rounded to first is not the question
    return made if bias else [t if i in (0, 1, 3) else None for i, t in enumerate(made)]


def exact(x, w_up, b_up, w_down, b_down, kind):
    x, w_up, b_up, w_down, b_down = (None if t is None else t.double() for t in (x, w_up, b_up, w_down, b_down))
    return F.linear(ACTIVATIONS[kind](F.linear(x, w_up, b_up)), w_down, b_down)


def gradients(function, given, seed=9):
    y = function(*given)
    dy = random(*y.shape, seed=seed).to(y.dtype)
    return y, torch.autograd.grad(y, [t for t in given[:5] if t is not None], dy)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", fp8_cuda.KINDS)
def test_feed_forward_is_near_the_exact_one_in_value_and_gradient(kind, bias):
    """Errors add up along the way, each bounded as above, those of `pre` times what the activation makes of them (about
    1; relu2 doubles them). A slope that jumps, relu's, is wrong where the error e of `pre` changes its sign, which is
    e / pi of all places and 2 e / pi of those with a gradient."""
    given = parts(bias)
    y, wanted = gradients(functools.partial(exact, kind=kind), given)
    found, got = gradients(functools.partial(fp8_layers.feed_forward, kind=kind), given)
    pre = math.hypot(U4, U4)
    gain = 2 if kind == "relu2" else 1.2
    forward = math.hypot(gain * pre, U4, U4)
    slope = math.sqrt(2 * pre / math.pi) if kind == "relu" else gain * pre
    d_pre = math.hypot(U5, U4, slope, U5)
    assert 0.4 * forward < off(found, y) < forward
    names = ("x", "w_up", "b_up", "w_down", "b_down") if bias else ("x", "w_up", "w_down")
    bounds = {
        "x": math.hypot(d_pre, U4),
        "w_up": math.hypot(d_pre, U4),
        "b_up": d_pre,
        "w_down": math.hypot(U5, forward),
    }
    for name, a, b in zip(names, got, wanted, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert off(a, b) < bounds.get(name, 2**-8), name


def layers(bias=True, widths=(48, 16, 32), d=64):
    made = [nn.Linear(d, n, bias=bias) for n in widths]
    for i, layer in enumerate(made):
        layer.weight.data = random(*layer.weight.shape, seed=i, spread=2.0**-i / math.sqrt(d))
        if bias:
            layer.bias.data = random(len(layer.bias), seed=9 + i, spread=0.3)
    return made


@pytest.mark.parametrize("expected", [None, 1.0, 0.25])
@pytest.mark.parametrize("bias", [True, False])
def test_projections_are_near_the_exact_ones_in_value_and_gradient(bias, expected):
    """Weights and gradients of unlike size share a scale; a factor of two in what is expected of x changes little."""
    given, x = layers(bias), random(3, 37, 64, seed=5).bfloat16().float().requires_grad_()
    parameters = [x, *(p for layer in given for p in layer.parameters())]
    ys = fp8_layers.projections(x, given, None if expected is None else torch.tensor(expected))
    dys = [random(*y.shape, seed=20 + i, spread=3.0**-i).bfloat16() for i, y in enumerate(ys)]
    wanted = [F.linear(x.double(), g.weight.double(), g.bias.double() if bias else None) for g in given]
    exact = torch.autograd.grad(wanted, parameters, [d.double() for d in dys])
    got = torch.autograd.grad(ys, parameters, dys)
    for y, right, layer in zip(ys, wanted, given, strict=True):
        assert y.dtype == torch.bfloat16
        assert y.shape == (3, 37, layer.out_features)
        assert 0.3 * U4 < off(y, right) < math.hypot(U4, U4)
    for p, a, b in zip(parameters, got, exact, strict=True):
        assert a.dtype == p.dtype
        assert a.shape == b.shape
        assert off(a, b) < (math.hypot(U5, U4) if p.dim() > 1 else 2**-7)


def test_a_projection_that_is_nan_stays_nan():
    for place in ("x", "weight", "gradient"):
        given, x, dy = layers(False, (16,)), random(16, 64), torch.ones(16, 16).bfloat16()
        bad = {"x": x, "weight": given[0].weight.data, "gradient": dy}[place]
        bad[2, 3] = math.inf
        y = fp8_layers.projections(x.requires_grad_(), given, torch.tensor(1.0))[0]
        got = torch.autograd.grad(y, (x, given[0].weight), dy)
        assert not (y if place != "gradient" else got[0]).isfinite().all()
        assert place == "x" or not got[0].isfinite().all()
        assert place == "weight" or not got[1].isfinite().all()


@pytest.mark.parametrize("norm", [c.LayerNorm(), c.LayerNorm(bias=False), c.RMSNorm()])
def test_a_norms_output_is_as_large_as_its_parameters_say(norm):
    made = build_norm(64, norm)
    for p in made.parameters():
        p.data = random(64, seed=3, spread=0.7)
    found = fp8_layers.expected_square((made,))
    assert not found.requires_grad
    assert abs(float(found) / float(fp8.mean_square(made(5 * random(256, 64)).detach())) - 1) < 0.1
    assert fp8_layers.expected_square(()) is None


@pytest.mark.parametrize(("placement", "kind"), [("pre", "norm_attention"), ("parallel", "norm"), ("post", None)])
def test_layers_know_which_norm_made_their_input(placement, kind):
    model = build(decoder(placement=placement, feedforward=c.Dense(32), **WIDE))
    names = set(model.state_dict())
    install(model)
    block = model.blocks[0]
    assert isinstance(block.attention, fp8_layers.Float8Attention)
    assert isinstance(block.attention.o, fp8_layers.Float8Linear)
    assert set(model.state_dict()) == names
    wanted = () if kind is None else (getattr(block, kind),)
    assert block.attention.norms == wanted
    wanted = (block.norm_feedforward,) if placement == "pre" else wanted
    assert block.feedforward.norms == wanted


def test_attention_of_odd_widths_is_left_as_it_is():
    model = build(decoder(feedforward=c.Dense(32)))
    install(model)
    assert all(type(block.attention) is Attention for block in model.blocks)
    assert all(type(block.attention.o) is nn.Linear for block in model.blocks)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position": c.Rotary()},
        {"position": c.QueryKeyPosition()},
        {"attention": c.Attention(n_heads=3, d_head=16, qk_norm=c.LayerNorm())},
        {"attention": c.Attention(n_heads=6, n_kv_heads=2, d_head=16, d_value=32, bias=False)},
    ],
)
def test_attention_in_8_bits_is_near_the_exact_one(changes):
    """Queries, keys and values err by 0.051 of theirs, scores of about 1 so by 0.07, the output by all of these."""
    model = lively(decoder(feedforward=c.Dense(32), **{**WIDE, **changes}))[0].float().train()
    attention, x = model.blocks[0].attention, random(2, 13, 32, seed=4).requires_grad_()
    seen = []
    hook = attention.register_forward_pre_hook(lambda module, given: seen.append(given))
    model(torch.arange(13)[None])
    hook.remove()
    rest = seen[0][1:]
    wanted = attention(x, *rest)
    install(model)
    found = attention(x, *rest)
    assert 0.005 < off(found, wanted) < 0.15
    dy = random(*wanted.shape, seed=6)
    exact = torch.autograd.grad(wanted, (x, attention.q.weight, attention.v.weight, attention.o.weight), dy)
    got = torch.autograd.grad(found, (x, attention.q.weight, attention.v.weight, attention.o.weight), dy.bfloat16())
    for a, b in zip(got, exact, strict=True):
        assert off(a, b) < 0.3
        assert float(F.cosine_similarity(a.flatten(), b.flatten(), 0)) > 0.96
    model.eval()
    assert torch.equal(attention(x, *rest), wanted)


def test_small_and_large_gradients_are_rounded_alike():
    """One scale per tensor: multiplying by a power of two, as a mean over more targets does, changes only the scale."""
    given = [*parts(), "gelu_tanh"]
    y = fp8_layers.feed_forward(*given)
    dy = random(*y.shape, seed=3).bfloat16()
    once = torch.autograd.grad(y, given[:5], dy, retain_graph=True)
    for factor in (2.0**-30, 2.0**20):
        for a, b in zip(once, torch.autograd.grad(y, given[:5], dy * factor, retain_graph=True), strict=True):
            assert torch.equal(a * factor, b)


def test_rows_are_filled_up_unseen():
    x, *rest = parts(rows=48)
    some = x[:37].detach().requires_grad_()
    y, got = gradients(functools.partial(fp8_layers.feed_forward, kind="silu"), [some, *rest])
    wanted_y, wanted = gradients(functools.partial(exact, kind="silu"), [some, *rest])
    assert y.shape == (37, 48)
    assert off(y, wanted_y) < 0.1
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert off(a, b) < 0.17
    batched = fp8_layers.feed_forward(x.view(3, 16, 48), *rest, "silu")
    assert torch.equal(batched.view(48, 48), fp8_layers.feed_forward(x, *rest, "silu"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_stay_visible(bad):
    """In an input, a weight or a gradient: the loop's check of loss and gradient norm sees it."""
    for place in (0, 1, 3):
        given = [t.detach().clone().requires_grad_() for t in parts()]
        with torch.no_grad():
            given[place][3, 5] = bad
        y, _ = gradients(functools.partial(fp8_layers.feed_forward, kind="relu"), given)
        assert not y.isfinite().all(), place
    given = parts()
    y = fp8_layers.feed_forward(*given, "relu")
    dy = torch.ones_like(y)
    dy[2, 3] = bad
    for gradient in torch.autograd.grad(y, given, dy):
        assert not gradient.isfinite().all()


def test_zeros_are_zeros():
    for zero in range(5):
        given = [(0 * t if i == zero else t).detach().requires_grad_() for i, t in enumerate(parts())]
        y, got = gradients(functools.partial(fp8_layers.feed_forward, kind="gelu"), given)
        wanted_y, wanted = gradients(functools.partial(exact, kind="gelu"), given)
        assert off(y, wanted_y) < 0.1
        for a, b in zip(got, wanted, strict=True):
            assert rms(a - b) <= 0.17 * rms(b)


WIDE = {"d_model": 32, "attention": c.Attention(n_heads=6, n_kv_heads=2, d_head=16, d_value=16)}


class Watch:
    """A tap that wants one site."""

    def __init__(self, site):
        self.site, self.seen = site, []

    def __call__(self, site, value):
        self.seen.append(site)
        return value

    def wants(self, site):
        return site.endswith(self.site)


def test_only_an_unwatched_training_step_is_in_8_bits():
    """Evaluated, or asked for what lies within, a layer is the engine's to the bit; its parameters keep their names."""
    config = decoder(feedforward=c.Dense(11, activation="silu"))
    plain, ids = lively(config)[0].float(), torch.arange(13)[None]
    model = build(config)
    names = set(model.state_dict())
    install(model)
    assert set(model.state_dict()) == names
    model.load_state_dict(plain.state_dict())
    for block in model.blocks:
        assert isinstance(block.feedforward, Dense)
    for mode in (model.eval, plain.eval):
        mode()
    assert torch.equal(model(ids), plain(ids))
    for mode in (model.train, plain.train):
        mode()
    watch = Watch("feedforward.post")
    assert torch.equal(model(ids, tap=watch), plain(ids))
    assert "blocks.1.feedforward.pre" in watch.seen
    watch = Watch("nothing")
    assert 0.001 < off(model(ids, tap=watch), plain(ids)) < 0.2
    assert "blocks.1.feedforward.out" in watch.seen
    assert "blocks.1.feedforward.pre" not in watch.seen


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"vocab_size": 5003}, True),
        ({"vocab_size": 992}, False),  # small: its logits are computed at once, in bf16
        ({"head": c.Head(bias=True)}, False),
        ({"head": c.Head(transform="gelu")}, False),
    ],
)
def test_only_a_large_plain_head_is_taken_in_8_bits(changes, fits):
    assert float8_head(build(decoder(**{"vocab_size": 4992, "head": c.Head(), **changes}))) is fits


def test_a_whole_models_gradient_keeps_its_direction(monkeypatch):
    """Feed-forwards and head in 8 bits against float64: the gradient of every matrix points the same way."""
    monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", 16)
    config = decoder(d_model=48, vocab_size=64, feedforward=c.Dense(96), head=c.Head(), n_layers=2)
    exact_model = lively(config)[0].train()
    ids = torch.randint(0, 64, (16, 14), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    total, _ = summed_loss(exact_model, batch, Loss(), True)
    total.backward()
    model = build(config).train()
    model.load_state_dict({k: v.float() for k, v in exact_model.state_dict().items()})
    install(model)
    assert float8_head(model)
    found, _ = summed_loss(model, batch, Loss(), True, float8=True)
    found.backward()
    assert abs(float(found.detach() / total.detach()) - 1) < 0.02
    other = dict(model.named_parameters())
    for name, p in exact_model.named_parameters():
        if p.dim() > 1:  # the gradient of a bias is a sum that may cancel
            assert float(F.cosine_similarity(p.grad.flatten(), other[name].grad.flatten().double(), 0)) > 0.97, name
    everything = [torch.cat([p.grad.flatten().double() for p in m.parameters()]) for m in (exact_model, model)]
    assert float(F.cosine_similarity(*everything, 0)) > 0.99


@pytest.mark.slow
def test_it_learns_as_bfloat16_does(tmp_path, monkeypatch):
    """Emulated on a CPU, all blocks and the head: after 200 steps within 0.03 nats of bf16, which lost 1.65."""
    monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", 2)
    session = tiny.session(
        tmp_path,
        *("machine.precision=bfloat16", "machine.compile=no", "loop.steps=200", "optim.lr=3e-3"),
        *("model.d_model=48", "model.n_heads=3", "model.d_ff=96"),
    )
    curves = []
    for float8 in (False, True):
        state = prepare_state(session.run)
        if float8:
            install(state.model)
            assert all(isinstance(block.feedforward, fp8_layers.Float8Dense) for block in state.model.blocks)
            assert all(isinstance(block.attention, fp8_layers.Float8Attention) for block in state.model.blocks)
            assert float8_head(state.model)
            state.loss_function = functools.partial(summed_loss, float8=True)
        curves.append([train_step(state, b)["loss"] for b in batches(session, 200)])
    last = [sum(curve[-10:]) / 10 for curve in curves]
    assert curves[0][0] - last[0] > 1.2
    assert abs(last[0] - last[1]) < 0.03
    assert curves[0] != curves[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler
def test_compiled_it_has_the_same_value_and_gradient():
    given = parts()
    y, wanted = gradients(functools.partial(fp8_layers.feed_forward, kind="gelu_tanh"), given)
    compiled = torch.compile(fp8_layers.feed_forward, fullgraph=True)
    found, got = gradients(lambda *t: compiled(*t, "gelu_tanh"), given)
    assert off(found, y) < 1e-2
    for a, b in zip(got, wanted, strict=True):
        assert off(a, b) < 1e-2


@pytest.mark.slow
def test_a_compiled_model_has_the_same_loss_and_gradient():
    """Norms are then cast where they are computed, from float32 and not from bf16: 3 % of the numbers are the next one,
    which these weights, whose attention is sharp, make much of."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.training.compiled_fp8"],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    apart, cosine = json.loads(done.stdout.splitlines()[-1])
    assert apart < 0.02
    assert cosine > 0.9


@pytest.mark.parametrize("spec", [c.Gated(96), c.Gated(96, "gelu_tanh", bias=True, limit=8.0, up_offset=1.0)])
def test_a_gated_feed_forward_is_near_the_exact_one(spec):
    """Errors of gate and up add up, and each matmul adds those of its two factors."""
    layer = build_dense(48, spec)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = random(*parameter.shape, seed=i, spread=0.2)
    x = random(64, 48, seed=9).bfloat16().float()
    found = []
    for kind in (Gated, fp8_layers.Float8Gated):
        layer.__class__, layer.norms = kind, ()
        given = x.clone().requires_grad_()
        y = layer.train()(given, NO_TAP)
        dy = random(*y.shape, seed=3).to(y.dtype)
        found.append([y, *torch.autograd.grad(y, [given, *layer.parameters()], dy)])
    pre = math.hypot(U4, U4)
    forward = math.hypot(2 * pre, U4, U4)
    backward = math.hypot(2 * pre, U4, U5, U5)
    for number, (wanted, got) in enumerate(zip(*found, strict=True)):
        assert off(got, wanted) < (forward if number == 0 else backward), number
    assert off(found[1][0], found[0][0]) > 0.2 * forward  # it is in float8
    layer.eval()
    layer.__class__ = Gated
    wanted = layer(x, NO_TAP)
    layer.__class__ = fp8_layers.Float8Gated
    assert torch.equal(layer(x, NO_TAP), wanted)
