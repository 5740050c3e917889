"""Induction heads: the circuit written down and proved, the detector and what it cannot tell, the skill learnt."""

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer import config as c
from glassformer import pretrained
from glassformer.finding import Finding
from glassformer.lens import patch, trace, zero
from glassformer.lens.circuit import Circuit, as_model, census, continuations, run, score_terms
from glassformer.lens.figure import COLOURS, Figure
from glassformer.lens.heads import head_table, induction_score, repeated_tokens
from glassformer.model import Model
from glassformer.shapes import Float
from glassformer.theory.claims.claim import Kind, Lab, claim, figure
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.tasks import TaskData
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import make_batch
from glassformer.training.run import Run, read_run, with_model
from glassformer.training.session import open_session
from glassformer.weights import load

MODEL = "induction"
SEEDS = 3


@claim("induction-head-circuit")
def induction_head_circuit(lab: Lab) -> Iterator[Finding]:
    matches, total = census(bos=not lab.broken)
    yield lab.exhaustive(
        "with BOS: the empirical continuations", abs(total - matches) + abs(total - 903), total, matches=matches
    )
    without, total = census(bos=False)
    yield lab.exhaustive("without BOS: 555 of 903", abs(without - 555) + abs(total - 903), total, matches=without)
    wrong, cases = _four_terms(lab)
    yield lab.exact("the score is the sum of four terms", wrong == 0, cases=cases)
    needed = {term: census(longest=4, without=(term,)) for term in ("k", "q", "direct", "qk")}
    yield lab.exhaustive(
        "only K-composition is needed",
        needed["k"][0] + sum(total - matches for term, (matches, total) in needed.items() if term != "k"),
        sum(total for _, total in needed.values()),
        matches={term: f"{matches} of {total}" for term, (matches, total) in needed.items()},
    )
    yield lab.exhaustive("a token never seen has no match", *_unseen())
    yield lab.exact("A B A without BOS", _first_token_artefact())
    yield lab.numerical("the engine runs the same circuit", _engine_pattern_error(bos=not lab.broken), 1e-5)


def _four_terms(lab: Lab) -> tuple[int, int]:
    """Random whole-number streams and weights: do the four terms add up to the score?"""
    rng, wrong, cases = lab.rng(), 0, 200
    for _ in range(cases):
        x, h = rng.integers(-5, 6, (2, 4, 3))
        w_q, w_k = rng.integers(-5, 6, (2, 3, 2))
        score = (x + h) @ w_q @ ((x + h) @ w_k).T
        wrong += not np.array_equal(sum(score_terms(x, h, w_q, w_k).values()), score)
    return wrong, cases


def _unseen() -> tuple[int, int]:
    """Prompts whose last token is new: head 2 finds no match and spreads its weight evenly."""
    cases = wrong = 0
    for length in range(1, 6):
        for tokens in itertools.product(range(3), repeat=length):
            if tokens[-1] not in tokens[:-1]:
                cases += 1
                wrong += len(set(run(Circuit(3, length + 1), tokens).pattern2[-1])) != 1
    return wrong, cases


def _first_token_artefact() -> bool:
    alone, pair, good = (
        continuations(tokens, 2, bos=bos) for tokens, bos in (([0], False), ([0, 1, 0], False), ([0, 1, 0], True))
    )
    near = Fraction(1, 1000)
    return alone == [1, 0, 0] and all(abs(p - Fraction(1, 2)) < near for p in pair[:2]) and abs(good[1] - 1) < near


def _engine_pattern_error(bos: bool) -> float:
    """Largest difference of head 2's pattern between the engine's model and the exact circuit, lengths 1 to 4."""
    model, circuit, worst = as_model(3, 6), Circuit(3, 6), 0.0
    for length in range(1, 5):
        rows = list(itertools.product(range(3), repeat=length))
        given = torch.tensor([((circuit.bos, *row) if bos else row) for row in rows])
        patterns = trace(model, given, sites="blocks.1.attention.pattern")["blocks.1.attention.pattern"][:, 0]
        for pattern, row in zip(patterns, rows, strict=True):
            exact = run(circuit, row).pattern2
            for t, weights in enumerate(exact[len(exact) - pattern.shape[0] :]):
                worst = max(worst, max(abs(float(p) - float(w)) for p, w in zip(pattern[t], weights, strict=False)))
    return worst


