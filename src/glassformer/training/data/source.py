"""From text to tokens on disk.

`prepare` streams a corpus into `train.bin` and `val.bin` (raw little-endian ids), `tokenizer.json` and a
`manifest.json` that says what they were made of. `open_prepared` maps them; `batches` says in which order
they are read.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, Protocol, get_args

import numpy as np
from torch import Tensor

from glassformer.errors import plural
from glassformer.files import write_atomically
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.batches import Batches, Order, eval_batches, mask_tokens, prefix_pairs
from glassformer.training.data.corpus import Corpus, DataError, Document, find
from glassformer.training.data.tokenizer import Tokenizer, UnknownCharacter
from glassformer.training.run import Run

__all__ = [
    "Batches",
    "Manifest",
    "Prepared",
    "Source",
    "eval_batches",
    "mask_tokens",
    "open_prepared",
    "prefix_pairs",
    "prepare",
]

FORMAT = 1
MANIFEST, TRAIN, VAL = "manifest.json", "train.bin", "val.bin"
SPLIT = "the last validation_fraction of the characters, documents in order; training gets the rounded-down rest"
BPE_BYTES = 100_000_000
"""A longer corpus trains its BPE on about this much: every k-th megabyte, k the smallest whole number that does."""


@dataclass(frozen=True)
class Manifest:
    """How the token files were made."""

    format: int
    corpus: str
    files: tuple[dict[str, Any], ...]
    """name, sha256, bytes and characters of each document."""
    spec: dict[str, Any]
    """The requested tokenizer: kind, and vocab_size (bpe) or sha256 (a file)."""
    tokenizer: dict[str, Any]
    """The resulting tokenizer: kind, vocab_size, sha256 of tokenizer.json."""
    separator: str
    """Text of the token between two documents."""
    split: dict[str, Any]
    """rule, validation_fraction, characters of both sides."""
    tokens: dict[str, int]
    """How many in train and val."""
    dtype: str


class Source(Protocol):
    """The data of a run: a prepared text, or a synthetic task (`tasks.TaskData`)."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def order(self, run: Run, rank: int = 0, world: int = 1) -> Order:
        """Batches of this rank, by step."""

    def validation(self, run: Run) -> Iterator[Any]:
        """Inputs and targets, or whole batches, the same ones each time."""

    def facts(self, run: Run) -> dict[str, Any]:
        """train_tokens and validation_tokens, for the log."""

    def baselines(self, vocab_size: int) -> dict[str, float]:
        """Losses to beat, by name."""


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus, its tokens memory-mapped."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: np.ndarray
    val: np.ndarray

    def order(self, run: Run, rank: int = 0, world: int = 1) -> Order:
        return Batches(self.train, run.context, run.loop.batch, run.seed, rank, world, mode=run.data.order)

    def validation(self, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
        return eval_batches(self.val, run.context, run.loop.batch, run.loop.eval_batches)

    def facts(self, run: Run) -> dict[str, Any]:
        return {"train_tokens": len(self.train), "validation_tokens": len(self.val)}

    def baselines(self, vocab_size: int) -> dict[str, float]:
        from glassformer.training.data import ngram  # imported only when baselines are requested

        return ngram.baselines(self.train, self.val, vocab_size)

    def first_word(self) -> str:
        """A whole word near the start of the validation split, to prompt a model with; empty if there is none."""
        start = self.val[:400] if len(self.val) else self.train[:400]
        return whole_word(self.tokenizer.decode(np.asarray(start).tolist()))

    def check(self, context: int) -> None:
        """Raise DataError if a split is shorter than one window. An empty validation split may be requested."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            n, wanted = len(tokens), name == "training" or self.manifest.split["validation_fraction"] > 0
            if n <= context and wanted:
                other = ", or a larger validation fraction (data.validation)" if name == "validation" else ""
                raise DataError(
                    f"the {name} split of {self.manifest.corpus} has {plural(n, 'token')}, but a window needs "
                    f"context + 1 = {context + 1:,}: use a longer text, a context of {max(n - 1, 1):,} or less "
                    f"(loop.context){other}."
                )


def whole_word(text: str) -> str:
    """The first whole word of a text that may begin and end within a word; one with a letter in it is preferred."""
    words = text.split()
    first = 0 if text[:1].isspace() else 1
    last = len(words) if text[-1:].isspace() else len(words) - 1
    whole = words[first:last] or words  # a text of one word, or without spaces
    return next((word for word in whole if any(map(str.isalpha, word))), whole[0] if whole else "")


def prepare(
    corpus: Corpus | str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    vocab_size: int | None = None,
    validation_fraction: float = 0.1,
    context: int | None = None,
) -> Prepared:
    """The tokens of a corpus in the folder `out`; made anew only when text, tokenizer or split are not those of before.

    `tokenizer` is char, byte, bpe (with `vocab_size`) or a `tokenizer.json`. Documents are joined by the end-of-text
    token where the tokenizer has one, else by a newline; there is no padding. Memory does not grow with the text. A
    crash leaves the old files or none that counts: the manifest goes first and comes back last. With `context`, splits
    shorter than a window are refused. Raises DataError.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must be at least 0 and less than 1, such as 0.1.")
    corpus = corpus if isinstance(corpus, Corpus) else find(corpus)
    folder = Path(out).expanduser()
    if corpus.root and folder.resolve().is_relative_to(corpus.root.resolve()):
        raise DataError(f"{folder} lies in the corpus {corpus.root} and would become part of it: prepare elsewhere.")
    spec, given = _spec(tokenizer, vocab_size)
    documents = corpus.documents()
    if not _is_current(folder, documents, spec, validation_fraction):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _build(folder, corpus.name, documents, spec, given, validation_fraction)
        except OSError as error:
            raise DataError(f"{folder} cannot be written ({error.strerror or error}): make room there.") from None
    prepared = open_prepared(folder)
    if context is not None:
        prepared.check(context)
    return prepared


def open_prepared(folder: str | Path) -> Prepared:
    """Open what `prepare` wrote to a folder, without reading the sources. Raises DataError if it is incomplete."""
    folder = Path(folder).expanduser()
    manifest = _read_manifest(folder)
    if manifest is None or not _is_whole(folder, manifest):
        raise DataError(f"{folder} has no whole prepared corpus ({MANIFEST}, {TRAIN}, {VAL}): prepare it again.")
    return Prepared(folder, manifest, tok.load(folder), *(_map(folder / name, manifest.dtype) for name in (TRAIN, VAL)))


def _map(file: Path, dtype: str) -> np.ndarray:
    if file.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, "r")


