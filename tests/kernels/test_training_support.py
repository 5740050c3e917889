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
from glassformer.kernels.registry import any_value, config_fields
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
LONG = c.LongScaling((1.0,) * 32, (2.0,) * 32, original_max_len=6)  # d_head 64: 32 frequencies
SEQ2SEQ = {"kind": c.Seq2SeqConfig, "n_encoder_layers": 2}


def attention(**changes):
    return {"attention": c.Attention(**({"n_heads": 1} | changes))}


def position(value):
    return {"position": value}


def latent(d_shared=16, **changes):
    return attention(latent=c.Latent(**({"kv_rank": 12, "d_shared": d_shared} | changes))) | position(
        c.Rotary(fraction=d_shared / 64)
    )


def narrow(**changes):
    return {"embedding": c.Embedding(width=24, **changes), "head": c.Head(tied=False)}


def experts(**changes):
    return {"feedforward": dataclasses.replace(MOE, **changes)}


def router(**changes):
    return {"feedforward": c.MoE(n_experts=4, n_active=2, expert=c.Dense(64), router=c.Router(**changes))}


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
    "attention.qk_norm.weight": attention(qk_norm=c.RMSNorm(weight=False)),
    "attention.qk_norm.offset": attention(qk_norm=c.RMSNorm(offset=1.0)),
    "attention.qk_norm_over": attention(qk_norm=c.RMSNorm(), qk_norm_over="all"),
    "attention.qk_norm_after_rotation": attention(qk_norm=c.RMSNorm(), qk_norm_after_rotation=True),
    "attention.clip": attention(clip=0.3),
    "attention.softcap": attention(softcap=0.5),
    "attention.sinks": attention(sinks=True),
    "attention.latent": latent(),
    "attention.latent.kv_rank": latent(kv_rank=16),
    "attention.latent.d_shared": latent(d_shared=32),
    "attention.latent.q_rank": latent(q_rank=24),
    "attention.latent.norm": latent(norm=c.LayerNorm()),
    "attention.latent.norm.eps": latent(norm=c.RMSNorm(eps=0.2)),
    "attention.latent.norm.bias": latent(norm=c.LayerNorm(bias=False)),
    "attention.latent.norm.weight": latent(norm=c.RMSNorm(weight=False)),
    "attention.latent.norm.offset": latent(norm=c.RMSNorm(offset=1.0)),
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
    "feedforward.limit": {"feedforward": c.Gated(64, limit=0.5)},
    "feedforward.down_bias": {"feedforward": c.Gated(64, down_bias=True)},
    "feedforward.up_offset": {"feedforward": c.Gated(64, up_offset=1.0)},
    "feedforward.expert.limit": experts(expert=c.Gated(64, limit=0.5)),
    "feedforward.expert.down_bias": experts(expert=c.Gated(64, down_bias=True)),
    "feedforward.expert.up_offset": experts(expert=c.Gated(64, up_offset=1.0)),
    "feedforward.router": router(scale=2.0),  # a part: its kind has one value
    "feedforward.router.score": router(score="sigmoid"),
    "feedforward.router.bias": router(bias=True),
    "feedforward.router.scale": router(scale=0.5),
    "feedforward.router.correction": router(correction=True),
    "feedforward.router.groups": router(groups=2),
    "feedforward.router.top_groups": router(groups=2, top_groups=2),
    "feedforward.router.group_score": router(groups=2, group_score="max"),
    "feedforward.shared": experts(shared=c.Dense(64)),
    "feedforward.shared.d_ff": experts(shared=c.Dense(32)),
    "feedforward.shared.activation": experts(shared=c.Dense(64, activation="tanh")),
    "feedforward.shared.bias": experts(shared=c.Dense(64, bias=False)),
    "feedforward.shared.limit": experts(shared=c.Gated(64, limit=0.5)),
    "feedforward.shared.down_bias": experts(shared=c.Gated(64, down_bias=True)),
    "feedforward.shared.up_offset": experts(shared=c.Gated(64, up_offset=1.0)),
    "feedforward.shared_gate": experts(shared=c.Dense(64), shared_gate=True),
    "norm": {"norm": c.RMSNorm()},
    "norm.eps": {"norm": c.LayerNorm(eps=0.2)},
    "norm.bias": {"norm": c.LayerNorm(bias=False)},
    "norm.weight": {"norm": c.RMSNorm(weight=False)},
    "norm.offset": {"norm": c.RMSNorm(offset=1.0)},
    "position": position(c.Alibi()),
    "position.spacing": position(c.Sinusoidal(spacing="inclusive")),
    "position.scale": position(c.Alibi(scale=0.3)),
    "position.rounded": position(c.Alibi(rounded=True)),
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
    "position.scaling.short": position(c.Rotary(scaling=dataclasses.replace(LONG, short=(1.5,) * 32))),
    "position.scaling.long": position(c.Rotary(scaling=dataclasses.replace(LONG, long=(3.0,) * 32))),
    "position.scaling.high_freq_factor": position(c.Rotary(scaling=dataclasses.replace(LLAMA, high_freq_factor=3.0))),
    "position.buckets": position(c.T5Bias(buckets=8)),
    "position.max_distance": position(c.T5Bias(max_distance=40)),
    "position.vectors": position(c.QueryKeyPosition()),
    "position.vectors.base": position(c.QueryKeyPosition(c.Sinusoidal(base=50.0))),
    "position.vectors.layout": position(c.QueryKeyPosition(c.Sinusoidal(layout="halves"))),
    "position.vectors.offset": position(c.QueryKeyPosition(c.Learned(offset=2))),
    "position.vectors.spacing": position(c.QueryKeyPosition(c.Sinusoidal(spacing="inclusive"))),
    "score_bias": {"score_bias": c.T5Bias()},
    "score_bias.buckets": {"score_bias": c.T5Bias(buckets=8)},
    "score_bias.max_distance": {"score_bias": c.T5Bias(max_distance=40)},
    "placement": {"placement": "parallel"},
    "first_norm": {"first_norm": False},
    "residual_scale": {"residual_scale": 0.5},
    "layer_kinds": {"layer_kinds": (c.LayerKind((1,), feedforward=c.Gated(64)),)},
    "shared_blocks": {"shared_blocks": (0, 0)},
    "max_len": {"max_len": 30},
    "embedding": {"embedding": c.Embedding(scale=2.0)},  # a part: its kind has one value
    "embedding.scale": {"embedding": c.Embedding(scale=3.0)},
    "embedding.n_segments": {"embedding": c.Embedding(n_segments=2)},
    "embedding.norm": {"embedding": c.Embedding(norm=True)},
    "embedding.width": narrow(),
    "embedding.project": narrow(project="before_positions"),
    "embedding.project_bias": narrow(project_bias=False),
    "head": {"head": c.Head(scale=2.0)},  # without a head there is no loss
    "head.tied": {"head": c.Head(tied=False)},
    "head.bias": {"head": c.Head(bias=True)},
    "head.scale": {"head": c.Head(scale=0.5)},
    "head.transform": {"head": c.Head(transform="gelu")},
    "head.width": {"head": c.Head(tied=False, width=24)},
    "head.transform_bias": {"head": c.Head(transform="gelu", transform_bias=False)},
    "head.softcap": {"head": c.Head(softcap=0.5)},
    "dropout": {"dropout": 0.2},
    "init_std": {"init_std": 0.1},
    "special": {"special": c.Special(bos=1)},  # a part: its kind has one value
    "special.bos": {"special": c.Special(bos=2)},
    "special.eos": {"special": c.Special(eos=(3,))},
    "special.pad": {"special": c.Special(pad=4)},
    "special.start": {"special": c.Special(start=5)},
    "special.forced_bos": {"special": c.Special(forced_bos=6)},
    "special.forced_eos": {"special": c.Special(forced_eos=7)},
    "special.suppressed": {"special": c.Special(suppressed=(8,))},
    "pooler": {"kind": c.EncoderConfig, "pooler": True},
    "n_encoder_layers": SEQ2SEQ,
}
DENSE = {f"feedforward.{field}" for field in ("d_ff", "activation", "bias")}
NO_DENSE = {name for name in CHANGES if name.startswith("feedforward") and name not in DENSE}
GATED = {"feedforward", *(f"feedforward.{field}" for field in ("limit", "down_bias", "up_offset"))}
LATENT = {name for name in CHANGES if name.startswith("attention.latent")}
DOWN = {name for name in CHANGES if name.endswith(".down_bias")}
NEVER = {"layer_kinds", "attention.softcap", "attention.sinks", *LATENT, *DOWN}
"""What no training kernel supports."""
KINDS = {"pooler", "n_encoder_layers"}
ROTATED = {name for name in CHANGES if name.startswith("position.scaling")} | {
    *(f"position.{field}" for field in ("base", "pairing", "fraction"))
}
OTHER_POSITIONS = {name for name in CHANGES if name.startswith(("position.vectors", "score_bias"))} | {
    "position",
    *(f"position.{field}" for field in ("buckets", "max_distance", "scale", "rounded")),
}
HEADS = {f"head.{field}" for field in ("transform", "transform_bias", "width", "softcap")}
REFUSED = {
    "float8 feed-forward": (NO_DENSE - GATED) | {"norm.weight", "first_norm"} | (NEVER - GATED),
    "float8 projections": {"attention.d_head", "norm.weight", "first_norm"} | NEVER,
    "float8 head": {"head.bias"} | HEADS | NEVER,
    "causal attention": {
        "d_model", "attention", *(f"attention.{n}" for n in ("n_heads", "n_kv_heads", "d_head", "d_value", "qk_norm",
        "qk_norm.eps", "qk_norm.bias", "qk_norm.weight", "qk_norm.offset", "qk_norm_over", "qk_norm_after_rotation",
        "window", "window_layers")), "dropout", *KINDS, *ROTATED, *OTHER_POSITIONS,
    } | NEVER,
    "fused blocks": (NO_DENSE | NEVER | KINDS) - {"feedforward", "feedforward.down_bias"} | {
        "placement", "dropout", "first_norm", "residual_scale", "attention.clip", "attention.qk_norm_after_rotation",
    },
    "grouped experts": {f"feedforward{field}" for field in ("", ".d_ff", ".activation", ".bias", ".limit", ".down_bias",
                                                            ".up_offset")},
    "CUDA loss": HEADS | NEVER,
    "CUDA Muon": NEVER,
    "CUDA AdamW": set(),
    "frozen matmuls": set(),
}  # fmt: skip
BASES = {"grouped experts": dataclasses.replace(BASE, feedforward=MOE)}
"""What is changed for a kernel that does not support BASE."""


