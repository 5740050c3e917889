"""Configs and models for tests: every variant the config can say, with a different prime for each dimension.

H = 6 over G = 2 or 3 (neither 1 nor H), D = 14 unequal to H·K, K = 4 and U = 5, V = 31, F = 11, T = 13.
"""

import dataclasses

import numpy as np
import torch
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.model import Model, build
from glassformer.reference import random_params

V, D, F, K, U, MAX_LEN = 31, 14, 11, 4, 5, 29
LONG = ((1.0, 1.5), (2.0, 7.0))
"""Divisors of the K / 2 frequencies for short and for long sequences."""

activations = st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", "quick_gelu"])
norms = st.sampled_from(
    [
        c.LayerNorm(),
        c.LayerNorm(eps=1e-3, bias=False),
        c.LayerNorm(offset=1.0),
        c.LayerNorm(weight=False, bias=False),
        c.RMSNorm(),
        c.RMSNorm(eps=1e-2),
        c.RMSNorm(offset=1.0),
        c.RMSNorm(weight=False),
    ]
)
scalings = st.sampled_from(
    [
        None,
        c.LinearScaling(factor=3.0),
        c.NTKScaling(factor=2.5),
        c.YarnScaling(factor=4.0, original_max_len=16),
        c.YarnScaling(factor=2.0, original_max_len=64, beta_fast=4.0, attention_factor=1.25, truncate=False),
        c.Llama3Scaling(factor=8.0, original_max_len=32),
        c.LongScaling(*LONG, original_max_len=64, attention_factor=1.2),
    ]
)
rotary = st.builds(
    c.Rotary,
    base=st.sampled_from([100.0, 10000.0]),
    pairing=st.sampled_from(["halves", "interleaved"]),
    fraction=st.just(1.0),
    scaling=scalings,
) | st.builds(
    c.Rotary,
    pairing=st.sampled_from(["halves", "interleaved"]),
    fraction=st.just(0.5),
    scaling=st.sampled_from([None, c.LinearScaling(factor=3.0)]),
)
positions = (
    st.sampled_from(
        [
            c.NoPosition(),
            c.Learned(),
            c.Learned(offset=2),
            c.Sinusoidal(),
            c.Sinusoidal(base=50.0, layout="halves"),
            c.Sinusoidal(layout="halves", spacing="inclusive", offset=2),
            c.Alibi(),
            c.Alibi(scale=0.5, rounded=True),
            c.T5Bias(buckets=8, max_distance=20),
            c.QueryKeyPosition(),
            c.QueryKeyPosition(c.Sinusoidal(base=50.0, layout="halves")),
            c.QueryKeyPosition(c.Learned(offset=2)),
        ]
    )
    | rotary
)
dense = st.builds(c.Dense, d_ff=st.just(F), activation=activations, bias=st.booleans())
gated = st.builds(
    c.Gated,
    d_ff=st.just(F),
    activation=activations,
    bias=st.booleans(),
    down_bias=st.sampled_from([None, None, True, False]),
)
limited = st.builds(c.Gated, d_ff=st.just(F), activation=activations, limit=st.just(0.4), up_offset=st.just(1.0))
plain_moe = st.builds(
    c.MoE, n_experts=st.just(5), n_active=st.sampled_from([1, 2, 5]), expert=dense | gated, normalize=st.booleans()
)
routers = st.builds(
    c.Router,
    score=st.sampled_from(["softmax", "sigmoid"]),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    correction=st.booleans(),
    groups=st.just(3),
    top_groups=st.sampled_from([1, 2]),
    group_score=st.sampled_from(["sum_of_two", "max"]),
) | st.builds(c.Router, score=st.just("sigmoid"), correction=st.booleans(), bias=st.booleans())
moe = (
    plain_moe
    | st.builds(
        c.MoE,
        n_experts=st.just(6),
        n_active=st.sampled_from([1, 2]),
        expert=dense | limited,
        normalize=st.booleans(),
        router=routers,
        shared=dense | gated,
        shared_gate=st.booleans(),
    )
    | st.builds(c.MoE, n_experts=st.just(6), n_active=st.just(2), expert=gated, router=routers)
)
usual_attention = {
    "n_heads": st.just(6),
    "n_kv_heads": st.sampled_from([None, 1, 2, 3]),
    "d_head": st.just(K),
    "d_value": st.sampled_from([None, U]),
    "scale": st.sampled_from([None, 1.0, 0.37]),
    "bias": st.booleans(),
    "out_bias": st.sampled_from([None, True, False]),
    "qk_norm": st.sampled_from([None, c.RMSNorm(), c.LayerNorm()]),
    "window": st.sampled_from([None, 1, 4]),
}
rare_attention = {
    "clip": st.sampled_from([None, 0.5]),
    "softcap": st.sampled_from([None, 0.7]),
    "sinks": st.booleans(),
}
qk_norms = {
    "qk_norm": st.sampled_from([c.RMSNorm(), c.LayerNorm(bias=False), c.RMSNorm(offset=1.0)]),
    "qk_norm_over": st.sampled_from(["head", "heads", "all"]),
}
attentions = (
    st.builds(c.Attention, **usual_attention)
    | st.builds(c.Attention, **usual_attention, **rare_attention)
    | st.builds(c.Attention, **{**usual_attention, **rare_attention, **qk_norms})
    | st.builds(
        c.Attention,
        **{**usual_attention, **rare_attention, **qk_norms, "qk_norm_over": st.sampled_from(["head", "heads"])},
        qk_norm_after_rotation=st.just(True),
    )
)
heads = st.builds(
    c.Head,
    tied=st.booleans(),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    transform=st.none() | activations,
    softcap=st.sampled_from([None, 0.9]),
)
E_WIDTH = 10
projections = st.sampled_from(
    [
        {},
        {},
        {"width": E_WIDTH},
        {"width": E_WIDTH, "project_bias": False},
        {"width": E_WIDTH, "project": "before_positions", "project_bias": False},
        {"width": D},
    ]
)