def _spec(tokenizer: str | Path | Tokenizer, vocab_size: int | None) -> tuple[dict[str, Any], Tokenizer | None]:
    """Return the request in a comparable form, and the tokenizer itself if it exists already."""
    if isinstance(tokenizer, str) and tokenizer in get_args(tok.Kind):
        if (tokenizer == "bpe") != (vocab_size is not None):
            tok.train_tokenizer(tokenizer, (), vocab_size)  # raises the error
        return {"kind": tokenizer} | ({"vocab_size": vocab_size} if vocab_size is not None else {}), None
    if isinstance(tokenizer, str) and not Path(tokenizer).expanduser().exists():
        tok.train_tokenizer(tokenizer, ())  # raises the error
    given = tokenizer if isinstance(tokenizer, Tokenizer) else tok.load(tokenizer)
    if vocab_size not in (None, given.vocab_size):
        raise DataError(f"vocab_size={vocab_size}, but the given tokenizer has {given.vocab_size} ids: leave it out.")
    return {"kind": "file", "sha256": _sha256(given.to_json().encode())}, given


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return manifest if manifest.format == FORMAT else None


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    width = np.dtype(manifest.dtype).itemsize
    try:
        sizes = [(folder / f"{name}.bin").stat().st_size == n * width for name, n in manifest.tokens.items()]
        return all(sizes) and _sha256((folder / tok.FILE).read_bytes()) == manifest.tokenizer["sha256"]
    except OSError:
        return False


def _is_current(folder: Path, documents: list[Document], spec: dict[str, Any], fraction: float) -> bool:
    """Return whether the folder holds exactly this; the sources are hashed only if everything else agrees."""
    manifest = _read_manifest(folder)
    if manifest is None or manifest.spec != spec or manifest.split["validation_fraction"] != fraction:
        return False
    was, now = [(f["name"], f["bytes"]) for f in manifest.files], [(d.name, d.size) for d in documents]
    if was != now or not _is_whole(folder, manifest):
        return False
    return all(f["sha256"] == document.hash() for f, document in zip(manifest.files, documents, strict=True))


