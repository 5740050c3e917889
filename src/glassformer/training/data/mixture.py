"""Several corpora in one run, each with its share of the sequences: a function of (seed, step, row), as `batches` are.

The sequences of a run, counted over steps and rows, are divided into blocks of `BLOCK`. Every block has the same number
of sequences of each corpus, in a random order. So the shares are exact in every block, and it is known at once which
corpus a sequence is of and how many sequences that corpus has had before.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from glassformer.training.data.batches import Batches, eval_batches, permuted
from glassformer.training.data.corpus import DataError
from glassformer.training.data.source import Prepared, prepare_corpus
from glassformer.training.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from glassformer.training.run import Run
    from glassformer.training.sections import Data

BLOCK = 4096
_ORDER, _CORPUS = 32, 64  # streams of random numbers, apart from those of `batches` and `tasks`; one for each corpus


def apportion(weights: tuple[float, ...], total: int) -> list[int]:
    """Return whole numbers that sum to `total`, in the proportion of the weights: largest remainders are rounded up."""
    exact = [total * Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    counts = [int(share) for share in exact]
    missing = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))[: total - sum(counts)]
    return [count + (i in missing) for i, count in enumerate(counts)]


@dataclass(frozen=True)
class MixedBatches:
    """Batches whose sequences are of several corpora. Each of `parts` has the order of one corpus."""

    parts: tuple[Batches, ...]
    shares: tuple[int, ...]
    """Sequences of each corpus in a block."""

    def draws(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each of this rank's sequences, and how many sequences that corpus has had before."""
        one = self.parts[0]
        rows = one.batch_size // one.world
        blocks, places = np.divmod(step * one.batch_size + one.rank * rows + np.arange(rows), BLOCK)
        slots = np.empty(rows, np.int64)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            slots[here] = permuted(one.seed, block, BLOCK, places[here], _ORDER)
        ends = np.cumsum(self.shares)
        corpora = np.searchsorted(ends, slots, side="right")
        shares = np.array(self.shares)[corpora]
        return corpora, blocks * shares + slots - (ends[corpora] - shares)

    def offsets(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the corpus of each sequence and where it begins there."""
        corpora, numbers = self.draws(step)
        found = np.empty(len(corpora), np.int64)
        for number, part in enumerate(self.parts):
            here = corpora == number
            if part.mode == "random":
                found[here] = part.offsets(step)[here]
            else:
                found[here] = part.windows(numbers[here], _CORPUS + number) * part.context
        return corpora, found

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets of a step: a pure function of the step."""
        corpora, offsets = self.offsets(step)
        inputs = torch.empty(len(corpora), self.parts[0].context, dtype=torch.int64)
        targets = torch.empty_like(inputs)
        for number, part in enumerate(self.parts):
            here = np.flatnonzero(corpora == number)
            inputs[here], targets[here] = part.read(offsets[here])
        return inputs, targets


@dataclass(frozen=True)
class Mixture:
    """Prepared corpora with weights. It is a `Source`."""

    parts: tuple[Prepared, ...]
    weights: tuple[float, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.parts[0].tokenizer

    @property
    def digest(self) -> str:
        return "+".join(part.digest for part in self.parts)

    def order(self, run: "Run", rank: int = 0, world: int = 1) -> MixedBatches:
        batches = [
            Batches(part.train, run.context, run.loop.batch, run.seed, rank, world, mode=run.data.order)
            for part in self.parts
        ]
        return MixedBatches(tuple(batches), tuple(self._shares(BLOCK)))

    def _shares(self, total: int) -> list[int]:
        shares = apportion(self.weights, total)
        for part, share, weight in zip(self.parts, shares, self.weights, strict=True):
            if not share:
                raise DataError(
                    f"{part.manifest.corpus} has the weight {weight} in data.mix, less than 1 / {BLOCK} of all: raise "
                    "it."
                )
        return shares

    def validation(self, run: "Run") -> Iterator[tuple[Tensor, Tensor]]:
        """The validation batches of each corpus, as many as its share of them, one at least."""
        counts = apportion(self.weights, run.loop.eval_batches)
        for part, count in zip(self.parts, counts, strict=True):
            yield from eval_batches(part.val, run.context, run.loop.batch, max(1, count))

    def facts(self, run: "Run") -> dict[str, Any]:
        shares = [share / BLOCK for share in self._shares(BLOCK)]
        return {
            "train_tokens": sum(len(part.train) for part in self.parts),
            "validation_tokens": sum(len(part.val) for part in self.parts),
            "mix": [
                {"corpus": part.manifest.corpus, "share": share, "train_tokens": len(part.train)}
                for part, share in zip(self.parts, shares, strict=True)
            ],
        }

    def baselines(self, vocab_size: int) -> dict[str, float]:
        return {}

    def check(self, context: int) -> None:
        """Raise DataError if a split of a corpus is shorter than one window, or a weight is too small."""
        self._shares(BLOCK)
        for part in self.parts:
            part.check(context)


def prepare_mixture(data: "Data", tokenizer: Tokenizer | None = None) -> Mixture:
    """Return the corpora of a run with data.mix. All have the tokenizer of data.corpus."""
    digests = data.sha256.split("+") if data.sha256 else [""] * (1 + len(data.mix))
    if len(digests) != 1 + len(data.mix):
        raise DataError(
            f"data.sha256 has {len(digests)} hashes for {1 + len(data.mix)} corpora: leave it out to take the corpora "
            "as they are now."
        )
    first = prepare_corpus(dataclasses.replace(data, mix=(), sha256=digests[0]), tokenizer)
    parts = [first]
    for number, (other, digest) in enumerate(zip(data.mix, digests[1:], strict=True)):
        cache = None if data.cache is None else f"{data.cache}-{number + 1}"
        asked = dataclasses.replace(
            data,
            corpus=other.corpus,
            mix=(),
            sha256=digest,
            cache=cache,
            vocab_size=None,
            field=other.field or data.field,
        )
        parts.append(prepare_corpus(asked, first.tokenizer))
    return Mixture(tuple(parts), (1.0, *(other.weight for other in data.mix)))
