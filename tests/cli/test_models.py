"""`glass size`, `sample`, `convert`, `env` as a user meets them, and one sentence for each mistake."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import glassformer as gf
from tests import folders
from tests.cli.asking import run, run_json


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("model") / "tiny")


def test_size_of_a_preset(capsys):
    code, out, _ = run(capsys, "size", "gpt2")
    assert code == 0
    assert "124,439,808" in out
    code, sheet = run_json(capsys, "size", "gpt2", "--batch", "2", "--context", "64")
    assert code == 0
    assert "124439808" in json.dumps(sheet)


def test_size_of_a_folder_and_of_a_file(capsys, folder):
    _, by_folder = run_json(capsys, "size", folder)
    _, by_file = run_json(capsys, "size", folder / "model.toml")
    assert by_folder == by_file


def test_size_chinchilla_and_jl(capsys):
    code, out, _ = run(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert code == 0
    assert "rule D = 20·N                 1e+11     2e+12  20.0  1.2e+24" in out
    code, result = run_json(capsys, "size", "chinchilla", "--flops", "1.2e24")
    assert "100000000000.0" in json.dumps(result)
    code, out, _ = run(capsys, "size", "jl", "--points", "1e12", "--eps", "0.1")
    assert code == 0
    assert "22,105" in out


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
    _, plain, quiet = run(capsys, *greedy)
    assert quiet == ""
    code, out, err = run(capsys, *greedy, "--draft", folder, "--draft-tokens", "3")
    assert (code, out) == (0, plain)
    assert err == "draft: 15 of 15 proposed tokens accepted (100%); 20 tokens in 5 passes of the model\n"
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


def test_convert_there_and_back(capsys, folder, tmp_path):
    code, out, _ = run(capsys, "convert", folder, tmp_path / "hf", "--to", "hf")
    assert code == 0
    assert "pass" in out
    code, result = run_json(capsys, "convert", tmp_path / "hf", tmp_path / "back", "--to", "glass")
    assert code == 0
    assert result["findings"][0]["measured"] == 0.0
    ours, back = gf.load(folder).state_dict(), gf.load(tmp_path / "back").state_dict()
    assert all(torch.equal(ours[name], back[name]) for name in ours)
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_env_gives_its_reason(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert "GFLOP/s in float32" in out
    code, facts = run_json(capsys, "env")
    assert facts["dtype"] in ("float32", "bfloat16")
    assert facts["versions"]["torch"].startswith("2.")


def test_in_a_terminal_of_eighty_columns_no_line_is_longer(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    subjects = "gpt2", "plan", "plan --model llama2_7b", "chinchilla --flops 1.2e24", "jl --points 1e12"
    for command in (["env"], *(["size", *subject.split()] for subject in subjects)):
        code, out, _ = run(capsys, *command)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80


def truncated(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def pickled(folder: Path) -> Path:
    torch.save({"x": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def hf(folder: Path, **changes) -> Path:
    """The same model as a Hugging Face folder with a spoilt config.json."""
    target = folder.parent / "spoilt"
    gf.save(gf.load(folder), target, format="hf")
    data = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**data, **changes}))
    return target


def not_a_number(folder: Path) -> Path:
    model = gf.load(folder)
    with torch.no_grad():
        model.embed.tokens.weight[3, 1] = float("nan")
    gf.save(model, folder.parent / "nan", format="glass")
    return folder.parent / "nan"


def an_encoder(folder: Path) -> Path:
    gf.save(
        gf.build(gf.presets.bert_base(n_layers=1, d_model=8, n_heads=2, vocab_size=65)),
        folder.parent / "encoder",
        format="glass",
    )
    return folder.parent / "encoder"


def bad_toml(folder: Path) -> Path:
    (folder / "bad.toml").write_text("a = = 3")
    return folder / "bad.toml"


MISTAKES = {
    "an unknown character": (lambda f: ["sample", "ROMEO: ½"], "'½' (U+00BD), which is not one of the 65 tokens"),
    "no such folder": (lambda f: ["sample", "--model", f / "nowhere", "hi"], "nowhere"),
    "missing weights": (lambda f: ["sample", "--model", without(f, "model.safetensors"), "hi"], "safetensors"),
    "truncated weights": (lambda f: ["sample", "--model", truncated(f), "hi"], "model.safetensors"),
    "a pickle": (lambda f: ["sample", "--model", pickled(f), "hi"], "pickle"),
    "unknown architecture": (lambda f: ["sample", "--model", hf(f, model_type="mamba"), "hi"], "mamba"),
    "heads not dividing": (lambda f: ["sample", "--model", hf(f, num_key_value_heads=3), "hi"], "3"),
    "vocabulary mismatch": (lambda f: ["sample", "--model", hf(f, vocab_size=299), "hi"], "299"),
    "ids out of range": (lambda f: ["sample", "--model", f, "--ids", "5 300"], "token id 300"),
    "not ids": (lambda f: ["sample", "--model", f, "--ids", "five"], "token ids"),
    "empty prompt": (lambda f: ["sample", "--model", f, ""], "empty"),
    "prompt too long": (lambda f: ["sample", "--model", f, "--ids", "1 " * 64], "fills the context of 64"),
    "no room": (lambda f: ["sample", "--model", f, "--ids", "1 " * 10, "--max-new-tokens", "99"], "54 new tokens"),
    "top-p of 0": (lambda f: ["sample", "--model", f, "hi", "--top-p", "0"], "top_p=0.0 must be in (0, 1]"),
    "top-p of 1.5": (lambda f: ["sample", "--model", f, "hi", "--top-p", "1.5"], "top_p=1.5"),
    "negative temperature": (lambda f: ["sample", "--model", f, "hi", "--temperature", "-1"], "temperature=-1.0"),
    "no such draft": (lambda f: ["sample", "--model", f, "hi", "--draft", f / "nowhere"], "nowhere"),
    "another vocabulary": (lambda f: ["sample", "hi", "--draft", f], "they must share one vocabulary"),
    "more ids": (lambda f: ["sample", "--ids", "5", "--draft", f], "the draft knows 300 tokens and the model 65"),
    "a draft of another kind": (lambda f: ["sample", "hi", "--draft", an_encoder(f)], "not a decoder-only model"),
    "no tokens proposed": (lambda f: ["sample", "hi", "--draft", "lookup", "--draft-tokens", "0"], "draft_tokens=0"),
    "beams and a draft": (lambda f: ["sample", "hi", "--draft", "lookup", "--beams", "2"], "no use for a draft"),
    "no beams": (lambda f: ["sample", "--model", f, "hi", "--beams", "0"], "--beams 0 must be at least 1"),
    "weights that are NaN": (
        lambda f: ["sample", "--model", not_a_number(f), "--ids", "5 6"],
        "numbers in embed.tokens.weight are NaN or infinite: copy the weights again",
    ),
    "converting NaN": (lambda f: ["convert", not_a_number(f), f.parent / "x"], "embed.tokens.weight are NaN"),
    "unknown preset": (lambda f: ["size", "gtp2"], "gpt2"),
    "unreadable TOML": (lambda f: ["size", bad_toml(f)], "not readable TOML"),
    "no such file": (lambda f: ["size", "nowhere/model.toml"], "does not exist"),
    "jl without points": (lambda f: ["size", "jl"], "--points"),
    "jl with eps 2": (lambda f: ["size", "jl", "--points", "10", "--eps", "2"], "eps"),
    "chinchilla without budget": (lambda f: ["size", "chinchilla"], "flops"),
    "occupied target": (lambda f: ["convert", f, Path(__file__).parent], "not a model folder"),
    "unknown dtype": (lambda f: ["sample", "--model", f, "hi", "--dtype", "float8"], "float8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_gets_one_sentence_and_exit_2(capsys, folder, tmp_path, mistake):
    own = shutil.copytree(folder, tmp_path / "tiny")
    arguments, words = MISTAKES[mistake]
    code, out, err = run(capsys, *arguments(own))
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err


def test_convert_refuses_a_folder_of_something_else_before_it_reads_a_model(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, said = run(capsys, "convert", "no/such-model", tmp_path)
    assert code == 2
    assert "is not empty and not a model folder" in said
