"""`glass convert` as a user meets it."""

import os
import shutil

import pytest
import torch

import glassformer as gf
from glassformer.finding import Finding
from glassformer.weights import verify
from glassformer.weights.formats.gguf import check, save
from glassformer.weights.formats.gguf.llama import is_installed
from tests.cli.asking import run, run_json


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


def test_convert_refuses_a_folder_of_something_else_before_it_reads_a_model(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, message = run(capsys, "convert", "no/such-model", tmp_path)
    assert code == 2
    assert "is not empty and not a model folder" in message


SIZE = {"d_model": 8, "n_layers": 1, "n_heads": 2, "vocab_size": 31, "max_len": 16}


def contents(folder):
    """Every file below a folder; links as what they point to."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture
def llama(tmp_path):
    return gf.save(gf.build(gf.presets.llama_tiny(**SIZE), seed=2), tmp_path / "llama")


@pytest.fixture
def gpt2(tmp_path):
    folder = gf.save(gf.build(gf.presets.gpt2(**SIZE), seed=1), tmp_path / "gpt2")
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "merges.txt").write_text("")
    return folder


@pytest.fixture
def run_folder(tmp_path, gpt2):
    """A training run of two checkpoints, as `glass train` leaves it."""
    root = tmp_path / "runs" / "X"
    for step in ("step-00000010", "step-00000020"):
        checkpoint = gf.save(gf.load(gpt2), root / "checkpoints" / step, format="glass")
        for name in ("run.toml", "meta.json", "optimizer.safetensors"):
            (checkpoint / name).write_text("of the run")
    for name in ("best", "last"):
        (root / name).symlink_to("checkpoints/step-00000020")
    for name in ("log.jsonl", "run.toml"):
        (root / name).write_text("of the run")
    return root


def refused(capsys, *arguments):
    code, out, err = run(capsys, "convert", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    return err


def test_another_model_is_replaced_only_with_force_and_none_of_its_files_stay(capsys, llama, gpt2, tmp_path):
    before = contents(gpt2)
    assert "already holds a model" in refused(capsys, llama, gpt2)
    assert contents(gpt2) == before
    code, result = run_json(capsys, "convert", llama, gpt2, "--force")
    assert (code, result["written"]) == (0, str(gpt2))
    assert sorted(p.name for p in gpt2.iterdir()) == ["config.json", "model.safetensors"]
    new, old = gf.load(gpt2).state_dict(), gf.load(llama).state_dict()
    assert all(torch.equal(new[name], old[name]) for name in old)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gpt2", "llama"]


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_model_is_never_converted_onto_itself(capsys, llama, tmp_path, monkeypatch, force):
    (tmp_path / "link").symlink_to("llama")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    same = [(llama, llama), (llama, "link"), ("link", llama), ("llama", "./link/../llama"), ("~/llama", "llama")]
    for source, target in same:
        assert "the source and the target" in refused(capsys, source, target, "--to", "glass", *force)
    assert "lies inside the source" in refused(capsys, llama, llama / "new", *force)
    outer = shutil.copytree(llama, tmp_path / "outer" / "deep").parent
    assert "lies inside the target" in refused(capsys, outer / "deep", outer, *force)
    assert contents(llama) == {name.removeprefix("llama/"): data for name, data in before.items() if "/" in name}


def test_a_model_of_the_hub_is_not_converted_onto_its_own_cache(capsys, llama, tmp_path, monkeypatch):
    """A hub name is a folder too, which is known only when it is resolved."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = shutil.copytree(llama, tmp_path / "hub" / "models--owner--model" / "snapshots" / "4f1a")
    before = contents(cached)
    assert "the source and the target" in refused(capsys, "owner/model", cached, "--force")
    assert "lies inside the source" in refused(capsys, "owner/model", cached / "new")
    assert contents(cached) == before


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_a_run_and_its_links_are_never_replaced(capsys, llama, run_folder, force):
    before = contents(run_folder)
    assert "is a symbolic link to checkpoints/step-00000020" in refused(capsys, llama, run_folder / "last", *force)
    assert "is the folder of a training run" in refused(capsys, llama, run_folder, *force)
    assert "not a model folder" in refused(capsys, llama, run_folder / "checkpoints", *force)
    assert contents(run_folder) == before


def test_a_checkpoint_is_replaced_only_with_force(capsys, llama, run_folder):
    checkpoint = run_folder / "checkpoints" / "step-00000010"
    before = contents(run_folder)
    assert "already holds a model" in refused(capsys, llama, checkpoint)
    assert contents(run_folder) == before
    assert run(capsys, "convert", llama, checkpoint, "--force")[0] == 0
    assert sorted(p.name for p in checkpoint.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_other_files_are_never_replaced(capsys, llama, gpt2, tmp_path, force):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused(capsys, llama, tmp_path / "file", *force)
    (gpt2 / "thesis.tex").write_text("mine")
    before = contents(gpt2)
    assert "(1: thesis.tex)" in refused(capsys, llama, gpt2, *force)
    assert contents(gpt2) == before


def test_a_folder_that_computes_something_else_is_not_put_in_place(capsys, llama, gpt2, monkeypatch):
    before = contents(gpt2)
    different = Finding.judge("same-logits", 0.5, 0.0, "the same weights", "look")
    monkeypatch.setattr(verify, "same_logits", lambda a, b: different)
    code, result = run_json(capsys, "convert", llama, gpt2, "--force")
    assert (code, result["written"], result["findings"][0]["measured"]) == (1, None, 0.5)
    assert contents(gpt2) == before


@pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
def test_gguf_is_run_by_llama_cpp_before_it_is_written(capsys, tmp_path):
    code, result = run_json(capsys, "convert", "bard", tmp_path / "bard.gguf", "--to", "gguf", "--quant", "q8_0")
    assert code == 0
    found = {finding["id"]: finding for finding in result["findings"]}
    assert found.keys() == {"llama.cpp-logits", "llama.cpp-greedy", "llama.cpp-tokens"}
    assert all(finding["verdict"] == "pass" for finding in found.values())
    assert result["written"] == str(tmp_path / "bard.gguf")
    code, out, _ = run(capsys, "sample", "--model", tmp_path / "bard.gguf", "ROMEO:", "--max-new-tokens", 3)
    assert code == 0
    assert out.startswith("ROMEO:")
    assert run(capsys, "convert", tmp_path / "bard.gguf", tmp_path / "back")[0] == 0
    assert gf.load_tokenizer(tmp_path / "back").encode("ROMEO:").ids == gf.load_tokenizer("bard").encode("ROMEO:").ids


def test_gguf_without_llama_cpp_says_that_it_was_not_verified(capsys, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    code, out, _ = run(capsys, "convert", llama, tmp_path / "m.gguf", "--to", "gguf")
    assert code == 0
    assert "skip  llama.cpp-logits  (llama-cpp-python is not installed, so the file was not run by llama.cpp.)" in out


def test_a_gguf_file_that_computes_something_else_is_not_put_in_place(capsys, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    run(capsys, "convert", llama, tmp_path / "m.gguf", "--to", "gguf")
    before = contents(tmp_path)
    different = [Finding.judge("llama.cpp-logits", 0.5, 0.1, "rounding", "look")]
    monkeypatch.setattr(save, "compare_with_llama", lambda *a: different)
    code, result = run_json(capsys, "convert", llama, tmp_path / "m.gguf", "--to", "gguf", "--force")
    assert (code, result["written"], result["findings"][0]["measured"]) == (1, None, 0.5)
    assert contents(tmp_path) == before


def test_the_name_of_the_target_must_fit_the_format(capsys, llama, tmp_path):
    assert "must end in .gguf" in refused(capsys, llama, tmp_path / "out", "--to", "gguf")
    assert "pass --to gguf" in refused(capsys, llama, tmp_path / "out.gguf")
    assert "is for --to gguf" in refused(capsys, llama, tmp_path / "out", "--quant", "q8_0")
    (tmp_path / "mine.gguf").write_text("mine")
    assert "another format" in refused(capsys, llama, tmp_path / "mine.gguf", "--to", "gguf", "--force")
    assert (tmp_path / "mine.gguf").read_text() == "mine"


def test_a_gguf_file_is_never_converted_onto_itself(capsys, llama, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    run(capsys, "convert", llama, tmp_path / "m.gguf", "--to", "gguf")
    message = refused(capsys, tmp_path / "m.gguf", tmp_path / "m.gguf", "--to", "gguf", "--force")
    assert "the source and the target" in message
