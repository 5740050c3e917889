"""glassformer: the Transformer you can see through.

Public names are imported when first used, so `import glassformer` and `glass --help` do not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "claims": "glassformer.theory.claims",
    "config": "glassformer.config",
    "masks": "glassformer.model.masks",
    "presets": "glassformer.config.presets",
}
"""Public names that are modules."""

_HOMES = {
    "glassformer.config": ("ModelConfig", "DecoderConfig", "EncoderConfig", "Seq2SeqConfig"),
    "glassformer.finding": ("Finding", "Verdict"),
    "glassformer.model": ("build",),
    "glassformer.generation": ("generate", "stream", "Sampling"),
    "glassformer.weights": ("load", "save", "load_tokenizer"),
    "glassformer.sizing": ("size",),
    "glassformer.doctor": ("diagnose",),
    "glassformer.doctor.compare": ("compare", "Comparison"),
    "glassformer.theory.claims": ("check",),
    "glassformer.lens": ("trace", "patch"),
}
"""Module -> the public functions and classes that it defines."""

_PUBLIC = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Comparison",
    "DecoderConfig",
    "EncoderConfig",
    "Finding",
    "ModelConfig",
    "Sampling",
    "Seq2SeqConfig",
    "Verdict",
    "__version__",
    "build",
    "check",
    "claims",
    "compare",
    "config",
    "diagnose",
    "generate",
    "load",
    "load_tokenizer",
    "masks",
    "patch",
    "presets",
    "save",
    "size",
    "stream",
    "trace",
]

if TYPE_CHECKING:
    from glassformer import config
    from glassformer.config import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
    from glassformer.doctor import diagnose
    from glassformer.doctor.compare import Comparison, compare
    from glassformer.finding import Finding, Verdict
    from glassformer.generation import Sampling, generate, stream
    from glassformer.lens import patch, trace
    from glassformer.model import build, masks
    from glassformer.sizing import size
    from glassformer.theory import claims
    from glassformer.theory.claims import check
    from glassformer.weights import load, load_tokenizer, save


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
    else:
        raise AttributeError(f"module 'glassformer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
