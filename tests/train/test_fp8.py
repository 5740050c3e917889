"""Products in 8 bits: what is rounded is rounded as the formats say, and what is learnt from them is nearly the same.

Bounds. Rounding to the nearest of b mantissa bits errs by u = 2^-b / sqrt(12) of the power of two below a number, in
the root mean square: at most u of the number, 0.036 in e4m3 (b = 3) and 0.072 in e5m2 (b = 2). A product of independent
matrices errs by sqrt(u^2 + v^2) of its own root mean square, however long the sums are. Numbers are larger than the
power of two below them, by 1.47 in the root mean square of a log-uniform one: the errors found are about 0.7 of these.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.config import ConfigError
from glassformer.model import build
from glassformer.model.feedforward import ACTIVATIONS, Dense
from glassformer.train import fp8
from glassformer.train.loop import prepare_state, train_step
from glassformer.train.objective import Batch, float8_head, summed_loss
from glassformer.train.run import Loss
from tests.train import tiny
from tests.train.test_loop import batches
from tests.variants import decoder, lively

U4, U5 = 2**-3 / math.sqrt(12), 2**-2 / math.sqrt(12)
FORMATS = {fp8.E4M3: U4, fp8.E5M2: U5}


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


def off(found, wanted):
    """The error's root mean square, relative to the wanted one's."""
    return rms(found.double() - wanted.double()) / rms(wanted)


def random(*shape, seed=0, spread=1.0):
    return spread * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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


@pytest.mark.parametrize("dtype", FORMATS)
def test_rounding_is_to_the_nearest_ties_to_even(dtype):
    """Against all 256 codes: no other is nearer, and of two equally near ones the even one is taken."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    numbers, codes = numbers[numbers.isfinite()], codes[numbers.isfinite()]
    positive = numbers[numbers > 0].sort().values
    middles = (positive[1:] + positive[:-1]) / 2
    x = torch.cat(
        [positive, middles, -middles, middles * 1.001, random(999).double(), 20 * random(99).double()]
    ).float()
    taken = fp8.quantise(x, 1.0, dtype)
    distance = (x.double()[:, None] - numbers).abs()
    nearest = distance.min(1).values
    assert torch.equal((x.double() - taken.double()).abs(), nearest)
    tied = (distance == nearest[:, None]).sum(1) > 1
    tied &= taken.float() != 0
    assert tied.sum() > 100
    assert not (taken.view(torch.uint8)[tied] % 2).any()


@pytest.mark.parametrize(("dtype", "u"), FORMATS.items())
def test_rounding_errs_as_the_bounds_here_say(dtype, u):
    x = random(20_000)
    assert 0.6 * u < off(fp8.quantise(x, 1.0, dtype).float(), x) < u


@pytest.mark.parametrize("dtype", FORMATS)
def test_large_values_saturate_and_what_is_no_number_stays_visible(dtype):
    given = torch.tensor([1e9, -1e9, 3e38, math.nan, math.inf, -math.inf, 0.0, 1e-30])
    found = fp8.quantise(given, 2.0, dtype).float()
    limit = fp8.LARGEST[dtype]
    assert float(torch.finfo(dtype).max) == limit
    assert found[:3].tolist() == [limit, -limit, limit]
    assert found[3:6].isnan().all()
    assert found[6:].tolist() == [0, 0]


def test_a_unit_is_the_power_of_two_below_the_root_mean_square():
    for value in (1.0, 0.999, 2.0, 3.7, 1e-9, 1e9):
        unit = float(fp8.unit_of(torch.tensor(value).square()))
        assert math.log2(unit) == int(math.log2(unit))
        assert unit <= value * (1 + 1e-6) < 2 * unit * (1 + 2e-6)
    assert fp8.unit_of(torch.tensor(0.0)) == 1
    assert fp8.unit_of(torch.tensor(1e-44)) == fp8.SMALLEST_UNIT
    assert fp8.unit_of(torch.tensor(math.nan)).isnan()
    assert fp8.unit_of(torch.tensor(math.inf)).isnan()


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_and_slopes_are_the_engines(kind):
    y = torch.linspace(-6, 6, 501, dtype=torch.float64, requires_grad=True)
    wanted = ACTIVATIONS[kind](y)
    (slope,) = torch.autograd.grad(wanted.sum(), y)
    value, found = fp8.activation(y.detach(), kind)
    assert torch.allclose(value, wanted.detach(), atol=1e-12)
    assert torch.allclose(found.double(), slope, atol=1e-12)