def _build(
    folder: Path, name: str, documents: list[Document], spec: dict[str, Any], given: Tokenizer | None, fraction: float
) -> None:
    """Read the corpus twice: for its alphabet, length and hashes, then for its tokens."""
    for old in folder.glob(".*.bin.*"):  # of a build that was killed
        if time.time() - old.stat().st_mtime > 86_400:
            old.unlink(missing_ok=True)
    kind = spec["kind"] if given is None else "byte"  # which only reads
    tokenizer = tok.train_tokenizer(kind, _scan(documents, kind), spec.get("vocab_size"))
    tokenizer = given or tokenizer
    total = sum(document.n_characters for document in documents)
    if not total:
        raise DataError(f"the corpus {name} has no characters: there is nothing to train on.")
    cut = int(total * (1 - Fraction(str(fraction))))
    files = tuple(
        {"name": d.name, "sha256": d.sha256, "bytes": d.n_bytes, "characters": d.n_characters} for d in documents
    )
    text = tokenizer.to_json()
    with ExitStack() as stack:
        staged = [_staged(folder / name, stack) for name in (TRAIN, VAL)]
        tokens = _encode(documents, tokenizer, cut, *staged)
        for file in staged:
            file.flush()
            os.fsync(file.fileno())
        manifest = Manifest(
            format=FORMAT,
            corpus=name,
            files=files,
            spec=spec,
            tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": _sha256(text.encode())},
            separator=tokenizer.separator,
            split={"rule": SPLIT, "validation_fraction": fraction, "train": cut, "val": total - cut},
            tokens={"train": tokens[0], "val": tokens[1]},
            dtype=np.dtype(tokenizer.dtype).name,
        )
        (folder / MANIFEST).unlink(missing_ok=True)
        for file, target in zip(staged, (TRAIN, VAL), strict=True):
            os.replace(file.name, folder / target)
        write_atomically(folder / tok.FILE, text.encode())
        write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2, ensure_ascii=False).encode())


def _staged(file: Path, stack: ExitStack) -> BinaryIO:
    """Open a temporary file that will be renamed to `file`; it is removed if that does not happen."""
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    stack.callback(Path(name).unlink, missing_ok=True)
    os.chmod(name, 0o644)  # mkstemp makes it private
    os.close(handle)
    return stack.enter_context(open(name, "wb"))


def _scan(documents: list[Document], kind: str) -> Iterator[str]:
    """All the text, or what a BPE of a long corpus is trained on; either way everything is read and hashed."""
    every = ceil(sum(document.size for document in documents) / BPE_BYTES) if kind == "bpe" else 1
    count = 0
    for document in documents:
        for text in document.read():
            if count % every == 0:
                yield text
            count += 1
    if len(documents) > 1:
        yield "\n"  # joins them


def _encode(documents: list[Document], tokenizer: Tokenizer, cut: int, train: BinaryIO, val: BinaryIO) -> list[int]:
    """Write the first `cut` characters to `train` and the rest to `val`; return the number of tokens of each."""
    counts, before = [0, 0], 0

    def write(ids: np.ndarray, in_val: bool) -> None:
        counts[in_val] += len(ids)
        (train, val)[in_val].write(ids.tobytes())

    for i, document in enumerate(documents):
        if i:
            write(_separator(tokenizer), in_val=before > cut)  # belongs to the document that it ends
        n, hashed = document.n_characters, document.sha256
        at = lines = 0
        for text, in_val in _pieces(document, tokenizer, cut - before):
            try:
                write(tokenizer.encode(text), in_val)
            except UnknownCharacter as error:
                raise error.at(document.label, at, lines) from None
            at += len(text)
            lines += text.count("\n")
        if document.sha256 != hashed:
            raise DataError(f"{document.label} changed while it was read: prepare it again when it is finished.")
        before += n
    return counts


def _separator(tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.end_of_text is not None:
        return np.array([tokenizer.end_of_text], tokenizer.dtype)
    try:
        return tokenizer.encode("\n")
    except DataError:
        raise DataError(
            "the documents of a folder are joined by a newline, which the given tokenizer does not know: use another "
            "tokenizer, or join them in one file yourself."
        ) from None


def _pieces(document: Document, tokenizer: Tokenizer, cut: int) -> Iterator[tuple[str, bool]]:
    """The document in parts that can be encoded one by one, none across `cut`, each with whether it lies behind it."""
    pending, at = "", 0
    for text in document.read():
        pending += text
        if at < cut < at + len(pending):
            yield pending[: cut - at], False
            pending, at = pending[cut - at :], cut
        if n := tokenizer.cut(pending):
            yield pending[:n], at >= cut
            pending, at = pending[n:], at + n
    if pending:
        yield pending, at >= cut
