"""Named configs as functions: the published architectures and a few small ones made for this project.

`NAME()` is the model as published; `NAME(n_layers=2, n_heads=4)` is the same with some fields changed, spelled as in
`glassformer.config.replace`. A new `d_model` also scales the feed-forward (`gpt2(d_model=96)` has d_ff=384) and the
scales of T5 and of Vaswani's Transformer, unless they are given too. The number of heads stays, and their width where
`d_head` is published (T5, Qwen3). Docstrings name the sources of the figures; dropout is that of the training.
"""

import math
from collections.abc import Callable
from typing import Any

from glassformer.config import (
    Alibi,
    Attention,
    ConfigError,
    DecoderConfig,
    Dense,
    Embedding,
    EncoderConfig,
    Gated,
    Head,
    LayerNorm,
    Learned,
    Llama3Scaling,
    ModelConfig,
    MoE,
    RMSNorm,
    Rotary,
    Seq2SeqConfig,
    Sinusoidal,
    Special,
    T5Bias,
)
from glassformer.config.releases import *  # noqa: F403 (its presets are presets of this module)
from glassformer.config.releases import RELEASES
from glassformer.config.schema import new_width, vary
from glassformer.errors import nearest

LLAMA_IDS = Special(bos=1, eos=(2,))


def _gpt2(d_model: int, n_layers: int, n_heads: int, changes: dict[str, Any]) -> ModelConfig:
    config = DecoderConfig(
        vocab_size=50257,
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(n_heads),
        feedforward=Dense(4 * d_model, "gelu_tanh"),
        max_len=1024,
        dropout=0.1,
        special=Special(bos=50256, eos=(50256,)),
    )
    return vary(config, changes)


def gpt2(**changes: Any) -> ModelConfig:
    """GPT-2, 124,439,808 parameters. Radford et al. 2019, table 2; ids and dropout from its config.json."""
    return _gpt2(768, 12, 12, changes)


def gpt2_medium(**changes: Any) -> ModelConfig:
    """GPT-2 medium, 354,823,168 parameters. Radford et al. 2019, table 2; heads from its config.json."""
    return _gpt2(1024, 24, 16, changes)


def gpt2_large(**changes: Any) -> ModelConfig:
    """GPT-2 large, 774,030,080 parameters. Radford et al. 2019, table 2; heads from its config.json."""
    return _gpt2(1280, 36, 20, changes)


def gpt2_xl(**changes: Any) -> ModelConfig:
    """GPT-2 XL, 1,557,611,200 parameters. Radford et al. 2019, table 2; heads from its config.json."""
    return _gpt2(1600, 48, 25, changes)


def _bert(d_model: int, n_layers: int, n_heads: int, changes: dict[str, Any]) -> ModelConfig:
    config = EncoderConfig(
        vocab_size=30522,
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(n_heads),
        feedforward=Dense(4 * d_model, "gelu"),
        norm=LayerNorm(eps=1e-12),
        placement="post",
        max_len=512,
        embedding=Embedding(n_segments=2, norm=True),
        head=Head(tied=True, bias=True, transform="gelu"),
        pooler=True,
        dropout=0.1,
        special=Special(pad=0),
    )
    return vary(config, changes)


def bert_base(**changes: Any) -> ModelConfig:
    """BERT base uncased with masked-LM head and pooler. Devlin et al. 2019, section 3; config.json for V and eps.

    110,104,890 parameters: 109,482,240 of the encoder with pooler and 622,650 of the head. The next-sentence classifier
    (1,538) is not part of the model here.
    """
    return _bert(768, 12, 12, changes)


def bert_large(**changes: Any) -> ModelConfig:
    """BERT large uncased with masked-LM head and pooler. Devlin et al. 2019, section 3; config.json for V and eps.

    336,224,058 parameters: 335,141,888 of the encoder with pooler and 1,082,170 of the head; the next-sentence
    classifier (2,050) would make 336,226,108.
    """
    return _bert(1024, 24, 16, changes)


def roberta_base(**changes: Any) -> ModelConfig:
    """RoBERTa base, 124,697,433 parameters: BERT with other data. Liu et al. 2019; V, eps and ids from its config.json.

    Positions start at row 2 of a table of 514 (fairseq counts from the padding id 1). One segment, always 0. The
    released weights have no pooler.
    """
    norm, special = LayerNorm(eps=1e-5), Special(bos=0, eos=(2,), pad=1)
    roberta: dict[str, Any] = {"vocab_size": 50265, "position": Learned(offset=2), "n_segments": 1, "pooler": False}
    return vary(_bert(768, 12, 12, {**roberta, "norm": norm, "special": special}), changes)