NOT_NATIVE = {
    "feedforward": {"native feed-forward"},
    "feedforward.d_ff": {"native feed-forward"},
    "feedforward.activation": {"native feed-forward"},
    "feedforward.expert": {"native feed-forward"},
    "feedforward.expert.activation": {"native feed-forward"},
    **{
        name: {"native feed-forward"}
        for name in CHANGES
        if name.startswith("feedforward.shared") or name.endswith((".limit", ".up_offset"))
    },
    **{name: {"native attention", "native feed-forward"} for name in NEVER},
    "attention.d_head": {"native attention"},
}
"""The CPU kernels that refuse a change."""


def changed(name, base=BASE):
    change = dict(CHANGES[name])
    kind = change.pop("kind", type(base))
    fields = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
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
        "position.scaling": [c.LinearScaling, c.NTKScaling, c.YarnScaling, c.Llama3Scaling, c.LongScaling],
        "position.vectors": [c.Sinusoidal, c.Learned], "score_bias": [c.T5Bias],
        "attention.latent": [c.Latent], "attention.latent.norm": [c.LayerNorm, c.RMSNorm],
        "feedforward.router": [c.Router], "feedforward.shared": [c.Dense, c.Gated],
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
    monkeypatch.setattr(training.causal, "available", lambda: True)
    monkeypatch.setattr(training.nvrtc, "can_launch", lambda: True)
    monkeypatch.setattr(training.trial, "is_successful", lambda config, device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


REQUESTS = {
    "float8": TrainingRequest(GPU, torch.bfloat16, compiled=True, float8=True),
    "fused": TrainingRequest(GPU, torch.bfloat16, captured=True),
    "native": TrainingRequest(CPU),
    "frozen": TrainingRequest(CPU, frozen=True),
}
BFLOAT16 = TrainingRequest(GPU, torch.bfloat16, compiled=True, muon=True)


def refused(kernel):
    request = REQUESTS.get(kernel.name.split()[0], BFLOAT16)
    base = BASES.get(kernel.name, BASE)
    assert kernel.supports(base, request) is None, kernel.name
    return {name for name in CHANGES if kernel.supports(changed(name, base), request) is not None}


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize(
    "kernel", [k for k in TRAINING_KERNELS if not k.name.startswith("native")], ids=lambda k: k.name
)
def test_a_cuda_kernel_refuses_exactly_the_listed_changes(kernel):
    assert refused(kernel) == REFUSED[kernel.name]


@pytest.mark.usefixtures("_every_machine")
def test_heads_that_are_rotated_or_shared_have_the_kernel_in_captured_steps():
    kernel = next(k for k in TRAINING_KERNELS if k.name == "causal attention")
    base = dataclasses.replace(BASE, attention=c.Attention(n_heads=4, d_head=64))
    for position in (c.Rotary(), c.Learned()):
        for groups in (4, 2):
            one = dataclasses.replace(base, position=position, attention=c.Attention(4, n_kv_heads=groups, d_head=64))
            plain = position == c.Learned() and groups == 4
            assert kernel.supports(one, REQUESTS["fused"]) is None
            assert (kernel.supports(one, BFLOAT16) is None) == plain


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


@pytest.mark.sample(45)
@needs_compiler
@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize("name", CHANGES)
def test_a_cpu_kernel_refuses_a_change_or_computes_it(name):
    same, installed = agrees(name)
    assert same
    assert set(installed) == {"native attention", "native feed-forward"} - NOT_NATIVE.get(name, set())


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
    monkeypatch.setitem(training.ALLOWED, kernel, {**training.ALLOWED[kernel], field: any_value})
    assert not agrees(change)[0]


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize(
    ("kernel", "field"), [("causal attention", "attention.window"), ("float8 feed-forward", "feedforward")]
)
def test_a_planted_fault_of_a_cuda_kernel_is_caught(kernel, field, monkeypatch):
    monkeypatch.setitem(training.ALLOWED, kernel, {**training.ALLOWED[kernel], field: any_value})
    found = next(k for k in TRAINING_KERNELS if k.name == kernel)
    assert refused(found) != REFUSED[kernel]


@pytest.mark.usefixtures("_every_machine")
@pytest.mark.parametrize("kernel", TRAINING_KERNELS, ids=lambda k: k.name)
def test_a_field_that_no_list_names_is_refused(kernel, monkeypatch):
    """A field that is added to the config later: here `dropout`, deleted from the list."""
    allowed = {name: rule for name, rule in training.ALLOWED[kernel.name].items() if name != "dropout"}
    monkeypatch.setitem(training.ALLOWED, kernel.name, allowed)
    assert "dropout" in refused(kernel)
