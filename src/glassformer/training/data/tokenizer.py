"""Text to tokens and back: characters, bytes, byte-pair encoding trained here, or any `tokenizer.json`.

All of them write themselves as a `tokenizer.json` of Hugging Face's `tokenizers`, so a trained model is sampled without
this package's training half. Characters and bytes are encoded here by table lookup, a hundred times faster; both ways
give the same tokens.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from glassformer.training.data.corpus import DataError

Kind = Literal["char", "byte", "bpe"]
"""What `train_tokenizer` makes."""
FILE = "tokenizer.json"
END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
"""Names under which tokenizers have an end of text, the first one found counts."""
PIECE = 1 << 16
"""Characters that `tokenizers` gets at a time: its working memory is a hundred times its input."""
_EDGE = re.compile(r"(?<=\S\n)(?=\S)")
_SPACE = re.compile(r"(?<=\w)(?= \w)")

Ids = Sequence[int] | np.ndarray


class UnknownCharacter(DataError):  # noqa: N818
    """A character that the vocabulary does not have: which, and where in the text."""

    def __init__(self, character: str, offset: int, line: int, n_known: int, source: str = "the text") -> None:
        self.character, self.offset, self.line, self.n_known = character, offset, line, n_known
        super().__init__(
            f"{character!r} (U+{ord(character):04X}) at offset {offset}, line {line} of {source}, is none of the "
            f"{n_known} characters of the vocabulary. Remove it, or train with a tokenizer that knows it, such as byte."
        )

    def at(self, source: str, offset: int, line: int) -> "UnknownCharacter":
        """The same in a larger text, of which `offset` characters and `line` line ends came before."""
        return UnknownCharacter(self.character, self.offset + offset, self.line + line, self.n_known, source)


class Tokenizer(ABC):
    """One interface for all kinds. Ids are 0 to `vocab_size` - 1."""

    kind: str
    end_of_text: int | None = None
    separator: str = "\n"
    """What stands between two documents: the name of the end of text where there is one."""

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The ids of a text, as `dtype`. Nothing is put before or after them."""

    @abstractmethod
    def decode(self, ids: Ids) -> str:
        """The text of ids. Ids past the vocabulary, which a padded embedding can give, have none."""

    @abstractmethod
    def to_json(self) -> str:
        """A `tokenizer.json`."""

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        return np.uint16 if self.vocab_size <= 1 << 16 else np.uint32

    def cut(self, text: str) -> int:
        """How much of a growing text can be encoded now, the rest waiting for what follows, with the same result."""
        return len(text)


class CharTokenizer(Tokenizer):
    """One id per character, in the order of code points."""

    kind = "char"

    def __init__(self, characters: str) -> None:
        if not characters or len(set(characters)) != len(characters):
            raise DataError(f"the {len(characters)} characters of a vocabulary must be different, and at least one.")
        _utf8(characters)
        self.characters = characters

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    @cached_property
    def _points(self) -> np.ndarray:
        return _code_points(self.characters).astype(np.uint32)

    @cached_property
    def _table(self) -> np.ndarray:
        """Id of each code point, `vocab_size` where it has none; the last entry stands for all beyond."""
        table = np.full(max(int(self._points.max()), 255) + 2, self.vocab_size, np.uint32)
        table[self._points] = np.arange(self.vocab_size)
        return table

    def encode(self, text: str) -> np.ndarray:
        points = _code_points(text)
        if points.dtype != np.uint8:
            points = np.minimum(points, len(self._table) - 1)
        ids = self._table[points]
        if ids.size and ids.max() == self.vocab_size:
            offset = int(np.argmax(ids == self.vocab_size))
            raise UnknownCharacter(text[offset], offset, text.count("\n", 0, offset) + 1, self.vocab_size)
        return ids.astype(self.dtype)

    def decode(self, ids: Ids) -> str:
        return self._points[_known(ids, self.vocab_size)].tobytes().decode("utf-32-le")

    def to_json(self) -> str:
        model = {
            "type": "WordLevel",
            "vocab": {character: i for i, character in enumerate(self.characters)},
            "unk_token": "<unk>",  # not in the vocabulary: an unknown character is an error there too, never dropped
        }
        split = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
        return _json(split, {"type": "Fuse"}, model)


