"""The order in which training reads tokens, and the targets of each objective.

What a step sees is a function of (seed, step, row) and of nothing else: the numbers come from Philox, which has a key
and a counter instead of a state. So a resumed run needs only the number of its step, a rank needs only its rows, and
the rows of all ranks together are those of a single process.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from glassformer.config.choices import WindowOrder
from glassformer.training.data.corpus import DataError
from glassformer.training.data.shards import Shards

Tokens = np.ndarray | Shards
"""The tokens of a split: in memory or a mapped file, or several files."""
IGNORED = -100
"""A target that no loss counts."""
_OFFSETS, _SHUFFLE, _MASK, _CIPHER = range(4)  # what the numbers are for: streams that never meet
ROUNDS = 16
"""Rounds of `permuted`. The counts of the 120 orders of five windows over 60,000 seeds have a chi-square statistic of
120 with 16 rounds (119 is expected), of 198 with 12 and of 1,471 with 8."""
_WORD = 1 << 64


def random_words(stream: int, seed: int, step: int, n: int, skip: int = 0) -> np.ndarray:
    """`n` random 64-bit numbers, n and `skip` (numbers passed over) multiples of 4, of a (stream, seed, step).

    Raw bits of a bit generator, which NumPy promises never to change, as it does not for its distributions.
    """
    assert n % 4 == skip % 4 == 0
    key, counter = np.array([seed % _WORD, step % _WORD], np.uint64), np.array([skip // 4, 0, stream, 0], np.uint64)
    generator = np.random.Philox(key=key, counter=counter)
    return generator.random_raw(n)


def in_fours(n: int) -> int:
    """n, rounded up to a multiple of 4: Philox gives numbers four at a time."""
    return -(-n // 4) * 4


def shuffled(seed: int, epoch: int, n: int) -> np.ndarray:
    """The numbers below n in the random order of an epoch."""
    return np.argsort(random_words(_SHUFFLE, seed, epoch, in_fours(n))[:n], kind="stable")


def permuted(seed: int, epoch: int, n: int, indices: np.ndarray, stream: int = _CIPHER) -> np.ndarray:
    """Return what stands at these indices of a random permutation of the numbers below n; nothing is stored.

    It is a Feistel network: x is written as (x // b, x % b) with a b >= n, and each round adds a hash of one half to
    the other, modulo a or b. Such a round can be undone, so the network is a permutation of the numbers below a b. A
    result of n or more goes through the network again until it is below n (cycle walking), which makes it a permutation
    of the numbers below n. At most a - 1 of the a b numbers are too large, so this is rare for large n.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = random_words(stream, seed, epoch, ROUNDS)
    found = np.asarray(indices).astype(np.uint64)
    walking = np.arange(len(found))
    while len(walking):
        left, right = np.divmod(found[walking], np.uint64(b))
        for key in range(0, ROUNDS, 2):
            left = (left + _mixed(right, keys[key])) % np.uint64(a)
            right = (right + _mixed(left, keys[key + 1])) % np.uint64(b)
        found[walking] = left * np.uint64(b) + right
        walking = walking[found[walking] >= n]
    return found.astype(np.int64)


def _mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a 32-bit hash of each number (the finalizer of SplitMix64), so that a sum with it does not overflow."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


class Order(Protocol):
    """What training asks for its batches, by the number of the step."""

    def batch(self, step: int) -> Any:
        """Inputs and targets, or a whole `objective.Batch`."""


@dataclass(frozen=True)
class Batches:
    """Batches of windows: `inputs (B,T)` and `targets (B,T)`, the tokens one later; int64.

    random: each row begins anywhere, uniformly and independently, as in nanoGPT. epoch: the windows of T targets that
    lie side by side, all of them once in a random order, then again in another. The tail shorter than a window is left
    out of an epoch. The order of an epoch is computed, not stored (see `permuted`).
    """

    tokens: Tokens
    context: int
    """T."""
    batch_size: int
    """Rows over all ranks."""
    seed: int = 0
    rank: int = 0
    world: int = 1
    start: int = 0
    """The step at which an iteration begins."""
    mode: WindowOrder = "random"

    def __post_init__(self) -> None:
        for name in ("context", "batch_size", "world"):
            if (value := getattr(self, name)) < 1:
                raise DataError(f"{name}={value} must be at least 1.")
        if self.mode not in get_args(WindowOrder):
            raise DataError(f"mode={self.mode!r} is not known. Use one of {', '.join(get_args(WindowOrder))}.")
        if not 0 <= self.rank < self.world:
            raise DataError(f"rank={self.rank} must be one of 0 to world - 1 = {self.world - 1}.")
        if self.batch_size % self.world:
            near = max(self.batch_size // self.world, 1) * self.world
            raise DataError(
                f"batch_size={self.batch_size} is not a multiple of world={self.world}: ranks cannot take equal "
                f"shares. Use {near} or {near + self.world}."
            )
        _check_length(self.tokens, self.context)

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return (len(self.tokens) - 1) // self.context

    def offsets(self, step: int) -> np.ndarray:
        """Return where this rank's sequences of a step begin."""
        rows = self.batch_size // self.world
        first = self.rank * rows
        if self.mode == "random":
            numbers = random_words(_OFFSETS, self.seed, step, in_fours(self.batch_size))[first : first + rows]
            # the remainder prefers no offset by more than n / 2^64
            return (numbers % np.uint64(len(self.tokens) - self.context)).astype(np.int64)
        return self.windows(step * self.batch_size + first + np.arange(rows)) * self.context

    def windows(self, numbers: np.ndarray, stream: int = _CIPHER) -> np.ndarray:
        """Return the windows that are read after so many others, epoch after epoch."""
        epochs, indices = np.divmod(numbers, self.n_windows)
        found = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs).tolist():
            found[epochs == epoch] = permuted(self.seed, epoch, self.n_windows, indices[epochs == epoch], stream)
        return found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets of a step: a pure function of the step."""
        return self.read(self.offsets(step))

    def read(self, offsets: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the windows that begin at these offsets."""
        return _split(_gather(self.tokens, offsets, self.context))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, from step `start` on."""
        step = self.start
        while True:
            yield self.batch(step)
            step += 1


def _check_length(tokens: Tokens, context: int) -> None:
    if len(tokens) <= context:
        raise DataError(
            f"{len(tokens):,} tokens are too few for a context of {context:,}: a window has context + 1. Use a longer "
            f"text or a context of at most {max(len(tokens) - 1, 1):,}."
        )


def _gather(tokens: Tokens, offsets: np.ndarray, context: int) -> np.ndarray:
    """Windows of context + 1 tokens, (B, T+1)."""
    if not isinstance(tokens, np.ndarray):
        return tokens.windows(offsets, context + 1).astype(np.int64)
    plain = tokens.view(np.ndarray)  # indexing a plain array is faster than indexing a memmap
    return np.lib.stride_tricks.sliding_window_view(plain, context + 1)[offsets].astype(np.int64)


def _split(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    block = torch.from_numpy(windows)
    whole = torch.contiguous_format
    # copies: `contiguous` would leave the inputs and targets of a single row in the same memory
    return block[:, :-1].clone(memory_format=whole), block[:, 1:].clone(memory_format=whole)


def eval_batches(
    tokens: Tokens, context: int, batch_size: int, limit: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets in a fixed order: every token but the first is a target exactly once.

    The last window is moved back so that it has full length too; its targets that were counted before are
    `IGNORED`, so losses must be weighted by the number of the others. The last batch may have fewer sequences. With
    `limit`, at most that many batches of full windows are spread evenly over the text.
    """
    _check_length(tokens, context)
    last = len(tokens) - 1 - context
    offsets = np.arange(0, last + 1, context)
    if limit is not None and limit * batch_size <= len(offsets):
        offsets = offsets[np.arange(limit * batch_size) * len(offsets) // (limit * batch_size)]
    elif offsets[-1] < last:
        offsets = np.append(offsets, last)
    seen = np.append(0, np.maximum(offsets[:-1] + context - offsets[1:], 0))
    for first in range(0, len(offsets), batch_size):
        inputs, targets = _split(_gather(tokens, offsets[first : first + batch_size], context))
        earlier = torch.from_numpy(seen[first : first + batch_size, None])
        yield inputs, targets.masked_fill_(torch.arange(context) < earlier, IGNORED)


def mask_tokens(
    tokens: Tensor, mask_id: int, vocab_size: int, seed: int, step: int, rate: float = 0.15, first_row: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs and targets (B,T) of a masked language model, by the rule of BERT (Devlin et al. 2019, 3.1 and A.1).

    In each row round(rate T) positions, at least one, are chosen at random and become targets; all others are
    `IGNORED`. Of the chosen, 80 % are replaced by `mask_id`, 10 % by a random one of `vocab_size` ids, 10 % stay. A
    rank passes the global number of its first row, and gets what a single process would have.
    """
    B, T = tokens.shape
    n_chosen = max(1, round(rate * T))
    if not 0 < rate <= 1 or n_chosen > T:
        raise DataError(f"rate={rate} must be more than 0 and at most 1, such as 0.15.")
    width = in_fours(3 * T)
    numbers = (
        random_words(_MASK, seed, step, B * width, first_row * width).reshape(B, width)[:, : 3 * T].reshape(B, 3, T)
    )
    chosen = torch.zeros(B, T, dtype=torch.bool)
    order = np.argsort(numbers[:, 0], axis=1, kind="stable")[:, :n_chosen]
    chosen.scatter_(1, torch.from_numpy(order), True)
    fate = torch.from_numpy((numbers[:, 1] % np.uint64(10)).astype(np.int64))
    other = torch.from_numpy((numbers[:, 2] % np.uint64(vocab_size)).astype(np.int64))
    inputs = torch.where(chosen & (fate < 8), mask_id, torch.where(chosen & (fate == 8), other, tokens))
    return inputs, torch.where(chosen, tokens, IGNORED)


def prefix_pairs(tokens: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source, decoder inputs and decoder targets of a sequence-to-sequence model: a text's first half, then its second.

    Of tokens (B,T) the source (B,T//2) is the first half and the targets are the rest; the decoder is given `start`
    and then the targets one earlier.
    """
    n_source = tokens.shape[1] // 2
    if n_source < 1:
        raise DataError(f"a context of {tokens.shape[1]} cannot be halved into source and target: use 2 or more.")
    source, targets = tokens[:, :n_source], tokens[:, n_source:]
    begin = torch.full_like(targets[:, :1], start)
    return source.contiguous(), torch.cat([begin, targets[:, :-1]], 1), targets.contiguous()