def test_casts_come_with_their_transposes():
    x, d = random(32, 48), random(32, 48, seed=1).bfloat16()
    unit = torch.tensor(0.5)
    x8, turned = fp8.cast(x, unit, fp8.E4M3)
    assert torch.equal(x8.float().T, turned.float())
    assert turned.is_contiguous()
    d8, d_turned, post_turned, sums = fp8.activate_backward(d, x.bfloat16(), unit, unit, "gelu", True)
    assert torch.equal(d8.float().T, d_turned.float())
    assert torch.equal(post_turned.float().T, fp8.activate(x.bfloat16(), unit, "gelu").float())
    assert off(d8.float().sum(0) * 0.5, sums) < 0.2
    assert fp8.activate_backward(d, x.bfloat16(), unit, unit, "gelu", False)[3].numel() == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_product_is_torchs_own_and_as_far_off_as_its_factors_are_rounded(dtype):
    a, b, bias = random(64, 512, spread=0.01), random(96, 512, seed=1, spread=7.0), random(96, seed=2).bfloat16()
    units = [fp8.unit_of(fp8.mean_square(t)) for t in (a, b)]
    a8, b8 = fp8.cast(a, units[0], dtype)[0], fp8.cast(b, units[1], fp8.E4M3)[0]
    found = fp8.product(a8, b8, *units, None, True)
    assert found.dtype == torch.bfloat16
    bound = math.hypot(FORMATS[dtype], U4)
    assert 0.5 * bound < off(found, a.double() @ b.double().T) < bound
    theirs = torch._scaled_mm(a8, b8.T, *units, bias, out_dtype=torch.bfloat16)
    assert off(fp8.product(a8, b8, *units, bias, True), theirs) < 2**-8


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_feed_forward_is_near_the_exact_one_in_value_and_gradient(kind, bias):
    """Errors add up along the way, each bounded as above, those of `pre` times what the activation makes of them (about
    1; relu2 doubles them). A slope that jumps, relu's, is wrong where the error e of `pre` changes its sign, which is
    e / pi of all places and 2 e / pi of those with a gradient."""
    given = parts(bias)
    y, wanted = gradients(functools.partial(exact, kind=kind), given)
    found, got = gradients(functools.partial(fp8.feed_forward, kind=kind), given)
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


def test_small_and_large_gradients_are_rounded_alike():
    """A unit per tensor: scaling by a power of two, as a mean over more targets does, changes nothing but the scale."""
    given = [*parts(), "gelu_tanh"]
    y = fp8.feed_forward(*given)
    dy = random(*y.shape, seed=3).bfloat16()
    once = torch.autograd.grad(y, given[:5], dy, retain_graph=True)
    for factor in (2.0**-30, 2.0**20):
        for a, b in zip(once, torch.autograd.grad(y, given[:5], dy * factor, retain_graph=True), strict=True):
            assert torch.equal(a * factor, b)


