"""Training: from a text file to a model that speaks, exact and crash-safe."""

from glassformer.training.data.ngram import baselines
from glassformer.training.loop import TrainState, train, train_step
from glassformer.training.run import RunConfig, read_run
from glassformer.training.session import Session, open_session, resume_session

__all__ = [
    "RunConfig",
    "Session",
    "TrainState",
    "baselines",
    "open_session",
    "read_run",
    "resume_session",
    "train",
    "train_step",
]
