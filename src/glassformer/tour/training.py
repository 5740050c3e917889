"""The part of the tour that trains a model: the corpus, its baselines, the run, and two sanity checks."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.finding import Finding
from glassformer.model import Model
from glassformer.training import Session, baselines, open_session, read_run, train, train_step
from glassformer.training.data.batches import Batches
from glassformer.training.data.corpus import DataError
from glassformer.training.loop import evaluate, prepare_state
from glassformer.training.objective import make_batch
from glassformer.training.run import Run, Schedule

# Measured: 1.66 nats on Shakespeare after 500 steps. nanoGPT's CPU setting reaches 2.27 then, and 1.91 after 2,000.
RUN = """
[model]
preset = "nano"
max_len = 128
position = { kind = "rotary" }
[optim]
kind = "muon"
lr = 3e-3
[schedule]
kind = "wsd"
warmup = 20
decay = 0.4
floor = 0.0
[loop]
batch = 12
log_every = 5
[machine]
compile = "no"
"""

Listener = Callable[[dict[str, Any]], None]
"""Receives each event of the tour as it happens. The key "event" names its kind, as `tour.run` emits it."""


TRAINED, ADAPTED = "trained", "adapted"
"""The folders of the two runs within that of the tour."""


@dataclass(frozen=True)
class Plan:
    """The settings of a tour."""

    minutes: float = 2.0
    """Minutes of training. Everything else takes about half a minute more."""
    out: Path = Path("tour")
    """Folder of the trained model and the report."""
    changes: tuple[str, ...] = ()
    """Changes to the run, such as model.n_layers=2."""
    force: bool = False
    """Whether an earlier tour in `out` may be replaced."""
    cache_lengths: tuple[int, ...] = (32, 64, 128, 255)
    """Numbers of tokens for which generation with and without a cache is timed."""
    tuning_steps: int = 16
    """Steps for which adapters of the bundled model are trained."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ValueError(f"minutes={self.minutes} must be a positive number: 2 beats the bigram baseline.")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: give a folder for the report, such as tour.")


@dataclass(frozen=True)
class Corpus:
    """The text that is trained on, and the loss of n-gram baselines on it, in nats per token."""

    name: str
    note: str
    """Why this is not the corpus that was asked for; usually empty."""
    train_tokens: int
    validation_tokens: int
    vocab_size: int
    excerpt: str
    baselines: dict[str, float]
    """uniform, unigram, bigram, 5-gram: cross-entropy on the validation split, highest first."""


@dataclass
class TrainingRecord:
    """The events of a run, collected."""

    start: dict[str, Any] = field(default_factory=dict)
    train: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best: float = math.inf
    seconds: float = 0.0
    final: float = math.inf
    """Loss of the trained model on the whole validation split, like the baselines; `validation` uses a part of it."""
    samples: list[tuple[int, str]] = field(default_factory=list)
    """Step and text."""

    def add(self, event: dict[str, Any]) -> None:
        """Record one event of the run."""
        match event["event"]:
            case "start":
                self.start = event
            case "step":
                self.train.append((event["step"], event["loss"]))
            case "validation":
                self.validation.append((event["step"], event["loss"]))
            case "sample":
                self.samples.append((event["step"], event["text"]))
            case "end":
                self.best, self.seconds = event["best"], event["seconds"]


def open_corpus(plan: Plan) -> tuple[Session, Corpus]:
    """Open Shakespeare, or the manual that comes with Python if it is not available, and measure the baselines."""
    changes = (*plan.changes, f"out={str(plan.out / TRAINED)!r}")
    note = ""
    try:
        session = open_session(read_run(RUN, changes, source="the tour"))
    except DataError as error:
        if any(change.startswith("data.corpus") for change in plan.changes):
            raise
        note = f"{str(error).rstrip('.')}. The tour trains on the manual that comes with Python instead."
        session = open_session(read_run(RUN, (*changes, "data.corpus=embedded"), source="the tour"))
    data, V = session.data, session.run.model.vocab_size
    losses = {"uniform": math.log(V), **baselines(data.train, data.val, V)}
    losses = dict(sorted(losses.items(), key=lambda item: -item[1]))
    excerpt = data.tokenizer.decode(np.asarray(data.train[:240]).tolist())
    return session, Corpus(data.manifest.corpus, note, len(data.train), len(data.val), V, excerpt, losses)