def embeddings_of(segments):
    """Embeddings of D and of another width; the number of segments is drawn."""
    return st.builds(
        lambda scale, n, norm, width: c.Embedding(scale=scale, n_segments=n, norm=norm, **width),
        st.sampled_from([1.0, 3.7]),
        segments,
        st.booleans(),
        projections,
    )


embeddings = embeddings_of(st.just(0))
score_biases = st.sampled_from([None, None, c.T5Bias(buckets=8, max_distance=20)])
common = {
    "vocab_size": st.just(V),
    "d_model": st.just(D),
    "n_layers": st.just(2),
    "attention": attentions,
    "feedforward": dense | gated | moe,
    "norm": norms,
    "position": positions,
    "max_len": st.just(MAX_LEN),
    "embedding": embeddings,
    "head": heads,
    "residual_scale": st.sampled_from([1.0, 0.6]),
    "score_bias": score_biases,
    "first_norm": st.booleans(),
}
SEQUENTIAL = ["pre", "post", "after", "sandwich"]
attention_only = {"feedforward": st.just(c.NoFeedForward()), "placement": st.sampled_from(SEQUENTIAL)}
every_placement = {"placement": st.sampled_from([*SEQUENTIAL, "parallel", "parallel_two"])}
mixed_layers = {
    "position": rotary | st.just(c.NoPosition()),
    "layer_kinds": st.tuples(
        st.builds(c.LayerKind, layers=st.just((1,)), position=rotary | st.just(c.NoPosition()))
        | st.builds(c.LayerKind, layers=st.just((0,)), feedforward=dense | gated | moe)
        | st.builds(c.LayerKind, layers=st.just((0, 1)), position=rotary, feedforward=gated)
    ),
}
latent = {
    "attention": st.builds(
        c.Attention,
        n_heads=st.just(6),
        d_head=st.just(K + 2),
        d_value=st.sampled_from([None, U]),
        bias=st.booleans(),
        window=st.sampled_from([None, 4]),
        sinks=st.booleans(),
        softcap=st.sampled_from([None, 0.7]),
        latent=st.builds(
            c.Latent, kv_rank=st.sampled_from([3, 40]), d_shared=st.just(2), q_rank=st.sampled_from([None, 5])
        ),
    ),
    "position": st.sampled_from(
        [c.NoPosition(), c.Rotary(fraction=2 / 6), c.Rotary(fraction=2 / 6, pairing="interleaved")]
    ),
}
encoder_parts = {
    **common,
    "embedding": embeddings_of(st.sampled_from([0, 3])),
    "pooler": st.booleans(),
}
seq2seq_parts = {**common, "placement": st.sampled_from(SEQUENTIAL), "n_encoder_layers": st.just(1)}
shared = {"shared_blocks": st.sampled_from([None, None, (0, 0)])}


