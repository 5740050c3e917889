"""The allow-lists of the training kernels: change every config field, and see that no kernel accepts silently.

A CPU kernel either refuses a change or gives the loss and gradients of plain torch within its bound. A CUDA kernel
refuses exactly the changes that are listed here.
"""

import copy
import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.kernels import training
from glassformer.kernels.registry import config_fields
from glassformer.kernels.toolchain import cxx
from glassformer.kernels.training import TRAINING_KERNELS, TrainingRequest, install_training_kernels
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss
from tests.variants import lively

GPU, CPU = torch.device("cuda"), torch.device("cpu")
BASE = c.DecoderConfig(
    vocab_size=67,
    d_model=64,
    n_layers=2,
    attention=c.Attention(n_heads=1),
    feedforward=c.Dense(64),
    position=c.Learned(),
    max_len=24,
    norm=c.LayerNorm(),
    head=c.Head(),
)
MOE = c.MoE(n_experts=3, n_active=2, expert=c.Dense(64))
ROTARY = c.Rotary()
YARN = c.YarnScaling(factor=2.0, original_max_len=16)
LLAMA = c.Llama3Scaling(factor=2.0, original_max_len=16)
SEQ2SEQ = {"kind": c.Seq2SeqConfig, "n_encoder_layers": 2}


def attention(**changes):
    return {"attention": c.Attention(**({"n_heads": 1} | changes))}


def position(value):
    return {"position": value}


CHANGES = {
    "vocab_size": {"vocab_size": 70},
    "d_model": {"d_model": 128},
    "n_layers": {"n_layers": 1},
    "attention": attention(n_heads=2),  # a part: its kind has one value
    "attention.n_heads": attention(n_heads=4),
    "attention.n_kv_heads": attention(n_heads=4, n_kv_heads=2),
    "attention.d_head": attention(d_head=24),
    "attention.d_value": attention(d_value=16),
    "attention.scale": attention(scale=0.7),
    "attention.bias": attention(bias=False),
    "attention.out_bias": attention(out_bias=False),
    "attention.qk_norm": attention(qk_norm=c.RMSNorm()),
    "attention.qk_norm.eps": attention(qk_norm=c.RMSNorm(eps=0.3)),
    "attention.qk_norm.bias": attention(qk_norm=c.LayerNorm(bias=False)),
    "attention.window": attention(window=3),
    "attention.window_layers": attention(window=3, window_layers=(1,)),
    "feedforward": {"feedforward": c.Gated(64)},
    "feedforward.d_ff": {"feedforward": c.Dense(48)},
    "feedforward.activation": {"feedforward": c.Dense(64, activation="silu")},
    "feedforward.bias": {"feedforward": c.Dense(64, bias=False)},
    "feedforward.n_experts": {"feedforward": MOE},
    "feedforward.n_active": {"feedforward": dataclasses.replace(MOE, n_active=1)},
    "feedforward.normalize": {"feedforward": dataclasses.replace(MOE, normalize=False)},
    "feedforward.expert": {"feedforward": dataclasses.replace(MOE, expert=c.Gated(64))},
    "feedforward.expert.d_ff": {"feedforward": dataclasses.replace(MOE, expert=c.Dense(32))},
    "feedforward.expert.activation": {"feedforward": dataclasses.replace(MOE, expert=c.Dense(64, activation="tanh"))},
    "feedforward.expert.bias": {"feedforward": dataclasses.replace(MOE, expert=c.Dense(64, bias=False))},
    "norm": {"norm": c.RMSNorm()},
    "norm.eps": {"norm": c.LayerNorm(eps=0.2)},
    "norm.bias": {"norm": c.LayerNorm(bias=False)},
    "position": position(c.Alibi()),
    "position.offset": position(c.Learned(offset=2)),
    "position.base": position(c.Rotary(base=100.0)),
    "position.layout": position(c.Sinusoidal(layout="halves")),
    "position.pairing": position(c.Rotary(pairing="interleaved")),
    "position.fraction": position(c.Rotary(fraction=0.5)),
    "position.scaling": position(c.Rotary(scaling=c.LinearScaling(2.0))),
    "position.scaling.factor": position(c.Rotary(scaling=c.NTKScaling(4.0))),
    "position.scaling.original_max_len": position(c.Rotary(scaling=YARN)),
    "position.scaling.beta_fast": position(c.Rotary(scaling=dataclasses.replace(YARN, beta_fast=16.0))),
    "position.scaling.beta_slow": position(c.Rotary(scaling=dataclasses.replace(YARN, beta_slow=2.0))),
    "position.scaling.attention_factor": position(c.Rotary(scaling=dataclasses.replace(YARN, attention_factor=1.5))),
    "position.scaling.truncate": position(c.Rotary(scaling=dataclasses.replace(YARN, truncate=False))),
    "position.scaling.low_freq_factor": position(c.Rotary(scaling=dataclasses.replace(LLAMA, low_freq_factor=0.5))),
    "position.scaling.high_freq_factor": position(c.Rotary(scaling=dataclasses.replace(LLAMA, high_freq_factor=3.0))),
    "position.buckets": position(c.T5Bias(buckets=8)),
    "position.max_distance": position(c.T5Bias(max_distance=40)),
    "position.vectors": position(c.QueryKeyPosition()),
    "position.vectors.base": position(c.QueryKeyPosition(c.Sinusoidal(base=50.0))),
    "position.vectors.layout": position(c.QueryKeyPosition(c.Sinusoidal(layout="halves"))),
    "position.vectors.offset": position(c.QueryKeyPosition(c.Learned(offset=2))),
    "placement": {"placement": "parallel"},
    "max_len": {"max_len": 30},
    "embedding": {"embedding": c.Embedding(scale=2.0)},  # a part: its kind has one value
    "embedding.scale": {"embedding": c.Embedding(scale=3.0)},
    "embedding.n_segments": {"embedding": c.Embedding(n_segments=2)},
    "embedding.norm": {"embedding": c.Embedding(norm=True)},
    "head": {"head": c.Head(scale=2.0)},  # without a head there is no loss
    "head.tied": {"head": c.Head(tied=False)},
    "head.bias": {"head": c.Head(bias=True)},
    "head.scale": {"head": c.Head(scale=0.5)},
    "head.transform": {"head": c.Head(transform="gelu")},
    "dropout": {"dropout": 0.2},
    "init_std": {"init_std": 0.1},
    "special": {"special": c.Special(bos=1)},  # a part: its kind has one value
    "special.bos": {"special": c.Special(bos=2)},
    "special.eos": {"special": c.Special(eos=(3,))},
    "special.pad": {"special": c.Special(pad=4)},
    "special.start": {"special": c.Special(start=5)},
    "pooler": {"kind": c.EncoderConfig, "pooler": True},
    "n_encoder_layers": SEQ2SEQ,
}
NO_DENSE = {name for name in CHANGES if name == "feedforward" or "feedforward.n_" in name or ".expert" in name} | {
    "feedforward.normalize"
}
KINDS = {"pooler", "n_encoder_layers"}
ROTATED = {name for name in CHANGES if name.startswith("position.scaling")} | {
    *(f"position.{field}" for field in ("base", "pairing", "fraction"))
}
OTHER_POSITIONS = {name for name in CHANGES if name.startswith(("position.vectors", "position.buckets"))} | {
    "position",
    "position.max_distance",
}
REFUSED = {
    "float8 feed-forward": NO_DENSE,
    "float8 projections": {"attention.d_head"},
    "float8 head": {"head.bias", "head.transform"},
    "causal attention": {
        "d_model", "attention", *(f"attention.{n}" for n in ("n_heads", "n_kv_heads", "d_head", "d_value", "qk_norm",
        "qk_norm.eps", "qk_norm.bias", "window", "window_layers")), "dropout", *KINDS, *ROTATED, *OTHER_POSITIONS,
    },
    "CUDA loss": {"head.transform"},
    "CUDA Muon": set(),
}  # fmt: skip


