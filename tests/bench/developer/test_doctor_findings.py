"""The gallery of findings has what the sweep knows, and nothing that does not show."""

import pytest

from glassformer.bench.developer.doctor_findings import DEFECTS, Shown, fields_of, page, run, script_of
from glassformer.bench.developer.doctor_sweep import KNOWN
from tests.docs.blocks import ROOT, blocks

BY_ID = {defect.id: defect for defect in DEFECTS}


def test_every_known_defect_has_a_script_and_no_other_does():
    assert len(BY_ID) == len(DEFECTS)
    found = {(name, defect.diagnosis) for defect in DEFECTS for name in defect.classes}
    assert found == {(name, diagnosis) for name, known in KNOWN.items() for diagnosis in known}


def test_what_does_not_show_is_left_out():
    defect = BY_ID["cache_reorder"]
    one = Shown(defect, "the script", {"DeepseekV4ForCausalLM": 0.25, "MiniMaxForCausalLM": 0.0})
    none = Shown(BY_ID["cache_mask"], "no script", {})
    text = page([one, none], "9.8.7", "6.5")
    assert one.missing == ["MiniMaxForCausalLM"]
    assert none.missing == ["FSMTForConditionalGeneration"]
    assert "transformers 9.8.7: 1 in 1 classes" in text
    assert "| `DeepseekV4ForCausalLM` | `cache_reorder` | 0.25 | 0 |" in text
    assert "MiniMax" not in text
    assert "FSMT" not in text
    assert [block.text for block in blocks(text) if block.language == "python"] == ["the script\n"]


def test_the_page_has_the_scripts_of_this_version():
    written = [block.text for block in blocks((ROOT / "docs/findings.md").read_text()) if block.language == "python"]
    assert len(written) == len(DEFECTS)
    for defect, script in zip(DEFECTS, written, strict=True):
        assert script.rstrip().endswith(script_of(defect).rstrip().rsplit("\n\n\n", 1)[1])
        assert all(f'"{name}": dict(' in script for name in defect.classes)


def test_a_config_has_only_what_differs_from_its_defaults():
    assert fields_of("OpenAIGPTLMHeadModel") == {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}


@pytest.mark.parametrize("id", ["cache_mask", "mask_constant"])
def test_some_defects_show(id):
    assert run(BY_ID[id]).missing == []


@pytest.mark.slow
@pytest.mark.parametrize("id", ["label_shift", "weight_tying", "pad_leak", "causal_leak", "chunks", "cache_reorder"])
def test_more_defects_show(id):
    assert run(BY_ID[id]).missing == []