def minilm_l6(**changes: Any) -> ModelConfig:
    """MiniLM with 6 layers, 22,892,346 parameters, pooler and masked-LM head included. Wang et al. 2020; config."""
    return vary(_bert(384, 6, 12, {}), changes)


def distilbert_base(**changes: Any) -> ModelConfig:
    """DistilBERT base uncased, 66,985,530 parameters: half of BERT's layers, no segments, no pooler.

    Sanh et al. 2019, section 3; V and dropout from its config.json.
    """
    return vary(_bert(768, 12, 12, {"n_layers": 6, "n_segments": 0, "pooler": False}), changes)


def _t5(
    d_model: int, n_layers: int, n_heads: int, feedforward: Dense | Gated, tied: bool, changes: dict[str, Any]
) -> ModelConfig:
    config = Seq2SeqConfig(
        vocab_size=32128,
        d_model=d_model,
        n_layers=n_layers,
        n_encoder_layers=n_layers,
        attention=Attention(n_heads, d_head=64, scale=1.0, bias=False),  # the 1/sqrt(K) is in the initial weights
        feedforward=feedforward,
        norm=RMSNorm(eps=1e-6),
        position=T5Bias(buckets=32, max_distance=128),
        head=Head(tied=tied, scale=d_model**-0.5 if tied else 1.0),
        dropout=0.1,
        special=Special(eos=(1,), pad=0, start=0),
    )
    if tied and (width := new_width(changes)) and not changes.keys() & {"head", "head__scale"}:
        changes = {**changes, "head__scale": width**-0.5}  # the scale belongs to the width, not to the name
    return vary(config, changes)


def t5_small(**changes: Any) -> ModelConfig:
    """T5 v1.0 small, 60,506,624 parameters. Raffel et al. 2020, section 3.7; V, d_kv and ids from its config.json."""
    return _t5(512, 6, 8, Dense(2048, "relu", bias=False), True, changes)


def t5_base(**changes: Any) -> ModelConfig:
    """T5 v1.0 base, 222,903,552 parameters. Raffel et al. 2020, section 3.1.2; V, d_kv and ids from its config.json."""
    return _t5(768, 12, 12, Dense(3072, "relu", bias=False), True, changes)


def t5_v1_1_small(**changes: Any) -> ModelConfig:
    """T5 v1.1 small, 76,961,152 parameters: gated feed-forward, untied head. Its config.json; Shazeer 2020 (GEGLU)."""
    return _t5(512, 8, 6, Gated(1024, "gelu_tanh"), False, changes)


def _vaswani(d_model: int, n_heads: int, dropout: float, changes: dict[str, Any]) -> ModelConfig:
    config = Seq2SeqConfig(
        vocab_size=37000,
        d_model=d_model,
        n_layers=6,
        n_encoder_layers=6,
        attention=Attention(n_heads),
        feedforward=Dense(4 * d_model, "relu"),
        position=Sinusoidal(),
        placement="post",
        embedding=Embedding(scale=math.sqrt(d_model)),
        dropout=dropout,
    )
    if (width := new_width(changes)) and not changes.keys() & {"embedding", "embedding__scale"}:
        changes = {**changes, "embedding__scale": math.sqrt(width)}  # the scale belongs to the width
    return vary(config, changes)


def transformer_base(**changes: Any) -> ModelConfig:
    """The base Transformer of Vaswani et al. 2017, table 3, with the shared 37,000-token vocabulary of section 5.1.

    63,082,496 parameters ("65 * 10^6" in the paper). Convention: every projection has a bias and the shared embedding
    is also the head, as in Marian; the paper does not say, and tensor2tensor had no attention biases.
    """
    return _vaswani(512, 8, 0.1, changes)


def transformer_big(**changes: Any) -> ModelConfig:
    """The big Transformer of Vaswani et al. 2017, table 3; dropout 0.3 as for English to German.

    214,245,376 parameters ("213 * 10^6" in the paper), biases as in `transformer_base`.
    """
    return _vaswani(1024, 16, 0.3, changes)