class ByteTokenizer(Tokenizer):
    """256 ids: the bytes of the text in UTF-8. Bytes that are no UTF-8 decode to U+FFFD."""

    kind = "byte"

    @property
    def vocab_size(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(self.dtype)

    def decode(self, ids: Ids) -> str:
        return _known(ids, 256).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def to_json(self) -> str:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        flags = ("fuse_unk", "byte_fallback", "ignore_merges")
        model = {"type": "BPE"} | dict.fromkeys(nothing) | dict.fromkeys(flags, False)
        return _json(level, level, model | {"vocab": _byte_signs(), "merges": []})


class JsonTokenizer(Tokenizer):
    """Whatever a `tokenizer.json` says, done by `tokenizers`; special tokens are only those written in the text.

    A long text is encoded in `pieces`. A tokenizer that joins text across line ends, or marks the begin of a text
    (SentencePiece), can differ at their edges from what it makes of the whole, by a token in about 20,000.
    """

    def __init__(
        self, text: str, kind: str = "json", source: str = "the tokenizer", vocabulary: dict[str, int] | None = None
    ) -> None:
        """`vocabulary` is that of the text without added tokens, if it was read: a large one takes long to ask for."""
        from tokenizers import Tokenizer as Engine  # characters and bytes do without it

        try:
            self.engine = Engine.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"{source} is not a tokenizer that `tokenizers` can read ({error}): give a {FILE}."
            ) from None
        self.kind, self._text = kind, text
        self.engine.no_truncation()
        self.engine.no_padding()
        if vocabulary is None:
            vocabulary = self.engine.get_vocab(with_added_tokens=False)
        self._size = 1 + max([*vocabulary.values(), *self.engine.get_added_tokens_decoder()], default=-1)
        if not self._size:
            raise DataError(f"{source} has an empty vocabulary: give a {FILE} that was trained.")
        for name in reversed(ENDS):
            if (end := self.engine.token_to_id(name)) is not None:
                self.end_of_text, self.separator = end, name

    @property
    def vocab_size(self) -> int:
        return self._size

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        try:
            encoded = self.engine.encode_batch_fast(list(pieces(text)), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"the tokenizer cannot encode this text ({error}): it has characters that the tokenizer does not know. "
                "Remove them, or use a tokenizer that knows every byte."
            ) from None
        return np.concatenate([np.array(part.ids, self.dtype) for part in encoded] or [np.empty(0, self.dtype)])

    def decode(self, ids: Ids) -> str:
        return self.engine.decode(_known(ids, self._size).tolist())

    def to_json(self) -> str:
        return self._text

    def cut(self, text: str) -> int:
        return _last_cut(text)


def _last_cut(text: str, within: int = PIECE) -> int:
    """Where a text may be cut so that its parts encode as the whole does; 0 when that is not known yet.

    Between two lines, neither of them blank: there the splitting rules of GPT-2 and its successors always split. In a
    text without such a position, before a single space between words; in one without spaces, anywhere.
    """
    for rule in (_EDGE, _SPACE):
        if found := [match.start() for match in rule.finditer(text, max(0, len(text) - within)) if match.start()]:
            return found[-1]
        if len(text) <= 4 * within:
            return 0
    return len(text)


def first_cut(text: str, far: bool = False) -> int:
    """Where a text may first be cut (see `_last_cut`); 0 if nowhere. `far` also allows a cut between words."""
    rules = (_EDGE, _SPACE) if far else (_EDGE,)
    return min((match.start() for rule in rules if (match := rule.search(text, 1))), default=0)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """A text in parts of about `size` characters that encode as the whole does (see `_last_cut`)."""
    begin = 0
    while len(text) - begin > size:
        cut, end = 0, begin
        while not cut and end < len(text):
            end += size
            cut = _last_cut(text[begin:end], size)
        if not cut:
            break
        yield text[begin : begin + cut]
        begin += cut
    if begin < len(text):
        yield text[begin:]


