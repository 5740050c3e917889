"""Beyond the training length: small models with five position schemes, trained on 32 tokens, read at up to 96."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.model import Model, build
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.registry import load_all
from glassformer.theory.claims.small_models import refusal
from glassformer.training import Run, train_step
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.tasks import Copy, Markov, Stream, TaskData
from glassformer.training.distributed.group import ALONE
from glassformer.training.loop import prepare_state
from glassformer.training.objective import make_batch
from glassformer.training.run import Data, Loop, Machine, Optim, Schedule

SHORT, LONG = 32, 96
LENGTHS = (32, 36, 40, 48, 64, 96)
SCHEMES: dict[str, c.Learned | c.Sinusoidal | c.Rotary | c.Alibi | c.NoPosition] = {
    "learned": c.Learned(),
    "sinusoidal": c.Sinusoidal(),
    "rotary": c.Rotary(),
    "alibi": c.Alibi(),
    "none": c.NoPosition(),
}
STEPS = {"markov": 800, "copy": 1500}


class Curve(NamedTuple):
    """What one training run measured."""

    losses: dict[int, float]
    """Nats per token by length: at 32 over all positions asked for, beyond it over positions 32 and on."""
    untouched: bool
    """Whether the rows of a learned table that training never reached still are what they were."""


RECORDED: dict[str, dict[str, list[float]]] = dict(load_all()["pe-extrapolation"].data)
"""Seed 0 at LENGTHS, as this check measured it; the figure shows it without training again."""


def model_config(scheme: str, vocab_size: int, max_len: int = LONG) -> c.DecoderConfig:
    return c.DecoderConfig(
        vocab_size=vocab_size,
        d_model=64,
        n_layers=2,
        attention=c.Attention(4),
        feedforward=c.Dense(256),
        position=SCHEMES[scheme],
        max_len=max_len,
        init_std=0.1,
        embedding=c.Embedding(scale=8.0),  # tokens must not be small compared with sinusoids of size 1
        head=c.Head(tied=False),
    )


def training_run(task: str, scheme: str, seed: int, context: int) -> Run:
    """The run: the same for every scheme of a task."""
    source = Markov() if task == "markov" else Copy(vocab=23, shortest=4)
    return Run(
        model=model_config(scheme, 24),
        data=Data(corpus=f"task:{task}"),
        task=source,
        optim=Optim(lr=3e-3, beta2=0.99, weight_decay=0.01),
        schedule=Schedule(warmup=50, floor=0.0),
        loop=Loop(steps=STEPS[task], batch=32, context=context),
        machine=Machine(device="cpu", precision="float32", compile="no"),
        seed=seed,
    )


@lru_cache(maxsize=64)
def measure(task: str, scheme: str, seed: int, context: int = SHORT) -> Curve:
    """Train on `context` tokens, then read the loss at every length."""
    run = training_run(task, scheme, seed, context)
    assert run.task is not None
    state = prepare_state(run, ALONE)
    order = TaskData(run.task).order(run)
    before = {name: value.clone() for name, value in state.model.named_parameters() if name.endswith("position.weight")}
    for step in range(run.loop.steps):
        train_step(state, make_batch(run, order.batch(step), step))
    after = dict(state.model.named_parameters())
    untouched = all(torch.equal(value[context:], after[name][context:]) for name, value in before.items())
    return Curve({length: loss_at(state.model, task, length, seed) for length in LENGTHS}, untouched)


@torch.no_grad()
def loss_at(model: Model, task: str, length: int, seed: int) -> float:
    """Mean loss on 256 fresh rows of this length, over the positions from 32 on; at length 32 over all asked for."""
    source = Markov() if task == "markov" else Copy(vocab=23)
    inputs, targets = Stream(source, length, 256, seed=10_000 + seed).batch(0)
    model.eval()
    losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
    asked = targets != IGNORED
    if length > SHORT:
        asked[:, :SHORT] = False
    return float(losses[asked].mean())


@claim("pe-extrapolation")
def extrapolation(lab: Lab) -> Iterator[Finding]:
    """Under `broken` models are trained on 64 tokens, on the Markov source only: 64 is then nothing new."""
    context, names = (64, ("markov",)) if lab.broken else (SHORT, ("markov", "copy"))
    yield _table_ends(lab)
    for task in names:
        judged = [scheme for scheme in SCHEMES if scheme != "none" or not lab.broken]
        curves = {scheme: measure(task, scheme, lab.seed, context) for scheme in judged}
        numbers = {scheme: curve.losses for scheme, curve in curves.items()}
        yield from _bands(lab, task, numbers)
        yield lab.exact(f"{task}: unseen rows stay as they were", curves["learned"].untouched)
        known = Markov().baselines() if task == "markov" else {}
        guess = known.get("unigram", float(np.log(23)))
        trained = max(losses[32] for scheme, losses in numbers.items() if scheme != "none")
        curves_text = {scheme: [round(losses[n], 3) for n in LENGTHS] for scheme, losses in numbers.items()}
        yield lab.empirical(f"{task}: all four learnt it", trained, None, guess - 0.5, lengths=LENGTHS, **curves_text)


def _table_ends(lab: Lab) -> Finding:
    """(a), first half: beyond its table a learned scheme has no vector to add, and the model raises an error."""
    model = build(model_config("learned", 24, max_len=SHORT))
    tokens = torch.zeros(1, SHORT + 1, dtype=torch.long)
    model(tokens[:, :SHORT])
    error = refusal(model, tokens)
    return lab.exact("(a) a learned table ends", "position 32 is outside" in error, error=error)


def _bands(lab: Lab, task: str, loss: dict[str, dict[int, float]]) -> Iterator[Finding]:
    rotary, alibi = loss["rotary"], loss["alibi"]
    yield lab.empirical(
        f"(a) {task}: learned, 48 against in range", loss["learned"][48] - loss["learned"][32], 1.0, None
    )
    for length in (36, 40):
        ahead = loss["sinusoidal"][length] - rotary[length]
        yield lab.empirical(f"(b) {task}: sinusoidal minus rotary at {length}", ahead, 0.0, None)
    yield lab.empirical(f"(c) {task}: rotary minus ALiBi at 64", rotary[64] - alibi[64], 0.5, None)
    yield lab.empirical(f"(d) {task}: rotary, 64 against in range", rotary[64] - rotary[32], 0.5, None)


@figure("pe-extrapolation", "Trained on 32 tokens: loss at positions beyond (recorded run, seed 0)", height=3.2)
def draw(lab: Lab, fig: Figure) -> None:
    axes = fig.canvas.subplots(1, 2, sharex=True)
    for ax, task, name in zip(axes, ("markov", "copy"), ("order-2 Markov source", "copying a block"), strict=True):
        for scheme, colour in zip(SCHEMES, (COLOURS[4], COLOURS[0], COLOURS[1], COLOURS[2], GREY), strict=True):
            style = "--" if scheme == "none" else "-"
            ax.plot(LENGTHS, RECORDED[task][scheme], "o", linestyle=style, color=colour, markersize=3, label=scheme)
        ax.axvline(SHORT, color="black", linewidth=0.8, linestyle=":")
        ax.set(title=name, xlabel="test length", xticks=(32, 40, 48, 64, 96), ylim=(0, None))
    axes[0].set_ylabel("nats per token, unseen positions")
    fig.canvas.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
