"""The activation names of TransformerLens, as other names of our sites.

    trace(model, tokens)["blocks.3.attn.hook_pattern"]          # the same tensor as blocks.3.attention.pattern
    patch(model, tokens, {"blocks.1.attn.hook_z": zero(heads=[2])})

An alias names a site; the tensor keeps our layout. TransformerLens puts the heads after the positions, (B,T,H,K), where
our q, k, v and heads are (B,H,T,K), and it writes a very small number where our scores are -inf.

Some activations of TransformerLens are not computed in this model as a tensor of their own, for example queries before
the rotary rotation. These names are refused with the reason; they never return a different tensor.
"""

from dataclasses import dataclass
from functools import lru_cache

from glassformer import config as c


@dataclass(frozen=True)
class Alias:
    """A name of TransformerLens: the site it means, or why this model has no such tensor."""

    site: str
    refused: str = ""


@lru_cache(maxsize=32)
def aliases_of(config: c.ModelConfig) -> dict[str, Alias]:
    """All TransformerLens names of a decoder-only or encoder-only model; an encoder-decoder has none."""
    if isinstance(config, c.Seq2SeqConfig):
        return {}
    block = _block_aliases(config)
    return {
        "hook_embed": Alias("embed", _embed_refused(config)),
        **{
            f"blocks.{layer}.{name}": _in_layer(alias, layer)
            for layer in range(config.n_layers)
            for name, alias in block
        },
        "ln_final.hook_out": Alias("final", "this model has no final norm: use final" if _is_post(config) else ""),
        "ln_final.hook_normalized": Alias("final", _normalized_refused("final")),
        "hook_unembed": Alias("logits"),
        "unembed.hook_out": Alias("logits"),
    }


def _in_layer(alias: Alias, layer: int) -> Alias:
    return Alias(f"blocks.{layer}.{alias.site}", alias.refused)


def _block_aliases(config: c.ModelConfig) -> list[tuple[str, Alias]]:
    """Aliases of one block, without the prefix blocks.I."""
    post, rotary = _is_post(config), isinstance(config.position, c.Rotary)
    out = "out_normed" if config.placement in ("after", "sandwich") else "out"  # what is added to the residual stream
    before_norm = (
        "with placement='post' it is taken before the norm, and this model records the norm's output" if post else ""
    )
    same = {
        "hook_resid_pre": "resid_pre",
        "attn.hook_v": "attention.v",
        "attn.hook_attn_scores": "attention.scores",
        "attn.hook_pattern": "attention.pattern",
        "attn.hook_z": "attention.heads",
        "hook_attn_out": f"attention.{out}",
        "ln1.hook_out": "resid_mid" if post else "attention.normed",
        "ln2.hook_out": "resid_post" if post else "feedforward.normed",
        "mlp.hook_pre": "feedforward.pre",
        "mlp.hook_post": "feedforward.post",
        "hook_mlp_out": f"feedforward.{out}",
    }
    return [
        *((name, Alias(site)) for name, site in same.items()),
        *((f"attn.hook_{x}", Alias(f"attention.{x}", _projection_refused(config, x))) for x in ("q", "k")),
        *(
            (
                f"attn.hook_rot_{x}",
                Alias(f"attention.{x}", "" if rotary else f"this model has no rotary positions: use attn.hook_{x}"),
            )
            for x in ("q", "k")
        ),
        *((f"hook_{x}", Alias(x, before_norm and f"{before_norm}: use {x}")) for x in ("resid_mid", "resid_post")),
        ("ln1.hook_normalized", Alias("attention.normed", _normalized_refused("attention.normed"))),
        ("ln2.hook_normalized", Alias("feedforward.normed", _normalized_refused("feedforward.normed"))),
    ]


def _is_post(config: c.ModelConfig) -> bool:
    return config.placement == "post"


def _projection_refused(config: c.ModelConfig, x: str) -> str:
    """TransformerLens records the projection; our q and k are recorded after QK-norm and rotation."""
    if isinstance(config.position, c.Rotary):
        return f"it is taken before the rotary rotation, and this model records {x} after it: use attn.hook_rot_{x}"
    if config.attention.qk_norm:
        return f"it is taken before QK-norm, and this model records {x} after it: use attention.{x}"
    return ""


def _embed_refused(config: c.ModelConfig) -> str:
    """TransformerLens records the token embedding; our site is the input of the first block."""
    added = isinstance(config.position, c.Learned | c.Sinusoidal) or config.embedding.n_segments > 0
    if config.embedding.width is not None:
        return "it is the token embedding alone, and this model records it projected to the model's width: use embed"
    return (
        "it is the token embedding alone, and this model records the sum with the positions: use embed" if added else ""
    )


def _normalized_refused(site: str) -> str:
    return f"it is the value before the norm's weight and bias, which is not a tensor of its own here: use {site}"
