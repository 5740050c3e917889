"""Where text comes from: files, a folder, a pattern, or a corpus by name; read as a stream, in bounded memory.

A name is `shakespeare` (1.1 MB, found locally or downloaded once and verified) or `embedded` (the English of
`pydoc_data.topics`, which every Python carries). Everything else is a path.
"""

import codecs
import glob
import hashlib
import io
import itertools
import os
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glassformer.chat.rows import COMPRESSED, chunks, is_data_file, split_files
from glassformer.errors import GlassformerError
from glassformer.files import cache_folder, write_atomically

SHAKESPEARE = "tinyshakespeare.txt"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1_115_394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NAMES = ("shakespeare", "embedded")
CONNECT_SECONDS, DOWNLOAD_SECONDS = 5.0, 60.0
CHUNK = 1 << 20
"""Bytes read at a time. Measured: larger chunks are not faster."""
_BOM = "\ufeff"


class DataError(GlassformerError):
    """Text or tokens that cannot be used. The message gives the value, the rule and the remedy."""


@dataclass
class Document:
    """One file of a corpus: a text, or rows with a text in each. `read` streams a text."""

    name: str
    """The path below the corpus, or the corpus' own name."""
    path: Path | None = None
    content: bytes | None = None

    @property
    def label(self) -> str:
        return str(self.path or self.name)

    @property
    def size(self) -> int:
        return len(self.content) if self.content is not None else self._path().stat().st_size

    @property
    def changed(self) -> int | None:
        """When the file was last written, in nanoseconds; None for a corpus that is no file."""
        return None if self.path is None else self.path.stat().st_mtime_ns

    @property
    def has_rows(self) -> bool:
        return self.path is not None and is_data_file(self.path)

    @property
    def divisible(self) -> bool:
        """Whether reading can begin in the middle."""
        if self.path is None:
            return False
        return self.path.suffix.lower() not in (*COMPRESSED, ".parquet", ".arrow")

    def _path(self) -> Path:
        assert self.path is not None
        return self.path

    def open(self) -> io.BytesIO | io.BufferedReader:
        return io.BytesIO(self.content) if self.content is not None else self._path().open("rb")

    def read_bytes(self, begin: int = 0, end: int | None = None) -> Iterator[bytes]:
        """The bytes in pieces of about a megabyte, decompressed; from `begin` to `end` of a file that is divisible."""
        try:
            with self.open() as file:
                if not self.divisible and self.path is not None:
                    yield from chunks(self.path, file)
                    return
                file.seek(begin)
                while data := file.read(CHUNK if end is None else max(0, min(CHUNK, end - begin))):
                    begin += len(data)
                    yield data
        except OSError as error:
            raise DataError(f"{self.label} cannot be read: {error.strerror or error}.") from None

    def read(self, begin: int = 0, end: int | None = None) -> Iterator[str]:
        """The text in pieces of about a megabyte; a character is never cut. `begin` and `end` are at whole characters.

        It comes as it is, line ends included; only a byte order mark in front is dropped. Raises DataError, with the
        byte offset, for bytes that are not UTF-8 and for NUL bytes: text has none, binary files do.
        """
        decoder, at, first = codecs.getincrementaldecoder("utf-8")(), begin, begin == 0
        for data in itertools.chain(self.read_bytes(begin, end), (b"",)):
            text = self._decode(decoder, data, at)
            at += len(data)
            if text:
                text, first = text.removeprefix(_BOM) if first else text, False
            if text:
                yield text

    def hash(self) -> str:
        """The SHA-256 of the bytes, which are not looked at."""
        try:
            with self.open() as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{self.label} cannot be read: {error.strerror or error}.") from None

    def _decode(self, decoder: codecs.IncrementalDecoder, data: bytes, before: int) -> str:
        """`data`, which begins `before` bytes into the file; empty data ends it."""
        waiting = len(decoder.getstate()[0])
        if (at := data.find(b"\0")) >= 0:
            raise DataError(
                f"{self.label} is not a text: it has a NUL byte at offset {before + at}, as binary files do. Give a "
                "UTF-8 text file, or a folder that holds nothing else."
            )
        try:
            return decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.label} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
                f"{before - waiting + error.start} ({error.reason}). Convert it first, e.g. with iconv -t UTF-8."
            ) from None


@dataclass(frozen=True)
class Corpus:
    """A named, ordered list of documents."""

    name: str
    paths: tuple[Path, ...] = ()
    root: Path | None = None
    """The folder, when it is one, or the folder of the files that a pattern matches."""
    is_pattern: bool = False
    content: str | None = None
    """The text itself, for a corpus that is no file."""

    def documents(self) -> list[Document]:
        """Fresh documents in order, empty files of a folder left out. Raises DataError when nothing is left."""
        if self.content is not None:
            return [Document(self.name, content=self.content.encode())]
        named = [(path.relative_to(self.root).as_posix() if self.root else path.name, path) for path in self.paths]
        try:
            documents = [document for name, path in named if (document := Document(name, path)).size]
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
        if not documents:
            what = f"{self.root} has only empty files" if self.root else f"{self.paths[0]} is empty (0 bytes)"
            raise DataError(f"{what}: there is nothing to train on. Give a text, or the name {' or '.join(NAMES)}.")
        return documents


