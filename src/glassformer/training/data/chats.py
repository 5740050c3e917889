"""Conversations as training data: read, rendered, divided, and counted. `packing` puts them into batches."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from torch import Tensor

from glassformer.chat.errors import ChatError
from glassformer.chat.formats import Example, read_examples
from glassformer.chat.render import Learned, Rendered, Renderer, add_chatml
from glassformer.chat.template import CHATML, CHATML_TOKENS, TEMPLATES
from glassformer.errors import listing, plural
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.corpus import DataError
from glassformer.training.data.packing import ChatBatches, Row, collate, pack
from glassformer.training.data.tokenizer import JsonTokenizer, Tokenizer
from glassformer.training.objective import Batch
from glassformer.training.run import Run
from glassformer.training.sections import Chat
from glassformer.weights import load_chat_template, load_special_tokens

TEMPLATE = "chat_template.jinja"


@dataclass
class Summary:
    """What was read: numbers that show whether the right tokens are learned."""

    rows: int = 0
    answers: int = 0
    tokens: int = 0
    learned: int = 0
    longest: int = 0
    dropped: int = 0
    cut: int = 0

    def text(self, context: int) -> str:
        """Return one sentence."""
        share = self.learned / max(1, self.tokens)
        text = (
            f"{plural(self.rows, 'row')} with {plural(self.answers, 'answer')} and {plural(self.tokens, 'token')}, of "
            f"which {share:.1%} are learned; the longest has {plural(self.longest, 'token')}"
        )
        for count, what in ((self.dropped, "left out"), (self.cut, "cut")):
            if count:
                were = "was" if count == 1 else "were"
                text += f"; {plural(count, 'row')} {were} {what}, longer than the context of {context:,}"
        return text


@dataclass
class ChatData:
    """The conversations of a run. It is a `Source`."""

    tokenizer: Tokenizer
    renderer: Renderer
    train: list[Row]
    val: list[Row]
    summary: Summary
    notes: list[str] = field(default_factory=list)
    packs: bool = True
    preferences: bool = False
    references: dict[str, Tensor] = field(default_factory=dict)
    """Log-probabilities (rows, 2) of `train` and `val` before training, for preferences."""

    def order(self, run: Run, rank: int = 0, world: int = 1) -> "ChatBatches":
        pairs = 2 if self.preferences else 1
        return ChatBatches(
            self.train,
            run.context,
            run.loop.batch // pairs,
            run.seed,
            rank,
            world,
            self.packs,
            self._reference("train"),
        )

    def validation(self, run: Run) -> Iterator[Batch]:
        rows = run.loop.batch // (2 if self.preferences else 1)
        bins = (
            pack([row.length for row in self.val], run.context) if self.packs else [[i] for i in range(len(self.val))]
        )
        for first in range(0, min(len(bins), rows * run.loop.eval_batches), rows):
            yield collate(self.val, bins[first : first + rows], run.context, self._reference("val"))

    def _reference(self, split: str) -> Tensor | None:
        return self.references[split] if self.preferences else None

    def facts(self, run: Run) -> dict[str, Any]:
        tokens = {
            f"{name}_tokens": sum(len(ids) for row in rows for ids, _ in row.parts)
            for name, rows in (("train", self.train), ("validation", self.val))
        }
        return tokens | {"chat": vars(self.summary)}

    def baselines(self, vocab_size: int) -> dict[str, float]:
        return {}

    def files(self) -> dict[str, str]:
        """Return the files that a checkpoint needs in addition to its tokenizer."""
        return {TEMPLATE: self.renderer.template.source}


def prepare_chats(run: Run, tokenizer: Tokenizer | None = None) -> ChatData:
    """Read, render and divide the conversations of a run. `tokenizer` is that of the model the run starts from."""
    assert run.chat is not None
    chat = run.chat
    examples = list(read_examples(run.data.corpus, chat.format, chat.system))
    held_out = list(read_examples(chat.validation, chat.format, chat.system)) if chat.validation else None
    renderer, tokenizer = _renderer(run, tokenizer, [*examples, *(held_out or [])])
    summary = Summary()
    reader = _Reader(renderer, tokenizer, chat, run.context, summary)
    if held_out is None:
        train, val = _split([row for example in examples if (row := reader.row(example))], run.data.validation)
    else:
        train = [row for example in examples if (row := reader.row(example))]
        val = [row for example in held_out if (row := reader.row(example))]
    for name, rows in (("training", train), ("validation", val)):
        if not rows:
            raise DataError(
                f"no row of {run.data.corpus} is left for {name} ({summary.text(run.context)}): use more rows, or a "
                "longer loop.context."
            )
    notes = [summary.text(run.context)]
    if repeated := len({_digest(row) for row in val} & {_digest(row) for row in train}):
        notes.append(f"{plural(repeated, 'row')} of the validation data are also training data")
    packs = chat.pack and chat.loss != "dpo"
    return ChatData(tokenizer, renderer, train, val, summary, notes, packs, chat.loss == "dpo")


def _digest(row: Row) -> bytes:
    return hashlib.sha256(b"".join(ids.tobytes() + b"|" for ids, _ in row.parts)).digest()


def _split(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """Return rows for training and for validation. The content of a row decides, so that equal rows stay together."""
    digests = [_digest(row) for row in rows]
    wanted = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    if wanted < 1:
        return rows, []
    limit = sorted(digests)[wanted - 1]
    train = [row for row, digest in zip(rows, digests, strict=True) if digest > limit]
    return train, [row for row, digest in zip(rows, digests, strict=True) if digest <= limit]


def _renderer(run: Run, tokenizer: Tokenizer | None, examples: list[Example]) -> tuple[Renderer, Tokenizer]:
    """Return the renderer of a run and its tokenizer, with the two tokens of ChatML if that is its template."""
    assert run.chat is not None
    from tokenizers import Tokenizer as Engine

    template, named = None, {}
    if run.start.model:
        template, named = load_chat_template(run.start.model), load_special_tokens(run.start.model)
    if run.chat.template:
        template = None if run.chat.template == "chatml" else _read_template(run.chat.template)
    if tokenizer is None:
        tokenizer = _make_tokenizer(run, [*_texts(examples), CHATML if template is None else template])
    engine = Engine.from_str(tokenizer.to_json())
    if template is None:
        missing = [token for token in CHATML_TOKENS if engine.token_to_id(token) is None]
        if missing:
            engine, template = add_chatml(engine)
            tokenizer = JsonTokenizer(engine.to_str(pretty=True))
        template = CHATML
    return Renderer(engine, template, named), tokenizer


def _read_template(path: str) -> str:
    """Return the template that a run names: one of ours, or a file."""
    if path in TEMPLATES:
        return TEMPLATES[path]
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"chat.template={path!r} cannot be read ({reason}): give a Jinja file, or {listing([*TEMPLATES])}."
        ) from None


def _texts(examples: Iterable[Example]) -> Iterator[str]:
    """Yield the texts of which a tokenizer is made."""
    for example in examples:
        yield example.text or ""
        for message in (*example.messages, *(example.chosen or ()), *(example.rejected or ())):
            yield str(message.get("content") or "")


def _make_tokenizer(run: Run, texts: list[str]) -> Tokenizer:
    kind = run.data.tokenizer
    if kind in get_args(tok.Kind):
        return tok.train_tokenizer(kind, [*texts, "system user assistant tool\n"], run.data.vocab_size)
    return tok.load(kind)


@dataclass
class _Reader:
    """Turns examples into rows, and counts."""

    renderer: Renderer
    tokenizer: Tokenizer
    chat: Chat
    context: int
    summary: Summary

    def row(self, example: Example) -> Row | None:
        """Return the row of an example; None if it is too long and left out."""
        try:
            parts = self._parts(example)
        except ChatError as error:
            text = str(error)
            raise ChatError(text if example.place in text else f"{example.place}: {text}") from None
        arrays = tuple((np.array(one.ids, np.int64), np.array(one.mask, bool)) for one in parts)
        for _, learned in arrays:
            if not learned[1:].any():
                raise ChatError(f"{example.place}, has no token to learn: it needs an answer of the assistant.")
        summary = self.summary
        summary.rows += 1
        summary.answers += sum(message["role"] == "assistant" for message in example.messages)
        summary.answers += 2 if example.chosen else 0
        longest = max(len(ids) for ids, _ in arrays)
        summary.longest = max(summary.longest, longest)
        if longest - 1 > self.context:
            cut = self._shortened(example, arrays, longest)
            if cut is None:
                summary.dropped += 1
                return None
            summary.cut += 1
            arrays = cut
        summary.tokens += sum(len(ids) for ids, _ in arrays)
        summary.learned += sum(int(learned[1:].sum()) for _, learned in arrays)
        return Row(example.place, arrays)

    def _shortened(self, example: Example, arrays: Any, longest: int) -> Any:
        if self.chat.too_long == "error":
            raise ChatError(
                f"{example.place}, has {longest:,} tokens, and the context is {self.context:,}: raise loop.context, or "
                "set chat.too_long to 'drop' or 'cut'."
            )
        if self.chat.too_long == "drop":
            return None
        cut = tuple((ids[: self.context + 1], learned[: self.context + 1]) for ids, learned in arrays)
        return cut if all(learned[1:].any() for _, learned in cut) else None

    def _parts(self, example: Example) -> list[Rendered]:
        dpo, renderer = self.chat.loss == "dpo", self.renderer
        if dpo != (example.chosen is not None):
            wanted = "chosen and rejected answers" if dpo else "conversations, and this row has chosen and rejected"
            remedy = "give pairs, or leave it out" if dpo else "set chat.loss=dpo"
            raise ChatError(f"{example.place}: chat.loss={self.chat.loss!r} needs {wanted}: {remedy}.")
        if example.chosen is not None and example.rejected is not None:
            pair = []
            for answer in (example.chosen, example.rejected):
                silent = [{**message, "weight": 0} for message in example.messages]
                pair.append(renderer.render([*silent, *answer], example.tools))
            return pair
        if example.text is not None:
            ids = renderer.plain(example.text)
            end = self.tokenizer.end_of_text
            ids += [] if end is None else [end]
            return [Rendered(example.text, ids, [True] * len(ids), [])]
        loss = self.chat.loss
        learned: Learned = "assistant" if loss == "dpo" else loss
        return [renderer.render(example.messages, example.tools, learned)]


def with_end_token(run: Run, data: ChatData) -> Run:
    """Return the run with a model whose config names the token that ends an answer."""
    special = run.model.special
    added = tuple(token for token in data.renderer.ends if token not in special.eos)
    if not added:
        return run
    return replace(run, model=replace(run.model, special=replace(special, eos=(*special.eos, *added))))


def show(data: ChatData, count: int) -> str:
    """Return rendered rows as text, with the learned tokens between ⟦ and ⟧."""
    shown = []
    for row in data.train[:count]:
        for part, (ids, learned) in enumerate(row.parts):
            name = f" ({('chosen', 'rejected')[part]})" if len(row.parts) > 1 else ""
            shown.append(f"--- {row.place}{name}, {plural(len(ids), 'token')} ---\n{_marked(data, ids, learned)}")
    return "\n".join(shown)


def _marked(data: ChatData, ids: np.ndarray, learned: np.ndarray) -> str:
    text, engine = "", data.renderer.tokenizer
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learned, [False]]).astype(int)))
    at = 0
    for begin, end in edges.reshape(-1, 2):
        text += engine.decode(ids[at:begin].tolist(), skip_special_tokens=False)
        text += f"⟦{engine.decode(ids[begin:end].tolist(), skip_special_tokens=False)}⟧"
        at = end
    return text + engine.decode(ids[at:].tolist(), skip_special_tokens=False)
