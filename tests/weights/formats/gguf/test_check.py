"""The comparison with llama.cpp fails where it should, and says so where it cannot be made."""

import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.finding import Verdict
from glassformer.weights.formats.gguf import check
from glassformer.weights.formats.gguf.check import compare_with_llama
from tests.weights.formats.gguf.models import CASES, NEEDS_LLAMA, random


def test_without_llama_cpp_it_is_a_skip_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    (finding,) = compare_with_llama(tmp_path, random(CASES["llama"]), "f32", None)
    assert finding.verdict is Verdict.SKIP
    assert "llama-cpp-python is not installed, so the file was not run by llama.cpp" in finding.why


@NEEDS_LLAMA
def test_another_model_fails_and_so_does_a_file_that_cannot_be_loaded(tmp_path):
    path = gf.save(random(CASES["llama"]), tmp_path / "m.gguf", format="gguf")
    verdicts = [f.verdict for f in compare_with_llama(path, random(CASES["llama"], seed=1), "f32", None)]
    assert verdicts == [Verdict.FAIL, Verdict.FAIL]
    path.write_bytes(path.read_bytes()[:1000])
    (finding,) = compare_with_llama(path, random(CASES["llama"]), "f32", None)
    assert finding.verdict is Verdict.FAIL
    assert "could not run the file" in finding.why


@pytest.mark.slow
@NEEDS_LLAMA
def test_with_gelu_from_a_table_in_float16_gpt2_is_as_close_as_the_others(tmp_path):
    """llama.cpp rounds the input and the output of GELU to float16. With the same rounding here little is left."""
    model = random(CASES["gpt2"])
    path = gf.save(model, tmp_path / "m.gguf", format="gguf")
    for block in model.blocks:
        block.feedforward.activation = lambda x: F.gelu(x.half().float(), approximate="tanh").half().float()
    found = {f.id: f for f in compare_with_llama(path, model, "f32", None)}["llama.cpp-logits"]
    assert found.measured <= 1e-4
    exact = {f.id: f for f in compare_with_llama(path, gf.load(path), "f32", None)}["llama.cpp-logits"]
    assert exact.measured > 2 * found.measured
    assert torch.isfinite(torch.tensor(exact.measured))