def find(name: str | Path) -> Corpus:
    """The corpus that a name, a path or a pattern means. Raises DataError, in one sentence, when there is none.

    A folder means every file in it, sorted by path, subfolders included, hidden ones (`.name`) not. If it has JSONL,
    Parquet or Arrow files, it means these alone, and of several splits the one for training.
    """
    if name == "shakespeare":
        return Corpus("shakespeare", (shakespeare(),))
    if name == "embedded":
        return Corpus("embedded", content=embedded())
    path = Path(name).expanduser()
    known = f"Give a text, JSONL or Parquet file, a folder or a pattern of them, {' or '.join(NAMES)}."
    if not path.exists() and (matches := sorted(map(Path, glob.glob(str(path), recursive=True)))):
        return _matching(str(name), [match for match in matches if match.is_file()])
    if not str(name) or not path.exists():
        raise DataError(f"the corpus {str(name)!r} does not exist. {known}")
    if path.is_file():
        return Corpus(path.stem, (path,))
    if not path.is_dir():
        raise DataError(f"the corpus {path} is neither a file nor a folder. {known}")
    files = sorted(_visible(path), key=lambda file: file.relative_to(path).as_posix())
    if any(is_data_file(file) for file in files):
        files = split_files(path, nested=True)
    if not files:
        raise DataError(f"the corpus folder {path} has no files (hidden ones do not count). {known}")
    return Corpus(path.resolve().name, tuple(files), path)


def _matching(pattern: str, files: list[Path]) -> Corpus:
    if not files:
        raise DataError(f"the pattern {pattern!r} matches folders only: let it match files, as in folder/*.txt.")
    text = next((file for file in files if not is_data_file(file)), None)
    if text is not None and any(is_data_file(file) for file in files):
        raise DataError(
            f"the pattern {pattern!r} matches data files and {text.name}, which is a text: let it match one kind only."
        )
    root = Path(os.path.commonpath([file.parent for file in files]))
    return Corpus(root.resolve().name, tuple(files), root, is_pattern=True)


def _visible(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None

    for directory, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(directory, name)).is_file())


def embedded() -> str:
    """The help topics of Python's manual: half a megabyte of English, different from one Python to the next."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python comes without pydoc_data, so there is no embedded corpus: give a text file."
        ) from None
    return "\n".join(topics[name].strip("\n") + "\n" for name in sorted(topics))


def shakespeare() -> Path:
    """The file of tiny Shakespeare: from $GLASSFORMER_DATA, from the cache, or downloaded into the cache."""
    given = os.environ.get("GLASSFORMER_DATA")
    if given and (file := Path(given).expanduser() / SHAKESPEARE).is_file():
        if not _is_genuine(file):
            raise DataError(
                f"{file} is not tiny Shakespeare ({SIZE:,} bytes, SHA-256 {SHA256[:12]}…): put the file of {URL} "
                "there, or use another text (--set data.corpus=PATH, or data.corpus=embedded)."
            )
        return file
    file = cache_folder() / SHAKESPEARE
    if not (file.is_file() and _is_genuine(file)):
        remedy = (
            f"put the file of {URL} at {file}{f' or in {given}' if given else ''}, or use the manual that comes with "
            "Python (--set data.corpus=embedded)"
        )
        data = _download(remedy)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, data)
        except OSError as error:
            raise DataError(
                f"{file} cannot be written ({error.strerror or error}): make room, set GLASSFORMER_DATA to a folder "
                f"that has {SHAKESPEARE}, or use the manual that comes with Python (--set data.corpus=embedded)."
            ) from None
    return file


def _is_genuine(file: Path) -> bool:
    try:
        return file.stat().st_size == SIZE and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _download(remedy: str) -> bytes:
    """Return the verified bytes of URL. `remedy` ends the error message: what a user can do instead."""
    answered, done = threading.Event(), threading.Event()
    data, reasons = bytearray(), []

    def work() -> None:
        try:
            with urllib.request.urlopen(URL, timeout=CONNECT_SECONDS) as reply:
                answered.set()
                while len(data) <= SIZE and (part := reply.read(1 << 16)):
                    data.extend(part)
        except Exception as error:  # of sockets, TLS and HTTP, of many kinds; nothing would catch it in a thread
            reasons.append(str(getattr(error, "reason", error)) or type(error).__name__)
        finally:
            answered.set()
            done.set()

    # a thread, because no timeout limits the lookup of a host name
    threading.Thread(target=work, daemon=True).start()
    if not answered.wait(CONNECT_SECONDS) or not done.wait(DOWNLOAD_SECONDS):
        reasons.append("no answer in time")
    if reasons:
        raise DataError(f"tiny Shakespeare is not on this machine and cannot be downloaded ({reasons[0]}): {remedy}.")
    if len(data) != SIZE or hashlib.sha256(data).hexdigest() != SHA256:
        raise DataError(
            f"the download of {URL} is not tiny Shakespeare ({len(data):,} bytes instead of {SIZE:,}, or another "
            f"SHA-256 than {SHA256[:12]}…): {remedy}."
        )
    return bytes(data)
