"""Synthetic tasks: data without end, or all there is of it, whose right answer is known.

A run names one as `data.corpus = "task:repeat"` and sets its parameters in `[task]`. A task gives rows of T + 1 tokens
and says which of their T next tokens can be known; the loss counts no others. What a step sees is a function of (seed,
step, row) alone, as in `batches`: a task resumes bit for bit and shards over ranks like any text.
"""

import difflib
import string
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from glassformer.errors import ConfigError, require, require_positive
from glassformer.training.data.batches import IGNORED, Order, in_fours, random_words, shuffled
from glassformer.training.data.tokenizer import CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from glassformer.training.run import Run

PREFIX = "task:"
_DRAWN, _VALIDATION, _SPLIT = range(16, 19)  # streams of random numbers, apart from those of `batches`
_SIGNS = string.digits + string.ascii_uppercase + string.ascii_lowercase + "".join(map(chr, range(0xC0, 0x2000)))
Rows = tuple[np.ndarray, np.ndarray]
"""Tokens (B,T+1), and which of the next tokens (B,T) can be known."""


class Drawn(Protocol):
    """A task whose rows are drawn: `n_numbers` random 64-bit words make one."""

    def n_numbers(self, context: int) -> int: ...

    def draw(self, words: np.ndarray, context: int) -> Rows: ...


@dataclass(frozen=True)
class Repeat:
    """Random tokens, then a random block, then the same block again: only what happened before tells what comes next.

    The row ends with the second copy; the block's length is uniform between `shortest` and `longest`, so the copy
    begins at a random place. Its first token cannot be known and is not asked for, nor is anything before it. Induction
    heads solve it (Olsson et al. 2022).
    """

    kind: ClassVar[str] = "repeat"
    vocab: int = 40
    """Number of different tokens."""
    shortest: int = 8
    """Fewest tokens of a block."""
    longest: int = 18
    """Most tokens of a block."""

    def __post_init__(self) -> None:
        require_positive(self, "vocab", "shortest", "longest")
        signs(self.vocab)  # refuses more than there are
        require(
            2 <= self.shortest <= self.longest,
            f"task.shortest={self.shortest} must be at least 2 and at most task.longest={self.longest}.",
        )

    def check(self, context: int) -> None:
        require(
            2 * self.longest <= context + 1,
            f"two copies of a block of task.longest={self.longest} tokens do not fit in a row of context + 1 = "
            f"{context + 1}: use a loop.context of at least {2 * self.longest - 1}, or shorter blocks.",
        )

    @property
    def characters(self) -> str:
        return signs(self.vocab)

    def baselines(self) -> dict[str, float]:
        return {}

    def n_numbers(self, context: int) -> int:
        return context + 2

    def draw(self, words: np.ndarray, context: int) -> Rows:
        length = self.shortest + _below(words[:, :1], self.longest - self.shortest + 1)  # (B, 1)
        tokens = _below(words[:, 1 : context + 2], self.vocab)
        position = np.arange(context + 1)[None]
        second = position >= context + 1 - length  # begins at the second copy
        tokens = np.take_along_axis(tokens, np.where(second, position - length, position), 1)
        return tokens, (second[:, 1:] & second[:, :-1])


@dataclass(frozen=True)
class Copy:
    """A random block, a separator (the last id), the block again, and separators to the end of the row.

    Blocks have T // 2 tokens, or a uniform number between `shortest` and that. The tokens of the copy are the targets.
    """

    kind: ClassVar[str] = "copy"
    vocab: int = 40
    """Number of different tokens in blocks; the separator is one more."""
    shortest: int | None = None
    """Fewest tokens of a block. Default: all blocks have half the context."""

    def __post_init__(self) -> None:
        require_positive(self, "vocab")
        signs(self.vocab)
        if self.shortest is not None:
            require_positive(self, "shortest")

    def check(self, context: int) -> None:
        least = 2 * (self.shortest or 1)
        require(
            context >= least,
            f"a block of {least // 2} tokens, a separator and a copy need a loop.context of at least {least}, not "
            f"{context}: lengthen it.",
        )

    @property
    def characters(self) -> str:
        return signs(self.vocab) + "|"

    def baselines(self) -> dict[str, float]:
        return {}

    def n_numbers(self, context: int) -> int:
        return 1 + context // 2

    def draw(self, words: np.ndarray, context: int) -> Rows:
        longest = context // 2
        shortest = longest if self.shortest is None else self.shortest
        length = shortest + _below(words[:, :1], longest - shortest + 1)  # (B, 1)
        block = _below(words[:, 1:], self.vocab)
        position = np.arange(context + 1)[None]
        copied = (position > length) & (position <= 2 * length)
        source = np.where(position < length, position, np.where(copied, position - length - 1, 0))
        tokens = np.where((position < length) | copied, np.take_along_axis(block, source, 1), self.vocab)
        return tokens, copied[:, 1:]


