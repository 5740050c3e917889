"""The doctor: what is wrong with a Transformer, where, and how to fix it."""

from glassformer.checks.errors import CannotExamineError
from glassformer.doctor.diagnose import diagnose
from glassformer.doctor.report import Diagnosis, Report

__all__ = ["CannotExamineError", "Diagnosis", "Report", "diagnose"]