def train_tokenizer(kind: str, texts: Iterable[str], vocab_size: int | None = None) -> Tokenizer:
    """A tokenizer of a corpus, given as any pieces of text; `vocab_size` is for `bpe`, the others find their own.

    The corpus is read once. The result depends on the text only: the same corpus gives the same tokenizer.
    """
    if kind not in get_args(Kind):
        raise DataError(f"tokenizer={kind!r} is not known. Use one of {', '.join(get_args(Kind))}, or a {FILE}.")
    if kind == "bpe":
        return _train_bpe(texts, vocab_size)
    if vocab_size is not None:
        raise DataError(f"vocab_size={vocab_size} is for bpe only: {kind} has as many ids as it needs. Leave it out.")
    if kind == "byte":
        for _ in texts:  # read, because the reading has its own ends (hashes, errors)
            pass
        return ByteTokenizer()
    seen = Alphabet()
    for text in texts:
        seen.add(text)
    return CharTokenizer(seen.characters())


class Alphabet:
    """The characters that occur in texts."""

    def __init__(self) -> None:
        self._seen = np.zeros(0x110000, bool)

    def add(self, text: str) -> None:
        self._seen[_code_points(text)] = True

    def characters(self) -> str:
        """Return them in the order of their code points."""
        return np.flatnonzero(self._seen).astype(np.uint32).tobytes().decode("utf-32-le", "surrogatepass")


def _train_bpe(texts: Iterable[str], vocab_size: int | None) -> Tokenizer:
    """Byte-level BPE as in GPT-2: its splitting rule, all 256 bytes, one special token, the end of text, with id 0."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size is None or vocab_size < 257:
        raise DataError(f"vocab_size={vocab_size} is too small for bpe: it has 256 bytes and {END}. Use 257 or more.")
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return JsonTokenizer(engine.to_str(pretty=True), "bpe")


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that has one."""
    file = Path(path).expanduser()
    file = file / FILE if file.is_dir() else file
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(f"the tokenizer {file} cannot be read ({reason}): give a {FILE}.") from None
    return from_json(text, str(file))


def from_json(text: str, source: str = "the tokenizer") -> Tokenizer:
    """The tokenizer that a `tokenizer.json` describes; one that this module wrote is recognised by its content."""
    try:
        content = json.loads(text)
        model = content["model"]
        vocabulary = model["vocab"]
        names = set(vocabulary) if isinstance(vocabulary, dict) else set()
    except (ValueError, KeyError, TypeError):
        return JsonTokenizer(text, source=source)  # raises the error
    if model.get("type") == "WordLevel" and names and all(len(name) == 1 for name in names):
        own: Tokenizer = CharTokenizer("".join(sorted(vocabulary, key=vocabulary.__getitem__)))
        if json.loads(own.to_json()) == content:
            return own
    own = ByteTokenizer()
    if model.get("type") == "BPE" and vocabulary == _byte_signs() and json.loads(own.to_json()) == content:
        return own
    return JsonTokenizer(text, _bpe_or_json(content), source, vocabulary if isinstance(vocabulary, dict) else None)


def _bpe_or_json(content: dict[str, Any]) -> str:
    """`bpe` for what `_train_bpe` makes: the end of text is its only special token and has id 0."""
    added = [(token.get("id"), token.get("content")) for token in content.get("added_tokens") or []]
    level = (content.get("pre_tokenizer") or {}).get("type") == "ByteLevel"
    return "bpe" if level and added == [(0, END)] and content["model"].get("type") == "BPE" else "json"


def _json(pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any]) -> str:
    head: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
    }
    parts = {"pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}
    return json.dumps(head | parts, ensure_ascii=False, indent=2)


def _byte_signs() -> dict[str, int]:
    """The printable sign that `tokenizers` shows for each byte: its Latin-1 character, or the next from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    signs = {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + i) for i, byte in enumerate(hidden)}
    return {signs[byte]: byte for byte in range(256)}


def _code_points(text: str) -> np.ndarray:
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise DataError(
            f"U+{half:04X} at offset {error.start} is half of a surrogate pair, not a character: it has no UTF-8. "
            "Remove it."
        ) from None


def _known(ids: Ids, size: int) -> np.ndarray:
    array = np.asarray(ids, np.int64).reshape(-1)
    if array.size and array.min() < 0:
        raise DataError(f"the id {int(array.min())} is negative: ids are 0 to {size - 1}.")
    return array[array < size]
