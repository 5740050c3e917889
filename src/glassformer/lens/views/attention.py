"""Views of attention: patterns, head scores, and the induction head."""

from typing import Any

import torch
from torch import Tensor

from glassformer import config as c
from glassformer.errors import nearest, plural
from glassformer.lens import figures
from glassformer.lens.figure import Figure
from glassformer.lens.heads import LONGEST, head_table, repeated_inputs
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from glassformer.lens.views.subject import Choice, Subject, View, index, pick
from glassformer.model import DecoderLM

MOST_NUMBERS = 1_000_000
"""Largest number of attention weights that are returned as numbers; more are only drawn."""
HEAD_SCORES = ("induction", "previous_token", "duplicate_token", "first_token", "relative_entropy", "copying")
"""The scores that are drawn by default."""


def attention(subject: Subject, choice: Choice) -> View:
    """Show the attention patterns of all heads, of one layer's heads, or of one head."""
    config = subject.model.config
    where = pick("attention", choice, "self", "encoder", "decoder", "cross")
    if isinstance(config, c.Seq2SeqConfig):
        where = choice.show or "cross"
        if where == "self":
            raise LensError("an encoder-decoder has three kinds of attention: show encoder, decoder or cross.")
    elif where != "self":
        raise LensError(
            f"{where} attention exists only in an encoder-decoder, which this model is not: leave out --show."
        )
    L = config.n_encoder_layers if isinstance(config, c.Seq2SeqConfig) and where == "encoder" else config.n_layers
    layer, head = index("layer", choice.layer, L), index("head", choice.head, config.n_heads)
    if layer is None and head is not None:
        layer = 0 if L == 1 else None
        if layer is None:
            raise LensError(f"head {head} exists in every layer: give --layer too, 0 to {L - 1}.")
    prefix, kind = {"self": ("", "attention"), "cross": ("decoder.", "cross")}.get(where, (f"{where}.", "attention"))
    site = f"{prefix}blocks.{'*' if layer is None else layer}.{kind}.pattern"
    maps = trace(subject.model, subject.tokens, sites=site, **subject.given).stack(site)[:, 0]  # (L, H, T, S)
    if head is not None:
        maps = maps[:, head : head + 1]
    source = [subject.say(i) for i in subject.ids]
    queries, keys = (source if where == "encoder" else subject.words), (source if where == "cross" else None)
    named = "" if where == "self" else f"{where} "

    def draw() -> Figure:
        if head is not None:
            title = f"{subject.name}: {named}attention of head {head} in layer {layer}"
            return figures.attention_head(maps[0, 0], queries, keys, title=title)
        T, S = maps.shape[2:]
        heads = maps.shape[0] * maps.shape[1]
        scope = f"the heads of layer {layer}" if layer is not None else f"all {heads} heads" if heads > 1 else "1 head"
        sides = f"{T} {'query' if T == 1 else 'queries'} (down) by {plural(S, 'key')} (right)"
        title = f"{subject.name}: {named}attention of {scope}, {sides}"
        return figures.attention_sheet(maps, queries, title=title, layers=None if layer is None else [layer])

    numbers = {"site": site, "head": head, "queries": queries, "keys": keys or queries, "shape": list(maps.shape)}
    return View({**numbers, "pattern": _weights(maps)}, draw)


def _weights(maps: Tensor) -> list[Any] | None:
    """Return the weights as lists, or None if there are too many."""
    return maps.tolist() if maps.numel() <= MOST_NUMBERS else None


def heads(subject: Subject, choice: Choice) -> View:
    """Show the scores of every head on repeated random tokens, and on the text if there is one."""
    text = subject.tokens if subject.ids else None
    table = head_table(subject.model, text, seed=choice.seed)
    if choice.show is not None and choice.show not in table.names:
        hint = nearest(choice.show, table.names, others="Scores:")
        raise LensError(f"{choice.show!r} is not a score.{hint}")
    names = [choice.show] if choice.show else [name for name in HEAD_SCORES if name in table.names]

    def draw() -> Figure:
        grids = {name: table.score(name) for name in names}
        shown = {n.replace("_", " "): None if bool(g.isnan().all()) else g for n, g in grids.items()}
        return figures.head_scores(shown, title=f"{subject.name}: head scores (layers down, heads right)")

    return View(table.to_dict(), draw)


def induction(subject: Subject, choice: Choice) -> View:
    """Show the strongest induction head (or the chosen one) on a random block and its copy, or on the text."""
    model, config = subject.model, subject.model.config
    pick("induction", choice, "stripe")
    if not isinstance(model, DecoderLM):
        raise LensError(
            f"{subject.name} is not a decoder-only model: induction needs tokens that see only earlier tokens."
        )
    layer, head = index("layer", choice.layer, config.n_layers), index("head", choice.head, config.n_heads)
    scores = head_table(model, seed=choice.seed, weights=False).score("induction")
    open_layers = range(config.n_layers) if layer is None else [layer]
    open_heads = range(config.n_heads) if head is None else [head]
    best = max(((i, j) for i in open_layers for j in open_heads), key=lambda at: float(scores[at].nan_to_num(-1.0)))
    ids = list(subject.ids) or _repeated_row(config, choice.seed)
    if len(set(ids)) == len(ids):
        raise LensError("no token of the text occurs twice, so there is no repetition to continue: give another text.")
    site = f"blocks.{best[0]}.attention.pattern"
    pattern = trace(model, torch.tensor([ids]), sites=site)[site][0, best[1]]
    words = [subject.say(i) for i in ids]

    def draw() -> Figure:
        title = f"{subject.name}: head {best[1]} in layer {best[0]}; framed: where an induction head attends"
        return figures.induction_stripe(pattern, ids, words, title=title)

    found = {"layer": best[0], "head": best[1], "score": _plain(scores[best])}
    return View({**found, "scores": _grid(scores), "tokens": ids, "words": words, "pattern": _weights(pattern)}, draw)


def _repeated_row(config: c.ModelConfig, seed: int) -> list[int]:
    length = min(LONGEST, (config.max_len or LONGEST + 1) - (config.special.bos is not None))
    row: list[int] = repeated_inputs(config, 1, length, seed=seed)[0].tolist()
    return row


def _plain(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)


def _grid(values: Tensor) -> list[list[float | None]]:
    return [[_plain(value) for value in row] for row in values]
