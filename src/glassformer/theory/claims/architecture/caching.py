"""The key/value cache changes nothing but rounding; how much work it saves."""

import statistics
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import sympy
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from glassformer import config as c
from glassformer.doctor.probes.caching import run_chunks
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Finding
from glassformer.generation import Sampling, generate, stream
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model import Cache, DecoderLM, build
from glassformer.model.transformer import Mask
from glassformer.shapes import Float, Int
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import (
    ChangedInputs,
    Inputs,
    Positions,
    random_model,
    random_tokens,
    small_config,
)
from glassformer.theory.claims.weights.rational import Head, Matrix, causal, random_heads, random_matrix, weights

STEPS = 100
NEW = 30
CASES: dict[str, tuple[Any, int]] = {
    "learned, L=1": (c.Learned(), 1),
    "sinusoidal, L=2": (c.Sinusoidal(), 2),
    "rotary, L=4": (c.Rotary(), 4),
}
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
PREFIXES = (1, 2, 3, 5, 10, 20, 50, 99)
CLOSE = 1e-3
"""A lead of the most likely token that rounding cannot reverse."""


class Stuck(ChangedInputs):
    """Every cached step gets position 0."""

    def changed(self, tokens: Int[Tensor, "B T"], mask: Mask, positions: Positions, cache: Cache | None) -> Inputs:
        return mask, positions if cache is None else torch.zeros(1, tokens.shape[1], dtype=torch.long)


def _model(case: str, dtype: torch.dtype, seed: int, stuck: bool = False) -> DecoderLM:
    position, layers = CASES[case]
    model = random_model(
        small_config(n_layers=layers, position=position, vocab_size=31, max_len=STEPS + 1), seed, 0.3, dtype
    )
    assert isinstance(model, DecoderLM)
    if stuck:
        model.__class__ = Stuck
    return model


class Both(NamedTuple):
    """Logits (T,V) after each of the first 1, 2, ..., T tokens."""

    cached: Float[Tensor, "T V"]
    full: Float[Tensor, "T V"]
    apart: float
    """The largest difference between one full pass and passes over prefixes of the lengths PREFIXES."""


@lru_cache(maxsize=16)
def both_ways(case: str, dtype: torch.dtype, seed: int, steps: int = STEPS, stuck: bool = False) -> Both:
    """Run step by step with a cache, as the doctor does, and in one full pass."""
    model = _model(case, dtype, seed, stuck)
    tokens = random_tokens(np.random.default_rng(seed), 1, steps, 31)
    with subject_of(model, kind="decoder").isolated() as patient, torch.no_grad():
        cached, _ = run_chunks(patient, tokens, [1] * steps)
        full = patient.logits(tokens)[0]
        prefixes = [patient.logits(tokens[:, :n])[0, -1] - full[n - 1] for n in PREFIXES if n <= steps]
    return Both(cached[0], full, float(torch.stack(prefixes).abs().max()))


@claim("kv-cache-exact")
def kv_cache_exact(lab: Lab) -> Iterator[Finding]:
    yield _in_rationals(lab)
    for case in CASES:
        for dtype, bound in BOUNDS.items():
            if lab.broken and dtype is torch.float64:
                continue  # one precision is enough for the control to fail
            found = both_ways(case, dtype, lab.seed, stuck=lab.broken)
            name = str(dtype).removeprefix("torch.")
            gap = max(max_difference(found.cached, found.full), found.apart)
            yield lab.numerical(
                f"{case}, {name}", gap, bound, tokens=STEPS, prefixes=PREFIXES, size=round(float(found.full.std()), 1)
            )
        yield _same_choice(lab, case, both_ways(case, torch.float32, lab.seed, stuck=lab.broken))
        if not lab.broken:
            yield _same_text(lab, case)


def _same_choice(lab: Lab, case: str, found: Both) -> Finding:
    """For the same tokens, the most likely next token is the same wherever its lead exceeds rounding."""
    top = found.full.topk(2).values
    lead = top[:, 0] - top[:, 1]
    differ = found.cached.argmax(-1) != found.full.argmax(-1)
    wrong = int((differ & (lead > CLOSE)).sum())
    judged = int((lead > CLOSE).sum())
    return lab.exhaustive(f"{case}, most likely token", wrong, judged, smallest_lead=float(lead.min()))


