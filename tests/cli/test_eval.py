"""`glass eval` as a user meets it: texts, questions, two models, JSON, and one sentence for each mistake."""

import json
import math

import pytest

import glassformer as gf
from tests import folders
from tests.cli.asking import run, run_json
from tests.evaluation import peers

TEXT = "the dog sat on the mat. a naïve 猫 sat on the log.\n" * 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "held_out.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another tiny model."""
    return folders.write(tmp_path_factory.mktemp("other") / "other", d_model=32)


def jsonl(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_a_text_is_measured_as_by_gf_evaluate(capsys, folder, text):
    expected = gf.evaluate(gf.load(folder), TEXT)
    code, found = run_json(capsys, "eval", folder, text)
    assert code == 0
    assert found["model"] == str(folder)
    assert found["nats_per_token"] == pytest.approx(expected.nats_per_token)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte)
    assert (found["bytes"], found["context"], found["stride"]) == (expected.n_bytes, 64, 32)
    code, out, err = run(capsys, "eval", folder, text)
    assert (code, err) == (0, "")
    assert f"{expected.bits_per_byte:.4f} ± {expected.bits_spread.standard_error:.4f}" in out
    assert "the first token of a document is not scored" in out
    assert "blocks of" in out


def test_windows_and_several_documents(capsys, folder, text, tmp_path):
    code, found = run_json(capsys, "eval", folder, text, "--stride", 16, "--context", 16)
    assert (code, found["context"], found["stride"]) == (0, 16, 16)
    code, found = run_json(capsys, "eval", folder, text, text)
    assert (code, found["documents"]) == (0, 2)
    rows = jsonl(tmp_path, *({"text": line} for line in TEXT.splitlines()))
    code, found = run_json(capsys, "eval", folder, rows)
    assert (code, found["documents"], found["error_unit"]) == (0, 12, "documents")


def test_two_models_are_compared_on_the_same_text(capsys, folder, other, text):
    code, found = run_json(capsys, "eval", folder, text, "--against", other)
    assert code == 0
    delta = found["difference"]
    assert delta["value"] == pytest.approx(found["bits_per_byte"] - found["against"]["bits_per_byte"])
    assert delta["interval"][0] < delta["value"] < delta["interval"][1]
    code, out, _ = run(capsys, "eval", folder, text, "--against", other)
    assert f"{folder} minus {other}" in out
    assert "is better" in out or "not decided" in out


def test_an_adapter_is_merged_and_compared_with_its_base(capsys, folder, text, tmp_path):
    adapter = folders.write_adapter(folder, tmp_path / "adapter")
    expected = gf.evaluate(gf.load(folder, adapter=adapter), TEXT)
    code, found = run_json(capsys, "eval", folder, text, "--adapter", adapter, "--against", folder)
    assert code == 0
    assert found["model"] == f"{folder} with {adapter}"
    assert found["nats_per_token"] == pytest.approx(expected.nats_per_token)
    assert found["against"]["nats_per_token"] == pytest.approx(gf.evaluate(gf.load(folder), TEXT).nats_per_token)
    assert abs(found["difference"]["value"]) > 0.1
    code, alone = run_json(capsys, "eval", folder, text, "--against", adapter)
    assert (code, alone["difference"]["value"]) == (0, pytest.approx(-found["difference"]["value"]))
    code, out, err = run(capsys, "eval", "bard", text, "--adapter", adapter)
    assert (code, out) == (2, "")
    assert "does not fit this model" in err or "trained on other weights" in err
    assert len(err.strip().splitlines()) == 1


