"""Which output depends on which input: the three architectures, a decoder without its mask, and the use of the mask."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor

from glassformer.doctor.probes.causality import leak_matrix
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Finding
from glassformer.lens import trace
from glassformer.lens.figure import Figure
from glassformer.model import EncoderLM, Model
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import (
    SEQUENCE,
    decoder,
    dependence,
    encoder,
    full_mask,
    seq2seq,
    unmasked,
)
from glassformer.training.data.batches import IGNORED, mask_tokens

SOURCE, TARGET = 6, 5
SEEN = 1e-8
"""Derivatives above this count as non-zero; without a path they are exactly 0."""


def patterns(lab: Lab) -> dict[str, tuple[Tensor, Tensor]]:
    """By name: max |d output_i / d input_j|, and where it may differ from 0."""
    tokens = torch.tensor([SEQUENCE[:SOURCE]])
    target = tokens[:, :TARGET].flip(1)
    triangle = torch.ones(SOURCE, SOURCE, dtype=torch.bool).tril()
    both = seq2seq(seed=lab.seed)
    mask = full_mask(tokens) if lab.broken else None
    return {
        "encoder-only": (dependence(encoder(seed=lab.seed), tokens), torch.ones_like(triangle)),
        "decoder-only": (dependence(decoder(seed=lab.seed), tokens, mask=mask), triangle),
        "encoder-decoder, source": (
            dependence(both, tokens, "encoder.embed", target=target),
            torch.ones(TARGET, SOURCE, dtype=torch.bool),
        ),
        "encoder-decoder, target": (
            dependence(both, tokens, "decoder.embed", target=target),
            triangle[:TARGET, :TARGET],
        ),
    }


@claim("architecture-masks")
def architecture_masks(lab: Lab) -> Iterator[Finding]:
    for name, (found, allowed) in patterns(lab).items():
        wrong = int(((found > SEEN) != allowed).sum() + ((found != 0) & ~allowed).sum())
        yield lab.exhaustive(f"{name}: derivatives", wrong, allowed.numel(), smallest=float(found[allowed].min()))
    yield _replaced_tokens(lab)
    yield _padding(lab)
    names = {kind: {n.split(".")[0] for n, _ in m.named_parameters()} for kind, m in _three(lab.seed).items()}
    crossing = {kind: [n for n, _ in m.named_parameters() if ".cross." in n] for kind, m in _three(lab.seed).items()}
    holds = "encoder" not in names["decoder-only"] and "decoder" not in names["encoder-only"]
    holds = holds and names["encoder-decoder"] >= {"encoder", "decoder"}
    holds = holds and [bool(crossing[kind]) for kind in names] == [False, False, True]
    yield lab.exact("who owns what", holds, parts={kind: sorted(found) for kind, found in names.items()})
    blocks = {
        kind: {n.split(".")[3] for n, _ in m.named_parameters() if ".blocks." in n}
        for kind, m in _three(lab.seed).items()
    }
    holds = all("feedforward" in found for found in blocks.values())
    yield lab.exact("all have a feed-forward", holds)


def _three(seed: int) -> dict[str, Model]:
    return {
        "encoder-only": encoder(seed=seed),
        "decoder-only": decoder(seed=seed),
        "encoder-decoder": seq2seq(seed=seed),
    }


def _replaced_tokens(lab: Lab) -> Finding:
    """The doctor's measurement: replace one token and compare every output. Earlier outputs must not change."""
    model: Model = decoder(seed=lab.seed)
    if lab.broken:
        model = unmasked(decoder(seed=lab.seed))
    with subject_of(model, kind="decoder").isolated() as patient:
        moved = leak_matrix(patient, SOURCE)
    future = torch.ones(SOURCE, SOURCE, dtype=torch.bool).triu(1)
    wrong = int((moved[future] != 0).sum() + (moved[~future] <= SEEN).sum())
    return lab.exhaustive("decoder-only: a token replaced", wrong, moved.numel())


@torch.no_grad()
def _padding(lab: Lab) -> Finding:
    """A padding token, on either side, is invisible to every real one, in all three."""
    tokens = torch.tensor([SEQUENCE[:SOURCE]])
    other = (tokens + 1) % 7
    wrong = cases = 0
    for hidden in ((0,), (0, 1), (SOURCE - 1,), (SOURCE - 2, SOURCE - 1)):
        real = torch.ones_like(tokens, dtype=torch.bool)
        real[0, list(hidden)] = False
        changed = torch.where(real, tokens, other)
        mask = None if lab.broken else real
        for kind, model in _three(lab.seed).items():
            if kind == "encoder-decoder":
                one, two = (model(x, tokens[:, :TARGET], source_mask=mask) for x in (tokens, changed))
                same = torch.equal(one, two)
            else:
                one, two = (model(x, mask=mask)[real] for x in (tokens, changed))
                same = torch.equal(one, two)
            wrong, cases = wrong + (not same), cases + 1
    return lab.exhaustive("padding", wrong, cases)


