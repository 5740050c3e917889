"""The tokens of a split in several files, read as if they were one array."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


class Shards:
    """Token files one after the other. Each is mapped into memory when it is first read; nothing is copied.

    It has what training asks of a split: its length, slices, and windows at many offsets at once.
    """

    def __init__(self, files: Sequence[Path], lengths: Sequence[int], dtype: str) -> None:
        self.files, self.dtype = tuple(files), np.dtype(dtype)
        self.ends = np.cumsum(np.array(lengths, np.int64))
        """Number of tokens up to the end of each file."""
        self._mapped: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def _shard(self, number: int) -> np.ndarray:
        if number not in self._mapped:
            # a plain array over the map: indexing it is faster than indexing a memmap
            self._mapped[number] = np.memmap(self.files[number], self.dtype, "r").view(np.ndarray)
        return self._mapped[number]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Return a copy of a slice. Its step must be 1."""
        begin, end, step = part.indices(len(self))
        if step != 1:
            raise IndexError(f"a slice of token files has step 1, not {step}")
        return self._read(begin, max(begin, end))

    def _read(self, begin: int, end: int) -> np.ndarray:
        """Return the tokens from `begin` to `end`, of one file or of several."""
        pieces = []
        number = int(np.searchsorted(self.ends, begin, side="right"))
        while begin < end:
            start = int(self.ends[number - 1]) if number else 0
            piece = self._shard(number)[begin - start : end - start]
            pieces.append(piece)
            begin += len(piece)
            number += 1
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def windows(self, offsets: np.ndarray, width: int) -> np.ndarray:
        """Return the `width` tokens at each offset, (len(offsets), width). A window may lie across files."""
        found = np.empty((len(offsets), width), self.dtype)
        for row, offset in enumerate(np.asarray(offsets).tolist()):
            found[row] = self._read(offset, offset + width)
        return found

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Return all tokens in memory: for a split that is known to be short."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def max(self) -> int:
        """Return the largest token id; the files are read one after the other."""
        return max(int(self._shard(number).max()) for number in range(len(self.files)))