def _llama(
    changes: dict[str, Any],
    vocab_size: int,
    d_model: int,
    n_layers: int,
    attention: Attention,
    feedforward: Gated | MoE,
    special: Special,
    *,
    max_len: int,
    base: float = 10000.0,
    eps: float = 1e-5,
    tied: bool = False,
) -> ModelConfig:
    config = DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        feedforward=feedforward,
        norm=RMSNorm(eps=eps),
        position=Rotary(base=base),
        max_len=max_len,
        head=Head(tied=tied),
        special=special,
    )
    return vary(config, changes)


def llama2_7b(**changes: Any) -> ModelConfig:
    """Llama 2 7B, 6,738,415,616 parameters. Touvron et al. 2023, table 1; F, eps and ids from its config.json."""
    return _llama(changes, 32000, 4096, 32, Attention(32, bias=False), Gated(11008), LLAMA_IDS, max_len=4096)


def llama2_70b(**changes: Any) -> ModelConfig:
    """Llama 2 70B, 68,976,648,192 parameters. Touvron et al. 2023, table 1; F, eps and ids from its config.json."""
    return _llama(changes, 32000, 8192, 80, Attention(64, 8, bias=False), Gated(28672), LLAMA_IDS, max_len=4096)


def llama3_8b(**changes: Any) -> ModelConfig:
    """Llama 3 8B (the 8,192-token release, rope without scaling), 8,030,261,248 parameters.

    Grattafiori et al. 2024, table 3; V, eps and ids from its config.json.
    """
    attention = Attention(32, n_kv_heads=8, bias=False)
    special = Special(bos=128000, eos=(128001,))
    return _llama(changes, 128256, 4096, 32, attention, Gated(14336), special, max_len=8192, base=500000.0)


def llama3_2_1b(**changes: Any) -> ModelConfig:
    """Llama 3.2 1B, 1,235,814,400 parameters. Its config.json; heads of width 64, tied head."""
    attention = Attention(32, n_kv_heads=8, bias=False)
    position = Rotary(base=500000.0, scaling=Llama3Scaling(factor=32.0, original_max_len=8192))
    given: dict[str, Any] = {"position": position, **changes}
    special = Special(bos=128000, eos=(128001,))
    return _llama(given, 128256, 2048, 16, attention, Gated(8192), special, max_len=131072, tied=True)


def mistral_7b(**changes: Any) -> ModelConfig:
    """Mistral 7B v0.1 with its window of 4,096, 7,241,732,096 parameters. Jiang et al. 2023, table 1; config.json."""
    attention = Attention(32, n_kv_heads=8, bias=False, window=4096)
    return _llama(changes, 32000, 4096, 32, attention, Gated(14336), LLAMA_IDS, max_len=32768)


def mixtral_8x7b(**changes: Any) -> ModelConfig:
    """Mixtral 8x7B v0.1, 46,702,792,704 parameters, 12,879,925,248 active. Jiang et al. 2024, table 1; config.json."""
    attention, moe = Attention(32, n_kv_heads=8, bias=False), MoE(n_experts=8, n_active=2, expert=Gated(14336))
    return _llama(changes, 32000, 4096, 32, attention, moe, LLAMA_IDS, max_len=32768, base=1e6)


def qwen2_0_5b(**changes: Any) -> ModelConfig:
    """Qwen2 0.5B, 494,032,768 parameters: biases on q, k and v only. Yang et al. 2024, table 1; config.json."""
    attention = Attention(14, n_kv_heads=2, bias=True, out_bias=False)
    qwen: dict[str, Any] = {"max_len": 131072, "base": 1e6, "eps": 1e-6, "tied": True}
    special = Special(bos=151643, eos=(151643,))
    return _llama(changes, 151936, 896, 24, attention, Gated(4864), special, **qwen)


def qwen3_0_6b(**changes: Any) -> ModelConfig:
    """Qwen3 0.6B, 596,049,920 parameters: norms on q and k, H·K = 2,048 wider than D = 1,024.

    Yang et al. 2025, table 1; K, F and ids from its config.json.
    """
    attention = Attention(16, n_kv_heads=8, d_head=128, bias=False, qk_norm=RMSNorm(eps=1e-6))
    qwen: dict[str, Any] = {"max_len": 40960, "base": 1e6, "eps": 1e-6, "tied": True}
    special = Special(bos=151643, eos=(151645,))
    return _llama(changes, 151936, 1024, 28, attention, Gated(3072), special, **qwen)


