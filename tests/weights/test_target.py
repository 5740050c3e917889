"""Which folders a model may be written to, and which are never replaced."""

import os
from pathlib import Path

import pytest

from glassformer.weights.errors import WeightsError
from glassformer.weights.target import check_apart, check_target

MODELS = {
    "ours": ["model.toml", "model.safetensors"],
    "Hugging Face": ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "vocab.json"],
    "shards": ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
    "a checkpoint": ["model.toml", "model.safetensors", "optimizer.safetensors", "run.toml", "meta.json"],
    "a reference": ["config.json", "model.safetensors", "reference.safetensors"],
}


def made(folder, names):
    folder.mkdir()
    for name in names:
        if name.endswith("/"):
            (folder / name).mkdir()
        else:
            (folder / name).write_text("mine")
    return folder


def refusal(call, *arguments):
    with pytest.raises(WeightsError) as refused:
        call(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_or_checkpoint_is_replaced_only_when_asked(tmp_path, kind):
    folder = made(tmp_path / "out", MODELS[kind])
    assert "already holds a model: pass --force (in Python: overwrite=True)" in refusal(check_target, folder)
    assert check_target(folder, overwrite=True) == folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_and_an_empty_folder_are_free(tmp_path, overwrite):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b"):
        assert check_target(target, overwrite) == target
        assert check_target(str(target), overwrite) == target


NEVER = {
    "other files": (["notes.txt"], "not a model folder"),
    "only a config": (["config.json"], "not a model folder"),
    "only weights": (["model.safetensors"], "not a model folder"),
    "a model and a note": (["config.json", "model.safetensors", "notes.txt"], "(1: notes.txt)"),
    "a model and a folder": (["model.toml", "model.safetensors", "data/"], "(1: data)"),
    "a folder named like a file": (["model.toml", "model.safetensors", "config.json/"], "(1: config.json)"),
    "a model and other weights": (["config.json", "model.safetensors", "pytorch_model.bin"], "pytorch_model.bin"),
    "a run": (["run.toml", "log.jsonl", "checkpoints/"], "the folder of a training run"),
    "a run with a model": (["run.toml", "model.safetensors", "log.jsonl"], "the folder of a training run"),
    "a hidden file": (["config.json", "model.safetensors", ".git/"], "(1: .git)"),
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", NEVER)
def test_anything_else_is_never_replaced(tmp_path, kind, overwrite):
    names, words = NEVER[kind]
    folder = made(tmp_path / "out", names)
    message = refusal(check_target, folder, overwrite)
    assert words in message
    assert "give another path" in message
    assert "--force" not in message  # it would not help


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_links_and_the_current_folder_are_refused(tmp_path, monkeypatch, overwrite):
    (tmp_path / "file").touch()
    assert "is a file" in refusal(check_target, tmp_path / "file", overwrite)
    made(tmp_path / "model", MODELS["ours"])
    for name, to in (("link", "model"), ("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(to)
        assert f"{name} is a symbolic link to {to}" in refusal(check_target, tmp_path / name, overwrite)
    assert "cannot be written" in refusal(check_target, tmp_path / "loop" / "below", overwrite)
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    for path in ("", ".", "..", tmp_path / "here"):
        assert "is the current folder or contains it" in refusal(check_target, path, overwrite)


def test_a_link_on_the_way_to_the_target_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    assert check_target(tmp_path / "link" / "out") == tmp_path / "disk" / "out"


def test_source_and_target_must_be_apart(tmp_path, monkeypatch):
    made(tmp_path / "a", ["inside/"])
    made(tmp_path / "b", [])
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    for source, target in (("a", "a"), ("a", "link"), ("link", "a"), ("a", "b/../a"), (tmp_path / "a", "a")):
        assert "is the source and the target" in refusal(check_apart, Path(source), Path(target))
    for target in ("a/new", "a/inside/new", "link/new"):
        assert "lies inside the source" in refusal(check_apart, Path("a"), Path(target))
    for source in ("a/inside", "link/inside"):
        assert "lies inside the target" in refusal(check_apart, Path(source), Path("a"))
    check_apart(Path("a"), Path("b"))
    check_apart(Path("a"), Path("ab"))
    check_apart(Path("a/inside"), Path("a/other"))


def test_one_folder_under_two_names_is_the_same(tmp_path, monkeypatch):
    """As with a bind mount, or where case is ignored."""
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os.path, "samestat", lambda a, b: True)
    assert "is the source and the target" in refusal(check_apart, tmp_path / "a", tmp_path / "b")
