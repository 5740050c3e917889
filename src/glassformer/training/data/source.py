"""From text to tokens on disk.

`prepare` streams a corpus into token files (`train-00000.bin`, …, `val-00000.bin`, …: raw little-endian ids),
`tokenizer.json` and a `manifest.json` that says what they were made of. `open_prepared` maps them; `batches` says in
which order they are read. `build` makes them. This module does not import torch until batches are asked for.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from glassformer.errors import listing, plural
from glassformer.files import in_writable_cache, write_atomically
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.corpus import Corpus, DataError, Document, find
from glassformer.training.data.shards import Shards
from glassformer.training.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.training.data.batches import Order, Tokens
    from glassformer.training.data.build import Progress
    from glassformer.training.run import Run
    from glassformer.training.sections import Data

FORMAT = 2
MANIFEST = "manifest.json"
PATTERN = re.compile(r"(train|val)(-\d{5,})?\.bin")
"""Names of token files."""
TEXT_SPLIT = "the last validation_fraction of the characters, documents in order; training gets the rounded-down rest"
ROW_SPLIT = "documents whose hash is below validation_fraction are for validation"
SHARD_BYTES = 2 << 30
"""Bytes of a token file, at most."""


@dataclass(frozen=True)
class Manifest:
    """How the token files were made."""

    format: int
    corpus: str
    files: tuple[dict[str, Any], ...]
    """name, sha256, bytes and characters of each source file, and when it was changed (nanoseconds; None: hash it)."""
    spec: dict[str, Any]
    """The requested tokenizer: kind, and vocab_size (bpe) or sha256 (a file); for rows, the field of the text."""
    tokenizer: dict[str, Any]
    """The resulting tokenizer: kind, vocab_size, sha256 of tokenizer.json."""
    separator: str
    """Text of the token between two documents."""
    split: dict[str, Any]
    """rule, validation_fraction, characters of both sides; for rows, the number of documents and of empty ones."""
    tokens: dict[str, int]
    """How many in train and val."""
    dtype: str
    shards: tuple[dict[str, Any], ...] = ()
    """name, split, tokens, sha256 and part of each token file, in the order of the corpus."""
    parts: dict[str, Any] = field(default_factory=dict)
    """What was counted in each part, by its key (see `build`)."""
    ends: tuple[int, ...] = ()
    """Numbers of source files after which a part ends, because an earlier preparation ended there."""

    def digests(self) -> list[str]:
        """Return a hash of the tokenizer and the token files up to and including each of them."""
        found = [_sha256(f"{self.tokenizer['sha256']} {self.dtype}".encode())]
        for shard in self.shards:
            found.append(_sha256(f"{found[-1]} {shard['split']} {shard['tokens']} {shard['sha256']}".encode()))
        return found

    def until(self, digest: str) -> "Manifest | None":
        """Return the manifest as it was when it had this digest, before the corpus grew; None if it never had it."""
        known = self.digests()
        if digest not in known:
            return None
        shards = self.shards[: known.index(digest)]
        sums = {split: sum(s["tokens"] for s in shards if s["split"] == split) for split in self.tokens}
        return replace(self, shards=shards, tokens=sums)

    def write(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST, json.dumps(asdict(self), indent=2, ensure_ascii=False).encode())


class Source(Protocol):
    """The data of a run: a prepared text, or a synthetic task (`tasks.TaskData`)."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def order(self, run: "Run", rank: int = 0, world: int = 1) -> "Order":
        """Batches of this rank, by step."""

    def validation(self, run: "Run") -> Iterator[Any]:
        """Inputs and targets, or whole batches, the same ones each time."""

    def facts(self, run: "Run") -> dict[str, Any]:
        """train_tokens and validation_tokens, for the log."""

    def baselines(self, vocab_size: int) -> dict[str, float]:
        """Losses to beat, by name."""


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus, its tokens memory-mapped."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    train: "Tokens"
    val: "Tokens"

    @property
    def digest(self) -> str:
        """A hash of the tokenizer and of all tokens: what ranks compare, and what a run records (data.sha256)."""
        return self.manifest.digests()[-1]

    def order(self, run: "Run", rank: int = 0, world: int = 1) -> "Order":
        from glassformer.training.data.batches import Batches

        return Batches(self.train, run.context, run.loop.batch, run.seed, rank, world, mode=run.data.order)

    def validation(self, run: "Run") -> "Iterator[tuple[Tensor, Tensor]]":
        from glassformer.training.data.batches import eval_batches

        return eval_batches(self.val, run.context, run.loop.batch, run.loop.eval_batches)

    def facts(self, run: "Run") -> dict[str, Any]:
        return {"train_tokens": len(self.train), "validation_tokens": len(self.val)}

    def baselines(self, vocab_size: int) -> dict[str, float]:
        from glassformer.training.data import ngram  # imported only when baselines are requested

        return ngram.baselines(self.train[: ngram.LIMIT], self.val[: ngram.LIMIT], vocab_size)

    def first_word(self) -> str:
        """A whole word near the start of the validation split, to prompt a model with; empty if there is none."""
        start = self.val[:400] if len(self.val) else self.train[:400]
        return whole_word(self.tokenizer.decode(np.asarray(start).tolist()))

    def check(self, context: int) -> None:
        """Raise DataError if a split is shorter than one window. An empty validation split may be requested."""
        for name, tokens in (("training", self.train), ("validation", self.val)):
            n, wanted = len(tokens), name == "training" or self.manifest.split["validation_fraction"] > 0
            if n <= context and wanted:
                remedies = ["a longer text"]
                if n > 1:
                    remedies.append(f"a context of {n - 1:,} or less (loop.context)")
                if name == "validation":
                    remedies.append("a larger validation fraction (data.validation)")
                raise DataError(
                    f"the {name} split of {self.manifest.corpus} has {plural(n, 'token')}, but a window needs "
                    f"context + 1 = {context + 1:,}: use {listing(remedies)}."
                )


