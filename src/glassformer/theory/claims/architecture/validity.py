"""When a key/value cache is valid: not only with a causal mask, and not always with one."""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens import trace
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.model import DecoderLM, masks
from glassformer.reference import random_params
from glassformer.shapes import Bool, Int
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import (
    SEQUENCE,
    decoder,
    model_with,
    random_tokens,
    seq2seq,
    small_config,
    unmasked,
)

Masks = NDArray[np.bool_]
"""(N,n,n): True where a query (row) sees a key (column)."""
CASES = {(3, 1): 64, (3, 2): 24, (3, 3): 23, (4, 2): 480}
"""Tokens and layers: how many of all masks with a full diagonal keep a cache right."""
SAME, OTHER = 1e-10, 1e-6
"""Float64 rounding stays below the first; a changed state exceeds the second."""


def all_masks(n: int) -> Masks:
    """Every mask in which each token sees itself: 2^(n(n-1)) of them."""
    free = [(i, j) for i in range(n) for j in range(n) if i != j]
    made = np.zeros((2 ** len(free), n, n), dtype=bool)
    made[:, range(n), range(n)] = True
    for (i, j), column in zip(free, np.array(list(itertools.product((False, True), repeat=len(free)))).T, strict=True):
        made[:, i, j] = column
    return made


def is_causal(m: Masks) -> NDArray[np.bool_]:
    future = np.triu(np.ones(m.shape[1:], dtype=bool), 1)
    return np.asarray(~(m & future).any((1, 2)))


def valid_by_rule(m: Masks, n_layers: int) -> NDArray[np.bool_]:
    """The graph rule, for every mask at once.

    At step t the state of token s after layer l is not what was stored when s arrived if it was so one layer below, if
    s sees a token that came since (s < u <= t), or if s read such a state. Right are the caches in which the newest
    token's last state is never one of these.
    """
    n = m.shape[1]
    valid = np.ones(len(m), dtype=bool)
    for t in range(n):
        grew = np.stack([m[:, s, s + 1 : t + 1].any(1) for s in range(t + 1)], 1)
        changed = np.zeros((len(m), t + 1), dtype=bool)
        for _ in range(n_layers):
            read = np.stack([(m[:, s, : s + 1] & changed[:, : s + 1]).any(1) for s in range(t + 1)], 1)
            changed = changed | grew | read
        valid &= ~changed[:, t]
    return valid


class Outcome(NamedTuple):
    """All masks of one size, through the engine."""

    gaps: NDArray[np.float64]
    """Largest difference of cached and recomputed logits, by mask."""
    rule: NDArray[np.bool_]
    causal: NDArray[np.bool_]

    @property
    def valid(self) -> NDArray[np.bool_]:
        return np.asarray(self.gaps < SAME)


@lru_cache(maxsize=8)
@torch.no_grad()
def outcome(n: int, n_layers: int, seed: int) -> Outcome:
    """One batch row per mask: tokens arrive one by one with a cache, and each prefix is computed again without it."""
    made = all_masks(n)
    pattern = torch.from_numpy(made)
    model = decoder(n_layers, seed)
    tokens = torch.tensor([SEQUENCE[:n]]).expand(len(made), n)
    cache, gaps = model.new_cache(), torch.zeros(len(made), dtype=torch.float64)
    for t in range(n):
        cached = model(tokens[:, t : t + 1], mask=pattern[:, t : t + 1, : t + 1], cache=cache)[:, 0]
        full = model(tokens[:, : t + 1], mask=pattern[:, : t + 1, : t + 1])[:, -1]
        gaps = torch.maximum(gaps, (cached - full).abs().amax(-1))
    return Outcome(gaps.numpy(), valid_by_rule(made, n_layers), is_causal(made))


