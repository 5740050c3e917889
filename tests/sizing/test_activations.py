"""What autograd is predicted to keep, against what it keeps: every tensor that the forward pass saves is weighed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.model import build
from glassformer.sizing import training_memory
from glassformer.sizing.activations import Pass, saved_by_activation, saved_by_norm
from tests import variants

BATCH, T, SOURCE = 3, 24, 17
V, D = 53, 24
COMMON = {
    "vocab_size": V,
    "d_model": D,
    "n_layers": 2,
    "attention": c.Attention(4),
    "feedforward": c.Dense(50),
    "position": c.NoPosition(),
    "max_len": T,
}


def decoder(**fields):
    return c.DecoderConfig(**{**COMMON, **fields})


def encoder(**fields):
    return c.EncoderConfig(**{**COMMON, **fields})


def seq2seq(**fields):
    return c.Seq2SeqConfig(**{**COMMON, "n_encoder_layers": 3, **fields})


BERT = {
    "placement": "post",
    "position": c.Learned(),
    "embedding": c.Embedding(n_segments=2, norm=True),
    "head": c.Head(bias=True, transform="gelu"),
}
A = c.Attention
CASES = {
    "layer norm": decoder(),
    "rms norm": decoder(norm=c.RMSNorm()),
    "learned": decoder(position=c.Learned()),
    "rotary, grouped": decoder(position=c.Rotary(), attention=A(4, n_kv_heads=2)),
    "one head, rotary": decoder(position=c.Rotary(), attention=A(1)),
    "values of another width": decoder(attention=A(4, n_kv_heads=2, d_value=5)),
    "qk norm": decoder(attention=A(4, n_kv_heads=2, qk_norm=c.LayerNorm())),
    "qk rms norm, rotary": decoder(attention=A(4, qk_norm=c.RMSNorm()), position=c.Rotary()),
    "window": decoder(attention=A(4, window=5)),
    "window in one layer": decoder(attention=A(4, window=5, window_layers=(1,))),
    "alibi": decoder(position=c.Alibi()),
    "alibi, encoder": encoder(position=c.Alibi()),
    "t5 bias": decoder(position=c.T5Bias(8, 20)),
    "t5 bias, encoder": encoder(position=c.T5Bias(8, 20)),
    "infused": decoder(position=c.QueryKeyPosition(), attention=A(4, n_kv_heads=2)),
    "query/key positions, trained, dropout": decoder(position=c.QueryKeyPosition(c.Learned()), dropout=0.1),
    "query/key positions, post": encoder(position=c.QueryKeyPosition(), placement="post"),
    "query/key positions, parallel": decoder(position=c.QueryKeyPosition(), placement="parallel"),
    "query/key positions, two stacks": seq2seq(position=c.QueryKeyPosition(c.Learned())),
    "attention only": decoder(feedforward=c.NoFeedForward()),
    "attention only, dropout, post": encoder(feedforward=c.NoFeedForward(), placement="post", dropout=0.1),
    "attention only, query/key positions": decoder(
        feedforward=c.NoFeedForward(), position=c.QueryKeyPosition(), norm=c.RMSNorm()
    ),
    "attention only, two stacks": seq2seq(feedforward=c.NoFeedForward(), dropout=0.1),
    "dropout": decoder(dropout=0.1),
    "dropout, grouped, window": decoder(dropout=0.1, attention=A(4, n_kv_heads=2, window=5)),
    "parallel": decoder(placement="parallel", norm=c.RMSNorm()),
    "bert": encoder(**BERT),
    "bert with dropout": encoder(**BERT, dropout=0.1),
    "seq2seq": seq2seq(),
    "seq2seq, post, dropout": seq2seq(placement="post", position=c.Sinusoidal(), dropout=0.1),
    "t5": seq2seq(position=c.T5Bias(8, 20), norm=c.RMSNorm(), head=c.Head(scale=0.2)),
    "experts": decoder(feedforward=c.MoE(4, 2, c.Gated(50))),
    "experts, not normalised": decoder(feedforward=c.MoE(4, 1, c.Dense(50, "relu"), normalize=False)),
    **{f"dense {a}": decoder(feedforward=c.Dense(50, a)) for a in ("relu", "gelu", "silu", "relu2", "tanh")},
    **{f"gated {a}": decoder(feedforward=c.Gated(50, a)) for a in ("relu", "gelu_tanh", "silu", "relu2", "tanh")},
}


def weigh_saved(config: c.ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of all distinct storages that the forward pass saves, parameters and the given token ids left out."""
    model = build(config, dtype=dtype).train()
    target, source = (torch.randint(0, config.vocab_size, (BATCH, length)) for length in (T, SOURCE))
    given = {p.untyped_storage().data_ptr() for p in model.parameters()}
    given |= {t.untyped_storage().data_ptr() for t in (target, source)}
    held: dict[int, torch.Tensor] = {}

    def catch(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no storage is freed and its address reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(catch, lambda tensor: tensor):
        logits = model(source, target) if config.kind == "seq2seq" else model(target)
        F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return sum(t.untyped_storage().nbytes() for pointer, t in held.items() if pointer not in given and t.dim() > 0)


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_bytes_are_those_autograd_saves(name, dtype):
    source = SOURCE if CASES[name].kind == "seq2seq" else None
    predicted = training_memory(CASES[name], BATCH, T, dtype, source=source).saved
    # Exact: a term that is wrong shows as one tensor too many or too few.
    assert predicted == weigh_saved(CASES[name], getattr(torch, dtype))


@settings(max_examples=60)
@given(variants.decoders | variants.encoders | variants.seq2seqs, st.sampled_from(["float32", "bfloat16"]))
def test_saved_bytes_of_generated_variants(config, dtype):
    source = SOURCE if config.kind == "seq2seq" else None
    assert training_memory(config, BATCH, T, dtype, source=source).saved == weigh_saved(config, getattr(torch, dtype))


def test_norms_and_activations_alone():
    assert saved_by_norm(c.LayerNorm(), rows=10, n=7, width=2) == 10 * 7 * 2 + 2 * 10 * 2
    assert saved_by_norm(c.RMSNorm(), rows=10, n=7, width=2) == 2 * 10 * 7 * 4 + 10 * 4
    assert [saved_by_activation(a, 5) for a in ("relu", "tanh", "gelu", "silu")] == [0, 0, 5, 5]


def test_dropout_and_trained_biases_forbid_the_fused_kernel():
    def materializes_pattern(config, training=True, cross=False):
        return Pass(config, BATCH, T, 4, causal=True, training=training).materializes_pattern(cross)

    assert not materializes_pattern(decoder())
    assert materializes_pattern(decoder(dropout=0.1))
    assert not materializes_pattern(decoder(dropout=0.1), training=False)
    assert materializes_pattern(seq2seq(position=c.T5Bias(8, 20)))
    assert not materializes_pattern(seq2seq(position=c.T5Bias(8, 20)), cross=True)
    assert materializes_pattern(decoder(attention=A(4, d_value=5)), training=False)
