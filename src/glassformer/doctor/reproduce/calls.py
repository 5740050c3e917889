"""How a model is called, as lines of a script: its argument names, its cache, and where it returns its logits."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from glassformer.doctor.subject import interface
from glassformer.doctor.subject.subject import Subject

FIELDS = ("logits", "prediction_logits", "last_hidden_state", "output", "out")
CACHES = ("past_key_values", "cache", "kv_cache", "present", "presents")


def accessor(output: Any, wanted: Any, names: tuple[str, ...]) -> str | None:
    """The text that takes `wanted` out of what a model returned: `.logits`, `["logits"]`, `[0]` or nothing."""
    if output is wanted:
        return ""
    for name in names:
        if isinstance(output, Mapping) and output.get(name) is wanted:
            return f'["{name}"]'
        if not isinstance(output, Mapping) and getattr(output, name, None) is wanted:
            return f".{name}"
    if isinstance(output, tuple | list):
        return next((f"[{i}]" for i, item in enumerate(output) if item is wanted), None)
    return None


def _address(value: Any) -> str:
    """The text for where new tokens are: a number, or the positions of each."""
    if not isinstance(value, Tensor):
        return "start"
    texts = ("torch.tensor(start)", "torch.arange(start, start + piece.shape[1])")
    return texts[value.dim()] if value.dim() < 2 else f"{texts[1]}.expand(len(piece), -1)"


class Calls:
    """Lines that define `logits(tokens, ...)` and, where there is a cache, `cached(tokens, pieces, ...)`."""

    def __init__(self, isolated: Subject):
        self.subject, self.face = isolated, isolated.interface
        tokens = isolated.tokens(2, 5)
        output = self._run(tokens, self._fixed(tokens, False))
        found = interface.find_logits(output, (2, 5))
        taken = accessor(output, found, FIELDS)
        if taken is None:
            raise ValueError("its logits are not a field of what it returns")
        self.take = taken

    def _fixed(self, tokens: Tensor, use_cache: bool) -> dict[str, Any]:
        given = dict(self.face.flags)
        if self.face.use_cache is not None:
            given[self.face.use_cache] = use_cache
        if self.face.needs_labels and self.face.labels:
            given[self.face.labels] = tokens
        return given

    def _run(self, tokens: Tensor, given: dict[str, Any]) -> Any:
        if self.face.is_seq2seq:
            return self.subject.model(self.subject.source(len(tokens)), **{str(self.face.target): tokens}, **given)
        return self.subject.model(tokens, **given)

    def arguments(self, use_cache: bool = False, tokens: str = "tokens") -> str:
        """The arguments that are the same in every call."""
        given = {name: repr(value) for name, value in self.face.flags.items()}
        if self.face.use_cache is not None:
            given[self.face.use_cache] = repr(use_cache)
        if self.face.needs_labels and self.face.labels:
            given[self.face.labels] = tokens
        if self.face.is_seq2seq:
            given[str(self.face.target)] = tokens
        return "".join(f", {name}={value}" for name, value in given.items())

    @property
    def first(self) -> str:
        return "source" if self.face.is_seq2seq else "tokens"

    def logits(self) -> str:
        """The function `logits`."""
        source = ", source=None" if self.face.is_seq2seq else ""
        lines = [f"def logits(tokens{source}, **given):"]
        if self.face.is_seq2seq:
            lines.append("    source = draw(len(tokens), 11, seed=77) if source is None else source")
        lines += [
            "    with torch.no_grad():",
            f"        return model({self.first}{self.arguments()}, **given){self.take}",
        ]
        return "\n".join(lines)

    def cached(self) -> str | None:
        """The function `cached`, None where there is no cache or it is not returned in a known way."""
        face = self.face
        if face.internal:
            return self._kept_inside()
        if face.cache is None:
            return None
        tokens = self.subject.tokens(2, 5)
        made = self.subject.new_cache(2)
        given = self._fixed(tokens, True) | ({} if made is None else {face.cache: made})
        output = self._run(tokens, given)
        found = interface.find_cache(output)
        text = None if found is None else accessor(output, found, CACHES)
        if (found is not None and text is None) or (found is None and made is None):
            return None
        take = accessor(output, interface.find_logits(output, (2, 5)), FIELDS)
        if take is None:
            return None
        new = "None" if made is None else f"model.{face.maker}()"
        source = ", source=None" if face.is_seq2seq else ""
        lines = [f"def cached(tokens, pieces, cache=None, start=0{source}, **given):"]
        if face.is_seq2seq:
            lines.append("    source = draw(len(tokens), 11, seed=77) if source is None else source")
        lines += [
            f"    cache, out = {new} if cache is None else cache, []",
            "    for size in pieces:",
            "        piece = tokens[:, start : start + size]",
            "        with torch.no_grad():",
            f"            result = model({'source' if face.is_seq2seq else 'piece'}, {face.cache}=cache"
            f"{self.arguments(True, 'piece')}, **given)",
            *([] if text is None else [f"        cache = result{text}"]),
            f"        out.append(result{take})",
            "        start += size",
            "    return torch.cat(out, 1), cache",
        ]
        return "\n".join(lines)

    def _kept_inside(self) -> str | None:
        """The function `cached` for a cache that the model keeps itself: its own method starts a sequence."""
        begin, tokens = self.face.begin, self.subject.tokens(2, 3)
        if begin is None or self.face.is_seq2seq:
            return None
        given = "".join(f", {name}={_address(f(tokens, 4))}" for name, f in self.face.address.items())
        two, three = (begin.sizes(self.subject.model, rows) for rows in (2, 3))
        words = {name: repr(value) if value == three[name] else "len(tokens)" for name, value in two.items()}
        return "\n".join([
            "def cached(tokens, pieces, cache=None, start=0, **given):",
            "    out = []",
            "    for size in pieces:",
            "        if start == 0:",
            f"            model.{begin.name}({', '.join(f'{n}={v}' for n, v in words.items())})",
            "        piece = tokens[:, start : start + size]",
            "        with torch.no_grad():",
            f"            out.append(model(piece{given}{self.arguments(True, 'piece')}, **given){self.take})",
            "        start += size",
            "    return torch.cat(out, 1), None",
        ])  # fmt: skip

    def mask(self, text: str) -> str:
        """A boolean tensor (True = real) as the model wants its mask."""
        wanted = f"~{text}" if self.face.mask_inverted else text
        return f"({wanted}).to({self.face.mask_dtype})"
