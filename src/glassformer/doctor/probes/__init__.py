"""Invariants of a Transformer, each written once: a Subject in, Findings out.

The id of a finding is `diagnosis/probe`: the diagnosis it speaks for, named as in the doctor's taxonomy, and the probe.
"""

from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.subject import Subject

__all__ = ["CannotExamineError", "Subject", "Unsupported", "subject_of"]
