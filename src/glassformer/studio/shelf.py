"""The models that may be named: the bundled ones, the folders given at start, and what was trained here.

A request names a model by its short name only; no path from outside is ever opened. Models are loaded when first used,
a bounded number at a time, each once however many ask for it.
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer import pretrained
from glassformer.config import ConfigError, ModelConfig, NoFeedForward, Seq2SeqConfig, from_toml
from glassformer.config.errors import nearest
from glassformer.files import checkpoint_step, model_name
from glassformer.sizing import count
from glassformer.studio.errors import StudioError, UnknownError

if TYPE_CHECKING:
    from glassformer.model import Model

TITLES = {
    "bard": "Shakespeare, by characters",
    "induction": "Two layers, continues repetitions",
}


@dataclass(frozen=True)
class Entry:
    name: str
    path: Path
    title: str
    bundled: bool = False


@dataclass
class Loaded:
    """A model with what turns text into its tokens and back."""

    name: str
    path: Path
    model: "Model"
    tokenizer: Any
    memory: dict[Any, Any] = field(default_factory=dict)
    """Results that depend on the weights alone, by what was asked."""
    _pieces: list[str] | None = None

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.model.config
        return config

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        from glassformer.generation.text import Continuation

        if self.tokenizer is None:
            raise StudioError(
                f"{self.name} has no tokenizer.json beside its weights: give token ids instead of a text."
            )
        return list(Continuation(self.model, self.tokenizer, text).tokens)

    def checked(self, ids: Iterable[int]) -> list[int]:
        """The ids, each inside the vocabulary, and no more than the context holds."""
        ids, size, limit = list(ids), self.config.vocab_size, self.config.max_len
        for token in ids:
            if not 0 <= token < size:
                raise StudioError(f"token id {token} is outside the vocabulary of {size}: use 0 to {size - 1}.")
        if limit is not None and len(ids) > limit:
            raise StudioError(f"{len(ids)} tokens are more than the context of {limit}: shorten the prompt.")
        return ids

    def say(self, token: int) -> str:
        """A token as text."""
        from glassformer.generation.text import token_text

        return token_text(self.tokenizer, token)

    def pieces(self) -> list[str]:
        """The word of every id of the vocabulary."""
        if self._pieces is None:
            self._pieces = [self.say(token) for token in range(self.config.vocab_size)]
        return self._pieces

    def decode(self, ids: list[int]) -> str:
        """The text of some tokens."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids)) if ids else ""

    def remember(self, key: Any, make: Callable[[], Any], most: int = 16) -> Any:
        """What `make` gives, kept for the next who asks the same."""
        if key not in self.memory:
            while len(self.memory) >= most:
                self.memory.pop(next(iter(self.memory)), None)
            self.memory[key] = make()
        return self.memory[key]


