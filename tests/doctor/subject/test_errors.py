"""Refusals are ValueErrors, so that the command line turns them into a sentence and exit 2."""

from glassformer.doctor.subject.errors import CannotExamineError, Unsupported


def test_refusing_a_subject_is_a_value_error_and_a_missing_capability_is_not():
    assert issubclass(CannotExamineError, ValueError)
    assert not issubclass(Unsupported, ValueError)
