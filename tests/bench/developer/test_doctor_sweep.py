"""The sweep over classes of transformers: its table, its verdict, and a few classes examined."""

import json

import pytest

from glassformer.bench.developer import doctor_sweep as sweep
from glassformer.bench.developer.tiny_transformers import build, class_names, kind_of


def found(name, *ids, **more):
    evidence = [["x/y", 0.5, 0.1, "why", {}]]
    diagnoses = [{"id": id, "where": "", "evidence": evidence, "consequences": []} for id in ids]
    return {"subject": name, "kind": "decoder", "diagnoses": diagnoses, "verdict": "healthy", "seconds": 2.0, **more}


KNOWN = found("MiniMaxForCausalLM", "cache_reorder")
HEALTHY = found("LlamaForCausalLM")
REFUSED = {"subject": "ViltForMaskedLM", "kind": "encoder", "refused": "it needs an image", "seconds": 1.0}


def test_the_table_tells_known_diagnoses_from_others():
    text = sweep.table([KNOWN, HEALTHY, REFUSED, found("GPT2LMHeadModel", "attn_scale"), found("RwkvForCausalLM")])
    assert "| MiniMaxForCausalLM | decoder | cache_reorder | x/y 0.5 / 0.1: why | yes |" in text
    assert "| GPT2LMHeadModel | decoder | attn_scale | x/y 0.5 / 0.1: why | NO |" in text
    assert "| ViltForMaskedLM | encoder | REFUSED | it needs an image | |" in text
    assert "known defects named: 1 of 2; other diagnoses: 1" in text
    assert "missing: RwkvForCausalLM: pad_leak" in text


def test_only_examinations_are_timed():
    text = sweep.table([KNOWN, {**HEALTHY, "seconds": 4.0}, REFUSED])
    assert text.endswith("median 3.00 s (quartiles 2.50 and 3.50, longest 4.0) per class")
    assert sweep.table([HEALTHY]).endswith("median 2.00 s (quartiles 2.00 and 2.00, longest 2.0) per class")
    assert "median" not in sweep.table([REFUSED])


def test_every_nth_class_is_examined_and_gpt2_is_timed(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(sweep, "class_names", lambda: ["A", "LlamaForCausalLM", "C"])
    monkeypatch.setattr(sweep, "sweep", lambda names, seconds: asked.extend(names) or [HEALTHY])
    monkeypatch.setattr(sweep, "gpt2_small", lambda: 40.0)
    monkeypatch.setattr("sys.argv", ["doctor_sweep", "--every", "2", "--gpt2"])
    assert sweep.main() == 0
    assert asked == ["A", "C"]
    assert "GPT-2 small: 40.0 s" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["doctor_sweep", "--every", "0"])
    with pytest.raises(SystemExit):
        sweep.main()


@pytest.mark.parametrize(
    ("results", "right"),
    [
        ([KNOWN, HEALTHY, REFUSED], True),
        ([found("GPT2LMHeadModel", "attn_scale")], False),
        ([found("RwkvForCausalLM")], False),
        ([{**HEALTHY, "error": "KeyError"}], False),
    ],
)
def test_only_the_known_defects_may_be_reported(results, right):
    assert sweep.is_as_known(results) is right


def test_the_last_result_of_a_class_holds(tmp_path):
    file = tmp_path / "results.jsonl"
    assert sweep.read_results(file) == {}
    file.write_text("\n".join(json.dumps(one) for one in (found("LlamaForCausalLM", "attn_scale"), HEALTHY, KNOWN)))
    assert sweep.read_results(file) == {"LlamaForCausalLM": HEALTHY, "MiniMaxForCausalLM": KNOWN}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # every module of transformers is imported
def test_there_are_classes_of_each_kind_and_every_known_defect_is_of_one():
    names = class_names()
    assert len(names) > 200
    assert {kind_of(name) for name in names} == {"decoder", "encoder", "seq2seq"}
    assert set(sweep.KNOWN) <= set(names)


def test_a_class_is_built_tiny_and_a_class_that_is_not_says_why():
    assert sum(p.numel() for p in build("LlamaForCausalLM").parameters()) < 2e5
    assert "AttributeError" in sweep.examine("NoSuchForCausalLM", 60)["not_built"]


A_FEW = (
    *("LlamaForCausalLM", "NomicBertForMaskedLM", "RoFormerForMaskedLM", "MiMoV2FlashForCausalLM"),
    *("T5GemmaForConditionalGeneration", "FunnelForMaskedLM", "MiniMaxForCausalLM", "OpenAIGPTLMHeadModel"),
    *("FSMTForConditionalGeneration", "YosoForMaskedLM"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", A_FEW)
def test_a_class_has_its_known_defects_and_no_other(name):
    result = sweep.examine(name, 600)
    assert sweep.is_as_known([result]), sweep.table([result])
