"""Training: from a text file to a model that speaks, exact and crash-safe."""

from glassformer.train.loop import TrainState, train, train_step
from glassformer.train.ngram import baselines
from glassformer.train.run import RunConfig, read_run
from glassformer.train.session import Session, open_session, resume_session

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
