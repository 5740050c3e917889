"""`glass look`: one figure of the inside of a model, or its numbers."""

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli.common import (
    Adapter,
    Force,
    InputError,
    Json,
    check_seed,
    check_writable,
    fitted,
    free_name,
    option,
    refuse_unused,
)
from glassformer.files import model_name

if TYPE_CHECKING:
    from glassformer.lens.views import Subject

TEXT = "First Citizen:\nBefore we proceed"
"""Default text for the bundled model."""
NEEDS_NO_TEXT = ("heads", "induction", "positions")
BUNDLED = {"induction": "induction"}
"""Kind -> the bundled model that is its default; `bard` for the other kinds."""
USES: dict[str, tuple[str, ...]] = {
    "attention": ("layer", "head", "target"),
    "heads": ("seed",),
    "induction": ("layer", "head", "seed"),
    "logit-lens": ("target",),
    "rank": ("target", "seed"),
    "positions": (),
    "attribution": ("position", "answer", "wrong", "target"),
    "patch": ("layer", "position", "answer", "wrong", "against", "target"),
    "training": (),
}
"""Kind -> the options that it uses, in addition to --model, --text, --ids, --show, --out and --json."""
ANSWER_TOKENS = 24
"""Number of greedy tokens of an encoder-decoder without --target."""


HELP = {
    "kind": "What to show: attention, heads, induction, logit-lens, rank, positions, attribution, patch, or training "
    "(the losses in the log of a run).",
    "model": "A model folder or a Hugging Face hub name; for `training`, the folder of a run. Default: a bundled "
    "model.",
    "text": "The text that the model reads. With --ids, token ids separated by spaces. Default: two lines of "
    "Shakespeare for the bundled model.",
    "out": "Write the picture to this .png, .svg, .pdf or .html file. Default: KIND.png in the current folder "
    "(KIND-2.png and so on if that exists), or no picture with --json.",
    "show": "Which picture of the kind to draw, such as `rank --show variants`. An unknown name lists the choices. "
    "Default: the first of them.",
    "layer": "Show this layer only, counted from 0. Default: all layers.",
    "head": "Show this head only, counted from 0. Default: all heads.",
    "position": "Position in the text whose logits are explained, counted from 0; negative numbers count from the end.",
    "answer": "The token whose logit is explained. Default: the most likely next token.",
    "wrong": "A second token, whose logit is subtracted. Default: none; for `patch`, the most likely next token of "
    "--against.",
    "against": "For `patch`: the other text. It must have the same number of tokens as --text. Default: none.",
    "target": "For an encoder-decoder: the text that its decoder reads. Default: the model's own greedy answer.",
    "ids": "Read texts and tokens as token ids.",
    "seed": "Seed of the random tokens of `heads`, `induction` and `rank`.",
}


def look(
    kind: Annotated[tyro.conf.Positional[str], option(HELP["kind"], "KIND")],
    model: Annotated[str | None, option(HELP["model"], "DIR|NAME")] = None,
    adapter: Adapter = None,
    text: Annotated[str | None, option(HELP["text"], "TEXT")] = None,
    out: Annotated[Path | None, option(HELP["out"], "FILE")] = None,
    show: Annotated[str | None, option(HELP["show"], "NAME")] = None,
    layer: Annotated[int | None, option(HELP["layer"], "INT")] = None,
    head: Annotated[int | None, option(HELP["head"], "INT")] = None,
    position: Annotated[int, option(HELP["position"])] = -1,
    answer: Annotated[str | None, option(HELP["answer"], "TOKEN", ["--token"])] = None,
    wrong: Annotated[str | None, option(HELP["wrong"], "TOKEN")] = None,
    against: Annotated[str | None, option(HELP["against"], "TEXT")] = None,
    target: Annotated[str | None, option(HELP["target"], "TEXT")] = None,
    ids: Annotated[bool, option(HELP["ids"])] = False,
    seed: Annotated[int, option(HELP["seed"])] = 0,
    force: Force = False,
    json: Json = False,
) -> int:
    """Look inside a model: draw one picture, or print its numbers with --json."""
    given = {"layer": layer, "head": head, "position": position, "answer": answer, "wrong": wrong, "seed": seed}
    _check(kind, {**given, "against": against, "target": target})
    check_seed(seed)
    out = out if out is not None or json else free_name(Path(f"{kind}.png"), force)
    if out is not None:
        check_writable("--out", out, makes_folders=True, force=force)
        from glassformer.lens.figure import format_of

        format_of(out)  # before any work
    if kind == "training":
        if adapter is not None:
            raise InputError("glass look training reads the log of a run: leave out --adapter.")
        return _training(model, out, json)
    from glassformer.lens.views import KINDS, Choice

    reader = _Reader(model or _bundled(kind), ids, adapter)
    subject = reader.subject(_text(kind, model, text, show), target)
    other = None if against is None else reader.encode(against, "--against")
    choice = Choice(show, layer, head, position, reader.token(answer), reader.token(wrong), other, seed)
    view = KINDS[kind](subject, choice)
    _give(kind, view.numbers, view.draw, out, json)
    return 0


def _check(kind: str, given: dict[str, object]) -> None:
    """Refuse an unknown kind, and options that a kind would silently ignore."""
    from glassformer.errors import nearest

    if kind not in USES:
        raise InputError(f"glass look knows no {kind!r}.{nearest(kind, USES, others='It draws')}")
    refuse_unused(f"glass look {kind}", given, USES[kind], {"position": -1, "seed": 0})


