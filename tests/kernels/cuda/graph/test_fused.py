"""A decode step by the fused kernels, emulated on a CPU, gives the logits of the engine."""

import dataclasses

import pytest
import torch

from glassformer import config as c
from glassformer.kernels.cuda.graph import linear, steps
from glassformer.kernels.cuda.graph.linear import quantise
from glassformer.model import build
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.graph.emulated import continued, on_cpu  # noqa: F401

V, T, NEW = 83, 5, 3
pytestmark = [needs_compiler, pytest.mark.usefixtures("on_cpu")]


def config(**changes) -> c.DecoderConfig:
    base = {
        "vocab_size": V, "d_model": 64, "n_layers": 2, "attention": c.Attention(4, 2, d_head=16),
        "feedforward": c.Gated(64), "norm": c.RMSNorm(), "position": c.Rotary(), "head": c.Head(tied=False),
    }  # fmt: skip
    return c.DecoderConfig(**{**base, **changes})


def error(
    cfg, batch: int = 1, dtype=torch.bfloat16, precision: str | None = None, engine_parts: int = 0, length: int = T
) -> float:
    """Largest difference of the logits of three steps from those of the engine in float32, relative to the largest."""
    cfg = dataclasses.replace(cfg, init_std=0.3)
    model = build(cfg, seed=1)
    generator, kept = torch.Generator().manual_seed(2), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.copy_(parameter.to(dtype).float())
            if (
                precision in ("int8", "fp8")
                and parameter.dim() == 2
                and name != "embed.tokens.weight"
                and "router" not in name
            ):
                stored, scale = quantise(parameter, precision)
                exact = stored.float() - 128 if precision == "int8" else stored.view(torch.float8_e4m3fn).float()
                kept[name] = parameter.clone()
                parameter.copy_(exact * scale[:, None])
    ids = torch.randint(0, V, (batch, length + NEW), generator=generator)
    half = build(cfg, seed=1)
    half.load_state_dict({**model.state_dict(), **kept})
    cache = model.new_cache("growing")
    with torch.no_grad():
        half(ids[:, :length], cache=cache)  # the prompt is read with the stored weights
        wanted = model(ids[:, length:], cache=cache).transpose(0, 1)
    half = half.to(dtype)
    new = [ids[:, length + i] for i in range(NEW)]
    slots = -(-(length + NEW) // 32) * 32
    found = continued(half, ids[:, :length], new, precision or str(dtype).removeprefix("torch."), slots)
    made = steps._LAST[half][1]
    used = made.body.is_fused
    assert (made.body.program is not None) == (batch == 1 and precision in ("int8", "fp8"))  # one launch for all
    branches = 1 if isinstance(cfg.feedforward, c.NoFeedForward) else 2
    assert cfg.n_layers * branches - sum(used.values()) == engine_parts
    assert made.body.history[:, length + 1 : length + 1 + NEW].T.tolist() == found.argmax(-1).tolist()
    return float((found - wanted).abs().max() / wanted.abs().max())


BF16 = 4e-2
"""Queries, keys, hidden units and operands are rounded to 8 bits, in two layers with large weights."""


@pytest.mark.sample(1)  # each case compiles kernels of its own
@pytest.mark.parametrize("batch", [1, 3, 16, 19])
def test_a_llama_like_model(batch):
    assert error(config(), batch) < BF16


def test_more_vectors_than_the_kernel_multiplies():
    """The matmuls of the library round their results to 16 bits, as those of the engine do."""
    assert error(config(), 70, torch.float16) < 2 * FP16


@pytest.mark.parametrize(("batch", "cluster"), [(3, 2), (12, 2), (3, 8)])
def test_blocks_share_the_columns_of_wide_matrices(batch, cluster, monkeypatch):
    """Slices of 3, 5 and 2 chunks of columns: not all blocks have as many."""
    monkeypatch.setattr(linear, "CLUSTERS", (cluster,))
    monkeypatch.setattr(linear, "ALONE", 0)
    wide = config(d_model=192, feedforward=c.Gated(320), attention=c.Attention(8, 2, d_head=16))
    assert error(wide, batch, torch.float16) < FP16


@pytest.mark.parametrize(
    "attention",
    [
        c.Attention(4, 2, d_head=16),
        c.Attention(16, 1, d_head=24, d_value=40, window=100, sinks=True, softcap=2.0),
    ],
    ids=["few heads", "more than 8 heads, odd widths, a window"],
)
def test_long_sequences(attention):
    """Keys fill the rings of all warps more than twice."""
    assert error(config(attention=attention), 2, torch.float16, length=150) < FP16


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "parallel", "residual_scale": 0.7},
        {"norm": c.RMSNorm(weight=False), "feedforward": c.Dense(128, bias=True)},
        {"feedforward": c.NoFeedForward(), "norm": c.RMSNorm(offset=1.0)},
    ],
    ids=["two readers of a norm", "no weight", "one branch"],
)
def test_matmuls_prepare_rms_norms(changes):
    """In bfloat16 a norm of several vectors has no kernel, but for the first one and one that two matmuls read."""
    cfg = config(**changes)
    assert error(cfg, 5) < BF16
    model = build(cfg, dtype=torch.bfloat16)
    cache = model.new_cache("static", capacity=32)
    with torch.no_grad():
        model(torch.zeros(5, T, dtype=torch.long), cache=cache)
    made = steps.captured_steps(model, cache, 5, 32, "bfloat16")
    kernels = [op.kernel for op in made.body.operations]
    assert kernels.count("normalize") == (1 + cfg.n_layers if cfg.placement == "parallel" else 1)


