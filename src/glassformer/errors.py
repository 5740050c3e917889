"""Errors that a user can cause, the words they share, and what to install for an optional dependency."""

import importlib.metadata
import importlib.util
import json


class GlassformerError(ValueError):
    """The base of every error that a user can cause. Its text is one sentence: the value, the rule, the remedy."""


def plural(count: int, noun: str, several: str = "") -> str:
    """Return a count with its noun, such as `1 claim` or `1,200 claims`."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


EXTRAS = {
    "studio": ("anyio", "starlette", "uvicorn", "pydantic", "plotly", "latex2mathml"),
    "theory": ("z3",),
    "hub": ("huggingface_hub",),
    "logs": ("tensorboard",),
    "export": ("gguf", "onnx", "onnxscript", "onnxruntime"),
    "tokenizers": ("sentencepiece", "google.protobuf"),
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
    try:
        text = importlib.metadata.distribution("glassformer").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}  # not installed at all: this is a checkout on the path
    return None if text is None else json.loads(text)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # ValueError: sys.modules has None for it
        return False
