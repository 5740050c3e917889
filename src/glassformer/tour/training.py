"""The part of the tour in which a model is trained, speaks, and is looked into. Data, no printing."""

import dataclasses
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.finding import Finding
from glassformer.generation import Sampling, generate
from glassformer.model import Model
from glassformer.training import Session, baselines, open_session, read_run, train, train_step
from glassformer.training.data.batches import Batches
from glassformer.training.data.corpus import DataError
from glassformer.training.loop import evaluate, prepare_state
from glassformer.training.objective import make_batch
from glassformer.training.run import RunConfig, Schedule

# measured: 1.66 nats on Shakespeare after 500 steps (nanoGPT's CPU setting is at 2.27 then, at 1.91 after 2,000)
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

Listen = Callable[[dict[str, Any]], None]
"""Is told {"event": "stage" | "size" | "corpus" | "training" | "spoken" | "samplers" | "race" |
"proof" | "examined" | "finding", ...}."""


SAMPLERS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0.0),
    "temp 0.5": Sampling(temperature=0.5),
    "as it is": Sampling(),
    "temp 2": Sampling(temperature=2.0),
    "top-k 4": Sampling(top_k=4),
    "top-p 0.7": Sampling(top_p=0.7),
    "min-p 0.2": Sampling(min_p=0.2),
    "penalty 2": Sampling(repetition_penalty=2.0),
}


TRAINED = "trained"
"""The run's folder within that of the tour."""


@dataclass(frozen=True)
class Plan:
    """What the tour does."""

    minutes: float = 2.0
    """Of training; the rest takes about another half."""
    out: Path = Path("tour")
    """Folder of the trained model and the report."""
    changes: tuple[str, ...] = ()
    """To the run, such as model.n_layers=2."""
    races: tuple[int, ...] = (32, 64, 128, 255)
    """Lengths of the cache races."""
    force: bool = False
    """Whether an earlier tour in `out` may be replaced."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minutes) and self.minutes > 0):
            raise ValueError(f"minutes={self.minutes} must be a positive number: 2 is enough to beat a bigram.")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: give a folder for the report, such as tour.")


@dataclass(frozen=True)
class Text:
    """The corpus and what counting it can do, in nats per token."""

    name: str
    note: str
    """Why it is not the one that was wanted; usually empty."""
    train_tokens: int
    validation_tokens: int
    vocab_size: int
    excerpt: str
    lines: dict[str, float]
    """uniform, unigram, bigram, 5-gram: cross-entropy of the validation split, easiest first."""


@dataclass
class Training:
    """What a run reported."""

    start: dict[str, Any] = field(default_factory=dict)
    train: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    best: float = math.inf
    seconds: float = 0.0
    final: float = math.inf
    """Of the trained model on the whole validation split, as the lines to beat are; all else is on a part of it."""
    says: list[tuple[int, str]] = field(default_factory=list)
    """Step and sample."""

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.start = event
            case "step":
                self.train.append((event["step"], event["loss"]))
            case "validation":
                self.validation.append((event["step"], event["loss"]))
            case "sample":
                self.says.append((event["step"], event["text"]))
            case "end":
                self.best, self.seconds = event["best"], event["seconds"]


def open_corpus(plan: Plan) -> tuple[Session, Text]:
    """Shakespeare where it can be had, else the text that every Python carries; counted, and its baselines measured."""
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
    lines = {"uniform": math.log(V), **baselines(data.train, data.val, V)}
    lines = dict(sorted(lines.items(), key=lambda item: -item[1]))
    excerpt = data.tokenizer.decode(np.asarray(data.train[:240]).tolist())
    return session, Text(data.manifest.corpus, note, len(data.train), len(data.val), V, excerpt, lines)


def fit_steps(session: Session, minutes: float) -> RunConfig:
    """The run with as many steps as fit into the minutes here, found by timing a few of them."""
    run, seconds = session.run, 60 * minutes
    state = prepare_state(run)
    order = Batches(session.data.train, run.context, run.loop.batch, seed=run.seed)
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 * seconds and len(times) < 30):
        batch = make_batch(run, order.batch(len(times)), len(times)).to(state.device)
        began = time.perf_counter()
        train_step(state, batch)
        times.append(time.perf_counter() - began)
    # the fastest is what the machine can do: neighbours on its cores make single steps ten times slower, and a plan
    # made from those was too short to learn anything (a median gave 74 steps instead of 1,000), so rather take longer;
    # a tenth of the time is for evaluation, samples and checkpoints
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


def first_prompt(session: Session) -> str:
    """What the samples go on from: a speaker's name, or the first word of the validation split."""
    prompt, tokenizer = "ROMEO:\n", session.data.tokenizer
    if session.data.manifest.corpus != "shakespeare":
        prompt = f"{session.data.first_word()} "
    try:
        tokenizer.encode(prompt)
    except DataError:
        prompt = tokenizer.decode(np.asarray(session.data.val[:4]).tolist())
    return prompt