@figure("induction-head-circuit", "The induction circuit on A B C A B", height=3.5)
def draw_circuit(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_attention

    tokens, letters = (0, 1, 2, 0, 1), ["BOS", *"ABCAB"]
    done = run(Circuit(3, 6), tokens)
    second = np.zeros((6, 6))
    for t, row in enumerate(done.pattern2):
        second[t, : len(row)] = [float(w) for w in row]
    axes = fig.canvas.subplots(1, 2)
    titles = ("head 1 (layer 1): previous token", "head 2 (layer 2): after the earlier copy")
    for ax, pattern, title in zip(axes, (done.pattern1.astype(float), second), titles, strict=True):
        draw_attention(ax, np.where(np.tri(6), pattern, np.nan))
        ax.set_xticks(range(6), letters)
        ax.set_yticks(range(6), letters)
        ax.set_xlabel("key")
        ax.set_title(title)
    axes[0].set_ylabel("query")
    arrow: dict[str, Any] = {"arrowstyle": "->", "color": COLOURS[1], "linewidth": 1.5}
    axes[0].annotate("", (1.45, 2), (2.45, 2), arrowprops=arrow)
    axes[0].text(2.6, 2, "B reads A before it", va="center", color=COLOURS[1], fontsize=8)
    axes[1].annotate("", (2.4, 4), (3.9, 4), arrowprops=arrow)
    axes[1].text(5.55, 1.1, "A looks where A\nstood before:\nat B, next", ha="right", color=COLOURS[1], fontsize=8)


@claim("induction-head-detection")
def induction_head_detection(lab: Lab) -> Iterator[Finding]:
    yield from _detector_parts(lab)
    yield lab.numerical("the hand-built circuit is found", _circuit_scores(lab), None, low=0.99)
    folder = pretrained.FOLDERS.get(MODEL)
    if folder is None:
        why = f"the model {MODEL!r} is not among those that came with this installation"
        yield lab.skipped("the shipped model", Kind.EMPIRICAL, why, "install the package with its models")
        return
    text = (folder / "run.toml").read_text(encoding="utf-8")
    model = load(folder)
    yield from _skill_parts(lab, "shipped model", model, read_run(text))
    if not lab.slow:
        yield lab.skipped("trained here", Kind.EMPIRICAL, f"trains {2 * SEEDS + 1} small models: run with --slow")
        return
    for seed in range(lab.seed, lab.seed + SEEDS):
        yield from _skill_parts(lab, f"two layers, seed {seed}", *trained(text, 1 if lab.broken else 2, seed))
        one, one_run = trained(text, 1, seed)
        scores = copy_scores(one, one_run)
        yield lab.empirical(f"one layer, seed {seed}: accuracy", accuracy(one, one_run), None, 0.4)
        yield lab.empirical(f"one layer, seed {seed}: best score", float(scores.max()), None, 0.3)
    yield from _other_algorithm(lab, text)


def _detector_parts(lab: Lab) -> Iterator[Finding]:
    """Score constructed patterns on random tokens with random block length and position."""
    tokens = repeated_tokens(60, rows=64, length=40, seed=lab.seed)
    if lab.broken:
        tokens = torch.tensor([[1, 2, 3, 1, 2]] * 64)
    rows, size = tokens.shape
    ideal = torch.eye(size).repeat(rows, 1, 1)
    for row, t in itertools.product(range(rows), range(size)):
        before = (tokens[row, :t] == tokens[row, t]).nonzero()
        if len(before):
            ideal[row, t] = torch.nn.functional.one_hot(before[-1, 0] + 1, size)
    score = float(induction_score(ideal[:, None], tokens))
    yield lab.exhaustive("an induction pattern scores 1", int(abs(score - 1) > 1e-12), rows)
    backwards = {}
    for offset in range(1, min(21, size)):
        pattern = torch.zeros(size, size)
        for t in range(size):
            pattern[t, max(t - offset, 0)] = 1
        backwards[offset] = float(induction_score(pattern.repeat(rows, 1, 1)[:, None], tokens))
    yield lab.exhaustive(
        "a head at a fixed distance scores below 0.3",
        sum(value >= 0.3 for value in backwards.values()),
        len(backwards),
        highest=max(backwards.values()),
    )
    uniform = torch.ones(size, size).tril() / torch.arange(1, size + 1)[:, None]
    has_copy = (tokens[:, :, None] == tokens[:, None, :]).tril(-1).any(-1)
    expected = (1 / torch.arange(1, size + 1, dtype=torch.float64)).expand(rows, -1)[has_copy].mean()
    score = float(induction_score(uniform.double().repeat(rows, 1, 1)[:, None], tokens))
    yield lab.exhaustive(
        "uniform attention scores the mean of 1/(t+1)", int(abs(score - float(expected)) > 1e-7), rows, score=score
    )


def _circuit_scores(lab: Lab) -> float:
    table = head_table(as_model(40, 41, e_beta=10**9), weights=False, seed=lab.seed)
    return float(table.score("induction")[0 if lab.broken else 1].max())


def accuracy(model: Model, run: Run, edits: Mapping[str, Any] | None = None) -> float:
    """Return the share of tokens in second copies that the most likely token predicts, on sequences not in training."""
    assert run.task is not None
    hit = count = 0
    for inputs, targets in TaskData(run.task).validation(run):
        asked = targets != IGNORED
        hit += int(((patch(model, inputs, edits or {}).argmax(-1) == targets) & asked).sum())
        count += int(asked.sum())
    return hit / count


def copy_scores(model: Model, run: Run) -> Float[Tensor, "L H"]:
    """Return the mean attention of the second copy to the position after the first occurrence, on unseen data."""
    assert run.task is not None
    inputs, targets = (torch.cat(parts) for parts in zip(*TaskData(run.task).validation(run), strict=True))
    asked = targets != IGNORED
    rows, positions = torch.where(asked)
    after = positions - asked.sum(1)[rows]  # a block of n tokens asks for n - 1: position - n + 1
    seen = trace(model, inputs, sites="blocks.*.attention.pattern")
    patterns = (seen[f"blocks.{layer}.attention.pattern"] for layer in range(model.config.n_layers))
    return torch.stack([pattern[rows, :, positions, after].mean(0) for pattern in patterns])


def _skill_parts(lab: Lab, name: str, model: Model, run: Run) -> Iterator[Finding]:
    induction = copy_scores(model, run)
    second = min(1, model.config.n_layers - 1)
    yield lab.empirical(f"{name}: accuracy", accuracy(model, run), 0.95, None)
    yield lab.empirical(
        f"{name}: best layer-2 score",
        float(induction[second].max()),
        0.8,
        None,
        induction=induction.tolist(),
        previous_token=head_table(model, weights=False, seed=lab.seed).score("previous_token").tolist(),
    )
    heads = [h for h, score in enumerate(induction[second].tolist()) if score >= 0.5]
    without = {f"blocks.{second}.attention.heads": zero(heads=heads)}
    yield lab.empirical(f"{name}: without its induction heads", accuracy(model, run, without), None, 0.2, heads=heads)
    yield lab.empirical(
        f"{name}: without layer 1", accuracy(model, run, {"blocks.0.attention.heads": zero()}), None, 0.2
    )


def _other_algorithm(lab: Lab, text: str) -> Iterator[Finding]:
    """A score is sufficient, not necessary: with a learned bias by distance the skill comes another way."""
    model, run = trained(text, 2, lab.seed, c.T5Bias(buckets=40, max_distance=40))
    scores = copy_scores(model, run)
    yield lab.empirical("relative bias: accuracy", accuracy(model, run), 0.6, None)
    yield lab.empirical("relative bias: best score", float(scores.max()), None, 0.2, induction=scores.tolist())


@cache
def trained(text: str, layers: int, seed: int, position: c.T5Bias | None = None) -> tuple[Model, Run]:
    """The recipe of the shipped model with so many layers and this seed, trained in memory: nothing is written."""
    run = read_run(text, (f"model.n_layers={layers}", f"seed={seed}"))
    session = open_session(run if position is None else with_model(run, position=position))
    state = prepare_state(session.run)
    order = session.data.order(session.run)
    for step in range(session.run.loop.steps):
        train_step(state, make_batch(session.run, order.batch(step), step).to(state.device))
    return state.model.eval(), session.run


@figure("induction-head-detection", "Induction scores and the best head", height=3.4)
def draw_detection(lab: Lab, fig: Figure) -> None:
    """Scores of every head and the map of the best one: of the shipped model, or of the circuit without it."""
    from glassformer.lens.figures.attention import draw_attention
    from glassformer.lens.figures.labels import settle, write_cells

    folder = pretrained.FOLDERS.get(MODEL)
    model = as_model(40, 41) if folder is None else load(folder)
    scores = head_table(model, weights=False, seed=lab.seed).score("induction")
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    tokens = _shown_tokens(model)
    site = f"blocks.{layer}.attention.pattern"
    pattern = trace(model, tokens, sites=site)[site][0, head]
    left, right = fig.canvas.subplots(1, 2, width_ratios=(1, 1.6))
    image = draw_attention(left, scores)
    left.set_xticks(range(scores.shape[1]))
    left.set_yticks(range(scores.shape[0]))
    left.set_xlabel("head")
    left.set_ylabel("layer, counted from 0")
    left.set_title("mean attention to what followed")
    draw_attention(right, np.where(np.tri(len(pattern)), pattern, np.nan))
    right.set_title(f"layer {layer}, head {head}: a block of 9 and its copy")
    right.set_xlabel("key")
    right.set_ylabel("query")
    right.set_yticks(range(0, len(pattern), 5))
    fig.canvas.colorbar(image, ax=[left, right], shrink=0.8, label="attention weight")
    settle(fig)
    write_cells(fig, left, image, [[f"{value:.2f}" for value in row] for row in scores.tolist()])


def _shown_tokens(model: Model) -> Tensor:
    """Four random tokens, a block of nine distinct ones, the block again; after BOS where the model has one."""
    order = torch.randperm(39, generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([order[9:13], order[:9], order[:9]])
    bos = model.config.special.bos
    return tokens[None] if bos is None else torch.cat([torch.tensor([bos]), tokens])[None]
