"""Training: from a text file to a trained model, reproducible and crash-safe.

Names are imported when first used: reading a run file or computing the size of a model does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Run": "run",
    "Session": "session",
    "TrainResult": "api",
    "TrainState": "loop",
    "baselines": "data.ngram",
    "open_session": "session",
    "read_run": "run",
    "resume_session": "session",
    "train": "loop",
    "train_step": "loop",
}

__all__ = [
    "Run",
    "Session",
    "TrainResult",
    "TrainState",
    "baselines",
    "open_session",
    "read_run",
    "resume_session",
    "train",
    "train_step",
]

if TYPE_CHECKING:
    from glassformer.training.api import TrainResult
    from glassformer.training.data.ngram import baselines
    from glassformer.training.loop import TrainState, train, train_step
    from glassformer.training.run import Run, read_run
    from glassformer.training.session import Session, open_session, resume_session


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
