"""`glass sample` as a user meets it."""

import contextlib
import gc
import io

import pytest
import torch

from glassformer.cli.sample import postponed_collection
from tests.cli.asking import has_compiler, run, run_json


def test_sample_continues_the_prompt_and_repeats_itself(capsys, folder):
    first = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20")
    assert first[0] == 0
    assert first[1].startswith("the cat")
    assert run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20") == first
    other = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--seed", "1")
    assert other[1] != first[1]
    uncached = run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--no-cache")
    assert uncached[1] == first[1]


def test_sample_with_a_draft_says_the_same_and_counts(capsys, folder):
    greedy = ["sample", "--model", folder, "the cat", "--max-new-tokens", "20", "--temperature", "0"]
    _, plain, facts = run(capsys, *greedy)
    assert facts.startswith("engine: torch on cpu in float32 (")
    assert "draft" not in facts
    code, out, err = run(capsys, *greedy, "--draft", folder, "--draft-tokens", "3")
    assert (code, out) == (0, plain)
    assert "draft: 15 of 15 proposed tokens accepted (100%); 20 tokens in 5 passes of the model\n" in err
    code, out, err = run(capsys, *greedy, "--draft", "lookup")
    assert (code, out) == (0, plain)
    assert err.startswith("draft: ")
    code, result = run_json(capsys, *greedy, "--draft", folder, "--draft-tokens", "3")
    assert code == 0
    assert result["draft"] == {"proposed": 15, "accepted": 15, "passes": 5}


def test_the_bundled_bard_speaks_without_a_word_about_models(capsys):
    code, out, _ = run(capsys, "sample", "ROMEO:", "--max-new-tokens", "40")
    assert code == 0
    assert out.startswith("ROMEO:")
    assert len(out) > 40


def test_sample_as_json_by_beams_and_by_ids(capsys, folder):
    code, result = run_json(capsys, "sample", "--model", folder, "--beams", "3", "the", "--max-new-tokens", "5")
    assert code == 0
    assert len(result["new_tokens"]) == 5
    code, result = run_json(capsys, "sample", "--model", folder, "--ids", "5 6", "--max-new-tokens", "5")
    assert code == 0
    assert result["prompt_tokens"] == [5, 6]


def test_json_and_standard_error_name_the_implementation_that_ran(capsys, folder):
    asked = ["sample", "--model", folder, "the cat", "--max-new-tokens", "5"]
    _, result = run_json(capsys, *asked, "--engine", "torch", "--precision", "bfloat16", "--device", "cpu")
    assert result["engine"] == {"engine": "torch", "device": "cpu", "precision": "bfloat16", "why": "requested"}
    _, _, err = run(capsys, *asked, "--engine", "torch", "--threads", "1")
    assert err == "engine: torch on cpu in float32 (requested)\n"


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
def test_the_bundled_model_says_the_same_in_both_engines(capsys, monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    asked = ["sample", "ROMEO:", "--max-new-tokens", "80"]
    results = [run_json(capsys, *asked, "--engine", engine)[1] for engine in ("torch", "native", "auto")]
    assert [result["engine"]["engine"] for result in results] == ["torch", "native", "native"]
    assert results[0]["new_tokens"] == results[1]["new_tokens"] == results[2]["new_tokens"]


def test_each_of_several_samples_is_reproducible_alone(capsys, folder):
    asked = ["sample", "--model", folder, "the cat", "--max-new-tokens", "12"]
    _, several = run_json(capsys, *asked, "--num-samples", "3", "--seed", "5")
    assert [one["seed"] for one in several["samples"]] == [5, 6, 7]
    assert len({one["text"] for one in several["samples"]}) == 3
    for i, one in enumerate(several["samples"]):
        _, alone = run_json(capsys, *asked, "--seed", 5 + i)
        assert alone["text"] == one["text"]
        assert len(alone["samples"]) == 1
    assert several["text"] == several["samples"][0]["text"]
    code, out, _ = run(capsys, *asked, "--num-samples", "3", "--seed", "5")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- sample {i + 1} of 3, seed {5 + i} ---" for i in range(3)
    ]


def test_a_prompt_from_a_file_or_standard_input(capsys, folder, tmp_path, monkeypatch):
    asked = ["sample", "--model", folder, "--max-new-tokens", "5"]
    _, wanted = run_json(capsys, *asked, "the cat\nsat ä")
    file = tmp_path / "prompt.txt"
    file.write_text("the cat\nsat ä\n", encoding="utf-8")
    _, found = run_json(capsys, *asked, "--prompt-file", file)
    assert found["text"] == wanted["text"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    _, found = run_json(capsys, *asked, "--prompt-file", "-")
    assert found["text"] == wanted["text"]


def test_the_number_of_threads_is_set(capsys, folder):
    assert torch.get_num_threads() == 1
    assert run(capsys, "sample", "--model", folder, "the cat", "--max-new-tokens", "2", "--threads", "2")[0] == 0
    assert torch.get_num_threads() == 2


def test_top_k_of_zero_is_off(capsys, folder):
    asked = ["sample", "--model", folder, "the cat", "--max-new-tokens", "12", "--temperature", "1.5", "--top-p", "1"]
    off, all_of_them, default = (
        run_json(capsys, *asked, "--top-k", k)[1]["new_tokens"] for k in (0, 300, 50)
    )  # fmt: skip
    assert off == all_of_them != default


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_postponed_and_set_back(enabled):
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(KeyError), postponed_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        (gc.enable if was else gc.disable)()