def fitting(kind, **parts):
    """Configs of a kind whose parts are drawn one by one, changed where two of them exclude each other."""

    def build(**given):
        embedding, head, position = given["embedding"], given["head"], given["position"]
        if isinstance(position, c.QueryKeyPosition):
            embedding = dataclasses.replace(embedding, width=None, project="after_norm", project_bias=True)
        if isinstance(position, c.T5Bias):
            given["score_bias"] = None
        if given["placement"] != "pre" or given.get("shared_blocks"):
            given["first_norm"] = True
        if embedding.width is not None and (head.tied or head.transform is not None):
            bias = embedding.project_bias  # any boolean
            head = dataclasses.replace(head, width=embedding.width, transform_bias=bias)
        return kind(**{**given, "embedding": embedding, "head": head})

    return st.builds(build, **parts)


decoders = (
    fitting(c.DecoderConfig, **common, **shared, **every_placement)
    | fitting(c.DecoderConfig, **{**common, **shared, **attention_only})
    | fitting(c.DecoderConfig, **{**common, **every_placement, **mixed_layers})
    | fitting(c.DecoderConfig, **{**common, **every_placement, **latent})
)
encoders = (
    fitting(c.EncoderConfig, **encoder_parts, **shared, **every_placement)
    | fitting(c.EncoderConfig, **{**encoder_parts, **shared, **attention_only})
    | fitting(c.EncoderConfig, **{**encoder_parts, **every_placement, **mixed_layers})
    | fitting(c.EncoderConfig, **{**encoder_parts, **every_placement, **latent})
)
seq2seqs = fitting(c.Seq2SeqConfig, **seq2seq_parts) | fitting(c.Seq2SeqConfig, **{**seq2seq_parts, **attention_only})

# One of each position scheme, for tests that must see them all in every run.
POSITIONS: dict[str, c.Position] = {
    "none": c.NoPosition(),
    "learned": c.Learned(),
    "sinusoidal": c.Sinusoidal(),
    "rotary-halves": c.Rotary(),
    "rotary-interleaved": c.Rotary(pairing="interleaved", fraction=0.5),
    "rotary-yarn": c.Rotary(scaling=c.YarnScaling(factor=4.0, original_max_len=16)),
    "rotary-long": c.Rotary(scaling=c.LongScaling(*LONG, original_max_len=1000, attention_factor=1.2)),
    "rotary-llama3": c.Rotary(scaling=c.Llama3Scaling(factor=8.0, original_max_len=32)),
    "alibi": c.Alibi(),
    "t5": c.T5Bias(buckets=8, max_distance=20),
    "query-key-sinusoidal": c.QueryKeyPosition(),
    "query-key-learned": c.QueryKeyPosition(c.Learned(offset=1)),
}


def decoder(**changes) -> c.ModelConfig:
    """A small decoder with grouped heads; fields change as in `config.replace`."""
    base = c.DecoderConfig(
        vocab_size=V,
        d_model=D,
        n_layers=2,
        attention=c.Attention(n_heads=6, n_kv_heads=2, d_head=K),
        feedforward=c.Dense(d_ff=F),
        max_len=MAX_LEN,
    )
    return c.replace(base, **changes)


def seq2seq(**changes) -> c.ModelConfig:
    base = c.Seq2SeqConfig(
        vocab_size=V,
        d_model=D,
        n_layers=2,
        n_encoder_layers=2,
        attention=c.Attention(n_heads=6, n_kv_heads=2, d_head=K),
        feedforward=c.Dense(d_ff=F),
        position=c.T5Bias(buckets=8, max_distance=20),
        special=c.Special(start=3),
    )
    return c.replace(base, **changes)


def lively(config: c.ModelConfig, seed: int = 0, std: float = 0.3) -> tuple[Model, dict[str, np.ndarray]]:
    """A float64 model and the oracle's parameters, the same numbers: nothing is zero or one, so nothing can hide."""
    params = random_params(config, seed=seed, std=std)
    model = build(config, dtype=torch.float64)
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in params.items()})
    return model.eval(), params


def tokens(rows: int, length: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, size=(rows, length)))


def ragged_mask(lengths: list[int], width: int, side: str) -> torch.Tensor:
    """(B,T) mask with lengths[b] real tokens on the given side's far end: side="left" pads on the left."""
    column = torch.arange(width)[None]
    n = torch.tensor(lengths)[:, None]
    return column >= width - n if side == "left" else column < n
