"""What a bug of the zoo is, and how one is planted: a healthy model in which one class is exchanged for a sick one.

The healthy twin has the same config, seed and weights, so that whatever differs is the bug.
"""

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

from torch import nn

from tests.bugs.base import Cache, Config, make

TAXONOMY = (
    *("causal_leak", "mask_value", "over_mask", "window"),
    *(
        "cache_mismatch",
        "decode_position",
        "cache_mask",
        "cache_rollback",
        "cache_reorder",
        "decode_select",
        "state_leak",
    ),
    *("position_missing", "position_train_infer", "rope_relative", "rope_pairing", "rope_values"),
    *("attn_scale", "softmax_axis", "attention_weights", "head_layout"),
    *("pad_leak", "left_pad_position", "batch_variance", "mask_nan"),
    *("norm_placement", "norm_eps", "norm_axis", "activation", "residual_growth"),
    "eval_stochastic",
    *("weight_tying", "label_shift", "loss_padding", "init_loss", "dead_gradient"),
    *("layer_reuse", "position_twice", "low_precision", "constant_logits"),
)
"""Every diagnosis."""


@dataclass(frozen=True)
class Bug:
    """A model broken in one known way."""

    id: str
    diagnosis: str
    words: str
    build: Callable[[], nn.Module]
    healthy: Callable[[], nn.Module]
    """The same model without the bug."""
    also: tuple[str, ...] = ()
    """Names a fair judge accepts too."""
    layer: int | None = None
    kind: str = "decoder"
    catalogue: tuple[int, ...] = ()
    """Reported bugs this one stands for, by their number in the catalogue."""
    expect: Mapping[str, object] = field(default_factory=dict)
    """Declared intent, beyond what the config says."""
    reference: Callable[[], nn.Module] | None = None
    """For what only a comparison can tell: the model it should equal."""
    special: str | None = None
    """The condition under which alone it shows: batch, train, padding, long, ..."""


def plant(
    id: str,
    diagnosis: str,
    words: str,
    cfg: Config = Config(),
    *,
    at: Mapping[str, type] | None = None,
    cache: type[Cache] | None = None,
    tamper: Callable[[nn.Module], None] | None = None,
    dress: Callable[[nn.Module], None] | None = None,
    warm: float = 1.0,
    compared: bool = False,
    **facts: object,
) -> Bug:
    """A bug from its parts.

    `at` says which modules (a pattern over their paths; "" is the model) become instances of which sick class, `cache`
    which cache class is used, `tamper` what else is done to the sick model; `dress` is done to both twins.
    """

    def healthy() -> nn.Module:
        model = make(cfg, warm=warm)
        if dress is not None:
            dress(model)
        return model

    def build() -> nn.Module:
        model = healthy()
        for pattern, sick in (at or {}).items():
            chosen = [m for name, m in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
            assert chosen, f"{id}: no module matches {pattern!r}"
            for module in chosen:
                module.__class__ = sick
        if cache is not None:
            model.cache_class = cache
        if tamper is not None:
            tamper(model)
        return model

    reference = healthy if compared else None
    return Bug(id, diagnosis, words, build, healthy, kind=cfg.kind, reference=reference, **facts)


def spelled_hf(model: nn.Module) -> None:
    """The same facts under the names of a Hugging Face config."""
    cfg: Config = model.cfg
    model.config = SimpleNamespace(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.d_model,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        intermediate_size=cfg.d_ff,
        max_position_embeddings=cfg.max_len,
        position_embedding_type={"learned": "absolute"}.get(cfg.position, cfg.position),
        rope_theta=cfg.rope_base,
        hidden_act={"gelu_tanh": "gelu_new", "swiglu": "silu"}.get(cfg.activation, cfg.activation),
        sliding_window=cfg.window,
        tie_word_embeddings=cfg.tie_weights,
        initializer_range=cfg.init_std,
        **{"rms_norm_eps" if cfg.norm == "rmsnorm" else "layer_norm_eps": cfg.norm_eps},
    )


def spelled_nanogpt(model: nn.Module) -> None:
    """The same facts under the names of nanoGPT, which has no others."""
    cfg: Config = model.cfg
    model.config = SimpleNamespace(
        block_size=cfg.max_len,
        vocab_size=cfg.vocab_size,
        n_layer=cfg.n_layers,
        n_head=cfg.n_heads,
        n_embd=cfg.d_model,
        dropout=cfg.dropout,
        bias=True,
    )
