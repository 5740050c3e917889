"""Errors that a user can cause, the checks that raise them, and what to install for an optional dependency."""

import importlib.util
import json
import typing
from typing import Any


class GlassformerError(ValueError):
    """The base of every error that a user can cause. Its text is one sentence: the value, the rule, the remedy."""


class ConfigError(GlassformerError):
    """A config that cannot be built. The message gives the value, the rule and the remedy."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_positive(owner: object, *names: str) -> None:
    """Raise ConfigError unless these fields are integers of at least 1."""
    for name in names:
        value = getattr(owner, name)
        require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            f"{type(owner).__name__}.{name}={value!r} must be a whole number of at least 1.",
        )


def require_choice(owner: object, name: str, choices: Any) -> None:
    """Raise ConfigError unless a field has one of the values of a Literal type."""
    value, allowed = getattr(owner, name), typing.get_args(choices)
    require(
        value in allowed,
        f"{type(owner).__name__}.{name}={value!r} is not known. Use one of {', '.join(map(repr, allowed))}.",
    )


def listing(items: list[Any], word: str = "or") -> str:
    """Return `a, b or c`."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" {word} " + texts[-1]


def nearest(name: str, known: Any, others: str = "Fields:", listed: Any = None) -> str:
    """Return the end of an error message: the known names most like this one, or else all of them (or `listed`)."""
    import difflib  # not needed unless there is an error

    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f" Did you mean {listing(close)}?" if close else f" {others} {', '.join(sorted(listed or known))}."


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun, such as `1 claim` or `1,200 claims`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


EXTRAS = {
    "studio": ("anyio", "starlette", "uvicorn", "pydantic", "plotly", "latex2mathml"),
    "theory": ("z3",),
    "hub": ("huggingface_hub",),
    "logs": ("tensorboard",),
    "data": ("pyarrow", "zstandard", "datasets"),
    "export": ("gguf", "onnx", "onnxscript", "onnxruntime"),
    "tokenizers": ("sentencepiece", "google.protobuf"),
    "eval": ("lm_eval",),
}
"""Each extra of this distribution that a command needs, and the modules that it installs."""


def missing(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed. Nothing is imported."""
    return [name for name in EXTRAS[extra] if not _found(name)]


def install(extra: str) -> str:
    """Return what to do to get an extra: `run pip install ...`, as it works for this installation.

    A checkout is installed again from its folder, because an index may not have this distribution. One that was
    installed from a URL is installed again from there, and any other from the index by its name (PEP 610).
    """
    origin = _origin()
    if origin is None:
        return f"run pip install 'glassformer[{extra}]'"
    url = origin.get("url", "")
    if "vcs_info" in origin:
        return f"run pip install 'glassformer[{extra}] @ {origin['vcs_info'].get('vcs', 'git')}+{url}'"
    if "archive_info" in origin:
        return f"run pip install 'glassformer[{extra}] @ {url}'"
    return f"run pip install '.[{extra}]' in the folder of the glassformer repository"


def _origin() -> dict[str, dict[str, str]] | None:
    """Return where this distribution was installed from (direct_url.json); None: from an index."""
    from importlib import metadata  # which takes as long to import as the rest of a small command

    try:
        text = metadata.distribution("glassformer").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}  # not installed at all: this is a checkout on the path
    return None if text is None else json.loads(text)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has None for it
        return False
