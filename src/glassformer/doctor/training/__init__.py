"""Examine a training pipeline: what one update trains the model towards, and what the optimizer does with it.

`diagnose_training(step, batch)` returns a report; `gf.diagnose_training` is this function.
"""

from glassformer.doctor.training.diagnose import diagnose_training

__all__ = ["diagnose_training"]