@figure("architecture-masks", "Which output depends on which input (measured derivatives)", height=2.3)
def draw_patterns(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_mask

    axes = fig.canvas.subplots(1, 4, width_ratios=(SOURCE, SOURCE, SOURCE, TARGET))
    for ax, (name, (found, _)) in zip(axes, patterns(lab).items(), strict=True):
        draw_mask(ax, (found > SEEN).numpy(), "1")
        title, _, read = name.partition(", ")
        ax.set(title=title, xlabel=f"{read or 'input'} token", xticks=range(found.shape[1]), yticks=range(len(found)))
    axes[0].set_ylabel("output")


@claim("encoder-from-decoder")
def encoder_from_decoder(lab: Lab) -> Iterator[Finding]:
    tokens, n = torch.tensor([SEQUENCE[:7]]), 7
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for layers in (1, 2):
        one = decoder(layers, seed=lab.seed)
        other = unmasked(one)
        same = {name.split(".", 1)[1]: value for name, value in one.state_dict().items() if "decoder." in name}
        held = {name.split(".", 1)[1]: value for name, value in other.state_dict().items() if "encoder." in name}
        holds = same.keys() == held.keys() and all(torch.equal(same[k], held[k]) for k in same)
        count = [sum(p.numel() for p in m.parameters()) for m in (one, other)]
        yield lab.exact(f"L={layers}: parameters", holds and count[0] == count[1], parameters=count[0])
        mask = full_mask(tokens) if lab.broken else None
        with_mask, without = trace(one, tokens, mask=mask), trace(other, tokens)
        pattern, full = (run.stack("blocks.*.attention.pattern") for run in (with_mask, without))
        hidden = pattern[..., future]
        yield lab.exact(f"L={layers}: masked", bool((hidden == 0).all()), largest=float(hidden.max()))
        yield lab.numerical(f"L={layers}: unmasked, least weight", float(full.min()), None, low=1e-12)
        uneven = max_difference(torch.stack([pattern, full]).sum(-1), 1)
        yield lab.numerical(f"L={layers}: rows sum to 1", uneven, (n + 2) * UNIT)
        yield from _last_output(lab, layers, with_mask.logits, without.logits)
    yield from _later_tokens_replaced(lab)


def _last_output(lab: Lab, layers: int, masked: Tensor, free: Tensor) -> Iterator[Finding]:
    moved = (masked - free).abs().amax((0, 2))
    if layers == 1:
        yield lab.exact("L=1: the last output is the same", float(moved[-1]) == 0.0)
    else:
        yield lab.numerical("L=2: the last output changes", float(moved[-1]), None, low=1e-6)
    yield lab.numerical(f"L={layers}: all others change", float(moved[:-1].min()), None, low=1e-6)


def _later_tokens_replaced(lab: Lab) -> Iterator[Finding]:
    one = decoder(seed=lab.seed)
    pair: tuple[Model, Model] = (unmasked(one), one) if lab.broken else (one, unmasked(one))
    largest = []
    for model in pair:
        with subject_of(model, kind="decoder").isolated() as patient:
            largest.append(float(leak_matrix(patient, 7).triu(1).max()))
    yield lab.exact("a later token replaced, with mask", largest[0] == 0.0)
    yield lab.numerical("a later token replaced, without", largest[1], None, low=1e-6)


@figure("encoder-from-decoder", "One head, the same weights", height=3.0)
def draw_with_and_without(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_attention

    tokens, one = torch.tensor([SEQUENCE[:7]]), decoder(1, seed=lab.seed)
    runs: dict[str, Any] = {
        "causal mask: a decoder": trace(one, tokens),
        "no mask: an encoder": trace(unmasked(one), tokens),
    }
    axes = fig.canvas.subplots(1, 2, sharey=True)
    for ax, (title, run) in zip(axes, runs.items(), strict=True):
        pattern = run["blocks.0.attention.pattern"][0, 0].numpy()
        shown = draw_attention(ax, np.where(pattern == 0.0, np.nan, pattern))
        ax.set(title=title, xlabel="key", xticks=range(7), yticks=range(7))
    axes[0].set_ylabel("query")
    fig.canvas.colorbar(shown, ax=axes, label="weight (white: exactly 0)")


V, T = 3, 4
START = 0


@claim("decoder-only-rationale")
def decoder_only_rationale(lab: Lab) -> Iterator[Finding]:
    model = decoder(seed=lab.seed, vocab_size=V)
    free = unmasked(model)
    total = total_probability(free if lab.broken else model)
    yield lab.numerical("causal: sum over all sequences", abs(total - 1), 1e-12, sequences=V**T, total=total)
    without = total_probability(free)
    yield lab.numerical("no mask: sum over all sequences", abs(without - 1), None, low=1e-3, total=without)
    yield from _supervision(lab)
    yield from _compatibility(lab)


@torch.no_grad()
def total_probability(model: Model) -> float:
    """sum over all V^T sequences x of prod_t p(x_t | what the model reads at t), the first read being a start token."""
    every = torch.tensor(list(itertools.product(range(V), repeat=T)))
    read = torch.cat([torch.full((len(every), 1), START), every[:, :-1]], 1)
    conditionals = model(read).softmax(-1).gather(2, every[..., None])[..., 0]
    return float(conditionals.prod(1).sum())


def _supervision(lab: Lab) -> Iterator[Finding]:
    """Return the number of predicted positions of a text."""
    rows, length = 4, 100
    tokens = torch.from_numpy(lab.rng().integers(0, 24, size=(rows, length + 1)))
    following = tokens[:, 1:]
    _, asked = mask_tokens(tokens[:, :-1], 24, 24, lab.seed, 0)
    counts = [int((targets != IGNORED).sum()) // rows for targets in (following, asked)]
    yield lab.exact("positions supervised", counts == [length, 15], causal=counts[0], masked=counts[1])


def odds_ratio(p: Any) -> Any:
    """(p11 p00) / (p10 p01) of a 2 x 2 table; scaling a row or a column leaves it."""
    return p[1][1] * p[0][0] / (p[1][0] * p[0][1])


def _compatibility(lab: Lab) -> Iterator[Finding]:
    """p(x1 | x2) and p(x2 | x1) of two binary tokens belong to one joint exactly where their odds ratios agree."""
    joint = [[sympy.Symbol(f"p{a}{b}", positive=True) for b in (0, 1)] for a in (0, 1)]
    first = [[joint[a][b] / (joint[0][b] + joint[1][b]) for b in (0, 1)] for a in (0, 1)]
    second = [[joint[a][b] / (joint[a][0] + joint[a][1]) for b in (0, 1)] for a in (0, 1)]
    holds = all(sympy.simplify(odds_ratio(side) - odds_ratio(joint)) == 0 for side in (first, second))
    yield lab.exact("odds ratios of a joint", holds)
    yield lab.exact("equal odds ratios make a joint", _sufficient())
    model = encoder(seed=lab.seed, vocab_size=3)
    ratios = [odds_ratio(side) for side in masked_conditionals(model)]
    apart = float(np.abs(np.log(ratios[0] / ratios[1])))
    yield lab.numerical("masked conditionals of a net", apart, None, low=0.01, odds_ratios=[float(r) for r in ratios])


def _sufficient() -> bool:
    """Conditionals with equal odds ratios have three free parameters; construct a joint distribution with them."""
    u0, v0, ratio = sympy.symbols("u0 v0 ratio", positive=True)
    # odds of a: u0 given b = 0 and u0 ratio given b = 1; odds of b: v0 given a = 0 and v0 ratio given a = 1
    joint = [[1, v0], [u0, u0 * v0 * ratio]]
    odds_a = [joint[1][b] / joint[0][b] for b in (0, 1)]
    odds_b = [joint[a][1] / joint[a][0] for a in (0, 1)]
    wanted = [u0, u0 * ratio, v0, v0 * ratio]
    return all(sympy.simplify(x - y) == 0 for x, y in zip([*odds_a, *odds_b], wanted, strict=True))


@torch.no_grad()
def masked_conditionals(model: EncoderLM) -> tuple[np.ndarray, np.ndarray]:
    """p(x1 = a | x2 = b) and p(x2 = b | x1 = a), as [a][b], from a net that reads token 2 as the mask."""
    hidden = 2
    first, second = np.empty((2, 2)), np.empty((2, 2))
    for known in (0, 1):
        first[:, known] = model(torch.tensor([[hidden, known]]))[0, 0, :2].softmax(-1).numpy()
        second[known] = model(torch.tensor([[known, hidden]]))[0, 1, :2].softmax(-1).numpy()
    return first, second