def fit_steps(session: Session, minutes: float) -> Run:
    """Return the run with as many steps as fit into the minutes on this machine, estimated by timing a few steps."""
    run, seconds = session.run, 60 * minutes
    state = prepare_state(run)
    order = Batches(session.data.train, run.context, run.loop.batch, seed=run.seed)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 * seconds and len(times) < 30):
        batch = make_batch(run, order.batch(len(times)), len(times)).to(state.device)
        began = time.perf_counter()
        train_step(state, batch)
        times.append(time.perf_counter() - began)
    # The fastest step shows what the machine can do. Other processes make single steps ten times slower, and a plan
    # based on the median was too short to learn anything (74 steps instead of 1,000), so it is better to take longer.
    # A tenth of the time is for evaluation, samples and checkpoints.
    steps = round(0.9 * seconds / min(times))
    checks = min(max(steps // 40, 2), 12)
    every = min(max(steps, 30), 20_000) // checks
    loop = dataclasses.replace(
        run.loop,
        steps=every * checks,
        eval_every=every,
        checkpoint_every=every * checks,
        sample_every=every * max(1, checks // 4),
    )
    return dataclasses.replace(run, loop=loop)


def train_model(plan: Plan, session: Session, corpus: Corpus, listen: Listener) -> tuple[Run, Model, TrainingRecord]:
    """Train for about the minutes of the plan. With `plan.force`, the model of an earlier tour is replaced."""
    run, record = fit_steps(session, plan.minutes), TrainingRecord()

    def report(event: dict[str, Any]) -> None:
        record.add(event)
        listen({"event": "training", "training_event": event})

    ngrams = {name: value for name, value in corpus.baselines.items() if name != "uniform"}
    state = train(run, session.data, report, baselines=lambda: ngrams, force=plan.force)
    whole_split = dataclasses.replace(run, loop=dataclasses.replace(run.loop, eval_batches=len(session.data.val)))
    record.final = evaluate(dataclasses.replace(state, run=whole_split), session.data.val)
    return run, state.model.eval(), record


def beats_bigram(plan: Plan, corpus: Corpus, record: TrainingRecord) -> Finding:
    """Judge whether the model predicts better than a bigram, which knows the previous character only."""
    name = "validation loss below the bigram baseline"
    if plan.minutes < 1:
        return Finding.skip(name, f"{plan.minutes:g} minutes of training are too short for this check: use --minutes 1")
    why = "nats per character on the whole validation split; a bigram uses one character, the model its context"
    return Finding.judge(name, record.final, corpus.baselines["bigram"], why, "train longer: --minutes 4")


def initial_loss(session: Session, record: TrainingRecord | None = None) -> Finding:
    """Judge whether the loss of an untrained model is that of the uniform distribution: ln V.

    It is measured on uniformly drawn tokens, with the windows and the shift of the text. On text, a head tied to the
    embedding favours the token it has just read. That lowers the loss by 5 % where repeats are common (in a manual,
    23 % of the characters are spaces).
    """
    run = session.run
    V = run.model.vocab_size
    tokens = np.random.default_rng(run.seed).integers(0, V, 1 + 100 * run.context)
    loss, uniform = evaluate(prepare_state(run), tokens), math.log(V)
    evidence = {"loss": loss, "ln_v": uniform}
    why = f"loss {loss:.3f} on uniformly drawn characters, ln {V} = {uniform:.3f}"
    if record is not None:
        evidence["on_text"] = record.validation[0][1]
        why += f" ({evidence['on_text']:.3f} on the text)"
    why += "; a wrong head, initialisation scale or target shift shows up here first"
    remedy = "check init_std, the scale of the head, and which token is the target"
    error = abs(loss - uniform) / uniform
    return Finding.judge("initial loss within 2 % of ln V", error, 0.02, why, remedy, **evidence)


def overfit_one_batch(session: Session, bound: float = 0.01, max_steps: int = 600) -> Finding:
    """Judge whether an untrained model can memorise a batch of four windows.

    The windows begin with different characters. Two that begin with the same character but continue differently have
    the same input at their first position, so that no model could reach a loss of 0.
    """
    base = session.run
    run = dataclasses.replace(
        base,
        loop=dataclasses.replace(base.loop, batch=4, accumulate=1, context=min(64, base.context), steps=max_steps),
        schedule=Schedule(kind="constant", warmup=min(10, max_steps - 1)),
        optim=dataclasses.replace(base.optim, weight_decay=0.0),
    )
    order = Batches(session.data.train, run.context, run.loop.batch, seed=run.seed)
    windows = next(w for step in range(10_000) if len((w := order.batch(step))[0][:, 0].unique()) == run.loop.batch)
    state = prepare_state(run)
    batch = make_batch(run, windows, 0).to(state.device)
    losses: list[float] = []
    while len(losses) < max_steps and (not losses or losses[-1] > bound):
        losses.append(float(train_step(state, batch)["loss"]))
    why = f"{batch.n_targets()} characters and far more parameters: a model that cannot memorise them has a bug"
    remedy = "check the path of the gradient: detached tensors, a mask that hides the input, a frozen parameter"
    name = f"overfits one batch to a loss under {bound:g}"
    return Finding.judge(name, losses[-1], bound, why, remedy, steps=len(losses), losses=losses)