def train_model(plan: Plan, session: Session, text: Text, listen: Listen) -> tuple[RunConfig, Model, Training]:
    """Train for about the plan's minutes; with `plan.force`, replace the model of an earlier tour."""
    folder = plan.out / TRAINED
    if plan.force and (folder / "log.jsonl").exists() and (folder / "run.toml").exists():
        shutil.rmtree(folder)
    run, record = fit_steps(session, plan.minutes), Training()
    prompt = first_prompt(session)

    def hear(event: dict[str, Any]) -> None:
        record(event)
        listen({"event": "training", "of": event})

    def speak(model: Model, tokenizer: Any) -> str:
        return sample(model, tokenizer, prompt, Sampling(temperature=0.8), length=80)

    lines = {name: value for name, value in text.lines.items() if name != "uniform"}
    state = train(run, session.data, hear, speak, None, lines)
    every_window = dataclasses.replace(run, loop=dataclasses.replace(run.loop, eval_batches=len(session.data.val)))
    record.final = evaluate(dataclasses.replace(state, run=every_window), session.data.val)
    return run, state.model.eval(), record


def beats_bigram(plan: Plan, text: Text, record: Training) -> Finding:
    """Attention has to earn its keep: the previous character alone must be a worse guess."""
    name = "validation loss below the bigram line"
    if plan.minutes < 1:
        return Finding.skip(name, f"{plan.minutes:g} minutes of training are too few to ask for it: give 1 or more")
    why = "nats per character on all of the validation split; a bigram knows one character, the model its context"
    return Finding.judge(name, record.final, text.lines["bigram"], why, "train longer: --minutes 4")


@dataclass(frozen=True)
class Spoken:
    """A continuation by one sampler."""

    sampler: str
    prompt: str
    text: str
    """The prompt and what follows."""


def sample(
    model: Model, tokenizer: Any, prompt: str, sampling: Sampling | None, length: int = 120, beams: int = 1
) -> str:
    """The prompt and its continuation, as far as the context goes."""
    ids = tokenizer.encode(prompt).tolist()
    room = (model.config.max_len or 10**9) - len(ids)
    out = generate(model, [ids], max(1, min(length, room)), sampling, beams=beams, seed=1)
    return tokenizer.decode([i for i in out[0] if i < tokenizer.vocab_size])


def speak_by_every_sampler(model: Model, session: Session, length: int = 120) -> Iterator[Spoken]:
    """One seed, one prompt; only the sampler differs."""
    prompt, tokenizer = first_prompt(session), session.data.tokenizer
    for name, sampling in SAMPLERS.items():
        yield Spoken(name, prompt, sample(model, tokenizer, prompt, sampling, length))
    yield Spoken("4 beams", prompt, sample(model, tokenizer, prompt, None, length, beams=4))


