"""Presets of released models: Pythia, Gemma, Phi-3, Qwen3, OLMo 2, SmolLM3, gpt-oss, DeepSeek-V3, ModernBERT, BART.

The figures are those of each release's config.json. A test compares the number of parameters with that of transformers.
"""

import math
from collections.abc import Callable
from typing import Any

from glassformer.config.experts import MoE, Router
from glassformer.config.model import DecoderConfig, EncoderConfig, LayerKind, ModelConfig, Seq2SeqConfig
from glassformer.config.parts import Attention, Dense, Embedding, Gated, Head, Latent, LayerNorm, RMSNorm, Special
from glassformer.config.position import Learned, LinearScaling, NoPosition, Rotary, YarnScaling
from glassformer.config.schema import new_width, vary

# fmt: off
__all__ = [
    "bart_base", "bart_large", "deepseek_v3", "gemma2_2b", "gemma2_9b", "gemma2_27b", "gemma3_1b", "gemma3_4b",
    "gemma3_12b", "gemma3_27b", "gemma3_270m", "gemma_2b", "gemma_7b", "gpt_oss_20b", "gpt_oss_120b",
    "modernbert_base", "modernbert_large", "olmo2_1b", "olmo2_7b", "olmo2_13b", "phi3_mini", "pythia_1_4b",
    "pythia_1b", "pythia_2_8b", "pythia_6_9b", "pythia_12b", "pythia_70m", "pythia_160m", "pythia_410m", "qwen3_1_7b",
    "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_30b_a3b", "qwen3_32b", "smollm3_3b",
]
# fmt: on


def _pythia(d_model: int, n_layers: int, n_heads: int, changes: dict[str, Any], vocab_size: int = 50304) -> ModelConfig:
    config = DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(n_heads),
        feedforward=Dense(4 * d_model, "gelu"),
        position=Rotary(fraction=0.25),
        placement="parallel_two",
        max_len=2048,
        head=Head(tied=False),
        special=Special(bos=0, eos=(0,)),
    )
    return vary(config, changes)


def pythia_70m(**changes: Any) -> ModelConfig:
    """Pythia 70M, 70,426,624 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(512, 6, 8, changes)


def pythia_160m(**changes: Any) -> ModelConfig:
    """Pythia 160M, 162,322,944 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(768, 12, 12, changes)


def pythia_410m(**changes: Any) -> ModelConfig:
    """Pythia 410M, 405,334,016 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(1024, 24, 16, changes)


def pythia_1b(**changes: Any) -> ModelConfig:
    """Pythia 1B, 1,011,781,632 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(2048, 16, 8, changes)


def pythia_1_4b(**changes: Any) -> ModelConfig:
    """Pythia 1.4B, 1,414,647,808 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(2048, 24, 16, changes)


def pythia_2_8b(**changes: Any) -> ModelConfig:
    """Pythia 2.8B, 2,775,208,960 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(2560, 32, 32, changes)