def _give(kind: str, numbers: dict[str, Any], draw: Callable[[], Any], out: Path | None, json: bool) -> None:
    if out is not None:
        figure = draw()
        figure.save(out)
        numbers = {**numbers, "written": str(out)}
        if not json:
            print(fitted(f"{out}: {figure.title}"))
    if json:
        if numbers.get("pattern", ()) is None:
            raise InputError("these are too many attention weights to print: choose --layer and --head, or draw them.")
        print(json_module.dumps({"kind": kind, **numbers}, allow_nan=False))


def _bundled(kind: str) -> str:
    from glassformer import pretrained

    wanted = BUNDLED.get(kind, "bard")
    return wanted if wanted in pretrained.FOLDERS else "bard"


def _text(kind: str, model: str | None, text: str | None, show: str | None) -> str | None:
    """Return the text to read; None if the kind needs no text."""
    if text is not None or kind in NEEDS_NO_TEXT or (kind, show) == ("rank", "variants"):
        return text
    if model is None:
        return TEXT
    raise InputError(f"glass look {kind} shows what a model does with a text: give --text.")


class _Reader:
    """A model and its tokenizer."""

    def __init__(self, name: str, ids: bool, adapter: str | None = None):
        from glassformer.weights import load_to_compute, load_tokenizer

        self.name, self.ids = name, ids
        self.model = load_to_compute(name, adapter=adapter)
        self.tokenizer = None if ids else load_tokenizer(name)

    def subject(self, text: str | None, target: str | None) -> "Subject":
        from glassformer.lens.views import Subject
        from glassformer.model import Seq2Seq

        tokens = [] if text is None else self.encode(text, "--text")
        written: list[int] | None = None
        if isinstance(self.model, Seq2Seq):
            written = self._answer(tokens) if target is None else self._started(self.encode(target, "--target"))
        elif target is not None:
            raise InputError(
                "--target is the decoder's input of an encoder-decoder, and this model has one stack: leave it out."
            )
        name = model_name(self.name) if Path(self.name).exists() else self.name
        return Subject(name, self.model, tokens, self.say, written)

    def encode(self, text: str, option: str) -> list[int]:
        """Return the token ids of a text that a user gave."""
        from glassformer.generation.text import Continuation

        if not text.strip() and (self.ids or not text):
            raise InputError(f"{option} is empty: a model reads at least one token.")
        read = Continuation(self.model, self.tokenizer, text, self.ids).tokens
        size = self.model.config.vocab_size
        for token in read:
            if not 0 <= token < size:
                raise InputError(f"token id {token} is outside the vocabulary of {size} (0 to {size - 1}).")
        limit = self.model.config.max_len
        if limit is not None and len(read) > limit:
            raise InputError(
                f"{option} has {len(read):,} tokens, more than the model's context of {limit:,}: shorten it to "
                f"{limit:,} tokens or fewer."
            )
        return list(read)

    def token(self, text: str | None) -> int | None:
        """Return the one token that an option names."""
        if text is None:
            return None
        # without the special tokens that a tokenizer adds to a text
        known = None if self.tokenizer is None else self.tokenizer.token_to_id(text)
        (token, *more) = self._pieces(text) if known is None else [known]
        if more:
            pieces = ", ".join(repr(self.say(i)) for i in (token, *more))
            raise InputError(f"{text!r} is {1 + len(more)} tokens of this model ({pieces}): give one of them.")
        return int(token)

    def _pieces(self, text: str) -> list[int]:
        if self.tokenizer is None or not text:
            return self.encode(text, "the token")
        try:
            found = self.tokenizer.encode(text, add_special_tokens=False).ids
        except Exception:  # the library raises plain Exception for what its vocabulary lacks
            found = []
        if not found:
            raise InputError(f"{text!r} is no token of this model: give a text of one token.")
        return list(found)

    def say(self, token: int) -> str:
        """Return a token as text."""
        from glassformer.generation.text import token_text

        return token_text(self.tokenizer, token)

    def _started(self, tokens: list[int]) -> list[int]:
        start = self.model.config.special.start
        return tokens if start is None or tokens[:1] == [start] else [start, *tokens]

    def _answer(self, source: list[int]) -> list[int]:
        """Return the greedy output of an encoder-decoder for a source."""
        from glassformer.generation import Sampling, generate

        if not source:
            return self._started([])
        room = ANSWER_TOKENS if self.model.config.max_len is None else min(ANSWER_TOKENS, self.model.config.max_len - 1)
        return self._started(generate(self.model, [source], room, Sampling(0.0)).new[0])


def _training(run: str | None, out: Path | None, json: bool) -> int:
    from glassformer.lens.figures.training import losses_of, probe_series, read_log, training_curves

    if run is None:
        raise InputError(
            "glass look training draws a run's log: give its folder with --model, such as runs/shakespeare."
        )
    events = read_log(run)
    numbers = {name: {"steps": steps, "values": values} for name, (steps, values) in losses_of(events).items()}
    probes = {name: {"steps": steps, "values": values} for name, (steps, values) in probe_series(events).items()}
    folder = Path(run) if Path(run).is_dir() else Path(run).parent
    title = f"{folder.resolve().name}: loss while training" + (", and the probes" if probes else "")
    _give("training", {**numbers, "probes": probes}, lambda: training_curves(events, title=title), out, json)
    return 0