@claim("kv-cache-validity")
def kv_cache_validity(lab: Lab) -> Iterator[Finding]:
    for (n, layers), expected in CASES.items():
        found = outcome(n, layers, lab.seed)
        rule = found.causal if lab.broken else found.rule
        between = int(((found.gaps >= SAME) & (found.gaps <= OTHER)).sum())
        wrong = int((found.valid != rule).sum()) + between
        numbers = {"valid": int(found.valid.sum()), "causal": int(found.causal.sum()), "all": len(found.gaps)}
        yield lab.exhaustive(f"rule, n={n}, L={layers}", wrong, len(found.gaps), **numbers)
        causal_ones = found.causal & ~found.valid
        holds = numbers["valid"] == expected and numbers["causal"] == 2 ** (n * (n - 1) // 2) and not causal_ones.any()
        yield lab.exhaustive(f"count, n={n}, L={layers}", int(not holds), 1, expected=expected, **numbers)
    yield from _valid_without_a_causal_mask(lab)
    yield from _first_layer(lab)
    yield from _windows(lab)
    yield from _invalid_under_a_causal_mask(lab)


@torch.no_grad()
def cached_gap(
    model: DecoderLM, tokens: Int[Tensor, "B T"], pattern: Bool[Tensor, "B T T"], pieces: list[int]
) -> float:
    """Tokens arrive in pieces of these lengths, a cache between them, against one pass over all."""
    cache, at, found = model.new_cache(), 0, []
    for size in pieces:
        to = at + size
        found.append(model(tokens[:, at:to], mask=pattern[:, at:to, :to], cache=cache))
        at = to
    return max_difference(torch.cat(found, 1), model(tokens, mask=pattern))


def _valid_without_a_causal_mask(lab: Lab) -> Iterator[Finding]:
    model, tokens = decoder(3, lab.seed), torch.tensor([SEQUENCE])
    prefix = masks.prefix(torch.tensor([4]), 8)
    pieces = [1] * 8 if lab.broken else [4, 1, 1, 1, 1]
    yield lab.numerical("prefix-LM", cached_gap(model, tokens, prefix, pieces), SAME)
    chunk = torch.arange(8) // 2
    chunks = (chunk[None, :] <= chunk[:, None])[None]
    pieces = [1] * 8 if lab.broken else [2] * 4
    yield lab.numerical("causal by chunk", cached_gap(model, tokens, chunks, pieces), SAME)
    both, source = seq2seq(2, lab.seed), torch.tensor([SEQUENCE[:6]])
    with torch.no_grad():
        cache = both.new_cache()
        steps = torch.cat([both(source, tokens[:, t : t + 1], cache=cache) for t in range(5)], 1)
        gap = max_difference(steps, both(source, tokens[:, :5]))
    yield lab.numerical("cross-attention", gap, SAME)


def _first_layer(lab: Lab) -> Iterator[Finding]:
    """Without a mask, what layer 1 stores of a token remains valid; what layer 2 stores does not."""
    model, tokens = unmasked(decoder(2, lab.seed)), torch.tensor([SEQUENCE[:4]])
    early, late = (trace(model, tokens[:, :n], sites="blocks.*.attention.k") for n in (2, 4))
    moved = [
        max_difference(early[f"blocks.{i}.attention.k"], late[f"blocks.{i}.attention.k"][:, :, :2]) for i in (0, 1)
    ]
    yield lab.numerical("no mask: stored keys of layer 1 stand", moved[0], 1e-12)
    yield lab.numerical("no mask: stored keys of layer 2 do not", moved[1], None, low=OTHER)


@torch.no_grad()
def _windows(lab: Lab) -> Iterator[Finding]:
    """A rolling cache is the band mask; reading the last w tokens again is not, L(w-1)+1 of them are."""
    layers = w = 3
    n, reach = 20, layers * (w - 1) + 1
    config = c.Attention(2, window=w)
    model = decoder(layers, lab.seed, attention=config, position=c.Rotary())
    tokens = random_tokens(lab.rng(), 1, n, 7)
    whole = model(tokens)
    cache = model.new_cache("windowed")
    rolling = torch.cat([model(tokens[:, t : t + 1], cache=cache) for t in range(n)], 1)
    yield lab.numerical("window: rolling cache", max_difference(rolling, whole), SAME, window=w, layers=layers)

    def read_again(count: int) -> float:
        positions = torch.arange(n - count, n)[None]
        return max_difference(model(tokens[:, -count:], positions=positions)[0, -1], whole[0, -1])

    yield lab.numerical("window: the last w read again", read_again(w), None, low=1e-3)
    yield lab.numerical("window: L(w-1) read again", read_again(reach - 1), None, low=OTHER)
    yield lab.numerical("window: L(w-1)+1 read again", read_again(reach), SAME)


@torch.no_grad()
def _invalid_under_a_causal_mask(lab: Lab) -> Iterator[Finding]:
    tokens, known = torch.tensor([SEQUENCE]), 4
    plain = small_config(position=c.Rotary())
    params = random_params(plain, lab.seed, 0.5)

    def at_length(n: int) -> DecoderLM:
        """Dynamic NTK: beyond the known length the base grows with the length of the text."""
        base = 10.0 * max(1.0, n / known) ** (4 / 2)
        model = model_with(small_config(position=c.Rotary(base=base)), params)
        assert isinstance(model, DecoderLM)
        return model

    cache, gaps = at_length(1).new_cache(), []
    for t in range(8):
        model = at_length(t + 1)
        cached = model(tokens[:, t : t + 1], cache=cache)[0, -1]
        gaps.append(max_difference(cached, model(tokens[:, : t + 1])[0, -1]))
    shown = [float(f"{gap:.2g}") for gap in gaps]
    yield lab.numerical("dynamic NTK: up to the known length", max(gaps[:known]), SAME, gaps=shown)
    yield lab.numerical("dynamic NTK: beyond it", min(gaps[known:]), None, low=OTHER)
    model = decoder(1, lab.seed, position=c.Learned(), max_len=8)
    cache = model.new_cache()
    model(tokens[:, :7], cache=cache)
    without_first = torch.ones(1, 1, 8, dtype=torch.bool)
    without_first[..., 0] = False
    kept = model(tokens[:, 7:], mask=without_first, positions=torch.tensor([[6]]), cache=cache)[0, -1]
    again = model(tokens[:, 1:])[0, -1]
    yield lab.numerical("re-indexed positions", max_difference(kept, again), None, low=OTHER)


@figure("kv-cache-validity", "Masks under which a cache is right", height=3.0)
def draw_validity(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_mask

    bars, example = fig.canvas.subplots(1, 2, width_ratios=(2, 1))
    for group, (n, layers) in enumerate(CASES):
        found = outcome(n, layers, lab.seed)
        counts = {"all": len(found.gaps), "valid": int(found.valid.sum()), "causal": int(found.causal.sum())}
        for shift, ((name, count), colour) in enumerate(
            zip(counts.items(), (GREY, COLOURS[2], COLOURS[0]), strict=True)
        ):
            x = group + 0.27 * (shift - 1)
            bars.bar(x, count, 0.25, color=colour, label=name if group == 0 else None)
            bars.text(x, count * 1.08, str(count), ha="center", fontsize=7)
    bars.set(yscale="log", ylim=(1, 20000), ylabel="masks with a full diagonal")
    bars.set_xticks(range(len(CASES)), [f"n={n}, L={layers}" for n, layers in CASES])
    bars.legend(ncols=3, loc="upper left")
    found, made = outcome(3, 2, lab.seed), all_masks(3)
    odd = made[found.valid & ~found.causal]
    shown = odd[np.argmax(odd.sum((1, 2)))]
    draw_mask(example, shown, "sees")
    example.set(title="valid, not causal (L=2)", xlabel="key", ylabel="query", xticks=range(3), yticks=range(3))
