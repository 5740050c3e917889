"""The healthy ward: subjects on which the doctor must stay quiet, or say only the note that belongs to them.

for subject in WARD:
    gf.diagnose(subject.build(), kind=subject.kind, vocab_size=subject.vocab_size).healthy
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.config import presets
from glassformer.model import build as build_glass
from tests.bugs import healthy_transformers as hf
from tests.bugs import healthy_traps as traps
from tests.bugs.base import Config, make
from tests.bugs.bug import spelled_hf, spelled_nanogpt

V = 97


@dataclass(frozen=True)
class Healthy:
    """A correct model. `run` gives its logits of tokens (an encoder-decoder: of source and target)."""

    id: str
    build: Callable[[], object]
    run: Callable[..., Tensor]
    family: str
    kind: str = "decoder"
    vocab_size: int = V
    note: str | None = None
    """The finding that is real and to be explained, not an alarm: left_pad_position."""
    trap: int | None = None
    """Its number in the list of traps, where it stands for one."""
    expect: Mapping[str, object] = field(default_factory=dict)
    """Intent that has to be declared."""
    words: str = ""


def plainly(model: object, *tokens: Tensor) -> Tensor:
    return model(*tokens)


def _own(id: str, cfg: Config, trap: int | None = None, words: str = "", after: Callable | None = None) -> Healthy:
    def built() -> object:
        model = make(cfg)
        if after is not None:
            after(model)
        return model

    return Healthy(f"base-{id}", built, plainly, "base", cfg.kind, trap=trap, words=words)


LLAMA = Config(position="rotary", norm="rmsnorm", activation="swiglu", n_kv_heads=2)
ENCODER, PAIR = Config(kind="encoder"), Config(kind="seq2seq")
BASE = (
    _own("learned", Config(), trap=3),
    _own("learned-long", Config(max_len=256, d_model=32, n_layers=2)),
    _own("gelu-tanh", Config(activation="gelu_tanh")),
    _own("llama-like", LLAMA, trap=5),
    _own("rotary-halves", Config(position="rotary")),
    _own("rotary-interleaved", Config(position="rotary", rope_pairing="interleaved")),
    _own("rotary-base", Config(position="rotary", rope_base=500000.0)),
    _own("alibi", Config(position="alibi"), trap=5),
    _own("alibi-fused", Config(position="alibi", fused=True)),
    _own("sinusoidal", Config(position="sinusoidal")),
    _own("nope", Config(position="none"), trap=6),
    _own("rmsnorm", Config(norm="rmsnorm", norm_eps=1e-6)),
    _own("post-norm", Config(norm_placement="post"), trap=13),
    _own("parallel", Config(position="rotary", norm_placement="parallel"), trap=13),
    _own("multi-query", replace(LLAMA, n_kv_heads=1), trap=13),
    _own("untied", Config(tie_weights=False), trap=13),
    _own("fused", replace(LLAMA, fused=True), trap=13),
    _own("window", Config(position="rotary", window=8)),
    _own("window-fused", Config(window=5, fused=True)),
    _own("deep", Config(n_layers=4, d_model=32)),
    _own("dropout", Config(dropout=0.2)),
    _own("dropout-fused", Config(dropout=0.1, fused=True, position="rotary")),
    _own("in-train-mode", Config(dropout=0.1), trap=14, after=lambda m: m.train()),
    _own("unscaled-scores", Config(attention_scale=1.0), trap=7, words="declared: no scaling"),
    _own("mup-scale", Config(attention_scale=1 / 12), trap=7, words="declared: 1/d_head"),
    _own("finite-mask", Config(mask_fill="min", see_self=False), trap=10, words="padding rows see padding"),
    _own("bfloat16", LLAMA, trap=11, after=lambda m: m.bfloat16()),
    _own("float64", Config(), after=lambda m: m.double()),
    _own("spelled-like-hf", LLAMA, after=spelled_hf),
    _own("spelled-like-nanogpt", Config(), after=spelled_nanogpt),
    _own("encoder", ENCODER),
    _own("encoder-rotary", replace(ENCODER, position="rotary", norm="rmsnorm")),
    _own("encoder-post", replace(ENCODER, norm_placement="post")),
    _own("encoder-alibi", replace(ENCODER, position="alibi")),
    _own("pair-learned", PAIR),
    _own("pair-rotary", replace(PAIR, position="rotary", norm="rmsnorm", activation="swiglu")),
    _own("pair-post", replace(PAIR, norm_placement="post", position="sinusoidal")),
    _own("pair-fused", replace(PAIR, fused=True)),
)


def tiny(preset: Callable[..., c.ModelConfig]) -> c.ModelConfig:
    """A preset's parts at a size that builds in milliseconds."""
    small = {"vocab_size": V, "d_model": 48, "n_layers": 2, "n_heads": 4, "d_head": 16}
    published = preset()
    small["n_kv_heads"] = None if published.attention.n_kv_heads is None else 2
    if published.max_len is not None:
        small["max_len"] = 128
    if published.attention.window is not None:
        small["window"] = 8
    if isinstance(published.feedforward, c.MoE):
        expert = c.Gated(40, published.feedforward.expert.activation)
        small["feedforward"] = c.MoE(n_experts=4, n_active=2, expert=expert)
    else:
        small["d_ff"] = 80
    if isinstance(published, c.Seq2SeqConfig):
        small["n_encoder_layers"] = 2
    return preset(**small)


def _glass(id: str, config: Callable[[], c.ModelConfig], trap: int | None = None) -> Healthy:
    return Healthy(f"glass-{id}", lambda: build_glass(config()), plainly, "glassformer", config().kind, trap=trap)