@dataclass(frozen=True)
class Markov:
    """A chain of order 2: p(z | x y) are rows of a table drawn from Dirichlet(concentration), fixed by `seed`.

    Rows begin in the stationary distribution of pairs, and the second token, which follows one token only, is no
    target: so the entropy rate is exactly the lowest possible loss, and the best bigram and unigram lie above it.
    """

    kind: ClassVar[str] = "markov"
    vocab: int = 24
    """Number of different tokens."""
    concentration: float = 0.1
    """Concentration of the Dirichlet distribution: the smaller, the more predictable the next token."""
    seed: int = 0
    """Seed of the table. The sequences drawn from it depend on the seed of the run."""

    def __post_init__(self) -> None:
        require_positive(self, "vocab")
        require(2 <= self.vocab <= 200, f"task.vocab={self.vocab} must be between 2 and 200: the table has its cube.")
        require(self.concentration > 0, f"task.concentration={self.concentration} must be positive, such as 0.1.")
        require(self.seed >= 0, f"task.seed={self.seed} must be 0 or more.")

    def check(self, context: int) -> None:
        require(context >= 2, f"loop.context={context}: a chain of order 2 needs at least 2.")

    @property
    def characters(self) -> str:
        return string.ascii_lowercase[: self.vocab] if self.vocab <= 26 else signs(self.vocab)

    def baselines(self) -> dict[str, float]:
        """Nats per token: of the chain itself (its entropy rate), of the best bigram and of the best unigram model."""
        table, pairs = _chain(self)
        single = pairs.sum(0)
        return {
            "unigram": _entropy(single),
            "bigram": _entropy(pairs) - _entropy(pairs.sum(1)),
            "entropy rate": float((pairs * _entropy_of_rows(table)).sum()),
        }

    def n_numbers(self, context: int) -> int:
        return context

    def draw(self, words: np.ndarray, context: int) -> Rows:
        table, pairs = _chain(self)
        V, uniform = self.vocab, (words >> np.uint64(11)) * 2.0**-53
        cumulative = table.cumsum(-1)
        tokens = np.empty((len(words), context + 1), np.int64)
        start = np.searchsorted(pairs.ravel().cumsum(), uniform[:, 0], side="right").clip(max=V * V - 1)
        tokens[:, 0], tokens[:, 1] = start // V, start % V
        for t in range(2, context + 1):
            rows = cumulative[tokens[:, t - 2], tokens[:, t - 1]]
            # the last sum may fall short of 1 by rounding
            tokens[:, t] = (rows <= uniform[:, t - 1, None]).sum(-1).clip(max=V - 1)
        known = np.ones((len(words), context), np.bool_)
        known[:, 0] = False
        return tokens, known