class Shelf:
    """Entries by name, and the few that are loaded."""

    def __init__(self, folders: Iterable[Path] = (), keep: int = 4, more: Callable[[], Mapping[str, Path]] = dict):
        self.keep, self.more = keep, more
        self._fixed = {e.name: e for e in _entries(folders)}
        self._loaded: OrderedDict[tuple[str, Path], Loaded] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Path], threading.Lock] = {}
        self._configs: dict[Path, ModelConfig] = {}

    def entries(self) -> dict[str, Entry]:
        """Everything that can be named now."""
        trained = {name: Entry(name, path, f"Trained here: {name}") for name, path in self.more().items()}
        return {**self._fixed, **{name: entry for name, entry in trained.items() if name not in self._fixed}}

    def entry(self, name: str) -> Entry:
        entries = self.entries()
        if name not in entries:
            hint = nearest(name[:100], entries, others="Models:")
            raise UnknownError(f"there is no model {name[:100]!r} here.{hint}")
        return entries[name]

    def get(self, name: str) -> Loaded:
        """The model, loaded if it is not. Needs torch."""
        entry = self.entry(name)
        key = (name, entry.path.resolve())
        with self._lock:
            turn = self._loading.setdefault(key, threading.Lock())
        with turn:
            with self._lock:
                if key in self._loaded:
                    self._loaded.move_to_end(key)
                    return self._loaded[key]
            made = _load(name, key[1])
            with self._lock:
                self._loaded[key] = made
                while len(self._loaded) > self.keep:
                    old, _ = self._loaded.popitem(last=False)
                    self._loading.pop(old, None)
            return made

    def fresh(self, name: str) -> Loaded:
        """A copy of its own, for those who change what they are given."""
        return _load(name, self.entry(name).path)

    def dtype(self, name: str) -> str:
        """What a model is computed in here: float32 unless it was loaded and has another."""
        with self._lock:
            for (held, _), loaded in self._loaded.items():
                if held == name:
                    return str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        return "float32"

    def config(self, name: str, torch_ready: bool) -> ModelConfig | None:
        """The config of a model; of a Hugging Face folder only once torch is there, else None."""
        path = self.entry(name).path
        if path not in self._configs:
            found = _own_config(path)
            if found is None and torch_ready:
                from glassformer.weights import load_config

                found = load_config(path)
            if found is None:
                return None
            if name not in self._fixed or path.is_symlink():
                return found  # a run's best model moves
            self._configs[path] = found
        return self._configs[path]

    def describe(self, torch_ready: bool) -> list[dict[str, Any]]:
        """What the page shows of each model. Where a config cannot be read yet (or at all) its fields are null."""
        return [self._described(entry, torch_ready) for entry in self.entries().values()]

    def _described(self, entry: Entry, torch_ready: bool) -> dict[str, Any]:
        step = checkpoint_step(entry.path)
        title = entry.title if step is None else f"{entry.title}, step {step:,}".removeprefix(f"{entry.name}, ")
        head = {"name": entry.name, "title": title, "bundled": entry.bundled, "step": step}
        head["tokenizer"] = (entry.path / "tokenizer.json").exists()
        try:
            config = self.config(entry.name, torch_ready)
        except (ValueError, OSError) as error:
            return {**head, **dict.fromkeys(FACTS), "error": str(error)}
        return {**head, **(dict.fromkeys(FACTS) if config is None else facts(config))}


FACTS = (
    "kind", "layers", "heads", "kv_heads", "d_model", "d_head", "d_ff", "vocab", "context", "parameters", "position",
    "norm", "placement", "feedforward", "encoder_layers",
)  # fmt: skip


def facts(config: ModelConfig) -> dict[str, Any]:
    """A config in the words of the page."""
    values = (
        config.kind,  # type: ignore[attr-defined]
        config.n_layers,
        config.n_heads,
        config.n_kv_heads,
        config.d_model,
        config.d_head,
        None if isinstance(config.feedforward, NoFeedForward) else config.d_ff,
        config.vocab_size,
        config.max_len,
        count(config),
        config.position.kind,
        config.norm.kind,
        config.placement,
        config.feedforward.kind,
        config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else None,
    )
    return dict(zip(FACTS, values, strict=True))


def _entries(folders: Iterable[Path]) -> list[Entry]:
    found = []
    for name in pretrained.NAMES:
        path = pretrained.folder(name)
        if path is not None:
            found.append(Entry(name, path, TITLES.get(name, name), bundled=True))
    for folder in folders:
        parts = (re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") for part in model_name(folder).split("/"))
        plain = "/".join(part for part in parts if part) or "model"
        taken, name, number = {e.name for e in found}, plain, 1
        while name in taken:
            number += 1
            name = f"{plain}-{number}"
        path = Path(os.path.abspath(folder))
        # the link of a run to its best checkpoint is followed each time it is loaded, a link to a run only here
        found.append(Entry(name, path.parent.resolve() / path.name, name))
    return found


def _own_config(path: Path) -> ModelConfig | None:
    """The config of a folder of ours, read without torch; None for a Hugging Face folder."""
    for name in ("model.toml", "run.toml"):
        file = path / name
        if file.exists():
            try:
                return from_toml(file.read_text(encoding="utf-8"), file.name)
            except (ConfigError, UnicodeDecodeError) as error:
                raise StudioError(f"{name} of {path.name} cannot be read: {error}") from None
    return None


def _load(name: str, path: Path) -> Loaded:
    from glassformer.weights import load, load_tokenizer

    model = load(path)
    if next(model.parameters()).dtype.itemsize == 2 and model.device.type == "cpu":
        model = model.float()  # half precisions are for storing and for accelerators
    return Loaded(name, path, model, load_tokenizer(path))
