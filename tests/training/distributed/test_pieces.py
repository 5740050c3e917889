"""Files that ranks write together are those of one process, byte for byte."""

import dataclasses
import errno
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import glassformer as gf
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.distributed import pieces
from glassformer.training.distributed.group import Group
from glassformer.training.loop import prepare_state, restore, save
from tests.training.distributed.ranks import job, short, together, where
from tests.training.tiny import corpus


class One(Group):
    """A group of one that writes in pieces."""


TENSORS = {
    "b": torch.arange(35.0).view(5, 7),
    "a": torch.arange(3.0),
    "step": torch.tensor(4.0),
    "bytes": torch.arange(9, dtype=torch.uint8),
    "half": torch.randn(3, 5).bfloat16(),
    "ids": torch.arange(6),
    "cube": torch.randn(3, 4, 5, dtype=torch.float64),
    "é": torch.randn(2, 1).half(),
    "none": torch.empty(0, 4),
    "int": torch.arange(5, dtype=torch.int32),
}


def test_the_file_is_that_of_the_library(tmp_path):
    save_file(TENSORS, tmp_path / "library", metadata={"format": "pt"})
    pieces.write(tmp_path / "pieces", TENSORS, One())
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize("cut", [(2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 5), (2, 3, 2)])
def test_parts_in_any_dimension_make_the_whole(tmp_path, cut):
    whole = TENSORS["cube"]
    path = tmp_path / "file"
    path.write_bytes(bytes(16 + whole.nbytes))
    edges = [[n * i // k for i in range(k + 1)] for n, k in zip(whole.shape, cut, strict=True)]
    with path.open("r+b") as file:
        for ranges in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
            box = tuple(slice(*ends) for ends in ranges)
            piece = pieces.Piece(tuple(whole.shape), box, whole[box], True, whole)
            pieces._write_piece(file.fileno(), 16, piece)
    assert path.read_bytes()[16:] == whole.numpy().tobytes()


def test_a_full_disk_is_an_error_on_all_ranks(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        pieces.write(tmp_path / "file", TENSORS, One())


FILES = ("model.safetensors", "optimizer.safetensors")


def rewrite(folder: Path, source: str, name: str) -> None:
    """Restore a checkpoint in this process and write it again."""
    session = resume_session(str(folder / source), (f'out="{folder / name}"', "loop.steps=9"))
    state = prepare_state(session.run, resumed=True)
    restore(state, *session.resume)
    save(state, session.data.tokenizer.to_json(), 0.0, False)


def same(folder: Path, a: str, b: str) -> None:
    for name in FILES:
        assert (folder / a / name).read_bytes() == (folder / b / name).read_bytes(), (a, b, name)


@pytest.mark.slow
def test_initial_weights_and_files_of_ranks_are_those_of_one_process(tmp_path):
    corpus(tmp_path)
    changes = ("loop.keep=9", "optim.ema=0.9", "loop.steps=3", "schedule.warmup=0", "loop.eval_every=3")
    parallel = "machine.parallel=fsdp"
    uneven = ("model.d_model=27", "model.n_heads=3", *changes)  # 2 ranks get 14 and 13 rows
    said = together(tmp_path, 2, [job(tmp_path, "two", *uneven, parallel)])
    assert said == [""]
    session = open_session(read_run("", short(*where(tmp_path, "one"), *uneven, parallel)))
    train(dataclasses.replace(session.run), session.data)
    first = "checkpoints/step-00000000"
    same(tmp_path, f"two/{first}", f"one/{first}")
    rewrite(tmp_path, "two", "again")
    same(tmp_path, "two/last", "again/last")


@pytest.mark.slow
def test_any_number_of_ranks_reads_what_another_wrote(tmp_path):
    """4 -> 3 -> 1 -> 2 -> 4 ranks: weights, averages, moments of AdamW and Muon, bit for bit."""
    corpus(tmp_path)
    changes = ("optim.ema=0.9", "loop.steps=3", "schedule.warmup=0", "machine.parallel=fsdp")
    kinds = {"adamw": (), "muon": ("optim.kind=muon",)}
    together(tmp_path, 4, [job(tmp_path, f"{n}-0", *changes, *more) for n, more in kinds.items()])
    for number, ranks in enumerate((3, 1, 2, 4), start=1):
        for kind in kinds if ranks == 1 else ():
            rewrite(tmp_path, f"{kind}-{number - 1}", f"{kind}-{number}")
        if ranks > 1:
            jobs = [
                job(tmp_path, f"{k}-{number}", "loop.steps=9", resume=f"{k}-{number - 1}") | {"rewrite": True}
                for k in kinds
            ]
            together(tmp_path, ranks, jobs)
        for kind in kinds:
            same(tmp_path, f"{kind}-0/last", f"{kind}-{number}/last")


WIDE = ("model.d_model=1024", "model.n_heads=8", "model.d_ff=4096", "model.n_layers=5", "machine.parallel=fsdp")


def peaks(folder: Path, ranks: int, what: str, given: dict) -> list[dict[str, float]]:
    """What each rank measured, in a process of its own."""
    together(folder, ranks, [given | {"measure": what}])
    found = [json.loads((folder / what / f"measured-{rank}.json").read_text()) for rank in range(ranks)]
    print(what, found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_rank_holds_more_than_its_share(tmp_path, ranks):
    """63 million parameters: peaks over an idle rank, for a build, a checkpoint, a resumed run and a model folder."""
    corpus(tmp_path)
    for found in peaks(tmp_path, ranks, "build", job(tmp_path, "build", *WIDE)):
        assert found["peak"] <= 1.2 * found["shard"] + 2 * found["largest"] + CONSTANT
    for found in peaks(tmp_path, ranks, "save", job(tmp_path, "save", *WIDE)):
        assert found["peak"] <= 1.3 * 4 * found["shard"] + CONSTANT  # weights, gradient, two moments
    resumed = job(tmp_path, "resume", resume="save/last") | {"measure": "resume"}
    for found in peaks(tmp_path, ranks, "resume", resumed):
        assert found["peak"] <= 1.3 * 3 * found["shard"] + 2 * found["largest"] + CONSTANT
    gf.save(gf.load(tmp_path / "save" / "last"), tmp_path / "folder", format="hf")
    started = [
        f'start.model="{tmp_path / "folder"}"',
        "loop.batch=12",
        "machine.parallel=fsdp",
        *where(tmp_path, "start"),
    ]
    for found in peaks(tmp_path, ranks, "start", {"changes": started}):
        assert found["peak"] <= 1.2 * found["shard"] + 2 * found["largest"] + CONSTANT


CONSTANT = 40.0
"""MB of buffers that do not grow with the model: gloo, FSDP's buckets, Python."""
