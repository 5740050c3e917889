"""Tables of tensor names that many families share."""

from collections.abc import Mapping

from glassformer.weights.convert import CONCATENATED, IDENTITY, Drop, Row, Transform, linear

OURS = "decoder.blocks.{i}"
Block = Mapping[str, str | tuple[str, Transform]]
"""The modules of a block: our names (several if theirs is fused) and their name, or name and memory layout."""

ATTENTION = {f"attention.{x}": f"self_attn.{x}_proj" for x in "qkvo"}
QK_NORMS = {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
GATED = {f"feedforward.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
PRE_NORMS = {"norm_attention": "input_layernorm", "norm_feedforward": "post_attention_layernorm"}
LLAMA: Block = {**PRE_NORMS, **ATTENTION, **QK_NORMS, **GATED}
"""The names of Llama, with norms of queries and keys."""
QKV = "attention.q attention.k attention.v"
GATE_UP = "feedforward.gate feedforward.up"
FUSED_GATE: Block = {GATE_UP: ("mlp.gate_up_proj", CONCATENATED), "feedforward.down": "mlp.down_proj"}

FREQUENCIES = (
    Drop("{p}layers.{i}.self_attn.rotary_emb.inv_freq", "frequencies, stored by old versions"),
    Drop("{p}rotary_emb.inv_freq", "frequencies, stored by old versions"),
)


def names(
    block: Block,
    *,
    layers: str = "{p}layers.{i}",
    embed: str = "embed_tokens",
    norm: str = "norm",
    head: str = "lm_head",
    position: str = "",
    embed_norm: str = "",
) -> tuple[Row, ...]:
    """Return the rows of a decoder: token table, blocks, final norm, head, and what else is given."""
    rows = [Row(f"{{p}}{embed}.weight", ("embed.tokens.weight",))]
    if position:
        rows.append(Row(f"{{p}}{position}.weight", ("decoder.position.weight",)))
    if embed_norm:
        rows += linear(f"{{p}}{embed_norm}", "decoder.embed_norm")
    for ours, theirs in block.items():
        name, transform = (theirs, IDENTITY) if isinstance(theirs, str) else theirs
        rows += linear(f"{layers}.{name}", *(f"{OURS}.{part}" for part in ours.split()), transform=transform)
    rows += linear(f"{{p}}{norm}", "decoder.norm")
    rows.append(Row(f"{head}.weight", ("head.weight",), tied_to=f"{{p}}{embed}.weight"))
    rows.append(Row(f"{head}.bias", ("head.bias",)))
    return tuple(rows)