FP16 = 6e-3
"""As above with 11 bits."""
VARIANTS = {
    "layer norm, biases, learned positions": {
        "norm": c.LayerNorm(), "attention": c.Attention(4), "feedforward": c.Dense(128), "max_len": 40,
        "position": c.Learned(offset=1), "head": c.Head(bias=True),
    },
    "sinusoids, embedding scale, soft cap of the logits": {
        "position": c.Sinusoidal(), "embedding": c.Embedding(scale=2.0),
        "head": c.Head(softcap=3.0, scale=0.5, bias=True),
    },
    "alibi": {"position": c.Alibi(scale=0.5)},
    "query/key norm of each head": {"attention": c.Attention(6, 1, d_head=32, qk_norm=c.RMSNorm())},
    "query/key norm with a weight per head": {
        "attention": c.Attention(4, 2, d_head=16, qk_norm=c.RMSNorm(offset=1.0), qk_norm_over="heads"),
    },
    "query/key norm of all heads": {
        "attention": c.Attention(4, 2, d_head=16, qk_norm=c.LayerNorm(), qk_norm_over="all"),
    },
    "query/key norm after the rotation": {
        "attention": c.Attention(4, 2, d_head=16, qk_norm=c.RMSNorm(), qk_norm_after_rotation=True),
    },
    "window, clip, soft cap, sinks": {
        "attention": c.Attention(
            6, 2, d_head=16, d_value=32, window=3, window_layers=(1,), clip=0.7, softcap=0.9, sinks=True
        ),
    },
    "interleaved pairs, half rotated": {"position": c.Rotary(pairing="interleaved", fraction=0.5)},
    "post": {"placement": "post", "norm": c.LayerNorm()},
    "after": {"placement": "after"},
    "sandwich": {"placement": "sandwich", "norm": c.RMSNorm(offset=1.0), "residual_scale": 0.7},
    "parallel": {"placement": "parallel"},
    "parallel, two norms": {"placement": "parallel_two", "norm": c.LayerNorm(bias=False)},
    "no first norm, no weight in norms": {"first_norm": False, "norm": c.RMSNorm(weight=False)},
    "limited gates": {"feedforward": c.Gated(64, limit=0.4, up_offset=1.0, bias=True, activation="quick_gelu")},
    "attention only": {"feedforward": c.NoFeedForward()},
    "layers of two kinds": {
        "layer_kinds": (
            c.LayerKind((1,), position=c.Rotary(base=100.0), feedforward=c.Dense(128, activation="relu2")),
        ),
    },
    "shared blocks": {"shared_blocks": (0, 0)},
    "experts": {"feedforward": c.MoE(4, 2, c.Gated(64))},
    "experts with biases, a shared one, groups": {
        "feedforward": c.MoE(
            6, 2, c.Dense(64), router=c.Router(score="sigmoid", groups=3, top_groups=2, scale=2.0, bias=True),
            shared=c.Gated(32), shared_gate=True,
        ),
        "placement": "sandwich",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_part(name, batch):
    assert error(config(**VARIANTS[name]), batch, torch.float16) < FP16


ENGINE = {
    "latent attention": (
        {"attention": c.Attention(4, d_head=24, latent=c.Latent(32, 8, 16)), "position": c.Rotary(fraction=1 / 3)}, 2
    ),
    "a T5 bias": ({"position": c.T5Bias(buckets=8, max_distance=20)}, 2),
    "a width of heads that is no multiple of 8": ({"attention": c.Attention(4, 2, d_head=20)}, 2),
    "a narrow feed-forward": ({"feedforward": c.Gated(40)}, 2),
    "a norm of the embedding and a layer before the head": (
        {"embedding": c.Embedding(norm=True), "head": c.Head(transform="gelu")}, 0
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINE)
def test_the_engine_computes_what_the_kernels_do_not(name):
    changes, engine_parts = ENGINE[name]
    assert error(config(**changes), 2, torch.float16, engine_parts=engine_parts) < FP16


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2, 18])
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_weights_in_8_bits(precision, batch):
    """The reference has the same weights, rounded to 8 bits."""
    assert error(config(), batch, torch.float16, precision) < FP16
