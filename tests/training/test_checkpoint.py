"""Checkpoints: what is kept, what is refused, and that a full disk leaves the last good one."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.training import checkpoint, read_run, train
from glassformer.training.checkpoint import CheckpointError
from tests.training import tiny


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    session = tiny.session(folder)
    train(session.run, session.data)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer(run):
    model = gf.load(run / "best")
    tokenizer = gf.load_tokenizer(run / "best")
    assert tokenizer.decode(tokenizer.encode("the cat").ids) == "the cat"
    assert tokenizer.get_vocab_size() == model.config.vocab_size
    assert (run / "best" / "run.toml").exists()


def test_only_the_best_and_the_newest_stay(tmp_path):
    session = tiny.session(tmp_path, "loop.keep=1", "loop.checkpoint_every=1", "loop.eval_every=4")
    train(session.run, session.data)
    names = {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()}
    best = (tmp_path / "run" / "best").resolve().name
    assert names == {best, "step-00000020"}


def test_best_is_the_lowest_validation_loss(run):
    losses = {
        e["step"]: e["loss"]
        for e in map(json.loads, (run / "log.jsonl").read_text().splitlines())
        if e["event"] == "validation"
    }
    _, meta, _, _ = checkpoint.read(run / "best")
    assert losses[meta["step"]] == min(losses.values()) == meta["best"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda c: flip(c / "model.safetensors"), "model.safetensors is not what was written"),
        (lambda c: flip(c / "optimizer.safetensors"), "optimizer.safetensors is not what was written"),
        (lambda c: (c / "optimizer.safetensors").unlink(), "lacks optimizer.safetensors"),
        (lambda c: (c / "meta.json").write_text("{}"), "not a training checkpoint"),
        (lambda c: (c / "meta.json").write_text("not json"), "not a training checkpoint"),
        (lambda c: (c / "run.toml").write_text("a = = 1"), "run.toml is not what was written"),
    ],
)
def test_damage_is_noticed_in_words(run, damage, words):
    damage(run / "last")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(run)
    assert words in str(caught.value)


def test_foreign_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.find(tmp_path)
    gf.save(gf.build(gf.presets.nano()), tmp_path / "model", format="glass")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint.find(tmp_path / "model")


def loaded(run: Path):
    """(run, model tensors, extra tensors) of the last checkpoint, in memory."""
    settings, _, *stored = checkpoint.read(run)
    return settings, *({name: checkpoint.copy_stored(t) for name, t in tensors.items()} for tensors in stored)


def test_tensors_are_read_on_demand_and_in_parts(run):
    _, _, model, _ = checkpoint.read(run)
    read = checkpoint.OnDemand(model, lambda name, stored: checkpoint.copy_stored(stored))
    assert (len(read), list(read)) == (len(model), list(model))
    whole = read["embed.tokens.weight"]
    part = checkpoint.copy_stored(model["embed.tokens.weight"], (slice(3, 5), slice(0, 24)))
    assert torch.equal(part, whole[3:5])
    assert part.untyped_storage().nbytes() == part.nbytes  # not a view of the file


def test_an_existing_checkpoint_is_never_overwritten(run):
    settings, model, extra = loaded(run)
    settings = settings.__class__(**{**vars(settings), "out": str(run)})
    before = {p: p.read_bytes() for p in (run / "last").iterdir()}
    path = checkpoint.write(settings, 20, model, extra, "{}", {"best": None})
    assert path.name == "step-00000020-1"
    assert all(p.read_bytes() == data for p, data in before.items())
    checkpoint.publish(settings, path, is_best=False)
    assert checkpoint.find(run) == path.resolve()


def test_a_full_disk_leaves_the_last_good_checkpoint(run, monkeypatch):
    settings, model, extra = loaded(run)
    settings = settings.__class__(**{**vars(settings), "out": str(run)})

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*earlier ones are whole"):
        checkpoint.write(settings, 30, model, extra, "{}", {"best": None})
    assert checkpoint.find(run).name == "step-00000020"
    assert not list((run / "checkpoints").glob(".writing-*"))
    checkpoint.read(run)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.slow
def test_a_really_full_disk(tmp_path):
    """A 2 MB file system, a run of larger checkpoints: one sentence, and the earlier checkpoint loads."""
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", small], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        session = tiny.session(tmp_path, f'out="{small / "run"}"', "loop.keep=9", "loop.checkpoint_every=1")
        with pytest.raises((CheckpointError, OSError)):
            train(session.run, session.data)
        checkpoint.read(small / "run")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_new_run_does_not_take_the_place_of_another(finished):
    session = tiny.session(finished)
    before = (finished / "run" / "best").resolve()
    with pytest.raises(CheckpointError, match=r"already holds a run \(step-00000020\): continue it with --resume"):
        train(session.run, session.data)
    assert (finished / "run" / "best").resolve() == before


@pytest.mark.parametrize("name", ["run.toml", "log.jsonl", "config.json", "model.safetensors", "best"])
def test_a_new_run_replaces_no_file_of_a_user(tmp_path, name):
    session = tiny.session(tmp_path)
    root = tmp_path / "run"
    root.mkdir()
    (root / name).write_text("mine")
    with pytest.raises(CheckpointError, match=f"already holds {name}, with which the files of a run would collide"):
        checkpoint.start_run(session.run, resumed=False)
    assert [(path.name, path.read_text()) for path in root.iterdir()] == [(name, "mine")]


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_again(tmp_path):
    session = tiny.session(tmp_path)
    started = checkpoint.start_run(session.run, resumed=False)
    (Path(started.out) / "log.jsonl").write_text("{}\n")
    assert checkpoint.start_run(session.run, resumed=False) == started


def test_force_replaces_a_run_and_no_other_file(run):
    (run / "notes.txt").write_text("mine")
    settings = dataclasses.replace(checkpoint.read(run)[0], out=str(run))
    checkpoint.start_run(settings, resumed=False, force=True)
    assert sorted(path.name for path in run.iterdir()) == ["notes.txt", "run.toml"]


def test_a_run_file_of_the_user_is_not_overwritten(tmp_path):
    (tmp_path / "run.toml").write_text("seed = 3\n")
    settings = read_run("", (f'out="{tmp_path}"',))
    for force in (False, True):
        with pytest.raises(CheckpointError, match=r"already holds run\.toml, with which"):
            checkpoint.start_run(settings, resumed=False, force=force)
    assert (tmp_path / "run.toml").read_text() == "seed = 3\n"


def test_a_run_without_a_checkpoint_starts_again(tmp_path):
    """The studio restarts a process that died before its first checkpoint."""
    settings = read_run("", (f'out="{tmp_path}"',))
    assert checkpoint.start_run(settings, resumed=False) == checkpoint.start_run(settings, resumed=False)


def test_without_out_a_run_gets_a_new_folder_that_its_run_file_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert checkpoint.start_run(read_run(), resumed=False).out == "runs/shakespeare-1"
    started = checkpoint.start_run(read_run(), resumed=False)
    assert started.out == "runs/shakespeare-2"
    assert read_run((tmp_path / started.out / "run.toml").read_text()) == started


def test_best_and_last_are_copies_where_links_are_not_possible(run, monkeypatch):
    settings, model, extra = loaded(run)
    settings = dataclasses.replace(settings, out=str(run))

    def refused(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    made = checkpoint.write(settings, 30, model, extra, "{}", {"best": None})
    checkpoint.publish(settings, made, is_best=True)
    assert not (run / "best").is_symlink()
    assert checkpoint.read(run / "best")[1]["step"] == 30
    assert checkpoint.read(run)[1]["step"] == 30


def test_leftovers_of_a_killed_process_are_removed(run):
    left = run / "checkpoints" / ".writing-1-step-00000099"
    left.mkdir()
    settings, model, extra = loaded(run)
    settings = settings.__class__(**{**vars(settings), "out": str(run)})
    checkpoint.write(settings, 30, model, extra, "{}", {"best": None})
    assert not left.exists()


def test_random_state_comes_back():
    held = checkpoint.random_state(torch.device("cpu"))
    a = torch.rand(3)
    checkpoint.set_random_state(held, torch.device("cpu"))
    assert torch.equal(a, torch.rand(3))
