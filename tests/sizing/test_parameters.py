"""Counts: against transformers on the meta device, the integers of the literature, the engine and the oracle."""

import math

import pytest
import torch
import transformers as hf
from hypothesis import given, settings

from glassformer.config import Attention, DecoderConfig, Dense, MoE, NoPosition, presets
from glassformer.model import build
from glassformer.reference.params import shapes
from glassformer.sizing import PARTS, active, count, count_by_part, parameters
from glassformer.sizing.parameters import part_of
from tests import variants
from tests.config.test_releases import NAMES
from tests.sampled import examples


def hf_count(make, *exclude: str) -> int:
    """Scalars in the parameters of a transformers model, tied ones once, built without memory."""
    with torch.device("meta"):
        model = make()
    model.tie_weights()
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in exclude))


def gpt2(d, layers, heads):
    return lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=d, n_layer=layers, n_head=heads))


def bert(d, layers, heads):
    config = hf.BertConfig(hidden_size=d, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * d)
    return lambda: hf.BertForMaskedLM(config)


def t5(**kwargs):
    return lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=32128, d_kv=64, **kwargs))


def marian(d, heads):
    config = hf.MarianConfig(
        vocab_size=37000,
        d_model=d,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * d,
        decoder_ffn_dim=4 * d,
        pad_token_id=0,
    )
    return lambda: hf.MarianMTModel(config)


def llama_like(kind, **kwargs):
    config = getattr(hf, f"{kind}Config")(**kwargs)
    return lambda: getattr(hf, f"{kind}ForCausalLM")(config)


def width(d, layers, heads, groups, f, vocab):
    return {
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": f,
        "vocab_size": vocab,
    }


PEERS = {
    "gpt2": gpt2(768, 12, 12),
    "gpt2_medium": gpt2(1024, 24, 16),
    "gpt2_large": gpt2(1280, 36, 20),
    "gpt2_xl": gpt2(1600, 48, 25),
    "bert_base": bert(768, 12, 12),
    "bert_large": bert(1024, 24, 16),
    "minilm_l6": bert(384, 6, 12),
    "roberta_base": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    ),
    "distilbert_base": lambda: hf.DistilBertForMaskedLM(hf.DistilBertConfig()),
    "t5_small": t5(d_model=512, d_ff=2048, num_layers=6, num_heads=8),
    "t5_base": t5(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
    "t5_v1_1_small": t5(
        d_model=512, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu", tie_word_embeddings=False
    ),
    "transformer_base": marian(512, 8),
    "transformer_big": marian(1024, 16),
    "llama2_7b": llama_like("Llama", **width(4096, 32, 32, 32, 11008, 32000)),
    "llama2_70b": llama_like("Llama", **width(8192, 80, 64, 8, 28672, 32000)),
    "llama3_8b": llama_like("Llama", **width(4096, 32, 32, 8, 14336, 128256)),
    "llama3_2_1b": llama_like("Llama", **width(2048, 16, 32, 8, 8192, 128256), tie_word_embeddings=True),
    "mistral_7b": llama_like("Mistral", **width(4096, 32, 32, 8, 14336, 32000)),
    "mixtral_8x7b": llama_like("Mixtral", **width(4096, 32, 32, 8, 14336, 32000)),
    "qwen2_0_5b": llama_like("Qwen2", **width(896, 24, 14, 2, 4864, 151936), tie_word_embeddings=True),
    "qwen3_0_6b": llama_like("Qwen3", **width(1024, 28, 16, 8, 3072, 151936), head_dim=128, tie_word_embeddings=True),
    "gptj_6b": llama_like("GPTJ"),
    "bloom_560m": llama_like("Bloom", vocab_size=250880, hidden_size=1024, n_layer=24, n_head=16),
}
# What the peer class leaves out: BertForMaskedLM has no pooler (D·D + D); T5Config of transformers 5 ties the head
# until a checkpoint brings another one, which every v1.1 checkpoint does (V·D).
BESIDES = {
    "minilm_l6": 384 * 384 + 384,
    "bert_base": 768 * 768 + 768,
    "bert_large": 1024 * 1024 + 1024,
    "t5_v1_1_small": 32128 * 512,
}


@pytest.mark.sample(11)
@pytest.mark.parametrize("name", PEERS)
def test_count_equals_transformers(name):
    # Marian stores its fixed waves as parameters (`embed_positions`); ours are computed.
    assert count(presets.get(name)) == hf_count(PEERS[name], "embed_positions") + BESIDES.get(name, 0)