def _same_text(lab: Lab, case: str) -> Finding:
    """`generate` itself, greedy and sampling with the same uniform numbers."""
    model = _model(case, torch.float64, lab.seed)
    wrong = 0
    for sampling in (None, Sampling(temperature=0.8, top_p=0.95)):
        with_cache, without = (
            generate(model, [[1, 2, 3]], NEW, sampling, cache=cache, seed=lab.seed, stop=[], engine="torch")
            for cache in (True, False)
        )
        wrong += sum(a != b for a, b in zip(with_cache.new[0], without.new[0], strict=True))
    return lab.exhaustive(f"{case}, generated", wrong, 2 * NEW)


def attend(x: Matrix, layers: list[list[Head]], allowed: Any) -> Matrix:
    """x + sum_h A_h x Wv_h Wo_h, layer after layer, in rationals with a rational kernel; all tokens at once."""
    for heads in layers:
        out = x
        for q, k, v, o in heads:
            out = out + weights(x @ q, x @ k, allowed) @ (x @ v) @ o
        x = out
    return x


def attend_cached(x: Matrix, layers: list[list[Head]]) -> Matrix:
    """The same, one token at a time: keys and values are stored when a token arrives and never changed."""
    stored: list[list[tuple[list[Any], list[Any]]]] = [[([], []) for _ in heads] for heads in layers]
    rows = []
    for token in x:
        row = token[None]
        for heads, held in zip(layers, stored, strict=True):
            out = row
            for (q, k, v, o), (keys, values) in zip(heads, held, strict=True):
                keys.append((row @ k)[0])
                values.append((row @ v)[0])
                out = out + weights(row @ q, np.array(keys)) @ np.array(values) @ o
            row = out
        rows.append(row[0])
    return np.array(rows)


def _in_rationals(lab: Lab) -> Finding:
    rng = lab.rng()
    x, layers = random_matrix(rng, 4, 3), [random_heads(rng, 2, 3, 2) for _ in range(2)]
    allowed = None if lab.broken else causal(4)
    same = bool((attend(x, layers, allowed) == attend_cached(x, layers)).all())
    return lab.exact("exact rationals", same)


@figure("kv-cache-exact", "Cached against recomputed logits", height=3.0)
def draw_differences(lab: Lab, fig: Figure) -> None:
    steps = 40
    ax = fig.canvas.subplots()
    for case, colour in zip(CASES, COLOURS, strict=False):
        for dtype, marker in ((torch.float32, "o"), (torch.float64, "s")):
            found = both_ways(case, dtype, lab.seed, steps)
            gap = (found.cached - found.full).abs().amax(-1).double().numpy()
            shown = np.where(gap > 0, gap, np.nan)
            name = str(dtype).removeprefix("torch.")
            ax.semilogy(range(1, steps + 1), shown, marker, color=colour, markersize=2.5, label=f"{case}, {name}")
    ax.axhline(1e-4, color="black", linewidth=0.8, linestyle=":")
    ax.axhline(1e-10, color="black", linewidth=0.8, linestyle=":")
    ax.set(xlabel="tokens seen", ylabel="largest |difference|", ylim=(1e-17, 1e-3))
    fig.canvas.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, markerscale=2)