def pythia_6_9b(**changes: Any) -> ModelConfig:
    """Pythia 6.9B, 6,857,302,016 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(4096, 32, 32, changes, vocab_size=50432)


def pythia_12b(**changes: Any) -> ModelConfig:
    """Pythia 12B, 11,846,072,320 parameters. Biderman et al. 2023, table 1; config.json."""
    return _pythia(5120, 36, 40, changes, vocab_size=50688)


def _gemma(
    changes: dict[str, Any], d_model: int, n_layers: int, attention: Attention, d_ff: int, **parts: Any
) -> ModelConfig:
    common: dict[str, Any] = {"vocab_size": 256000, "position": Rotary(), "max_len": 8192}
    config = DecoderConfig(
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        feedforward=Gated(d_ff, "gelu_tanh"),
        norm=RMSNorm(eps=1e-6, offset=1.0),
        embedding=Embedding(scale=math.sqrt(new_width(changes) or d_model)),
        special=Special(bos=2, eos=(1,), pad=0),
        **{**common, **parts},
    )
    return vary(config, changes)


def gemma_2b(**changes: Any) -> ModelConfig:
    """Gemma 2B, 2,506,172,416 parameters. Gemma Team 2024a, table 1; config.json."""
    return _gemma(changes, 2048, 18, Attention(8, 1, 256, bias=False), 16384)


def gemma_7b(**changes: Any) -> ModelConfig:
    """Gemma 7B, 8,537,680,896 parameters. Gemma Team 2024a, table 1; config.json."""
    return _gemma(changes, 3072, 28, Attention(16, 16, 256, bias=False), 24576)


def _gemma2(
    changes: dict[str, Any], d_model: int, n_layers: int, heads: tuple[int, int, int], d_ff: int, scalar: int
) -> ModelConfig:
    n_heads, n_kv_heads, d_head = heads
    even = tuple(range(0, n_layers, 2))
    more: dict[str, Any] = {"scale": scalar**-0.5, "softcap": 50.0, "window": 4096, "window_layers": even}
    attention = Attention(n_heads, n_kv_heads, d_head, bias=False, **more)
    return _gemma(changes, d_model, n_layers, attention, d_ff, placement="sandwich", head=Head(softcap=30.0))


def gemma2_2b(**changes: Any) -> ModelConfig:
    """Gemma 2 2B, 2,614,341,888 parameters. Gemma Team 2024b, table 1; config.json."""
    return _gemma2(changes, 2304, 26, (8, 4, 256), 9216, 256)


def gemma2_9b(**changes: Any) -> ModelConfig:
    """Gemma 2 9B, 9,241,705,984 parameters. Gemma Team 2024b, table 1; config.json."""
    return _gemma2(changes, 3584, 42, (16, 8, 256), 14336, 256)


def gemma2_27b(**changes: Any) -> ModelConfig:
    """Gemma 2 27B, 27,227,128,320 parameters. Gemma Team 2024b, table 1; config.json."""
    return _gemma2(changes, 4608, 46, (32, 16, 128), 36864, 144)


def _gemma3(
    changes: dict[str, Any], d_model: int, n_layers: int, heads: tuple[int, int, int], d_ff: int, *,
    large: bool = False, scalar: int = 256,
) -> ModelConfig:  # fmt: skip
    n_heads, n_kv_heads, d_head = heads
    local = tuple(layer for layer in range(n_layers) if (layer + 1) % 6)
    more: dict[str, Any] = {"scale": scalar**-0.5, "window": 1024 if large else 512, "window_layers": local}
    attention = Attention(n_heads, n_kv_heads, d_head, bias=False, qk_norm=RMSNorm(eps=1e-6, offset=1.0), **more)
    return _gemma(
        *(changes, d_model, n_layers, attention, d_ff),
        placement="sandwich",
        vocab_size=262208 if large else 262144,
        max_len=131072 if large else 32768,
        position=Rotary(base=1e6, scaling=LinearScaling(8.0) if large else None),
        layer_kinds=(LayerKind(local, position=Rotary()),),
    )


def gemma3_270m(**changes: Any) -> ModelConfig:
    """Gemma 3 270M, 268,098,176 parameters. Gemma Team 2025; config.json."""
    return _gemma3(changes, 640, 18, (4, 1, 256), 2048)


def gemma3_1b(**changes: Any) -> ModelConfig:
    """Gemma 3 1B, 999,885,952 parameters. Gemma Team 2025; config.json."""
    return _gemma3(changes, 1152, 26, (4, 1, 256), 6912)


def gemma3_4b(**changes: Any) -> ModelConfig:
    """Gemma 3 4B, the text model, 3,880,263,168 parameters. Gemma Team 2025; config.json."""
    return _gemma3(changes, 2560, 34, (8, 4, 256), 10240, large=True)


def gemma3_12b(**changes: Any) -> ModelConfig:
    """Gemma 3 12B, the text model, 11,766,034,176 parameters. Gemma Team 2025; config.json."""
    return _gemma3(changes, 3840, 48, (16, 8, 256), 15360, large=True)


def gemma3_27b(**changes: Any) -> ModelConfig:
    """Gemma 3 27B, the text model, 27,009,346,304 parameters. Gemma Team 2025; config.json."""
    return _gemma3(changes, 5376, 62, (32, 16, 128), 21504, large=True, scalar=168)


def _decoder(
    changes: dict[str, Any], vocab_size: int, d_model: int, n_layers: int, attention: Attention, part: Gated | MoE,
    **parts: Any,
) -> ModelConfig:  # fmt: skip
    common: dict[str, Any] = {"norm": RMSNorm(), "head": Head(tied=False), "position": Rotary()}
    config = DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        attention=attention,
        feedforward=part,
        **{**common, **parts},
    )
    return vary(config, changes)


def phi3_mini(**changes: Any) -> ModelConfig:
    """Phi-3 mini with 4,096 tokens, 3,821,079,552 parameters. Abdin et al. 2024; config.json."""
    attention = Attention(32, bias=False, window=2047)
    special = Special(bos=1, eos=(32000,), pad=32000)
    return _decoder(
        *(changes, 32064, 3072, 32, attention, Gated(8192)), norm=RMSNorm(1e-5), max_len=4096, special=special
    )


def _qwen3(
    changes: dict[str, Any], d_model: int, n_layers: int, heads: tuple[int, int], part: Gated | MoE, tied: bool
) -> ModelConfig:
    attention = Attention(*heads, d_head=128, bias=False, qk_norm=RMSNorm(1e-6))
    more: dict[str, Any] = {
        "position": Rotary(base=1e6),
        "max_len": 40960,
        "special": Special(bos=151643, eos=(151645,)),
    }
    return _decoder(changes, 151936, d_model, n_layers, attention, part, head=Head(tied=tied), **more)


def qwen3_1_7b(**changes: Any) -> ModelConfig:
    """Qwen3 1.7B, 1,720,574,976 parameters. Yang et al. 2025, table 1; config.json."""
    return _qwen3(changes, 2048, 28, (16, 8), Gated(6144), True)


def qwen3_4b(**changes: Any) -> ModelConfig:
    """Qwen3 4B, 4,022,468,096 parameters. Yang et al. 2025, table 1; config.json."""
    return _qwen3(changes, 2560, 36, (32, 8), Gated(9728), True)


def qwen3_8b(**changes: Any) -> ModelConfig:
    """Qwen3 8B, 8,190,735,360 parameters. Yang et al. 2025, table 1; config.json."""
    return _qwen3(changes, 4096, 36, (32, 8), Gated(12288), False)


def qwen3_14b(**changes: Any) -> ModelConfig:
    """Qwen3 14B, 14,768,307,200 parameters. Yang et al. 2025, table 1; config.json."""
    return _qwen3(changes, 5120, 40, (40, 8), Gated(17408), False)


def qwen3_32b(**changes: Any) -> ModelConfig:
    """Qwen3 32B, 32,762,123,264 parameters. Yang et al. 2025, table 1; config.json."""
    return _qwen3(changes, 5120, 64, (64, 8), Gated(25600), False)


def qwen3_30b_a3b(**changes: Any) -> ModelConfig:
    """Qwen3 30B-A3B, 30,532,122,624 parameters, 3,353,032,704 active. Yang et al. 2025, table 2; config.json."""
    return _qwen3(changes, 2048, 48, (32, 4), MoE(128, 8, Gated(768)), False)


def _olmo2(changes: dict[str, Any], d_model: int, n_layers: int, n_heads: int, d_ff: int) -> ModelConfig:
    attention = Attention(n_heads, bias=False, qk_norm=RMSNorm(1e-6), qk_norm_over="all")
    more: dict[str, Any] = {"position": Rotary(base=500000.0), "max_len": 4096, "placement": "after"}
    special = Special(eos=(100257,), pad=100277)
    return _decoder(changes, 100352, d_model, n_layers, attention, Gated(d_ff), special=special, **more)


def olmo2_1b(**changes: Any) -> ModelConfig:
    """OLMo 2 1B, 1,484,916,736 parameters. OLMo Team 2025; config.json."""
    return _olmo2(changes, 2048, 16, 16, 8192)


def olmo2_7b(**changes: Any) -> ModelConfig:
    """OLMo 2 7B, 7,298,617,344 parameters. OLMo Team 2025; config.json."""
    return _olmo2(changes, 4096, 32, 32, 11008)


def olmo2_13b(**changes: Any) -> ModelConfig:
    """OLMo 2 13B, 13,716,198,400 parameters. OLMo Team 2025; config.json."""
    return _olmo2(changes, 5120, 40, 40, 13824)


def smollm3_3b(**changes: Any) -> ModelConfig:
    """SmolLM3 3B, 3,075,098,624 parameters: every fourth layer has no positions. Its model card; config.json."""
    without = LayerKind(tuple(range(3, 36, 4)), position=NoPosition())
    more: dict[str, Any] = {
        "position": Rotary(base=5e6),
        "max_len": 65536,
        "special": Special(bos=128000, eos=(128012,), pad=128004),
    }
    return _decoder(
        *(changes, 128256, 2048, 36, Attention(16, 4, bias=False), Gated(11008)),
        head=Head(), layer_kinds=(without,), **more,
    )  # fmt: skip


def _gpt_oss(changes: dict[str, Any], n_layers: int, n_experts: int) -> ModelConfig:
    even = tuple(range(0, n_layers, 2))
    attention = Attention(64, 8, 64, sinks=True, window=128, window_layers=even)
    expert = Gated(2880, "quick_gelu", bias=True, limit=7.0, up_offset=1.0)
    yarn = YarnScaling(32.0, 4096, truncate=False)
    return _decoder(
        *(changes, 201088, 2880, n_layers, attention, MoE(n_experts, 4, expert, router=Router(bias=True))),
        norm=RMSNorm(1e-5), position=Rotary(base=150000.0, scaling=yarn), max_len=131072,
        special=Special(eos=(200002,), pad=199999),
    )  # fmt: skip


def gpt_oss_20b(**changes: Any) -> ModelConfig:
    """OpenAI gpt-oss-20b, 20,914,757,184 parameters. Its model card 2025, table 1; config.json."""
    return _gpt_oss(changes, 24, 32)


def gpt_oss_120b(**changes: Any) -> ModelConfig:
    """OpenAI gpt-oss-120b, 116,829,156,672 parameters. Its model card 2025, table 1; config.json."""
    return _gpt_oss(changes, 36, 128)


def deepseek_v3(**changes: Any) -> ModelConfig:
    """DeepSeek-V3 without its prediction of further tokens, 671,026,404,352 parameters.

    DeepSeek-AI 2024, section 4.2; config.json. Latent attention, 256 experts and a shared one from layer 3 on.
    """
    scale = 192**-0.5 * (0.1 * math.log(40.0) + 1) ** 2
    attention = Attention(128, d_head=192, d_value=128, scale=scale, bias=False, latent=Latent(512, 64, 1536))
    router = Router(score="sigmoid", scale=2.5, correction=True, groups=8, top_groups=4)
    moe = MoE(256, 8, Gated(2048), router=router, shared=Gated(2048))
    yarn = YarnScaling(40.0, 4096, attention_factor=1.0)
    return _decoder(
        *(changes, 129280, 7168, 61, attention, moe),
        position=Rotary(pairing="interleaved", fraction=64 / 192, scaling=yarn), max_len=163840,
        layer_kinds=(LayerKind((0, 1, 2), feedforward=Gated(18432)),), special=Special(bos=0, eos=(1,)),
    )  # fmt: skip


def _modernbert(changes: dict[str, Any], d_model: int, n_layers: int, n_heads: int, d_ff: int) -> ModelConfig:
    local = tuple(layer for layer in range(n_layers) if layer % 3)
    config = EncoderConfig(
        vocab_size=50368,
        d_model=d_model,
        n_layers=n_layers,
        attention=Attention(n_heads, bias=False, window=65, window_layers=local),
        feedforward=Gated(d_ff, "gelu"),
        norm=LayerNorm(bias=False),
        position=Rotary(base=160000.0),
        layer_kinds=(LayerKind(local, position=Rotary()),),
        first_norm=False,
        max_len=8192,
        embedding=Embedding(norm=True),
        head=Head(bias=True, transform="gelu", transform_bias=False),
        special=Special(bos=50281, eos=(50282,), pad=50283),
    )
    return vary(config, changes)


def modernbert_base(**changes: Any) -> ModelConfig:
    """ModernBERT base with its masked-LM head, 149,655,232 parameters. Warner et al. 2024, table 4; config.json."""
    return _modernbert(changes, 768, 22, 12, 1152)


def modernbert_large(**changes: Any) -> ModelConfig:
    """ModernBERT large with its masked-LM head, 395,881,664 parameters. Warner et al. 2024, table 4; config.json."""
    return _modernbert(changes, 1024, 28, 16, 2624)


def _bart(changes: dict[str, Any], d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    config = Seq2SeqConfig(
        vocab_size=50265,
        d_model=d_model,
        n_layers=n_layers,
        n_encoder_layers=n_layers,
        attention=Attention(n_heads),
        feedforward=Dense(4 * d_model, "gelu"),
        position=Learned(offset=2),
        placement="post",
        max_len=1024,
        embedding=Embedding(norm=True),
        dropout=0.1,
        special=Special(bos=0, eos=(2,), pad=1, start=2, forced_eos=2),
    )
    return vary(config, changes)


def bart_base(**changes: Any) -> ModelConfig:
    """BART base, 139,420,416 parameters. Lewis et al. 2020, section 4; config.json."""
    return _bart(changes, 768, 6, 12)


def bart_large(**changes: Any) -> ModelConfig:
    """BART large, 406,291,456 parameters. Lewis et al. 2020, section 4; config.json."""
    return _bart(changes, 1024, 12, 16)


RELEASES: tuple[Callable[..., ModelConfig], ...] = tuple(globals()[name] for name in __all__)
