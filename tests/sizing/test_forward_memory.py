"""Predicted peaks of forward passes without gradients, against measured ones."""

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from glassformer.sizing import inference_memory
from tests.sizing.test_memory import (
    ALBERT,
    BARE,
    BERT,
    BLOOM,
    GPT,
    LLAMA,
    MISTRAL,
    MODERN,
    MPNET,
    PROJECTED,
    T5,
    TRAINED,
    WITHIN,
    call,
    live_peak,
    tokens_for,
    weigh,
)


def with_latent(**changes) -> c.ModelConfig:
    attention = c.Attention(4, d_head=96, d_value=64, bias=False, latent=c.Latent(128, 32, **changes))
    return c.replace(LLAMA, attention=attention, position=c.Rotary(fraction=1 / 3))


LATENT = with_latent(q_rank=96)
PREFILL = {
    "gpt2 float32": (GPT, 4, 256, None, "float32"),
    "gpt2 bfloat16": (GPT, 4, 256, None, "bfloat16"),
    "llama float32": (LLAMA, 4, 256, None, "float32"),
    "bert float32": (BERT, 4, 256, None, "float32"),
    "t5 bfloat16": (T5, 4, 96, 256, "bfloat16"),
    "window float32": (MISTRAL, 4, 256, None, "float32"),
    "alibi float32": (BLOOM, 2, 256, None, "float32"),
    "attention only, query/key positions float32": (BARE, 4, 256, None, "float32"),
    "attention only, query/key positions, post float32": (c.replace(BARE, placement="post"), 4, 256, None, "float32"),
    "query/key positions, trained float32": (TRAINED, 4, 256, None, "float32"),
    "values of another width float32": (c.replace(GPT, d_value=48), 2, 256, None, "float32"),
    "factorized embedding, shared blocks float32": (ALBERT, 4, 256, None, "float32"),
    "projection before positions float32": (PROJECTED, 4, 256, None, "float32"),
    "score bias float32": (MPNET, 2, 256, None, "float32"),
    "no first norm float32": (MODERN, 4, 256, None, "float32"),
    "latent attention float32": (LATENT, 4, 256, None, "float32"),
    "latent attention bfloat16": (LATENT, 4, 256, None, "bfloat16"),
    "latent attention, queries of full rank float32": (with_latent(), 2, 512, None, "float32"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_peak(name):
    config, batch, T, S, dtype = PREFILL[name]
    model = build(config, dtype=getattr(torch, dtype)).eval()
    target, source = tokens_for(config, batch, T, S or T)

    def prefill() -> None:
        kind = "windowed" if config.attention.window else "growing"
        kwargs = {} if config.kind == "encoder" else {"cache": model.new_cache(kind)}
        call(model, target, source, **kwargs)

    with torch.inference_mode():
        measured = weigh(model) + live_peak(prefill)
    predicted = inference_memory(config, batch, T, dtype, source=S)
    assert predicted.prefill_peak == pytest.approx(measured, rel=WITHIN[dtype])
    # and without the weights, which are known exactly
    weights = predicted.weights
    assert predicted.prefill_peak - weights == pytest.approx(measured - weights, rel=WITHIN[dtype])


DECODE = {
    "gpt2 float32": (GPT, 8, 256, None, "float32"),
    "llama bfloat16": (LLAMA, 8, 256, None, "bfloat16"),
    "t5 float32": (T5, 8, 64, 128, "float32"),
    "values of another width float32": (c.replace(GPT, d_value=48), 8, 256, None, "float32"),
    "the same, grouped float32": (c.replace(GPT, d_value=48, n_kv_heads=2), 8, 256, None, "float32"),
    "attention only, query/key positions float32": (BARE, 8, 256, None, "float32"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DECODE)
def test_decode_peak(name):
    config, batch, T, S, dtype = DECODE[name]
    model = build(config, dtype=getattr(torch, dtype)).eval()
    target, source = tokens_for(config, batch, T, S or T)
    cache = model.new_cache("static", capacity=T)
    predicted = inference_memory(config, batch, T, dtype, source=S)
    with torch.inference_mode():
        call(model, target[:, :-1], source, cache=cache)
        assert cache.n_bytes() == predicted.cache + predicted.cross_cache
        step = live_peak(lambda: call(model, target[:, -1:], source, cache=cache))
    measured = weigh(model) + cache.n_bytes() + step
    assert predicted.decode_peak == pytest.approx(measured, rel=WITHIN[dtype])


def test_a_windowed_cache_holds_no_more_than_its_window():
    T = 300
    model, tokens = build(MISTRAL).eval(), torch.randint(0, 2003, (2, T))
    cache = model.new_cache("windowed", slack=1)  # W - 1 keys and one more
    with torch.inference_mode():
        model(tokens, cache=cache)
    assert cache.n_bytes() == inference_memory(MISTRAL, 2, T).cache
    assert inference_memory(MISTRAL, 2, 40).cache == 2 * 40 * inference_memory(MISTRAL).cache_per_token


def test_a_growing_cache_holds_one_layer_twice_for_a_moment():
    batch, T = 8, 256
    model, tokens = build(LLAMA).eval(), torch.randint(0, 2003, (batch, T))
    cache = model.new_cache("growing")
    with torch.inference_mode():
        model(tokens[:, :-1], cache=cache)
        # The profiler misses the release of what was made before it, so all layers appear to grow at once.
        grown = live_peak(lambda: model(tokens[:, -1:], cache=cache))
    predicted = inference_memory(LLAMA, batch, T)
    assert predicted.growth * LLAMA.n_layers == predicted.cache
    assert grown == pytest.approx(predicted.cache, rel=0.10)
