"""Without onnxruntime the comparison is a skip that says so. tests/weights/formats/onnx/test_save.py runs it."""

from glassformer.finding import Verdict
from glassformer.weights.formats.onnx import check
from tests.weights.formats.gguf.models import CASES, random


def test_without_onnxruntime_it_is_a_skip(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    (finding,) = check.compare_with_onnxruntime(tmp_path, random(CASES["llama"]))
    assert finding.verdict is Verdict.SKIP
    assert "onnxruntime is not installed, so the graph was not run" in finding.why


def test_present_becomes_past():
    assert check.next_past({"logits": 1, "present.0.key": 2}) == {"past_key_values.0.key": 2}
