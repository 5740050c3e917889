"""The models that a request can name: bundled ones, folders given at start-up, and models trained in the studio.

A request names a model by its short name; a path in a request is never opened. A model is loaded on first use, once
even if several requests need it, and only a limited number stays in memory.
"""

import contextlib
import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer import pretrained
from glassformer.config import ConfigError, ModelConfig, NoFeedForward, Seq2SeqConfig, from_toml
from glassformer.errors import nearest
from glassformer.files import checkpoint_step, model_name
from glassformer.sizing import count
from glassformer.studio.errors import NotFoundError, StudioError
from glassformer.studio.settings import ADAPTERS

if TYPE_CHECKING:
    from glassformer.generation.kept import KeptCache
    from glassformer.model import Model

TITLES = {
    "bard": "Shakespeare, by characters",
    "induction": "Two layers, continues repetitions",
    "bard-chat": "An adapter of bard that answers questions",
}


@dataclass(frozen=True)
class ModelEntry:
    """Name and folder of a model that can be loaded."""

    name: str
    path: Path
    title: str
    bundled: bool = False
    base: Path | None = None
    """The model into which the adapter at `path` is merged; None for a whole model, or for the base that it names."""


@dataclass
class LoadedModel:
    """A model with its tokenizer."""

    name: str
    path: Path
    """Where its tokenizer and chat template are."""
    model: "Model"
    tokenizer: Any
    cache: dict[Any, Any] = field(default_factory=dict)
    """Results that depend on the weights alone."""
    _vocabulary: list[str] | None = None
    _kept: "KeptCache | None" = None
    _keeping: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def kept_cache(self) -> "Iterator[KeptCache]":
        """Lend the KV cache that outlives a request: a client sends the whole conversation with each message.

        While a request has it, others get a cache of their own.
        """
        from glassformer.generation.kept import KeptCache

        model: Any = self.model
        if not self._keeping.acquire(blocking=False):
            yield KeptCache(model)
            return
        try:
            if self._kept is None:
                self._kept = KeptCache(model)
            yield self._kept
        finally:
            self._keeping.release()

    @property
    def config(self) -> ModelConfig:
        config: ModelConfig = self.model.config
        return config

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        from glassformer.generation.text import Continuation

        if self.tokenizer is None:
            raise StudioError(f"{self.name} has no tokenizer.json next to its weights: give token ids instead of text.")
        return list(Continuation(self.model, self.tokenizer, text).tokens)

    def check_ids(self, ids: Iterable[int]) -> list[int]:
        """Return the ids as a list; raise StudioError if one is outside the vocabulary or there are too many."""
        ids, size, limit = list(ids), self.config.vocab_size, self.config.max_len
        for token in ids:
            if not 0 <= token < size:
                raise StudioError(f"token id {token} is outside the vocabulary of {size}: use 0 to {size - 1}.")
        if limit is not None and len(ids) > limit:
            raise StudioError(f"{len(ids)} tokens are more than the context of {limit}: shorten the prompt.")
        return ids

    def token_text(self, token: int) -> str:
        """Return the text of one token."""
        from glassformer.generation.text import token_text

        return token_text(self.tokenizer, token)

    def vocabulary(self) -> list[str]:
        """Return the text of every token of the vocabulary."""
        if self._vocabulary is None:
            self._vocabulary = [self.token_text(token) for token in range(self.config.vocab_size)]
        return self._vocabulary

    def decode(self, ids: list[int]) -> str:
        """Return the text of a list of tokens."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return str(self.tokenizer.decode(ids)) if ids else ""

    def cached(self, key: Any, compute: Callable[[], Any], capacity: int = 16) -> Any:
        """Return the cached value of `key`; compute and cache it if there is none."""
        if key not in self.cache:
            while len(self.cache) >= capacity:
                self.cache.pop(next(iter(self.cache)), None)
            self.cache[key] = compute()
        return self.cache[key]


class ModelStore:
    """All models by name, and a cache of the loaded ones.

    `trained` returns the folders of models trained in the studio, by name; `adapters` are pairs of an adapter and the
    model into which it is merged.
    """

    def __init__(
        self,
        folders: Iterable[Path] = (),
        capacity: int = 4,
        trained: Callable[[], Mapping[str, Path]] = dict,
        adapters: Iterable[tuple[Path, Path | None]] = (),
    ):
        self.capacity, self.trained = capacity, trained
        self._fixed = {e.name: e for e in _entries([*((folder, None) for folder in folders), *adapters])}
        self._loaded: OrderedDict[tuple[str, Path], LoadedModel] = OrderedDict()
        self._lock = threading.Lock()
        self._loading: dict[tuple[str, Path], threading.Lock] = {}
        self._configs: dict[Path, ModelConfig] = {}

    def entries(self) -> dict[str, ModelEntry]:
        """Return every model that can be named now."""
        trained = {name: ModelEntry(name, path, f"Trained here: {name}") for name, path in self.trained().items()}
        return {**self._fixed, **{name: entry for name, entry in trained.items() if name not in self._fixed}}

    def entry(self, name: str) -> ModelEntry:
        entries = self.entries()
        if name not in entries:
            hint = nearest(name[:100], entries, others="Models:")
            raise NotFoundError(f"there is no model {name[:100]!r} here.{hint}")
        return entries[name]

    def get(self, name: str) -> LoadedModel:
        """Return the model, loading it if necessary. Needs torch."""
        entry = self.entry(name)
        key = (name, entry.path.resolve())
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                if key in self._loaded:
                    self._loaded.move_to_end(key)
                    return self._loaded[key]
            loaded = _load(entry)
            with self._lock:
                self._loaded[key] = loaded
                while len(self._loaded) > self.capacity:
                    old, _ = self._loaded.popitem(last=False)
                    self._loading.pop(old, None)
            return loaded

    def load_copy(self, name: str) -> LoadedModel:
        """Load a separate copy, for code that modifies the model."""
        return _load(self.entry(name))

    def dtype(self, name: str) -> str:
        """Return the dtype in which the studio computes a model: float32 if it is not loaded yet."""
        with self._lock:
            for (other, _), loaded in self._loaded.items():
                if other == name:
                    return str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
        return "float32"

    def config(self, name: str, torch_ready: bool) -> ModelConfig | None:
        """Return the config of a model. Reading that of a Hugging Face folder needs torch; without it, return None."""
        entry = self.entry(name)
        path = entry.path
        if path not in self._configs:
            found = _own_config(entry.base or path)
            if found is None and torch_ready:
                from glassformer.weights import load_config

                found = load_config(path if entry.base is None else entry.base)
            if found is None:
                return None
            if name not in self._fixed or path.is_symlink():
                return found  # the best model of a training run changes
            self._configs[path] = found
        return self._configs[path]

    def describe(self, torch_ready: bool) -> list[dict[str, Any]]:
        """Describe each model for the page. If a config cannot be read (yet), its fields are null."""
        return [self._described(entry, torch_ready) for entry in self.entries().values()]

    def _described(self, entry: ModelEntry, torch_ready: bool) -> dict[str, Any]:
        step = checkpoint_step(entry.path)
        title = entry.title if step is None else f"{entry.title}, step {step:,}".removeprefix(f"{entry.name}, ")
        head = {"name": entry.name, "title": title, "bundled": entry.bundled, "step": step}
        try:
            places = _places(entry, torch_ready)
            head["tokenizer"] = any((place / "tokenizer.json").exists() for place in places)
            head["chat"] = any(map(_has_template, places))
            config = self.config(entry.name, torch_ready)
        except (ValueError, OSError) as error:
            return {**head, **dict.fromkeys(FACTS), "error": str(error)}
        return {**head, **(dict.fromkeys(FACTS) if config is None else facts(config))}


FACTS = (
    "kind", "layers", "heads", "kv_heads", "d_model", "d_head", "d_ff", "vocab", "context", "parameters", "position",
    "norm", "placement", "feedforward", "encoder_layers",
)  # fmt: skip


def facts(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config under the names that the page uses."""
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