def test_rows_are_filled_up_unseen():
    x, *rest = parts(rows=48)
    some = x[:37].detach().requires_grad_()
    y, got = gradients(functools.partial(fp8.feed_forward, kind="silu"), [some, *rest])
    wanted_y, wanted = gradients(functools.partial(exact, kind="silu"), [some, *rest])
    assert y.shape == (37, 48)
    assert off(y, wanted_y) < 0.1
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        assert off(a, b) < 0.17
    batched = fp8.feed_forward(x.view(3, 16, 48), *rest, "silu")
    assert torch.equal(batched.view(48, 48), fp8.feed_forward(x, *rest, "silu"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_no_number_afterwards(bad):
    """In an input, a weight or a gradient: the loop's check of loss and gradient norm sees it."""
    for place in (0, 1, 3):
        given = [t.detach().clone().requires_grad_() for t in parts()]
        with torch.no_grad():
            given[place][3, 5] = bad
        y, _ = gradients(functools.partial(fp8.feed_forward, kind="relu"), given)
        assert not y.isfinite().all(), place
    given = parts()
    y = fp8.feed_forward(*given, "relu")
    dy = torch.ones_like(y)
    dy[2, 3] = bad
    for gradient in torch.autograd.grad(y, given, dy):
        assert not gradient.isfinite().all()


def test_zeros_are_zeros():
    for zero in range(5):
        given = [(0 * t if i == zero else t).detach().requires_grad_() for i, t in enumerate(parts())]
        y, got = gradients(functools.partial(fp8.feed_forward, kind="gelu"), given)
        wanted_y, wanted = gradients(functools.partial(exact, kind="gelu"), given)
        assert off(y, wanted_y) < 0.1
        for a, b in zip(got, wanted, strict=True):
            assert rms(a - b) <= 0.17 * rms(b)


def test_the_operators_keep_to_their_declared_shapes():
    x, unit = random(32, 16), torch.tensor(1.0)
    targets = torch.arange(32) % 16
    for operator, given in (
        (fp8.cast, (x, unit, fp8.E5M2)),
        (fp8.mean_squares, ([x, x.bfloat16(), unit],)),
        (fp8.activate, (x.bfloat16(), unit, "silu")),
        (fp8.activate_backward, (x.bfloat16(), x.bfloat16(), unit, unit, "silu", True)),
        (fp8.activate_backward, (x.bfloat16(), x.bfloat16(), unit, unit, "silu", False)),
        (fp8.product, (fp8.cast(x, unit, fp8.E4M3)[0], fp8.cast(x, unit, fp8.E4M3)[0], unit, unit, None, True)),
        (fp8.loss_gradients, (x.bfloat16(), targets, -100, 0.1, 0.1)),
    ):
        torch.library.opcheck(operator, given, test_utils="test_faketensor")


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
    fp8.enable(model)
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
    assert "block.1.feedforward.pre" in watch.seen
    watch = Watch("nothing")
    assert 0.001 < off(model(ids, tap=watch), plain(ids)) < 0.2
    assert "block.1.feedforward.out" in watch.seen
    assert "block.1.feedforward.pre" not in watch.seen


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"vocab_size": 5000}, False),  # no multiple of 16
        ({"vocab_size": 992}, False),  # small: its logits are computed at once, in bf16
        ({"head": c.Head(bias=True)}, False),
        ({"head": c.Head(transform="gelu")}, False),
    ],
)
def test_only_a_large_plain_head_is_taken_in_8_bits(changes, fits):
    assert float8_head(build(decoder(**{"vocab_size": 4992, "head": c.Head(), **changes}))) is fits


def test_a_whole_models_gradient_keeps_its_direction(monkeypatch):
    """Feed-forwards and head in 8 bits against float64: the gradient of every matrix points the same way."""
    monkeypatch.setattr("glassformer.train.objective.CHUNKED_FROM", 16)
    config = decoder(d_model=48, vocab_size=64, feedforward=c.Dense(96), head=c.Head(), n_layers=2)
    exact_model = lively(config)[0].train()
    ids = torch.randint(0, 64, (16, 14), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    total, _ = summed_loss(exact_model, batch, Loss(), True)
    total.backward()
    model = build(config).train()
    model.load_state_dict({k: v.float() for k, v in exact_model.state_dict().items()})
    fp8.enable(model)
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
    """Emulated on a CPU, all feed-forwards and the head: after 200 steps within 0.03 nats of bf16, which lost 1.65."""
    monkeypatch.setattr("glassformer.train.objective.CHUNKED_FROM", 2)
    monkeypatch.setattr("glassformer.train.objective.MULTIPLE", 1)
    session = tiny.session(
        tmp_path, "machine.precision=bfloat16", "machine.compile=no", "loop.steps=200", "optim.lr=3e-3"
    )
    curves = []
    for float8 in (False, True):
        state = prepare_state(session.run)
        if float8:
            fp8.enable(state.model)
            assert all(isinstance(block.feedforward, fp8.Float8Dense) for block in state.model.blocks)
            assert float8_head(state.model)
            state.loss_function = functools.partial(summed_loss, float8=True)
        curves.append([train_step(state, b)["loss"] for b in batches(session, 200)])
    last = [sum(curve[-10:]) / 10 for curve in curves]
    assert curves[0][0] - last[0] > 1.2
    assert abs(last[0] - last[1]) < 0.03
    assert curves[0] != curves[1]


def test_a_cpu_is_refused_in_words():
    with pytest.raises(ConfigError, match="needs a CUDA GPU, and this run is on the cpu"):
        fp8.require_device(torch.device("cpu"))


def test_an_old_gpu_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older one")
    with pytest.raises(ConfigError, match=r"8\.9 or more, and an older one has 8\.0"):
        fp8.require_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.require_device(torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own compiler
def test_compiled_it_has_the_same_value_and_gradient():
    given = parts()
    y, wanted = gradients(functools.partial(fp8.feed_forward, kind="gelu_tanh"), given)
    compiled = torch.compile(fp8.feed_forward, fullgraph=True)
    found, got = gradients(lambda *t: compiled(*t, "gelu_tanh"), given)
    assert off(found, y) < 1e-2
    for a, b in zip(got, wanted, strict=True):
        assert off(a, b) < 1e-2