@dataclass(frozen=True)
class ModularAddition:
    """`a b =` and the answer (a + b) mod p, over all p^2 pairs; a fraction is for training, the others for validation.

    The only task with an end: a step takes the next `loop.batch` pairs of a shuffled round, and all of them when
    `loop.batch` is their number, int(fraction p^2). Power et al. 2022; Nanda et al. 2023.
    """

    kind: ClassVar[str] = "modular-addition"
    p: int = 31
    """The modulus."""
    fraction: float = 0.5
    """Fraction of the pairs that are trained on; the others are for validation."""

    context: ClassVar[int] = 3

    def __post_init__(self) -> None:
        require_positive(self, "p")
        require(2 <= self.p <= 1000, f"task.p={self.p} must be between 2 and 1000.")
        require(
            0 < self.fraction < 1 and 1 <= self.n_train < self.p**2,
            f"task.fraction={self.fraction} must be between 0 and 1 and leave pairs of the {self.p**2} to both sides.",
        )

    @property
    def n_train(self) -> int:
        return int(self.fraction * self.p**2)

    def check(self, context: int) -> None:
        require(context == 3, f"loop.context={context}: the rows of modular-addition have 3 tokens, so leave it out.")

    @property
    def characters(self) -> str:
        return signs(self.p) + "="

    def baselines(self) -> dict[str, float]:
        return {}

    def split(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequences a, b, =, answer (N,4) for training and for validation: every pair is in one of them."""
        p = self.p
        words = random_words(_SPLIT, seed, 0, in_fours(p * p))[: p * p]
        a, b = np.divmod(np.argsort(words, kind="stable"), p)
        rows = np.stack([a, b, np.full_like(a, p), (a + b) % p], 1)
        return rows[: self.n_train], rows[self.n_train :]


Task = Repeat | Copy | Markov | ModularAddition
TASKS: dict[str, type[Task]] = {kind.kind: kind for kind in (Repeat, Copy, Markov, ModularAddition)}


def named(corpus: str) -> type[Task]:
    """The task that `task:NAME` means. Raises ConfigError with the nearest name."""
    name = corpus.removeprefix(PREFIX)
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=2, cutoff=0.4)
    hint = f"Did you mean {' or '.join(PREFIX + n for n in close)}?" if close else f"Use one of {', '.join(TASKS)}."
    raise ConfigError(f"data.corpus={corpus!r} names no task. {hint}")


@dataclass(frozen=True)
class TaskData:
    """A task as a source of batches: what `Prepared` is for a text."""

    task: Task

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return CharTokenizer(self.task.characters)

    def order(self, run: "Run", rank: int = 0, world: int = 1) -> Order:
        """Batches of training rows by step, this rank's share of them."""
        shape = (run.loop.batch, run.seed, rank, world)
        if isinstance(self.task, ModularAddition):
            return Listed(self.task.split(run.seed)[0], *shape)
        return Stream(self.task, run.context, *shape)

    def validation(self, run: "Run") -> Iterator[tuple[Tensor, Tensor]]:
        """`loop.eval_batches` batches that training never sees; of modular addition all pairs left, or the first."""
        n, seed = run.loop.batch, run.seed
        if isinstance(self.task, ModularAddition):
            left = self.task.split(seed)[1]
            for first in range(0, min(len(left), n * run.loop.eval_batches), n):
                yield _answers(left[first : first + n])
            return
        unseen = Stream(self.task, run.context, n, seed, stream=_VALIDATION)
        for number in range(run.loop.eval_batches):
            yield unseen.batch(number)

    def facts(self, run: "Run") -> dict[str, Any]:
        """For the log: what is trained on, and how many tokens of it are read in this run."""
        validation = sum(inputs.numel() for inputs, _ in self.validation(run))
        whole = {"train_tokens": run.loop.steps * run.loop.batch * run.context, "validation_tokens": validation}
        return {"task": self.task.kind, **whole}

    def baselines(self, vocab_size: int) -> dict[str, float]:
        """Return the known losses of reference models, in nats per token."""
        return self.task.baselines()


@dataclass(frozen=True)
class Stream:
    """New random sequences for every step; sequence r of a step is the same on every rank."""

    task: Drawn
    context: int
    batch_size: int
    seed: int = 0
    rank: int = 0
    world: int = 1
    stream: int = _DRAWN

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows, width = self.batch_size // self.world, in_fours(self.task.n_numbers(self.context))
        words = random_words(self.stream, self.seed, step, rows * width, self.rank * rows * width)
        chosen = words.reshape(rows, width)[:, : self.task.n_numbers(self.context)]
        return _known(*self.task.draw(chosen, self.context))


@dataclass(frozen=True)
class Listed:
    """Sequences of a finite list (N,T+1) with the last token as target: all once in random order, then in another."""

    rows: np.ndarray
    batch_size: int
    seed: int = 0
    rank: int = 0
    world: int = 1

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        share = self.batch_size // self.world
        at = step * self.batch_size + self.rank * share + np.arange(share)
        rounds, indices = np.divmod(at, len(self.rows))
        chosen = np.empty(share, np.int64)
        for number in np.unique(rounds).tolist():
            chosen[rounds == number] = shuffled(self.seed, number, len(self.rows))[indices[rounds == number]]
        return _answers(self.rows[chosen])


def signs(n: int) -> str:
    """n different characters, one for each token: digits and letters first."""
    require(n <= len(_SIGNS), f"task.vocab={n} exceeds {len(_SIGNS)}: there are no more signs to show tokens by.")
    return _SIGNS[:n]


def _below(words: np.ndarray, n: int) -> np.ndarray:
    """Uniform whole numbers below n; the remainder prefers none by more than n / 2^64."""
    return (words % np.uint64(n)).astype(np.int64)


def _known(tokens: np.ndarray, known: np.ndarray) -> tuple[Tensor, Tensor]:
    inputs, following = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
    return inputs, following.masked_fill_(~torch.from_numpy(known), IGNORED)


def _answers(rows: np.ndarray) -> tuple[Tensor, Tensor]:
    known = np.zeros((len(rows), rows.shape[1] - 1), np.bool_)
    known[:, -1] = True
    return _known(rows, known)


@lru_cache(maxsize=4)
def _chain(task: Markov) -> tuple[np.ndarray, np.ndarray]:
    """The table p(z | x y), (V,V,V), and the stationary distribution of pairs (V,V), by iteration to the last digit."""
    V = task.vocab
    table = np.random.default_rng(task.seed).dirichlet(np.full(V, task.concentration), size=(V, V))
    pairs = np.full((V, V), 1 / V**2)
    for _ in range(100_000):
        following = np.einsum("xy,xyz->yz", pairs, table)
        if np.abs(following - pairs).max() < 1e-16:
            break
        pairs = following / following.sum()
    return table, pairs


def _entropy_of_rows(p: np.ndarray) -> np.ndarray:
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)


def _entropy(p: np.ndarray) -> float:
    return float(_entropy_of_rows(p.ravel()))
