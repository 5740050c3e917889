"""glassformer: the Transformer you can see through.

Public names are imported when first used, so `import glassformer` and `glass --help` do not wait for torch.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_MODULES = {
    "claims": "glassformer.theory.claims",
    "config": "glassformer.config",
    "lens": "glassformer.lens",
    "masks": "glassformer.model.masks",
    "presets": "glassformer.config.presets",
}
"""Public names that are modules."""

_HOMES = {
    "glassformer.config": ("ModelConfig", "DecoderConfig", "EncoderConfig", "Seq2SeqConfig"),
    "glassformer.finding": ("Finding", "Verdict"),
    "glassformer.errors": ("GlassformerError",),
    "glassformer.model": ("build", "Cache", "DecoderLM", "EncoderLM", "Seq2Seq"),
    "glassformer.generation": ("generate", "stream", "encode", "Sampling"),
    "glassformer.weights": ("load", "save", "load_tokenizer"),
    "glassformer.evaluation.cross_entropy": ("evaluate", "Evaluation"),
    "glassformer.training.api": ("train", "TrainResult"),
    "glassformer.training.run": ("Run",),
    "glassformer.training.size": ("size",),
    "glassformer.doctor.diagnose": ("diagnose",),
    "glassformer.doctor.training": ("diagnose_training",),
    "glassformer.doctor.compare": ("compare", "Comparison"),
    "glassformer.theory.claims": ("check",),
    "glassformer.lens.trace": ("trace",),
    "glassformer.lens.patch": ("patch",),
}
"""Module -> the public functions and classes that it defines."""

_PUBLIC = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cache",
    "Comparison",
    "DecoderConfig",
    "DecoderLM",
    "EncoderConfig",
    "EncoderLM",
    "Evaluation",
    "Finding",
    "GlassformerError",
    "ModelConfig",
    "Run",
    "Sampling",
    "Seq2Seq",
    "Seq2SeqConfig",
    "TrainResult",
    "Verdict",
    "__version__",
    "build",
    "check",
    "claims",
    "compare",
    "config",
    "diagnose",
    "diagnose_training",
    "encode",
    "evaluate",
    "generate",
    "lens",
    "load",
    "load_tokenizer",
    "masks",
    "patch",
    "presets",
    "save",
    "size",
    "stream",
    "trace",
    "train",
]

if TYPE_CHECKING:
    from glassformer import config, lens
    from glassformer.config import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
    from glassformer.doctor.compare import Comparison, compare
    from glassformer.doctor.diagnose import diagnose
    from glassformer.doctor.training import diagnose_training
    from glassformer.errors import GlassformerError
    from glassformer.evaluation.cross_entropy import Evaluation, evaluate
    from glassformer.finding import Finding, Verdict
    from glassformer.generation import Sampling, encode, generate, stream
    from glassformer.lens.patch import patch
    from glassformer.lens.trace import trace
    from glassformer.model import Cache, DecoderLM, EncoderLM, Seq2Seq, build, masks
    from glassformer.theory import claims
    from glassformer.theory.claims import check
    from glassformer.training.api import TrainResult, train
    from glassformer.training.run import Run
    from glassformer.training.size import size
    from glassformer.weights import load, load_tokenizer, save


def imported_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return `__getattr__` of a package whose names are imported when first used. `homes`: the module of each."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


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