def _entries(folders: Iterable[tuple[Path, Path | None]]) -> list[ModelEntry]:
    found = [
        ModelEntry(name, path, TITLES.get(name, name), bundled=True, base=_bundled_base(path))
        for name, path in pretrained.FOLDERS.items()
    ]
    for folder, base in folders:
        parts = (re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") for part in model_name(folder).split("/"))
        plain = "/".join(part for part in parts if part) or "model"
        taken, name, number = {e.name for e in found}, plain, 1
        while name in taken:
            number += 1
            name = f"{plain}-{number}"
        path = Path(os.path.abspath(folder))
        # the link of a run to its best checkpoint is followed each time it is loaded, a link to a run only here
        title = name if base is None else f"{name} on {model_name(base)}"
        found.append(ModelEntry(name, path.parent.resolve() / path.name, title, base=base))
    return found


def _bundled_base(path: Path) -> Path | None:
    """Return the model that a bundled adapter belongs to, without torch; None for a whole model."""
    file = path / ADAPTERS[0]
    if not file.is_file():
        return None
    return pretrained.FOLDERS.get(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])


def _own_config(path: Path) -> ModelConfig | None:
    """Return the config of a glassformer folder, without torch; None for a Hugging Face folder."""
    for name in ("model.toml", "run.toml"):
        file = path / name
        if file.exists():
            try:
                return from_toml(file.read_text(encoding="utf-8"), file.name)
            except (ConfigError, UnicodeDecodeError) as error:
                raise StudioError(f"{name} of {path.name} cannot be read: {error}") from None
    return None


def _places(entry: ModelEntry, torch_ready: bool) -> list[Path]:
    """Return the folders that may have tokenizer and template: that of an adapter comes before that of its base."""
    if entry.base is not None:
        return [entry.path, entry.base]
    if torch_ready and any((entry.path / name).is_file() for name in ADAPTERS):
        from glassformer.weights.formats.adapter import base_of

        return [entry.path, base_of(entry.path)]
    return [entry.path]


def _has_template(path: Path) -> bool:
    """Return whether a folder has a chat template, without torch."""
    if (path / "chat_template.jinja").exists() or (path / "chat_template.json").exists():
        return True
    try:
        return '"chat_template"' in (path / "tokenizer_config.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _load(entry: ModelEntry) -> LoadedModel:
    from glassformer.generation.request import tokenizer_of
    from glassformer.weights import load_to_compute

    path = entry.path.resolve()
    model = load_to_compute(path) if entry.base is None else load_to_compute(entry.base, adapter=path)
    return LoadedModel(entry.name, model.origin.path, model, tokenizer_of(model))  # type: ignore[union-attr,arg-type]