def test_every_published_preset_has_a_peer():
    assert set(presets.ALL) - set(PEERS) - set(NAMES) == {"nano", "shakespeare", "llama_tiny", "moe_tiny"}


def test_gpt2_parts_are_those_of_the_literature():
    parts = count_by_part(presets.gpt2())
    assert parts == {
        "embedding": 38_597_376,
        "positions": 786_432,
        "attention": 12 * 2_362_368,
        "cross": 0,
        "feedforward": 12 * 4_722_432,
        "norms": 12 * 3_072 + 1_536,
        "head": 0,
        "pooler": 0,
    }
    assert count(presets.gpt2(tied=False)) == 163_037_184


@pytest.mark.parametrize(
    ("vocab", "bare", "pooled", "both"),
    [
        (30000, 333_557_760, 334_607_360, 335_691_058),
        (30522, 334_092_288, 335_141_888, 336_226_108),
        (28996, 332_529_664, 333_579_264, 334_661_958),
    ],
)
def test_the_nine_numbers_of_bert_large(vocab, bare, pooled, both):
    config = presets.bert_large(vocab_size=vocab)
    next_sentence = 2 * 1024 + 2  # the classifier of the second pre-training task, no part of our model
    assert count(presets.bert_large(vocab_size=vocab, head=None, pooler=False)) == bare
    assert count(presets.bert_large(vocab_size=vocab, head=None)) == pooled
    assert count(config) + next_sentence == both


def test_a_block_of_width_512():
    parts = count_by_part(presets.gpt2(d_model=512, n_layers=1, n_heads=8, d_ff=2048))
    assert (parts["attention"], parts["feedforward"]) == (1_050_624, 2_099_712)
    assert parts["norms"] == 2_048 + 1_024  # two of the block, one final


@pytest.mark.parametrize(("E", "A"), [(1, 1), (2, 1), (4, 2), (8, 2)])
def test_share_of_the_experts_is_2E_over_2E_plus_1(E, A):
    D = 48
    moe = MoE(n_experts=E, n_active=A, expert=Dense(4 * D, bias=False))
    config = DecoderConfig(
        vocab_size=7, d_model=D, n_layers=3, attention=Attention(4, bias=False), feedforward=moe, position=NoPosition()
    )
    parts = count_by_part(config)
    router = 3 * D * E
    experts = parts["feedforward"] - router
    assert experts / (experts + parts["attention"]) == 2 * E / (2 * E + 1)
    assert count(config) - active(config) == 3 * (E - A) * 8 * D * D


CONFIGS = variants.decoders | variants.encoders | variants.seq2seqs


@given(CONFIGS)
@settings(max_examples=examples(60))
def test_parts_add_up_to_the_count(config):
    parts = count_by_part(config)
    assert tuple(parts) == PARTS
    assert sum(parts.values()) == count(config) == sum(math.prod(s) for s in parameters(config).values())
    assert 0 < active(config) <= count(config)


@given(CONFIGS)
@settings(max_examples=examples(60))
def test_names_and_shapes_equal_the_oracle(config):
    trained = {name: tuple(shape) for name, shape in shapes(config).items() if not name.endswith(".correction")}
    assert parameters(config) == trained


@given(CONFIGS)
@settings(max_examples=examples(40))
def test_names_and_shapes_equal_the_engine(config):
    model = build(config, device="meta")
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == parameters(config)


def test_a_model_without_head_has_no_head():
    assert count_by_part(presets.gpt2(head=None))["head"] == 0
    assert not any(name.startswith("head") for name in parameters(presets.llama2_7b(head=None)))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("embed.tokens.weight", "embedding"),
        ("decoder.position.weight", "positions"),
        ("decoder.blocks.0.attention.q_norm.weight", "attention"),
        ("decoder.blocks.11.cross.o.bias", "cross"),
        ("encoder.blocks.0.feedforward.experts.3.up.weight", "feedforward"),
        ("encoder.blocks.0.norm_feedforward.weight", "norms"),
        ("encoder.embed_norm.bias", "norms"),
        ("head.norm.weight", "head"),
        ("pooler.bias", "pooler"),
    ],
)
def test_part_of(name, part):
    assert part_of(name) == part