class Patterns:
    """A tap that keeps the attention patterns."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if self.wants(site):
            self.found.append(value.detach().float().cpu())
        return value

    def wants(self, site: str) -> bool:
        return site.endswith("attention.pattern")


@dataclass(frozen=True)
class Attention:
    """What every head of a model looks at while it reads a text."""

    tokens: list[str]
    patterns: list[list[list[list[float]]]]
    """Layer, head, reader, read: each reader's row sums to 1."""
    previous: list[list[float]]
    """Layer, head: mean weight on the token before."""
    sharpest: tuple[int, int]
    """The head with the least entropy per row."""


def read_attention(model: Model, session: Session, length: int = 32) -> Attention:
    """The patterns of all heads on the first line of the validation split that is long enough."""
    tokenizer = session.data.tokenizer
    text = tokenizer.decode(np.asarray(session.data.val[:4000]).tolist())
    lines = [line for line in text.split("\n") if len(line) >= length] or [text]
    ids = tokenizer.encode(lines[0]).tolist()[: min(length, model.config.max_len or length)]
    tap = Patterns()
    with torch.no_grad():
        model(torch.tensor([ids], device=model.device), tap=tap)
    patterns = torch.cat(tap.found)  # (L, H, T, T): one text
    previous = patterns.diagonal(-1, 2, 3).mean(-1)
    entropy = torch.special.entr(patterns).sum(-1).mean(-1)
    layer, head = divmod(int(entropy.argmin()), entropy.shape[1])
    tokens = [tokenizer.decode([i]) for i in ids]
    return Attention(tokens, patterns.tolist(), previous.tolist(), (layer, head))


def initial_loss(session: Session, record: Training | None = None) -> Finding:
    """A fresh model knows nothing, so its loss is that of guessing evenly: ln V.

    Measured on tokens drawn evenly, cut into windows and shifted as the text is. A head tied to the embedding begins by
    favouring the token just read: on text full of repeats (the spaces of a manual: 23 %) that alone takes off 5 %.
    """
    run = session.run
    V = run.model.vocab_size
    tokens = np.random.default_rng(run.seed).integers(0, V, 1 + 100 * run.context)
    loss, even = evaluate(prepare_state(run), tokens), math.log(V)
    evidence = {"loss": loss, "ln_v": even}
    why = f"loss {loss:.3f} on evenly drawn characters, ln {V} = {even:.3f}"
    if record is not None:
        evidence["on_text"] = record.validation[0][1]
        why += f" ({evidence['on_text']:.3f} on the text)"
    why += "; a wrong head, scale or shift of the targets shows here first"
    remedy = "look at init_std, at the scale of the head, and at which token is the target"
    return Finding.judge("initial loss within 2 % of ln V", abs(loss - even) / even, 0.02, why, remedy, **evidence)


def overfit_one_batch(session: Session, bound: float = 0.01, max_steps: int = 600) -> Finding:
    """A fresh model on the same four windows until it knows them by heart.

    The windows begin with different characters: two that began alike but went on differently could not be told apart
    at their first position, and no model would reach a loss of 0.
    """
    given = session.run
    run = dataclasses.replace(
        given,
        loop=dataclasses.replace(given.loop, batch=4, accumulate=1, context=min(64, given.context), steps=max_steps),
        schedule=Schedule(kind="constant", warmup=min(10, max_steps - 1)),
        optim=dataclasses.replace(given.optim, weight_decay=0.0),
    )
    order = Batches(session.data.train, run.context, run.loop.batch, seed=run.seed)
    windows = next(w for step in range(10_000) if len((w := order.batch(step))[0][:, 0].unique()) == run.loop.batch)
    state = prepare_state(run)
    batch = make_batch(run, windows, 0).to(state.device)
    losses: list[float] = []
    while len(losses) < max_steps and (not losses or losses[-1] > bound):
        losses.append(float(train_step(state, batch)["loss"]))
    why = f"{batch.n_targets()} characters and far more parameters: memory suffices, so what is left is a bug"
    remedy = "look at the gradient's path: detached tensors, a mask that hides the input, a frozen parameter"
    name = f"overfits one batch to a loss under {bound:g}"
    return Finding.judge(name, losses[-1], bound, why, remedy, steps=len(losses), losses=losses)