def gptj_6b(**changes: Any) -> ModelConfig:
    """GPT-J 6B, 6,050,882,784 parameters: attention and feed-forward side by side, 64 of 256 components rotated.

    Wang and Komatsuzaki 2021 (model card); eps, dropout and ids from its config.json.
    """
    config = DecoderConfig(
        vocab_size=50400,
        d_model=4096,
        n_layers=28,
        attention=Attention(16, bias=False),
        feedforward=Dense(16384, "gelu_tanh"),
        position=Rotary(pairing="interleaved", fraction=0.25),
        placement="parallel",
        max_len=2048,
        head=Head(tied=False, bias=True),
        special=Special(bos=50256, eos=(50256,)),
    )
    return vary(config, changes)


def bloom_560m(**changes: Any) -> ModelConfig:
    """BLOOM 560M, 559,214,592 parameters: ALiBi, and a norm on the embedding. Le Scao et al. 2022, table 3; config."""
    config = DecoderConfig(
        vocab_size=250880,
        d_model=1024,
        n_layers=24,
        attention=Attention(16),
        feedforward=Dense(4096, "gelu_tanh"),
        position=Alibi(),
        max_len=2048,
        embedding=Embedding(norm=True),
        special=Special(bos=1, eos=(2,), pad=3),
    )
    return vary(config, changes)


def _nanogpt(
    d_model: int, n_layers: int, n_heads: int, max_len: int, dropout: float, changes: dict[str, Any]
) -> ModelConfig:
    config = DecoderConfig(
        vocab_size=65,
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(n_heads, bias=False),
        feedforward=Dense(4 * d_model, "gelu", bias=False),
        norm=LayerNorm(bias=False),
        max_len=max_len,
        dropout=dropout,
    )
    return vary(config, changes)


def nano(**changes: Any) -> ModelConfig:
    """nanoGPT's character Shakespeare for a CPU, 804,096 parameters: the flags of its README, no biases (train.py)."""
    return _nanogpt(128, 4, 4, 64, 0.0, changes)


def shakespeare(**changes: Any) -> ModelConfig:
    """nanoGPT's character Shakespeare for a GPU, 10,745,088 parameters: its config/train_shakespeare_char.py."""
    return _nanogpt(384, 6, 6, 256, 0.2, changes)


def llama_tiny(**changes: Any) -> ModelConfig:
    """Llama's parts at a size that trains in minutes on CPU, over bytes; made for this project. 430,944 parameters."""
    attention = Attention(4, n_kv_heads=2, bias=False)
    return _llama(changes, 256, 96, 4, attention, Gated(256), Special(), max_len=256, tied=True)


def moe_tiny(**changes: Any) -> ModelConfig:
    """`llama_tiny` narrower, two of four experts active for each token. 460,352 parameters, 263,744 active."""
    attention = Attention(4, n_kv_heads=2, bias=False)
    moe = MoE(n_experts=4, n_active=2, expert=Gated(128))
    return _llama(changes, 256, 64, 4, attention, moe, Special(), max_len=256, tied=True)


_PRESETS: tuple[Callable[..., ModelConfig], ...] = (
    gpt2, gpt2_medium, gpt2_large, gpt2_xl, bert_base, bert_large, roberta_base, distilbert_base, minilm_l6, t5_small,
    t5_base, t5_v1_1_small, transformer_base, transformer_big, llama2_7b, llama2_70b, llama3_8b, llama3_2_1b,
    mistral_7b, mixtral_8x7b, qwen2_0_5b, qwen3_0_6b, gptj_6b, bloom_560m, *RELEASES, nano, shakespeare, llama_tiny,
    moe_tiny,
)  # fmt: skip
ALL: dict[str, Callable[..., ModelConfig]] = {preset.__name__: preset for preset in _PRESETS}


def get(name: str, **changes: Any) -> ModelConfig:
    """Return the preset called `name`, changed. Dashes, dots and capitals do not matter: "GPT2-medium" works."""
    if not isinstance(name, str):
        raise ConfigError(f"a preset is named by text such as 'gpt2', not by {type(name).__name__}.")
    spelled = name.lower().replace("-", "_").replace(".", "_")
    if spelled not in ALL:
        raise ConfigError(f"{name!r} is not a preset.{nearest(spelled, ALL, others='Use one of')}")
    return ALL[spelled](**changes)
