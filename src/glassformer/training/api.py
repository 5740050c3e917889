"""`gf.train` and `gf.evaluate`: the public functions over sessions, the loop and the batches of this package."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.config import ConfigError, ModelConfig
from glassformer.generation.request import tokenizer_of
from glassformer.model import DecoderLM, Model
from glassformer.training.data.batches import IGNORED, eval_batches
from glassformer.training.data.tasks import Task
from glassformer.training.loop import train as run_training
from glassformer.training.run import Run, override
from glassformer.training.sections import Chat, Data, Loop, Lora, Loss, Machine, Optim, Probe, Schedule
from glassformer.training.session import open_session, read_run_file
from glassformer.weights import load, load_tokenizer

Event = dict[str, Any]
"""One line of log.jsonl: `event` is "start", "step", "validation", "sample", "probe" or "end"."""
Text = str | Sequence[int] | np.ndarray | Tensor
"""A text, or the token ids of one."""
CONTEXT = 512
"""Tokens per window of `evaluate` for a model without max_len."""
LOGITS = 1 << 26
"""Largest number of logits that `evaluate` computes at a time."""


class Overrides(TypedDict, total=False):
    """The parts of a run that `gf.train` can change: some fields of a section as a dict, or a whole section."""

    model: ModelConfig | Mapping[str, Any]
    data: Data | Mapping[str, Any]
    task: Task | Mapping[str, Any]
    optim: Optim | Mapping[str, Any]
    schedule: Schedule | Mapping[str, Any]
    loss: Loss | Mapping[str, Any]
    loop: Loop | Mapping[str, Any]
    machine: Machine | Mapping[str, Any]
    probe: Probe | Mapping[str, Any]
    lora: Lora | Mapping[str, Any]
    chat: Chat | Mapping[str, Any]
    seed: int
    out: str | os.PathLike[str]


@dataclass(frozen=True)
class TrainResult:
    """What `gf.train` returns."""

    model: Model
    """The model after the last step, in evaluation mode; with `optim.ema`, the averaged weights. The model with the
    lowest validation loss is in `folder / "best"`."""
    tokenizer: Any
    """The `tokenizers.Tokenizer` of the run, as `gf.load_tokenizer` returns it."""
    history: list[Event]
    """The events of the run in order, as in log.jsonl: `[e["loss"] for e in history if e["event"] == "validation"]`."""
    folder: Path
    """The folder of the run: checkpoints, log.jsonl and the resolved run.toml."""


def train(
    run: Run | str | os.PathLike[str],
    *,
    start: Model | str | os.PathLike[str] | None = None,
    listen: Callable[[Event], None] | None = None,
    force: bool = False,
    **overrides: Unpack[Overrides],
) -> TrainResult:
    """Train a model and return it with its tokenizer, the events of the run, and the folder of the run.

    `run` is a `gf.Run`, the path of a run file, or the path of a text file or a folder of texts, which is trained on
    with the default settings. `overrides` change parts of the run, and fields that are not named keep their values:
    `gf.train("run.toml", loop={"steps": 5}, optim={"lr": 3e-4}, seed=1, out="runs/short")`.

    `start` is a model to fine-tune, or the folder or name of one; fresh weights are trained without it. It brings its
    config and its tokenizer, and the defaults are those of fine-tuning: `gf.train("text.txt", start="bard")`.

    `listen` is called with each event while the run trains. `force` replaces the run that the folder `out` already
    holds. Raises GlassformerError for an invalid run, and KeyboardInterrupt after a checkpoint if interrupted.
    """
    history: list[Event] = []

    def record(event: Event) -> None:
        history.append(event)
        if listen is not None:
            listen(event)

    changes: dict[str, Any] = dict(overrides)
    if "out" in changes:
        changes["out"] = os.fspath(changes["out"])
    if start is not None:
        changes["start"] = {"model": _start(run, start)}

    def note(text: str) -> None:
        record({"event": "note", "text": text})

    resolved = _resolve(run, changes, note)
    session = open_session(resolved)
    for text in session.notes:
        note(text)
    state = run_training(session.run, session.data, record, baselines=None, force=force)
    folder = Path(state.run.out)
    trained = load(folder / "last", device=state.device, dtype=torch.float32)
    return TrainResult(trained, load_tokenizer(folder / "last"), history, folder)


def _start(run: Run | str | os.PathLike[str], start: Model | str | os.PathLike[str]) -> str:
    """Return the path or name of a model to start from. A model in memory is written to the cache if need be."""
    if isinstance(run, Run):
        raise ConfigError("a gf.Run has a model of its own, and start= brings another: give a run file or a text.")
    if isinstance(start, str | os.PathLike):
        return os.fspath(start)
    from glassformer.training.tuning.start import stored

    return stored(start)


def _resolve(run: Run | str | os.PathLike[str], changes: dict[str, Any], note: Callable[[str], None]) -> Run:
    if isinstance(run, Run):
        return override(run, changes, note=note)
    path = Path(run).expanduser()
    text = read_run_file(path)
    if text is not None:
        return override(text, changes, str(path), note)
    data = changes.get("data", {})
    fields = dataclasses.asdict(data) if isinstance(data, Data) else dict(data)
    return override("", changes | {"data": fields | {"corpus": str(path)}}, str(path), note)


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text."""

    nats_per_token: float
    """Mean cross-entropy of the targets, in nats."""
    standard_error: float | None
    """Standard error of nats_per_token over the windows, whose tokens are not independent. None for one window."""
    bits_per_byte: float | None
    """Cross-entropy of the targets in bits, divided by the UTF-8 bytes of their text. None if the text is not known."""
    tokens: int
    """Number of targets: every token of the text but the first, which has no context."""
    n_bytes: int | None
    """UTF-8 bytes of the text of the targets."""
    context: int
    """Tokens per window."""
    stride: int
    """Targets per window, except in the first one and in the last one."""

    @property
    def perplexity(self) -> float:
        """exp(nats_per_token)."""
        return math.exp(self.nats_per_token)