NOT_NATIVE = {
    "feedforward": {"native feed-forward"},
    "feedforward.d_ff": {"native feed-forward"},
    "feedforward.activation": {"native feed-forward"},
    "feedforward.expert": {"native feed-forward"},
    "feedforward.expert.activation": {"native feed-forward"},
    "attention.d_head": {"native attention", "native linear"},
}
"""The CPU kernels that refuse a change."""


def changed(name):
    change = dict(CHANGES[name])
    kind = change.pop("kind", type(BASE))
    fields = {f.name: getattr(BASE, f.name) for f in dataclasses.fields(BASE)}
    return kind(**(fields | change))


def fields_of_all_variants():
    """Names of every field that a config can have: those of all changed configs together."""
    return {name for change in CHANGES for name, _, _ in config_fields(changed(change))}


def declared_fields():
    """Names of every field of every part, from the types themselves."""
    parts = {
        "attention": [c.Attention], "feedforward": [c.Dense, c.Gated, c.MoE, c.NoFeedForward],
        "feedforward.expert": [c.Dense, c.Gated], "attention.qk_norm": [c.LayerNorm, c.RMSNorm],
        "norm": [c.LayerNorm, c.RMSNorm], "embedding": [c.Embedding], "head": [c.Head], "special": [c.Special],
        "position": [c.NoPosition, c.Learned, c.Sinusoidal, c.Rotary, c.Alibi, c.T5Bias, c.QueryKeyPosition],
        "position.scaling": [c.LinearScaling, c.NTKScaling, c.YarnScaling, c.Llama3Scaling],
        "position.vectors": [c.Sinusoidal, c.Learned],
    }  # fmt: skip
    names = {f.name for kind in c.MODEL_KINDS.values() for f in dataclasses.fields(kind)}
    return names | {
        f"{part}.{f.name}" for part, kinds in parts.items() for kind in kinds for f in dataclasses.fields(kind)
    }


