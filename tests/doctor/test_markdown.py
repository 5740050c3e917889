"""Markdown: verdict, evidence, fix and script."""

import torch
import transformers

from glassformer.doctor.markdown import environment, to_markdown
from glassformer.doctor.report import Diagnosis, Report
from glassformer.doctor.reproduce import Reproduction
from glassformer.finding import Finding, Verdict

FAILED = Finding("attn_scale/ratio", Verdict.FAIL, 4.0, 1.0, "0.5 | not 0.125", "scale once", {"layer": 1})
SKIPPED = Finding.skip("cache_mismatch/steps", "the model takes no cache")
DIAGNOSIS = Diagnosis("attn_scale", "attention scale", {"layer": 1}, (FAILED,), "scale once", (SKIPPED,))
REPORT = Report("mine", "decoder", (DIAGNOSIS,), (FAILED, SKIPPED), ("a note",))


def test_a_document_has_evidence_fix_and_script():
    text = to_markdown(REPORT, [Reproduction(FAILED, "print(1)\n")], {"torch": "2.0"})
    assert text.startswith("# mine (decoder): attn_scale")
    assert "| `attn_scale/ratio` | 4 > 1 | 0.5 \\| not 0.125 |" in text
    assert "**Fix:** scale once" in text
    assert "```python\nprint(1)\n```" in text
    assert "torch 2.0" in text
    assert "* a note" in text
    assert "`cache_mismatch/steps`" in text


def test_what_looks_like_a_tag_is_shown():
    text = to_markdown(Report("<lambda>", "decoder", (), (), ("it prints: '<pad>'",)))
    assert "# &lt;lambda>" in text
    assert "* it prints: '&lt;pad>'" in text


def test_a_diagnosis_without_a_script_says_so():
    assert "no stand-alone script" in to_markdown(REPORT)


def test_the_environment_has_the_version_of_the_models_package():
    found = environment(transformers.GPT2Model)
    assert found["torch"] == torch.__version__
    model = torch.nn.Linear(2, 2)
    assert environment(model)["torch"] == torch.__version__
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=11)
    assert environment(transformers.GPT2Model(config))["transformers"] == transformers.__version__
