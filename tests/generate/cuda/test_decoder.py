"""What the persistent kernel refuses, and what it is given."""

import pytest
import torch

from glassformer import config as c
from glassformer import presets
from glassformer.generate.cuda.decoder import CudaDecodeError, CudaDecoder, obstacle
from tests.variants import decoder, lively


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (presets.bert_base(), "decoder-only"),
        (decoder(placement="post"), "pre-norm"),
        (presets.get("moe_tiny"), "pre-norm blocks with one feed-forward"),
        (decoder(position=c.Alibi()), "alibi"),
        (presets.get("llama2_7b"), "registers"),
        (presets.get("qwen3_0_6b"), "norms of queries"),
    ],
)
def test_what_it_does_not_know_is_said(config, words):
    assert words in obstacle(config)


def test_gpt2_and_small_llamas_are_known():
    assert obstacle(presets.gpt2()) is None
    assert obstacle(presets.get("llama_tiny")) is None


def test_refusals_are_one_sentence():
    with pytest.raises(CudaDecodeError, match="use engine='torch'"):
        CudaDecoder(lively(decoder(placement="post"))[0], programs=1)
    native = CudaDecoder(lively(decoder())[0].float(), programs=1)
    with pytest.raises(CudaDecodeError, match="more do not fit"):
        native.greedy(native.capacity + 1)


def test_matrices_are_stacked_by_layer_and_a_prompt_is_taken_over():
    model = lively(decoder())[0].float()
    native = CudaDecoder(model, programs=1, dtype=torch.float32)
    attention = model.blocks[1].attention
    rows = torch.cat([attention.q.weight, attention.k.weight, attention.v.weight])
    assert torch.equal(native.given["w_qkv"][1], rows)
    cfg = model.config
    kept = [(torch.randn(cfg.n_kv_heads, 4, cfg.d_head), torch.randn(cfg.n_kv_heads, 4, cfg.d_value))] * cfg.n_layers
    native.take([5, 6, 7, 8, 9], kept)
    assert native.place == 4
    assert native.tokens[:5].tolist() == [5, 6, 7, 8, 9]
    assert torch.equal(native.given["keys"][1, :, :4], kept[1][0])