def evaluate(
    model: Model,
    text_or_tokens: Text,
    tokenizer: Any = None,
    *,
    context: int | None = None,
    stride: int | None = None,
) -> Evaluation:
    """Return the cross-entropy of a text under a decoder, with every token but the first predicted exactly once.

    Windows of `context` tokens (default: the model's max_len, 512 without one) slide over the text by `stride` tokens
    (default: half the context), and each window scores the tokens that no earlier window scored. So every target but
    those of the first window sees at least `context - stride` tokens before it. `stride=context` is the evaluation of
    training. `tokenizer` is a `tokenizers.Tokenizer`; the default is that of the folder the model was loaded from.
    """
    if not isinstance(model, DecoderLM):
        raise ConfigError(
            f"evaluate scores next tokens, which {type(model).__name__} does not predict: pass a decoder-only model."
        )
    tokenizer = tokenizer_of(model) if tokenizer is None else tokenizer
    tokens, n_bytes = _tokens_and_bytes(text_or_tokens, tokenizer)
    if len(tokens) < 2:
        raise ConfigError(f"a text of {len(tokens)} tokens has no target: the first token has no context.")
    vocabulary = model.config.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise ConfigError(
            f"token id {int(tokens.max() if tokens.min() >= 0 else tokens.min())} is outside the model's vocabulary of "
            f"{vocabulary} ids: pass the tokenizer of this model."
        )
    context, stride = _window(model.config, len(tokens), context, stride)
    sums, counts = _score(model, tokens, context, stride)
    total, n = float(sums.sum()), int(counts.sum())
    mean = total / n
    windows = len(sums)
    residuals = sums - mean * counts
    error = math.sqrt(windows / (windows - 1) * float(residuals.square().sum())) / n if windows > 1 else None
    bits = total / math.log(2) / n_bytes if n_bytes else None
    return Evaluation(mean, error, bits, n, n_bytes, context, stride)


def _tokens_and_bytes(
    given: str | Sequence[int] | np.ndarray | Tensor, tokenizer: Any
) -> tuple[np.ndarray, int | None]:
    """Return token ids (N,), and the UTF-8 bytes of the text of all but the first; None without a tokenizer."""
    if isinstance(given, str):
        if tokenizer is None:
            raise ConfigError("a text needs a tokenizer, and this model has none: pass tokenizer=, or token ids.")
        encoded = tokenizer.encode(given, add_special_tokens=False)
        start = encoded.offsets[1][0] if len(encoded.ids) > 1 else len(given)
        return np.asarray(encoded.ids, np.int64), len(given[start:].encode())
    tokens = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise ConfigError(
            f"tokens of shape {tokens.shape} and dtype {tokens.dtype} are not one sequence of ids: pass integers (N,)."
        )
    tokens = tokens.astype(np.int64)
    if tokenizer is None:
        return tokens, None
    whole, first = (tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in (tokens, tokens[:1]))
    return tokens, len(whole.encode()) - len(first.encode())


def _window(config: ModelConfig, n: int, context: int | None, stride: int | None) -> tuple[int, int]:
    limit = config.max_len
    if context is not None and (context < 1 or (limit is not None and context > limit)):
        raise ConfigError(f"context={context} must be between 1 and the model's max_len, {limit or 'without a limit'}.")
    context = min(context or limit or CONTEXT, n - 1)
    stride = max(1, context // 2) if stride is None else stride
    if stride < 1:
        raise ConfigError(f"stride={stride} must be at least 1 and at most the context, {context}.")
    return context, min(stride, context)


@torch.no_grad()
def _score(model: DecoderLM, tokens: np.ndarray, context: int, stride: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy and the number of targets of each window, both float64."""
    rows = max(1, LOGITS // (context * model.config.vocab_size))
    sums, counts = [], []
    was_training = model.training
    model.eval()
    try:
        for inputs, targets in eval_batches(tokens, context, rows, stride=stride):
            logits = model(inputs.to(model.device)).flatten(0, 1).float()
            losses = F.cross_entropy(logits, targets.to(model.device).flatten(), ignore_index=IGNORED, reduction="none")
            sums.append(losses.view(targets.shape).double().sum(1).cpu())
            counts.append((targets != IGNORED).double().sum(1))
    finally:
        model.train(was_training)
    return torch.cat(sums), torch.cat(counts)