def test_questions_are_answered(capsys, folder, other, tmp_path):
    rows = [{"context": "the cat sat on", "choices": ["the mat", "a café"], "answer": i % 2} for i in range(10)]
    code, found = run_json(capsys, "eval", folder, jsonl(tmp_path, *rows), "--against", other)
    assert (code, found["rows"], found["chance"], found["acc"]["value"]) == (0, 10, 0.5, 0.5)
    assert found["difference"]["acc"]["value"] == 0
    code, out, _ = run(capsys, "eval", folder, jsonl(tmp_path, *rows), "--against", other)
    assert "accuracy, per character" in out
    assert "10 questions" in out
    clozes = jsonl(tmp_path, {"context": "the cat", "target": "sat"}, {"context": "the dog", "target": "sat"})
    code, found = run_json(capsys, "eval", folder, clozes)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats"]["value"]))
    code, out, _ = run(capsys, "eval", folder, clozes)
    assert "per target" in out


def test_bfloat16_is_close_to_float32(capsys, folder, text):
    exact = run_json(capsys, "eval", folder, text, "--device", "cpu")[1]["nats_per_token"]
    coarse = run_json(capsys, "eval", folder, text, "--precision", "bfloat16")[1]["nats_per_token"]
    assert coarse != exact
    assert coarse == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_local_tasks_of_lm_eval(capsys, folder, tmp_path, monkeypatch):
    peers.run_offline(monkeypatch, tmp_path / "cache")
    tasks = peers.task_files(tmp_path) / "choice.yaml"
    code, found = run_json(capsys, "eval", folder, "--tasks", tasks)
    assert (code, found["samples"]) == (0, {"choice": 12})
    assert [metric["metric"] for metric in found["tasks"]] == ["acc", "acc_norm", "acc_bytes"]


def encoder(folder):
    model = gf.build(gf.presets.bert_base(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=300))
    gf.save(model, folder / "encoder", format="glass", tokenizer=folders.tokenizer())
    return folder / "encoder"


MISTAKES = {
    "no text": (lambda f, t, tmp: [f], "there is nothing to evaluate"),
    "no such text": (lambda f, t, tmp: [f, tmp / "nowhere.txt"], "nowhere.txt cannot be read"),
    "no such model": (lambda f, t, tmp: [tmp / "nowhere", t], "nowhere"),
    "no such second model": (lambda f, t, tmp: [f, t, "--against", tmp / "nowhere"], "nowhere"),
    "an empty text": (lambda f, t, tmp: [f, jsonl(tmp, {"text": ""})], "has no token to score"),
    "a text that is none": (lambda f, t, tmp: [f, f / "model.safetensors"], "is not UTF-8 text"),
    "a bad row": (lambda f, t, tmp: [f, jsonl(tmp, {"text": "a"}, {"txt": "b"})], "line 2 of"),
    "two tables": (lambda f, t, tmp: [f, jsonl(tmp, {"text": "a"}), t], "must be the only file"),
    "stride 0": (lambda f, t, tmp: [f, t, "--stride", 0], "--stride 0 must be"),
    "a long context": (lambda f, t, tmp: [f, t, "--context", 65], "context=65 must be between 1 and the model's"),
    "a stride for questions": (
        lambda f, t, tmp: [f, jsonl(tmp, {"context": "a", "target": "b"}), "--stride", 3],
        "glass eval with clozes has no use for --stride",
    ),
    "a task and a text": (lambda f, t, tmp: [f, t, "--tasks", "x.yaml"], "are two evaluations: leave one of them out"),
    "a task and two models": (lambda f, t, tmp: [f, "--tasks", "x.yaml", "--against", f], "no use for --against"),
    "an encoder": (lambda f, t, tmp: [encoder(tmp), t], "EncoderLM does not predict"),
    "no tokenizer": (lambda f, t, tmp: [folders.write(tmp / "m", with_tokenizer=False), t], "has no tokenizer.json"),
    "no GPU": (lambda f, t, tmp: [f, t, "--device", "cuda"], "no CUDA device is here"),
    "int8": (lambda f, t, tmp: [f, t, "--precision", "int8"], "int8"),
    "an unknown character": (lambda f, t, tmp: ["bard", t], "'ï' (U+00EF) in line 1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_gets_one_sentence_and_exit_2(capsys, folder, text, tmp_path, mistake):
    arguments, words = MISTAKES[mistake]
    code, out, err = run(capsys, "eval", *arguments(folder, text, tmp_path))
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