class Counter(TorchFunctionMode):
    """Counts the model's work: rows through each linear layer and entries of the score matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, int] = {}
        self.squares: list[int] = []
        self.triangles: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            self.rows[id(args[1])] = self.rows.get(id(args[1]), 0) + args[0].shape[:-1].numel()
        if func is torch.nn.functional.scaled_dot_product_attention:
            T, S = args[0].shape[2], args[1].shape[2]
            self.squares.append(T * S)
            self.triangles.append(T * (T + 1) // 2 if kwargs.get("is_causal") else T * S)
        return func(*args, **kwargs)


class Cost(NamedTuple):
    """Of one layer."""

    rows: set[int]
    """The rows through each of its linear layers: one number if all agree."""
    squares: int
    triangles: int


@lru_cache(maxsize=16)
def cost(steps: int, cached: bool) -> Cost:
    """Count the work of `generate` in one layer for `steps` tokens after a start token."""
    model = build(small_config(n_layers=2, max_len=steps + 1))
    counter = Counter()
    with counter:
        generate(model, [[0]], steps, cache=cached, stop=[], engine="torch")  # a counter does not see kernels
    assert isinstance(model, DecoderLM)
    block = model.blocks[0]
    own = {id(p) for n, p in block.named_parameters() if n.endswith("weight") and "norm" not in n}
    rows = {counter.rows[key] for key in own}
    assert len(own) == 6  # q, k, v, o, up, down
    return Cost(rows, sum(counter.squares) // 2, sum(counter.triangles) // 2)


@claim("kv-cache-cost")
def kv_cache_cost(lab: Lab) -> Iterator[Finding]:
    n, t = sympy.symbols("T t", integer=True, positive=True)
    sums = {
        "rows": (t, n * (n + 1) / 2),
        "squares": (t**2, n * (n + 1) * (2 * n + 1) / 6),
        "triangles": (t * (t + 1) / 2, n * (n + 1) * (n + 2) / 6),
    }
    holds = all(sympy.simplify(sympy.summation(term, (t, 1, n)) - closed) == 0 for term, closed in sums.values())
    yield lab.exact("sums in closed form", holds)
    for steps in (1, 2, 25, STEPS):
        full, cached = cost(steps, cached=False), cost(steps, cached=not lab.broken)
        rows, squares, triangles = (int(closed.subs(n, steps)) for _, closed in sums.values())
        expected = [{rows}, squares, triangles, {steps}, rows, rows]
        wrong = sum(a != b for a, b in zip([*full, *cached], expected, strict=True))
        counted = {"full": [sorted(full.rows), *full[1:]], "cached": [sorted(cached.rows), *cached[1:]]}
        yield lab.exhaustive(f"counters, T={steps}", wrong, len(expected), **counted)
    ratios = [Fraction(5050, 100), Fraction(338350, 5050), Fraction(171700, 5050)]
    full, cached = cost(STEPS, cached=False), cost(STEPS, cached=not lab.broken)
    measured = [Fraction(max(full.rows), max(cached.rows))]
    measured += [Fraction(entries, cached.squares) for entries in (full.squares, full.triangles)]
    yield lab.exact("ratios at T=100", measured == ratios, ratios=[float(r) for r in measured])
    yield from _clock(lab)


def seconds(cached: bool, repeats: int = 5) -> tuple[float, float]:
    """Return the median times to generate 25 and 100 tokens, for a model wide enough that arithmetic dominates."""
    config = small_config(
        n_layers=2, d_model=192, attention=c.Attention(4), feedforward=c.Dense(768), max_len=STEPS + 1
    )
    model = build(config)
    early, late = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for number, _ in enumerate(stream(model, [[0]], STEPS, cache=cached, stop=[], engine="torch"), 1):
            if number == 25:
                early.append(time.perf_counter() - start)
        late.append(time.perf_counter() - start)
    return statistics.median(early), statistics.median(late)


def _clock(lab: Lab) -> Iterator[Finding]:
    if lab.broken:
        return  # the counters make the control fail
    full, cached = seconds(cached=False), seconds(cached=True)
    ratio = {25: full[0] / cached[0], STEPS: full[1] / cached[1]}
    warnings = [
        text
        for text, bad in (
            ("at T=100 the cache is not even twice as fast", ratio[STEPS] <= 2),
            ("the gain does not grow from T=25 to T=100", ratio[STEPS] <= ratio[25]),
        )
        if bad
    ]
    yield lab.empirical("clock", ratio[STEPS], 1.0, None, at_25=round(ratio[25], 2), warnings=warnings)


@figure("kv-cache-cost", "Work done by the time T tokens are generated", height=3.0)
def draw_cost(lab: Lab, fig: Figure) -> None:
    steps = np.arange(1, STEPS + 1)
    panels: dict[str, dict[str, Any]] = {
        "rows through each map of a layer": {"recomputed": steps * (steps + 1) / 2, "cached": steps},
        "entries of a layer's scores": {
            "recomputed, whole squares": steps * (steps + 1) * (2 * steps + 1) / 6,
            "recomputed, causal part": steps * (steps + 1) * (steps + 2) / 6,
            "cached": steps * (steps + 1) / 2,
        },
    }
    for ax, (title, lines) in zip(fig.canvas.subplots(1, 2), panels.items(), strict=True):
        for name, values in lines.items():
            colour = COLOURS[0] if name == "cached" else COLOURS[1]
            ax.semilogy(steps, values, "--" if "causal" in name else "-", color=colour, label=name)
        for cached in (False, True):
            found = cost(STEPS, cached)
            shown = [max(found.rows)] if "rows" in title else [found.squares, found.triangles]
            ax.plot([STEPS] * len(shown), shown, "o", color=COLOURS[0 if cached else 1], markersize=4)
        ax.set(title=title, xlabel="tokens generated, T")
        ax.legend(loc="lower right")
    fig.axes[0].set_ylabel("so far (dots: counted)")
