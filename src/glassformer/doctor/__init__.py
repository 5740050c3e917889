"""The doctor: what is wrong with a Transformer, where, and how to fix it."""

from glassformer.doctor.diagnose import diagnose
from glassformer.doctor.report import Diagnosis, Report
from glassformer.doctor.subject.errors import CannotExamineError

__all__ = ["CannotExamineError", "Diagnosis", "Report", "diagnose"]
