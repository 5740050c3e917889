"""Conversations in batches: several share a sequence, in an order that the seed decides.

A conversation of n tokens takes n - 1 positions: inputs are all tokens but the last, targets all but the first, and a
target that is not learned is `IGNORED`. Conversations share a sequence by best fit, longest first, within a buffer. The
batch numbers them, so that none attends to another and positions restart.
"""

import bisect
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from glassformer.training.data.batches import IGNORED, shuffled
from glassformer.training.data.corpus import DataError
from glassformer.training.objective import Batch

BUFFER = 4096
"""Conversations that are packed together. Best fit over more of them gains almost nothing."""


@dataclass(frozen=True)
class Row:
    """One sequence to learn, or two of them for a preference: token ids and which are learned."""

    place: str
    parts: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def length(self) -> int:
        """Positions that the longest part takes."""
        return max(len(ids) for ids, _ in self.parts) - 1


@dataclass(frozen=True)
class ChatBatches:
    """Batches of packed conversations, a pure function of (seed, step, rank). Each epoch is packed anew."""

    rows: list[Row]
    context: int
    batch_size: int
    """Sequences (pairs of preferences) over all ranks."""
    seed: int = 0
    rank: int = 0
    world: int = 1
    packs: bool = True
    reference: Tensor | None = None
    _epochs: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)
    """Number of sequences before each epoch."""
    _bins: dict[int, list[list[int]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size % self.world:
            raise DataError(f"loop.batch={self.batch_size} is not a multiple of the {self.world} processes: change it.")

    def epoch(self, number: int) -> list[list[int]]:
        """Return the sequences of an epoch, each a list of rows."""
        if number not in self._bins:
            for old in [known for known in self._bins if abs(known - number) > 1]:
                del self._bins[old]
            order = shuffled(self.seed, number, len(self.rows)).tolist()
            bins = [[i] for i in order]
            if self.packs:
                bins = []
                for first in range(0, len(order), BUFFER):
                    some = order[first : first + BUFFER]
                    found = pack([self.rows[i].length for i in some], self.context)
                    bins += [[some[i] for i in group] for group in found]
                # best fit puts the longest first: another order, or batches would be sorted by length
                bins = [bins[i] for i in shuffled(self.seed ^ 0x5EED, number, len(bins)).tolist()]
            self._bins[number] = bins
        return self._bins[number]

    def _sequence(self, number: int) -> list[int]:
        """Return the rows of a sequence, counted over all epochs."""
        while number >= self._epochs[-1]:
            self._epochs.append(self._epochs[-1] + len(self.epoch(len(self._epochs) - 1)))
        epoch = bisect.bisect_right(self._epochs, number) - 1
        return self.epoch(epoch)[number - self._epochs[epoch]]

    def batch(self, step: int) -> Batch:
        """Return this rank's sequences of a step."""
        share = self.batch_size // self.world
        first = step * self.batch_size + self.rank * share
        bins = [self._sequence(number) for number in range(first, first + share)]
        return collate(self.rows, bins, self.context, self.reference)


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Return groups of indices whose lengths sum to at most `capacity`: best fit, longest first."""
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free positions, number of the group), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(free, (lengths[index], -1))
        if at == len(free):
            groups.append([index])
            left, number = capacity - lengths[index], len(groups) - 1
        else:
            room, number = free.pop(at)
            groups[number].append(index)
            left = room - lengths[index]
        if left > 0:
            bisect.insort(free, (left, number))
    return groups


def collate(rows: list[Row], bins: list[list[int]], context: int, reference: Tensor | None = None) -> Batch:
    """Return a batch whose sequences hold the rows of each bin, one after the other, padded at the end.

    A sequence is as long as the longest of the batch; the context if conversations are packed, so that shapes stay.
    """
    pairs = reference is not None
    groups = [[rows[i].parts[part] for i in group] for group in bins for part in range(2 if pairs else 1)]
    packed = any(len(group) > 1 for group in groups)
    used = max(sum(len(ids) - 1 for ids, _ in group) for group in groups)
    width = context if packed else used
    inputs = torch.zeros(len(groups), width, dtype=torch.long)
    targets = torch.full_like(inputs, IGNORED)
    documents = torch.full_like(inputs, -1)
    for row, group in enumerate(groups):
        at = 0
        for number, (ids, learned) in enumerate(group):
            end = at + len(ids) - 1
            inputs[row, at:end] = torch.from_numpy(ids[:-1])
            wanted = np.where(learned[1:], ids[1:], IGNORED)
            targets[row, at:end] = torch.from_numpy(wanted)
            documents[row, at:end] = number
            at = end
    held = None
    if reference is not None:
        held = reference[[i for group in bins for i in group]].flatten()
    return Batch(inputs, targets, documents=documents if packed else None, reference=held)