def whole_word(text: str) -> str:
    """The first whole word of a text that may begin and end within a word; one of letters is preferred."""
    words = text.split()
    first = 0 if text[:1].isspace() else 1
    last = len(words) if text[-1:].isspace() else len(words) - 1
    whole = words[first:last] or words  # a text of one word, or without spaces
    plain = [word for word in whole if word.rstrip(".,:;!?").isalpha()]  # a prompt that needs no quotes in a shell
    return next(iter(plain or [word for word in whole if any(map(str.isalpha, word))] or whole), "")


def prepare(
    corpus: Corpus | str | Path,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    *,
    vocab_size: int | None = None,
    validation_fraction: float = 0.1,
    context: int | None = None,
    field: str = "text",
    processes: int = 1,
    shard_bytes: int = SHARD_BYTES,
    progress: "Progress | None" = None,
) -> Prepared:
    """The tokens of a corpus in the folder `out`; made anew only when text, tokenizer or split are not those of before.

    `tokenizer` is char, byte, bpe (with `vocab_size`) or a `tokenizer.json`. Documents are joined by the end-of-text
    token where the tokenizer has one, else by a newline; there is no padding. Memory does not grow with the text. The
    tokens do not depend on `processes` or `shard_bytes`. A crash leaves the old files or none that counts; another
    call continues with what was finished. With `context`, splits shorter than a window are refused. Raises DataError.
    """
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must be at least 0 and less than 1, such as 0.1.")
    for name, value in (("processes", processes), ("shard_bytes", shard_bytes // 4)):
        if value < 1:
            raise DataError(f"{name}={value} must be a positive whole number; a token takes up to 4 bytes.")
    corpus = corpus if isinstance(corpus, Corpus) else find(corpus)
    folder = Path(out).expanduser()
    if corpus.root and not corpus.is_pattern and folder.resolve().is_relative_to(corpus.root.resolve()):
        raise DataError(f"{folder} lies in the corpus {corpus.root} and would become part of it: prepare elsewhere.")
    spec, given = _spec(tokenizer, vocab_size)
    documents = corpus.documents()
    if documents[0].has_rows:
        spec["field"] = field
    with locked(folder):
        if not _is_current(folder, documents, spec, validation_fraction):
            from glassformer.training.data.build import Order, build  # not needed for what was prepared before

            order = Order(
                folder, corpus.name, documents, spec, given, validation_fraction, shard_bytes, processes, progress
            )
            try:
                folder.mkdir(parents=True, exist_ok=True)
                build(order, read_manifest(folder))
            except OSError as error:
                raise DataError(
                    f"{folder} cannot be written ({error.strerror or error}): make room there, or set data.cache "
                    "to another folder."
                ) from None
        prepared = open_prepared(folder, tokenizer=given)
    if context is not None:
        prepared.check(context)
    return prepared


def prepare_corpus(
    data: "Data",
    tokenizer: Tokenizer | None = None,
    processes: int = 1,
    shard_bytes: int = SHARD_BYTES,
    progress: "Progress | None" = None,
) -> Prepared:
    """Return the tokens of [data] of a run; `tokenizer` is that of the model it starts from, if this has one.

    A folder that was prepared before is used as it is. So are the token files of a run that recorded their hash.
    """
    given: str | Tokenizer = data.tokenizer if tokenizer is None else tokenizer
    folder = Path(data.corpus).expanduser()
    if read_manifest(folder) is not None:
        prepared = open_prepared(folder, data.sha256)
        if tokenizer is not None and _sha256(tokenizer.to_json().encode()) != prepared.manifest.tokenizer["sha256"]:
            raise DataError(
                f"{folder} was prepared with another tokenizer than the run has (that of start.model, or for data.mix "
                "that of data.corpus): prepare it again with --tokenizer FOLDER/tokenizer.json."
            )
        return prepared
    out = _token_folder(data, given)
    if data.sha256:
        with contextlib.suppress(DataError):
            return open_prepared(out, data.sha256)
    prepared = prepare(
        data.corpus,
        given,
        out,
        vocab_size=data.vocab_size,
        validation_fraction=data.validation,
        field=data.field,
        processes=processes,
        shard_bytes=shard_bytes,
        progress=progress,
    )
    return open_prepared(out, data.sha256, prepared.tokenizer) if data.sha256 else prepared


def _token_folder(data: "Data", tokenizer: str | Tokenizer) -> Path:
    """Return the folder for the tokens: data.cache, or one in the user's cache whose name depends on [data]."""
    if data.cache is not None:
        return Path(data.cache)
    name = _sha256(tokenizer.to_json().encode()) if isinstance(tokenizer, Tokenizer) else tokenizer
    corpus = str(Path(data.corpus).resolve()) if Path(data.corpus).exists() else data.corpus
    words = [corpus, name, str(data.vocab_size), str(data.validation)]
    if data.field != "text":
        words.append(data.field)
    return in_writable_cache(f"tokens/{find(data.corpus).name}-{_sha256(chr(10).join(words).encode())[:12]}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on token files: the first process writes them, the others wait and read them.

    It is a file lock of the system, which ends with its process. Without such a lock, no process waits.
    """
    try:
        import fcntl

        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.parent / f".{folder.name}.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def open_prepared(folder: str | Path, digest: str = "", tokenizer: Tokenizer | None = None) -> Prepared:
    """Open what `prepare` wrote to a folder, without reading the sources. Raises DataError if it is incomplete.

    With `digest`, only the token files that there were when the folder had this digest. `tokenizer` is not read again
    if it is that of the folder: a large one takes a quarter of a second.
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    if manifest is None or not is_whole(folder, manifest):
        raise DataError(f"{folder} has no whole prepared corpus ({MANIFEST} and its files): prepare it again.")
    if digest:
        manifest = manifest.until(digest)
        if manifest is None:
            raise DataError(
                f"{folder} no longer begins with the tokens that the run has recorded (data.sha256={digest[:12]}…): "
                "the corpus was changed. Restore it, or take it as it is now with --set data.sha256=''."
            )
    if tokenizer is None or _sha256(tokenizer.to_json().encode()) != manifest.tokenizer["sha256"]:
        tokenizer = tok.load(folder)
    return Prepared(folder, manifest, tokenizer, _map(folder, manifest, "train"), _map(folder, manifest, "val"))


def _map(folder: Path, manifest: Manifest, split: str) -> "Tokens":
    held = [shard for shard in manifest.shards if shard["split"] == split and shard["tokens"]]
    match held:
        case []:
            return np.empty(0, manifest.dtype)
        case [shard]:
            return np.memmap(folder / shard["name"], manifest.dtype, "r")
    return Shards([folder / shard["name"] for shard in held], [shard["tokens"] for shard in held], manifest.dtype)


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


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a prepared folder; None if there is none that this version can read."""
    try:
        manifest = Manifest(**json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
        if manifest.format == 1:  # one file for each split, without a hash
            shards = [
                {"name": f"{split}.bin", "split": split, "tokens": count, "sha256": "", "part": ""}
                for split, count in manifest.tokens.items()
            ]
            return replace(manifest, shards=tuple(shards))
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return manifest if manifest.format == FORMAT else None


def is_whole(folder: Path, manifest: Manifest) -> bool:
    """Return whether all token files are there, in the right length, and the tokenizer is the right one."""
    width = np.dtype(manifest.dtype).itemsize
    try:
        whole = all((folder / s["name"]).stat().st_size == s["tokens"] * width for s in manifest.shards)
        return whole and _sha256((folder / tok.FILE).read_bytes()) == manifest.tokenizer["sha256"]
    except OSError:
        return False


def _is_current(folder: Path, documents: list[Document], spec: dict[str, Any], fraction: float) -> bool:
    """Return whether the folder holds exactly this.

    A source that has the same size and time as before is taken as the same. Another time makes it be hashed, once: the
    new time is then written into the manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None or manifest.spec != spec or manifest.split["validation_fraction"] != fraction:
        return False
    was, now = [(f["name"], f["bytes"]) for f in manifest.files], [(d.name, d.size) for d in documents]
    if was != now or not is_whole(folder, manifest):
        return False
    pairs = list(zip(manifest.files, documents, strict=True))
    if manifest.format == FORMAT and all(f.get("changed") == d.changed is not None for f, d in pairs):
        return True
    if not all(f["sha256"] == document.hash() for f, document in pairs):
        return False
    if any(document.path for document in documents) or manifest.format != FORMAT:
        from glassformer.training.data.build import refresh

        refresh(folder, manifest, documents)
    return True
