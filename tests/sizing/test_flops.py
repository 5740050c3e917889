"""Operations: against torch's own counter on the engine, and closed forms against brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from glassformer.config import Attention, Dense, Gated, Head, Latent, LayerKind, MoE, Rotary, presets
from glassformer.model import build
from glassformer.sizing import active, attended_pairs, decode_flops, flops
from tests import variants
from tests.sampled import examples

SMALL = {"n_layers": 2, "d_model": 48, "d_ff": 100, "vocab_size": 91, "dropout": 0.0}
CASES = {
    "gpt2": presets.gpt2(n_heads=4, **SMALL),
    "bert": presets.bert_base(n_heads=4, **SMALL),
    "t5": presets.t5_small(n_encoder_layers=3, n_heads=4, d_head=11, **SMALL),
    "llama": presets.llama_tiny(n_layers=3),
    "moe": presets.moe_tiny(n_layers=2),
    "wide values": variants.decoder(d_value=5),
    "latent": variants.decoder(
        attention=Attention(6, d_head=6, d_value=5, latent=Latent(kv_rank=9, d_shared=2, q_rank=7), sinks=True),
        position=Rotary(fraction=2 / 6),
    ),
    "mixed": variants.decoder(
        layer_kinds=(LayerKind((0,), feedforward=MoE(6, 2, Gated(7), shared=Dense(9), shared_gate=True)),)
    ),
    "qk norm, untied": variants.decoder(head=Head(tied=False), attention=Attention(6, n_kv_heads=3, d_head=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_equal_torch_counting_on_the_engine(name):
    config = CASES[name]
    model, seq2seq = build(config), config.kind == "seq2seq"
    tokens, source = torch.randint(0, config.vocab_size, (3, 17)), torch.randint(0, config.vocab_size, (3, 23))
    # The written-out path: the counter does not know the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        out = model(source, tokens) if seq2seq else model(tokens)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    predicted = flops(config, batch=3, context=17, source=23 if seq2seq else None)
    assert forward.get_total_flops() == predicted.total_forward
    assert backward.get_total_flops() == predicted.total_backward


@pytest.mark.parametrize("name", ["gpt2", "llama", "moe", "t5", "latent", "mixed"])
def test_a_decoded_token_equals_torch_counting_on_the_engine(name):
    config = CASES[name]
    model, seq2seq = build(config).eval(), config.kind == "seq2seq"
    tokens, source = torch.randint(0, config.vocab_size, (1, 17)), torch.randint(0, config.vocab_size, (1, 23))
    cache = model.new_cache()
    inputs = (source,) if seq2seq else ()
    with sdpa_kernel(SDPBackend.MATH):  # with gradients: the counter follows modules through their graph
        model(*inputs, tokens[:, :-1], cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(*inputs, tokens[:, -1:], cache=cache)
    predicted = decode_flops(config, context=17, source=23 if seq2seq else None)
    assert counter.get_total_flops() == sum(predicted.values())


@given(st.integers(1, 40), st.none() | st.integers(1, 50), st.booleans())
def test_seen_pairs_equals_counting_them(T, window, causal):
    def sees(q: int, k: int) -> bool:
        return (k <= q or not causal) and (window is None or abs(q - k) < window)

    assert attended_pairs(T, window, causal) == sum(sees(q, k) for q in range(T) for k in range(T))


@given(variants.decoders, st.integers(1, 40))
@settings(max_examples=examples(30))
def test_decoding_token_by_token_costs_what_the_masked_pass_costs(config, T):
    """Each query meets each visible key once, cached or not: the sums agree exactly, part by part."""
    if config.attention.latent is not None:
        return  # a decoded token is computed in the absorbed form, which has other widths
    whole = flops(config, batch=1, context=T).needed
    steps = [decode_flops(config, context=t) for t in range(1, T + 1)]
    assert {part: sum(step[part] for step in steps) for part in whole} == whole


def test_gpt2_at_full_context():
    work = flops(presets.gpt2(), batch=1, context=1024)
    assert work.forward["projections"] == 2 * 1024 * 12 * 4 * 768**2
    assert work.forward["scores"] == work.forward["mix"] == 2 * 1024**2 * 768 * 12
    assert work.forward["feedforward"] == 2 * 1024 * 12 * 8 * 768**2
    assert work.forward["head"] == 2 * 1024 * 768 * 50257
    assert work.needed["scores"] == 2 * (1024 * 1025 // 2) * 768 * 12
    assert work.rule == 6 * 124_439_808 * 1024
    assert work.training == 3 * work.total_forward


def test_the_rule_counts_each_stack_with_its_own_tokens():
    config = presets.t5_small()
    one, two = flops(config, context=10, source=10).rule, flops(config, context=10, source=20).rule
    assert one == 6 * active(config) * 10
    encoder = 6 * (4 * 512**2 + 2 * 512 * 2048) + 32 * 8 + 13 * 512  # blocks, buckets, norms
    assert two - one == 6 * encoder * 10


def test_only_active_experts_count():
    few, all_ = presets.moe_tiny(n_active=1), presets.moe_tiny(n_active=4)
    expert = 2 * 3 * 64 * 128 * 4  # per token: 3·D·F multiply-adds in each of 4 layers
    assert flops(all_, context=1).forward["feedforward"] - flops(few, context=1).forward["feedforward"] == 3 * expert


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flops(presets.gpt2(), context=0), "context=0"),
        (lambda: flops(presets.gpt2(), source=3), "source=3"),
        (lambda: flops(presets.t5_small(), source=0), "source=0"),
        (lambda: decode_flops(presets.bert_base()), "an encoder does not decode"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_defaults_are_the_model_s_context_or_512():
    assert flops(presets.gpt2()).context == 1024
    assert (flops(presets.t5_small()).context, flops(presets.t5_small()).source) == (512, 512)
