"""Heads: every attention pattern, what each head does, and what the model says without some of them."""

from typing import Any

from glassformer.studio import schema
from glassformer.studio.api.reading import Reading, read, top_tokens
from glassformer.studio.errors import StudioError, TooLargeError
from glassformer.studio.settings import LIMITS
from glassformer.studio.shelf import Shelf
from glassformer.studio.wire import Packet


def patterns(shelf: Shelf, asked: schema.Patterns, most: int = LIMITS.pattern_bytes) -> Packet:
    """Attention of all heads (or of one layer's) as (L,H,T,S), one byte a weight."""
    from glassformer.lens.trace import stacks_of, trace

    reading = read(shelf, asked)
    stack, kind = _where(reading, asked.where)
    layers = stacks_of(reading.model.config)[stack]
    if asked.layer is not None and asked.layer >= layers:
        raise StudioError(f"layer {asked.layer} does not exist in this model: its layers are 0 to {layers - 1}.")
    T = len(reading.ids if reading.target is None or stack == "encoder." else reading.target)
    S = len(reading.ids) if kind == "cross" else T
    size = (1 if asked.layer is not None else layers) * reading.model.config.n_heads * T * S
    if size > most:
        raise TooLargeError(f"these patterns are {size:,} bytes, more than {most:,}: name one layer, or fewer tokens.")
    site = f"{stack}block.{'*' if asked.layer is None else asked.layer}.{kind}.pattern"
    maps = trace(reading.model, reading.tokens, sites=site, **reading.given).stack(site)[:, 0]
    source = [reading.loaded.say(i) for i in reading.ids]
    words = source if stack == "encoder." else reading.words
    meta = {"pieces": words, "keys": source if kind == "cross" else words, "layer": asked.layer, "site": site}
    return Packet({"pattern": (maps, "u8")}, meta, {"pattern": (0.0, 1.0)})


def _where(reading: Reading, where: str) -> tuple[str, str]:
    """(stack, kind of attention)."""
    if reading.target is None:
        if where != "self":
            raise StudioError(f"{where} is a place in an encoder-decoder, which this model is not: ask for self.")
        return "", "attention"
    return {"self": ("decoder.", "attention"), "cross": ("decoder.", "cross")}.get(where, ("encoder.", "attention"))


def scores(shelf: Shelf, asked: schema.HeadScores) -> dict[str, Any]:
    """Scores of every head on repeated random tokens and of its weights; null where one has no meaning."""
    from glassformer.lens.heads import head_table

    loaded = shelf.get(asked.model)

    def make() -> dict[str, Any]:
        table = head_table(loaded.model, seed=asked.seed)
        rows = [{"layer": row.layer, "head": row.head, "scores": row.scores} for row in table.rows]
        return {"rows": rows, "names": list(table.names), "notes": table.notes}

    made: dict[str, Any] = loaded.remember(("heads", asked.seed), make)
    return made


def ablate(shelf: Shelf, asked: schema.Ablate) -> dict[str, Any]:
    """The next token before and after heads are taken out (zero) or replaced by their mean over the text."""
    from glassformer.lens.patch import mean, patch, zero
    from glassformer.lens.trace import trace

    reading = read(shelf, asked)
    config = reading.model.config
    by_layer: dict[int, list[int]] = {}
    for layer, head in asked.heads:
        if layer >= config.n_layers or head >= config.n_heads:
            raise StudioError(
                f"head {layer}.{head} does not exist: layers are 0 to {config.n_layers - 1}, heads 0 to "
                f"{config.n_heads - 1}."
            )
        by_layer.setdefault(layer, []).append(head)
    make = zero if asked.mode == "zero" else mean
    stack = "" if reading.target is None else "decoder."
    edits = {f"{stack}block.{layer}.attention.heads": make(heads=heads) for layer, heads in by_layer.items()}
    before = trace(reading.model, reading.tokens, sites=(), **reading.given).logits[0, -1]
    after = patch(reading.model, reading.tokens, edits, **reading.given)[0, -1]
    old, new = (logits.double().log_softmax(-1) for logits in (before, after))
    return {
        "before": top_tokens(reading.loaded, before, asked.top),
        "after": top_tokens(reading.loaded, after, asked.top),
        "kl": float((old.exp() * (old - new)).sum()),
    }
