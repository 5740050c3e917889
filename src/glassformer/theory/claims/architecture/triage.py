"""Bad samples from a well-trained model: three faults, three tests, and which failures identify which fault."""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.doctor.probes.caching import against_full
from glassformer.doctor.probes.causality import leak_matrix
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.model import Cache
from glassformer.model.transformer import Mask, init_weights
from glassformer.reference import random_params
from glassformer.shapes import Bool, Int
from glassformer.theory.claims.claim import Kind, Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import ChangedInputs, Inputs, Positions, full_mask, small_config

FAULTS = {"M": "missing mask", "P": "shifted positions", "C": "lossy cache"}
INJECTED = [frozenset(chosen) for n in range(3) for chosen in itertools.combinations(FAULTS, n)]
"""None, each fault alone, each pair."""
TESTS = {"M": "a later token is replaced", "P": "inference against training", "C": "cached against recomputed"}
SYMBOLS, STEPS, BATCH, CONTEXT, FRESH = 24, 500, 32, 32, 30_000


class Faulty(ChangedInputs):
    """The package's decoder with faults that users commonly introduce around it."""

    def __init__(self, config: c.DecoderConfig, faults: frozenset[str] = frozenset()):
        super().__init__(config)
        self.faults = faults

    def changed(self, tokens: Int[Tensor, "B T"], mask: Mask, positions: Positions, cache: Cache | None) -> Inputs:
        start, new = (0 if cache is None else len(cache)), tokens.shape[1]
        if "P" in self.faults and not self.training:
            positions = torch.arange(start + 1, start + new + 1)[None]
        pattern = self._pattern(tokens, start)
        return mask if pattern is None else pattern, positions

    def _pattern(self, tokens: Tensor, start: int) -> Bool[Tensor, "B T S"] | None:
        rows, new = tokens.shape
        seen = None
        if "M" in self.faults:
            seen = full_mask(tokens) if not start else torch.ones(rows, new, start + new, dtype=torch.bool)
        if "C" in self.faults and start:
            index = torch.arange(start + new)
            seen = (index[None, :] <= index[start:, None]).expand(rows, new, -1) if seen is None else seen
            seen = seen & (index != start - 1)  # the key stored last is not found
        return seen


def faulty(faults: frozenset[str], seed: int, position: c.Learned | c.Rotary = c.Learned()) -> Faulty:
    config = small_config(vocab_size=11, position=position, max_len=24)
    assert isinstance(config, c.DecoderConfig)
    model = Faulty(config, faults).double().eval()
    params = random_params(config, seed, 0.5)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})
    return model


@lru_cache(maxsize=32)
def signature(faults: frozenset[str], seed: int, rotary: bool = False) -> str:
    """Which of the three tests fail on an engine with these faults, in the order M, P, C."""
    model = faulty(faults, seed, c.Rotary() if rotary else c.Learned())
    with subject_of(model, kind="decoder").isolated() as patient:
        leaks = float(leak_matrix(patient, 8).triu(1).max()) > 0
        stale = against_full(patient, 1, [1] * 8).ratio > 1
    return "".join(name for name, fails in (("M", leaks), ("P", mismatch(model) > 1e-9), ("C", stale)) if fails)


@torch.no_grad()
def mismatch(model: Faulty) -> float:
    """Largest difference of the training and the inference path at equal prefixes, no cache in either."""
    tokens, worst = torch.arange(8)[None], 0.0
    for n in range(1, 9):
        one, other = model.train()(tokens[:, :n])[0, -1], model.eval()(tokens[:, :n])[0, -1]
        worst = max(worst, max_difference(one, other))
    return worst


@claim("generation-bug-triage")
def generation_bug_triage(lab: Lab) -> Iterator[Finding]:
    found = {faults: signature(faults, lab.seed, rotary=lab.broken) for faults in INJECTED}
    shown = {"+".join(sorted(faults)) or "none": text or "none" for faults, text in found.items()}
    clean, singles = frozenset[str](), [faults for faults in INJECTED if len(faults) == 1]
    yield lab.exhaustive("the clean model passes all", int(found[clean] != ""), 1, failing=shown)
    wrong = sum(list(found.values()).count(found[one]) != 1 for one in singles if one != frozenset("M"))
    wrong += len({found[clean], *(found[one] for one in singles)}) != 4
    yield lab.exhaustive("single faults are distinguished", int(wrong), 4, failing=shown)
    named = sum(bool(text) and text[0] not in faults for faults, text in found.items())
    named += sum(bool(faults) and not text for faults, text in found.items())
    yield lab.exhaustive("the first failure names a fault", named, len(INJECTED))
    missed = sum(_repair(faults, lab.seed, rotary=lab.broken) != faults for faults in INJECTED)
    yield lab.exhaustive("repairing one by one finds all", missed, len(INJECTED))
    yield from _leak_test(lab)


def _repair(faults: frozenset[str], seed: int, rotary: bool) -> frozenset[str]:
    """Return the faults that the procedure fixes, at most one per test."""
    repaired: frozenset[str] = frozenset()
    for _ in FAULTS:
        failing = signature(faults - repaired, seed, rotary)
        if not failing:
            break
        repaired |= {failing[0]}
    return repaired


@lru_cache(maxsize=8)
def trained_loss(faults: frozenset[str], seed: int, steps: int = STEPS) -> float:
    """Nats per token on fresh text, after training on independent uniform symbols, of which nothing can be learnt."""
    config = c.DecoderConfig(
        vocab_size=SYMBOLS, d_model=64, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(256),
        position=c.Rotary(), max_len=CONTEXT,
    )  # fmt: skip
    model = Faulty(config, faults)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(rows: int) -> Tensor:
        text = torch.randint(SYMBOLS, (rows, CONTEXT + 1), generator=generator)
        return F.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])

    for _ in range(steps):
        optimizer.zero_grad()
        loss(BATCH).backward()
        optimizer.step()
    with torch.no_grad():
        return float(loss(math.ceil(FRESH / CONTEXT)))


def _leak_test(lab: Lab) -> Iterator[Finding]:
    if not lab.slow:
        yield lab.skipped("loss below the entropy", Kind.EMPIRICAL, "trains two small models: run with --slow")
        return
    entropy = math.log(SYMBOLS)
    causal = trained_loss(frozenset("M") if lab.broken else frozenset(), lab.seed)
    yield lab.empirical("causal: loss on fresh text", causal, entropy - 0.02, None, entropy=entropy, tokens=FRESH)
    leaking = trained_loss(frozenset("M"), lab.seed)
    yield lab.empirical("no mask: loss on fresh text", leaking, None, entropy - 0.5, entropy=entropy, steps=STEPS)


@figure("generation-bug-triage", "Which test fails under which fault", height=3.2)
def draw_signatures(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    rows = [" + ".join(FAULTS[name] for name in sorted(faults)) or "none" for faults in INJECTED]
    found = [signature(faults, lab.seed) for faults in INJECTED]
    ax = fig.canvas.subplots()
    fails = [[name in text for name in TESTS] for text in found]
    draw_map(ax, fails, high=1.8, colours="Oranges", aspect="auto")
    for i, row in enumerate(fails):
        for j, failed in enumerate(row):
            ax.text(j, i, "fails" if failed else "passes", ha="center", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(
        range(len(TESTS)), [text.replace(" a", "\na", 1).replace(" is", "\nis", 1) for text in TESTS.values()]
    )
    ax.set(ylabel="injected", xlabel="test")