def test_every_field_has_a_change():
    assert declared_fields() == CHANGES.keys()
    assert fields_of_all_variants() <= CHANGES.keys()
    for name in CHANGES:
        assert changed(name) != BASE, name


@pytest.fixture
def _every_machine(monkeypatch):
    """The machine supports all kernels: the config alone decides."""
    monkeypatch.setattr(cxx, "register_bits", lambda: 512)
    monkeypatch.setattr(cxx, "is_intel", lambda: False)
    monkeypatch.setattr(training.hopper, "available", lambda: True)
    monkeypatch.setattr(training.loss, "available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


REQUESTS = {
    "float8": TrainingRequest(GPU, torch.bfloat16, compiled=True, float8=True),
    "native": TrainingRequest(CPU),
}
BFLOAT16 = TrainingRequest(GPU, torch.bfloat16, compiled=True, muon=True)


def refused(kernel):
    request = REQUESTS.get(kernel.name.split()[0], BFLOAT16)
    assert kernel.supports(BASE, request) is None, kernel.name
    return {name for name in CHANGES if kernel.supports(changed(name), request) is not None}


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize(
    "kernel", [k for k in TRAINING_KERNELS if not k.name.startswith("native")], ids=lambda k: k.name
)
def test_a_cuda_kernel_refuses_exactly_the_listed_changes(kernel):
    assert refused(kernel) == REFUSED[kernel.name]


def gradients(model):
    """Loss and gradients of one step; dropout draws the same numbers in every call."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 67, (2, 14), generator=draw)
    source = torch.randint(0, 67, (2, 9), generator=draw) if isinstance(model.config, c.Seq2SeqConfig) else None
    torch.manual_seed(5)
    total, plain = summed_loss(model, Batch(ids[:, :-1], ids[:, 1:], source), Loss(), True)
    total.backward()
    return float(plain.detach()), {name: p.grad for name, p in model.named_parameters()}


def agrees(name):
    """Whether the kernels that support a change give the loss and gradients of plain torch."""
    plain = lively(changed(name), seed=3)[0].float().train()
    fast = copy.deepcopy(plain)
    installed = install_training_kernels(fast, TrainingRequest(CPU))
    (loss, wanted), (found_loss, found) = gradients(plain), gradients(fast)
    largest = max(float(g.abs().max()) for g in wanted.values() if g is not None)
    same = found_loss == pytest.approx(loss, rel=1e-5)
    for key, true in wanted.items():
        same &= (true is None) == (found[key] is None)
        if true is not None:
            same &= torch.allclose(found[key], true, rtol=1e-4, atol=1e-5 * largest)
    return same, installed


needs_compiler = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")


@needs_compiler
@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize("name", CHANGES)
def test_a_cpu_kernel_refuses_a_change_or_computes_it(name):
    same, installed = agrees(name)
    assert same
    assert set(installed) == {"native attention", "native linear", "native feed-forward"} - NOT_NATIVE.get(name, set())


FAULTS = {
    "any activation": ("native feed-forward", "feedforward.activation", "feedforward.activation"),
    "any activation of an expert": (
        "native feed-forward", "feedforward.expert.activation", "feedforward.expert.activation",
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_in_an_allow_list_is_caught(fault, monkeypatch):
    kernel, field, change = FAULTS[fault]
    monkeypatch.setitem(training.ALLOWED, kernel, {**training.ALLOWED[kernel], field: training.any_value})
    assert not agrees(change)[0]


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize(
    ("kernel", "field"), [("causal attention", "attention.window"), ("float8 feed-forward", "feedforward")]
)
def test_a_planted_fault_of_a_cuda_kernel_is_caught(kernel, field, monkeypatch):
    monkeypatch.setitem(training.ALLOWED, kernel, {**training.ALLOWED[kernel], field: training.any_value})
    found = next(k for k in TRAINING_KERNELS if k.name == kernel)
    assert refused(found) != REFUSED[kernel]


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize("kernel", TRAINING_KERNELS, ids=lambda k: k.name)
def test_a_field_that_no_list_names_is_refused(kernel, monkeypatch):
    """A field that is added to the config later: here `dropout`, deleted from the list."""
    allowed = {name: rule for name, rule in training.ALLOWED[kernel.name].items() if name != "dropout"}
    monkeypatch.setitem(training.ALLOWED, kernel.name, allowed)
    assert "dropout" in refused(kernel)
