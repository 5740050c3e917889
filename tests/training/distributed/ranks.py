"""Launches ranks for the tests of this folder. It is also what torchrun runs: see `main` at its end.

Starting processes takes most of the time, so one launch does many jobs.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training import loop, muon, open_session, read_run, resume_session, train
from glassformer.training.distributed.group import leave, start
from glassformer.training.loop import TrainState, prepare_state, restore, save
from glassformer.training.session import Session
from tests.cli.asking import settings
from tests.training.tiny import SMALL, corpus

ROOT = Path(__file__).parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SHORT = (
    *SMALL, "loop.batch=12", "loop.eval_every=10", "loop.checkpoint_every=10", "loop.log_every=1",
    "checkpoint.first=true",
)  # fmt: skip
# losses are about 3 and in float32, whose spacing there is 2.4e-7: a few roundings in 20 steps
BOUND = 1e-6
# AdamW in 20 steps stays below 5e-7 (measured). Muon's bf16 rounds two orders of a sum apart, by 2^-9 of an element of
# an update, which 20 steps carry to 1e-4 of the loss; so here it computes in float32, where it has to agree as well.


def where(folder: Path, name: str) -> tuple[str, ...]:
    return (
        f'data.corpus="{folder / "corpus.txt"}"',
        f'data.cache="{folder / "tokens"}"',
        f'out="{folder / name}"',
    )


def short(*changes: str) -> tuple[str, ...]:
    """SHORT and changes to it; experts have their own width."""
    base = [c for c in SHORT if not ("model.d_ff" in c and "model.preset=moe_tiny" in changes)]
    return (*base, *changes)


def alone(folder: Path, name: str, *changes: str) -> dict[int, float]:
    """The losses of one process."""
    session = open_session(read_run("", short(*where(folder, name), *changes)))
    with muon_in_float32(), first_gradients():
        train(session.run, session.data)
    return curve(folder / name)


@contextlib.contextmanager
def first_gradients() -> Iterator[None]:
    """Write the gradients of the first step, before they are clipped, to gradients.safetensors in the run's folder."""
    step, clip = loop.train_step, loop.clip

    def first_step(state: TrainState, batch: Any) -> Any:
        def clip_first(*given: Any) -> Any:
            whole = getattr(state.group, "whole_tensor", lambda name, tensor: tensor)
            named = ((name, p.grad) for name, p in state.model.named_parameters() if p.grad is not None)
            found = {name: whole(name, gradient).cpu().contiguous() for name, gradient in named}
            if state.group.is_main:
                save_file(found, Path(state.run.out, "gradients.safetensors"))
            return clip(*given)

        with pytest.MonkeyPatch.context() as patch:
            if state.step == 0:
                patch.setattr(loop, "clip", clip_first)
            return step(state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", first_step)
        yield


def gradient_error(found: Path, expected: Path) -> float:
    """Return the largest difference of the first gradients of two runs."""
    ours, theirs = (load_file(folder / "gradients.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


ORTHOGONALIZED: list[int] = []
"""Matrices in each call that orthogonalizes some, in this process."""


@contextlib.contextmanager
def muon_in_float32() -> Iterator[None]:
    orthogonalize = muon.orthogonalize

    def counted(stack: torch.Tensor) -> torch.Tensor:
        ORTHOGONALIZED.append(len(stack))
        return orthogonalize(stack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        patch.setattr(muon, "orthogonalize", counted)
        yield


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


def launch(ranks: int, *command: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
    words = [*TORCHRUN, str(ranks), *command]
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT
    )


def together(folder: Path, ranks: int, jobs: list[dict], seconds: float = 400) -> list[str]:
    """Do jobs, one after the other, in one launch; return what was refused, an empty text for each job that ran."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = launch(ranks, __file__, str(folder / "jobs.json"), seconds=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "jobs.said").read_text())


def job(folder: Path, name: str, *changes: str, resume: str | None = None) -> dict:
    if resume is not None:
        return {"resume": [str(folder / resume)], "changes": [f'out="{folder / name}"', *changes]}
    return {"changes": short(*where(folder, name), *changes)}


def curve(folder: Path) -> dict[int, float]:
    """Training losses by step, and validation losses by minus the step."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    signs = {"step": 1, "validation": -1}
    return {signs[e["event"]] * e["step"]: e["loss"] for e in events if e["event"] in signs}


def assert_same(found: dict[int, float], expected: dict[int, float], first: int = 1) -> None:
    assert set(range(first, 21)) <= found.keys()
    assert max(abs(found[i] - expected[i]) for i in found) <= BOUND


KINDS = ("ddp", "fsdp")


def compare(
    folder: Path, ranks: int, settings: dict[str, tuple[str, ...]], more: tuple[dict, ...] = ()
) -> dict[str, dict[int, float]]:
    """Each setting, by DDP, by FSDP, and by one process, whose curves are returned. `more` jobs are done as well."""
    corpus(folder)
    jobs = [job(folder, f"{n}-{k}", *c, f"machine.parallel={k}") for n, c in settings.items() for k in KINDS]
    assert together(folder, ranks, [*jobs, *more]) == [""] * (len(jobs) + len(more))
    expected = {name: alone(folder, name, *changes) for name, changes in settings.items()}
    for name in settings:
        for kind in KINDS:
            assert_same(curve(folder / f"{name}-{kind}"), expected[name])
    return expected


def ranks_by_hand(ranks: int, *changes: str) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of the processes torchrun would start, here without it: they never come to meet."""
    words = [sys.executable, "-m", "glassformer", "train", "--no-latest", *settings(*changes)]
    started = []
    for rank in range(ranks):
        env = {**environment(), "WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(words, env=env, text=True, cwd=ROOT, **pipes))
    out = [process.communicate(timeout=60) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, out, strict=True)]


def do(given: dict) -> Any:
    """One job: a run, whose changes may differ on rank 1."""
    rank = os.environ["RANK"]
    changes = (*given["changes"], *(given.get("second", ()) if rank == "1" else ()))
    where = given.get("resume") and given["resume"][min(int(rank), len(given["resume"]) - 1)]
    session = resume_session(where, changes) if where else open_session(read_run("", changes))
    if given.get("measure"):
        return measured(session, given["measure"])
    if given.get("rewrite"):
        state = prepare_state(session.run, resumed=True)
        restore(state, *session.resume)
        save(state, session.data.tokenizer.to_json(), 0.0, False)
        return state
    with muon_in_float32(), first_gradients():
        return train(session.run, session.data, resume=session.resume)


def memory(what: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) / 1024


def measured(session: Session, what: str) -> TrainState:
    """Build, save or resume, and print by how much the peak of this process exceeds that of an idle rank."""
    group = start(session.run)
    group.totals(0)
    idle = memory("VmRSS")
    state = prepare_state(session.run, group, resumed=session.resume is not None)
    if what == "save":
        for parameter in state.parameters:
            parameter.grad = torch.zeros_like(parameter)
        state.optimizer.step(1.0)
        Path("/proc/self/clear_refs").write_text("5")
        save(state, session.data.tokenizer.to_json(), 0.0, False)
    if session.resume is not None:
        restore(state, *session.resume)
    held = sum(group.local(p).numel() for p in state.parameters) * 4 / 2**20
    largest = max(p.numel() for p in state.parameters) * 4 / 2**20
    found = {"peak": memory("VmHWM") - idle, "shard": held, "largest": largest}
    Path(session.run.out).mkdir(exist_ok=True)
    Path(session.run.out, f"measured-{group.rank}.json").write_text(json.dumps(found))
    return state


def count_gathered_bytes() -> list[int]:
    """Return a list to which the bytes of every tensor that FSDP gathers are added."""
    import torch.distributed as dist

    gather, counted = dist.all_gather_into_tensor, []

    def count(out: torch.Tensor, *given: Any, **named: Any) -> Any:
        counted.append(out.nbytes)
        return gather(out, *given, **named)

    dist.all_gather_into_tensor = count
    return counted


def main() -> None:
    jobs = Path(sys.argv[1])
    said, gathered = [], count_gathered_bytes()
    totals = []
    for given in json.loads(jobs.read_text()):
        with pytest.MonkeyPatch.context() as patch:
            if os.environ["RANK"] == "1" and given.get("version"):
                patch.setattr(gf, "__version__", given["version"])
            try:
                group = do(given).group
                said.append("")
                totals.append(sum(gathered))
            except ConfigError as error:
                said.append(str(error))
    jobs.with_suffix(f".gathered-{os.environ['RANK']}").write_text(" ".join(map(str, totals)))
    jobs.with_suffix(f".orthogonalized-{os.environ['RANK']}").write_text(str(sum(ORTHOGONALIZED)))
    if os.environ["RANK"] == "0":
        jobs.with_suffix(".said").write_text(json.dumps(said))
    group.close()
    leave(0)


if __name__ == "__main__":
    main()
