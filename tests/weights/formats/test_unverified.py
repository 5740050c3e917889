"""The error of a file that computes something else is one sentence with what was measured."""

from pathlib import Path

from glassformer.finding import Finding
from glassformer.weights.formats.unverified import UnverifiedError


def test_the_message_has_what_failed():
    findings = [Finding.judge("a", 0.5, 1.0, "fine"), Finding.judge("b", 2.0, 1.0, "rounding")]
    error = UnverifiedError(Path("m.gguf"), findings)
    assert str(error) == "m.gguf was not written, because what was written differs from the model: b 2 > 1 (rounding)."
    assert error.findings == findings