LATER = ("bart_", "deepseek_", "gemma", "gpt_oss_", "modernbert_", "olmo2_", "phi3_", "pythia_", "smollm3_")
QWEN3 = [name for name in presets.ALL if name.startswith("qwen3_") and name != "qwen3_0_6b"]
FIRST_PRESETS = {name: preset for name, preset in presets.ALL.items() if not name.startswith((*LATER, *QWEN3))}
"""The families of the others are examined in tests/doctor/test_every_family.py."""
NANO = tiny(presets.nano)
GLASS = (
    *(_glass(name, lambda preset=preset: tiny(preset)) for name, preset in FIRST_PRESETS.items()),
    _glass("t5-bias-decoder", lambda: c.replace(NANO, position=c.T5Bias(buckets=8, max_distance=20))),
    _glass("nope", lambda: c.replace(NANO, position=c.NoPosition()), trap=6),
    _glass("infused", lambda: c.replace(NANO, position=c.QueryKeyPosition())),
    _glass("attention-only", lambda: c.replace(NANO, feedforward=c.NoFeedForward())),
    _glass("qk-norm-post", lambda: c.replace(NANO, qk_norm=c.RMSNorm(), placement="post")),
    _glass("window-in-one-layer", lambda: c.replace(NANO, window=8, window_layers=(1,))),
    _glass("yarn", lambda: c.replace(NANO, position=c.Rotary(scaling=c.YarnScaling(factor=4.0, original_max_len=32)))),
)


def hf_logits(model: object, *tokens: Tensor) -> Tensor:
    if len(tokens) == 2:
        return model(input_ids=tokens[0], decoder_input_ids=tokens[1]).logits
    return model(input_ids=tokens[0]).logits


def _hf(name: str, kind: str) -> Healthy:
    note = "left_pad_position" if name in hf.LEFT_PADDING_MOVES_POSITIONS else None
    trap = {"roberta": 2, "t5": 4, "mistral_window": 8, "gemma2_window": 8, "mixtral": 11, "gpt_neo": 7}.get(name)
    if note and trap is None:
        trap = 1
    made = hf.KINDS[kind][name]
    return Healthy(f"hf-{name}", lambda: hf.build(made), hf_logits, "transformers", kind, note=note, trap=trap)


TRANSFORMERS = tuple(_hf(name, kind) for kind, names in hf.KINDS.items() for name in names)


def nano_logits(model: object, idx: Tensor) -> Tensor:
    return model(idx, idx)[0]


def dict_logits(model: object, idx: Tensor) -> Tensor:
    return model(idx)["logits"]


def _odd(id: str, built: Callable[[], object], run: Callable[..., Tensor] = plainly, **facts: object) -> Healthy:
    return Healthy(f"odd-{id}", built, run, "odd", **facts)


ODD = (
    _odd("nanogpt-style", traps.nano_style, nano_logits, words="(logits, loss), cropped without targets"),
    _odd("dict-output", lambda: traps.DictOutput(make(LLAMA)), dict_logits),
    _odd("tokens-only", lambda: traps.TokensOnly(make(Config())), words="no mask, positions, cache or config"),
    _odd("plain-callable", traps.plain_callable),
    _odd("torch-pre-norm", lambda: traps.torch_style(True)),
    _odd("torch-post-norm", lambda: traps.torch_style(False)),
    _odd(
        "prefix-lm",
        lambda: traps.TokensOnly(traps.changed(Config(), "", traps.PrefixLM)),
        expect={"prefix-lm": 8},
        words="the first 8 tokens see one another",
    ),
    _odd("pad-derived-positions", lambda: traps.changed(ENCODER, "", traps.PadDerived), kind="encoder", trap=2),
    _odd("rolling-cache", traps.rolling, trap=8),
    _odd(
        "alibi-slope-times-key",
        lambda: traps.changed(Config(position="alibi"), "*.attention", traps.SlopeTimesKey),
        trap=9,
    ),
    _odd("qk-norm-learned-scale", traps.qk_norm, trap=7),
    _odd("soft-cap", lambda: traps.changed(LLAMA, "*.attention", traps.SoftCap)),
    _odd("squared-relu", lambda: traps.TokensOnly(traps.changed(Config(), "*.mlp", traps.SquaredRelu))),
    _odd("sharp-attention", traps.sharp, trap=12),
    _odd("trained", traps.trained, trap=12),
    _odd("zero-init-projections", traps.zero_init),
    _odd("frozen-embedding", traps.frozen_embedding),
    _odd("shared-layers", traps.shared_layers),
    _odd("reloaded", traps.reloaded, trap=13),
    _odd("scaled-embedding", traps.embedding_scaled),
    _odd("shared-key-value", traps.shared_key_value, words="no projection of values: they are the keys by design"),
    _odd("talking-heads", traps.talking_heads),
    _odd("learned-exponent", traps.gated_weights),
    _odd("masked-afterwards", lambda: traps.changed(Config(), "*.attention", traps.MaskedAfterwards)),
    _odd("closure-blocks", traps.closure_blocks, nano_logits, words="a deep copy computes with the original's modules"),
)

WARD: tuple[Healthy, ...] = BASE + GLASS + TRANSFORMERS + ODD


def tokens_for(subject: Healthy, rows: int = 2, length: int = 20, seed: int = 1) -> tuple[Tensor, ...]:
    """What `subject.run` takes: tokens, or source and target. Small ids have meanings in some vocabularies."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(3, subject.vocab_size, (rows, length), generator=generator)
    if subject.kind != "seq2seq":
        return (made,)
    return torch.randint(3, subject.vocab_size, (rows, 11), generator=generator), made
