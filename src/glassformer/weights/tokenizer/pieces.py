"""The vocabulary of a sentencepiece model as a tokenizer of the library `tokenizers`.

`tokenizers` merges pairs by rank, and sentencepiece's BPE merges the pair whose result has the highest score. So every
way to split a piece into two pieces becomes a merge, ranked by the score of the piece.
"""

from dataclasses import dataclass
from typing import Any

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Types of pieces, in sentencepiece and in GGUF."""


@dataclass(frozen=True)
class Pieces:
    """Pieces with scores and types, and the rules of a sentencepiece model."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    prefix: bool = True
    """Put a space in front of a text."""
    single_spaces: bool = False
    """Remove spaces at the ends, and replace several spaces by one."""
    charsmap: bytes = b""
    """Replacements of characters, compiled by sentencepiece."""

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer`."""
        from tokenizers import AddedToken, Tokenizer, decoders

        tokenizer = Tokenizer(self._model())
        tokenizer.normalizer, tokenizer.pre_tokenizer = self._rules()
        ends = [decoders.Strip(" ", 1, 0)] if self.prefix else []
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
        )
        added = [
            AddedToken(piece, normalized=False, special=kind != USER)
            for piece, kind in zip(self.pieces, self.types, strict=True)
            if kind in (UNKNOWN, CONTROL, USER)
        ]
        tokenizer.add_tokens(added)
        return tokenizer

    def _rules(self) -> tuple[Any, Any]:
        """Return the normalizer and the pre-tokenizer.

        The space in front belongs to the text, not to each part between special tokens: `Metaspace` with "first" does
        so, but not if the part begins with a space already. Without `single_spaces` such a text gets a second space, so
        the spaces are replaced before, and `Metaspace` sees none.
        """
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [normalizers.Precompiled(self.charsmap)] if self.charsmap else []
        if self.single_spaces:
            steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(left=False, right=True)]
        else:
            steps += [normalizers.Replace(" ", SPACE)]
        first: list[Any] = [pre_tokenizers.Metaspace(" ", "first", split=False)] if self.prefix else []
        later = pre_tokenizers.Metaspace(SPACE, "never", split=self.unigram)
        return normalizers.Sequence(steps), pre_tokenizers.Sequence([*first, later])

    def _model(self) -> Any:
        from tokenizers import models

        unknown = next((i for i, kind in enumerate(self.types) if kind == UNKNOWN), None)
        fallback = BYTE in self.types
        if self.unigram:
            pairs = list(zip(self.pieces, self.scores, strict=True))
            return models.Unigram(pairs, unk_id=unknown, byte_fallback=fallback)
        vocabulary = {piece: i for i, piece in enumerate(self.pieces)}
        return models.BPE(
            vocabulary,
            self._merges(vocabulary),
            unk_token=None if unknown is None else self.pieces[unknown],
            fuse_unk=True,
            byte_fallback=fallback,
        )

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        """Return the pairs of pieces that form a piece, by falling score."""
        merges = []
        for i, (piece, kind) in enumerate(zip(self.pieces, self.types, strict=True)):
            if kind != NORMAL:
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-self.scores[i], i, vocabulary[left], (left, right)))
        return [merge[-1] for merge in sorted(merges)]
