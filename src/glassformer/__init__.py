"""glassformer: the Transformer you can see through.

Public names are imported when first used, so `import glassformer` and `glass --help` do not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module it lives in; None: the name is the module itself
_PUBLIC: dict[str, str | None] = {
    "config": None,
    "presets": None,
    "size": None,
    "ModelConfig": "config",
    "DecoderConfig": "config",
    "EncoderConfig": "config",
    "Seq2SeqConfig": "config",
    "Finding": "finding",
    "Verdict": "finding",
    "build": "model",
    "masks": "model",
    "generate": None,
    "stream": "generate",
    "Sampling": "generate",
    "load": "weights",
    "save": "weights",
    "load_tokenizer": "weights",
    "claims": None,
    "compare": None,
    "Comparison": "compare",
    "check": "claims",
    "diagnose": "doctor",
    "trace": "lens",
    "patch": "lens",
}

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
    from glassformer import generation as generate
    from glassformer import sizing as size
    from glassformer.config import DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
    from glassformer.doctor import compare
    from glassformer.doctor.compare import Comparison
    from glassformer.doctor.diagnose import diagnose
    from glassformer.finding import Finding, Verdict
    from glassformer.generation import Sampling, stream
    from glassformer.lens.patch import patch
    from glassformer.lens.trace import trace
    from glassformer.model import build, masks
    from glassformer.theory import claims
    from glassformer.theory.claims import check
    from glassformer.weights import load, load_tokenizer, save


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'glassformer' has no attribute {name!r}")
    home = _PUBLIC[name]
    module = importlib.import_module(f"glassformer.{home or name}")
    value = module if home is None else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
