"""N processes compute what one does. This file is also what torchrun runs: see `main` at its end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.distributed.group import ALONE, check, leave, start
from tests.cli.asking import settings
from tests.training.tiny import SMALL, WORDS, corpus
from tests.training.tuning.models import character_model

ROOT = Path(__file__).parents[3]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SHORT = (*SMALL, "loop.batch=12", "loop.eval_every=10", "loop.checkpoint_every=10", "loop.log_every=1")
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
    with muon_in_float32():
        train(session.run, session.data)
    return curve(folder / name)


@contextlib.contextmanager
def muon_in_float32() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
        yield


def environment() -> dict[str, str]:
    path = os.pathsep.join((str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


def launch(ranks: int, *command: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    words = [*TORCHRUN, str(ranks), *command]
    return subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT
    )


def together(folder: Path, ranks: int, jobs: list[dict]) -> None:
    """Runs, one after the other, in one launch: starting processes is what takes the time."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = launch(ranks, __file__, str(folder / "jobs.json"))
    assert done.returncode == 0, done.stderr[-3000:]


def job(folder: Path, name: str, *changes: str, resume: str | None = None) -> dict:
    if resume is not None:
        return {"resume": str(folder / resume), "changes": [f'out="{folder / name}"', *changes]}
    return {"resume": None, "changes": short(*where(folder, name), *changes)}


def curve(folder: Path) -> dict[int, float]:
    """Training losses by step, and validation losses by minus the step."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    signs = {"step": 1, "validation": -1}
    return {signs[e["event"]] * e["step"]: e["loss"] for e in events if e["event"] in signs}


def assert_same(found: dict[int, float], expected: dict[int, float], first: int = 1) -> None:
    assert set(range(first, 21)) <= found.keys()
    assert max(abs(found[i] - expected[i]) for i in found) <= BOUND


KINDS = ("ddp", "fsdp")


def compare(folder: Path, ranks: int, settings: dict[str, tuple[str, ...]]) -> dict[str, dict[int, float]]:
    """Each setting, by DDP, by FSDP, and by one process, whose curves are returned."""
    corpus(folder)
    jobs = [job(folder, f"{n}-{k}", *c, f"machine.parallel={k}") for n, c in settings.items() for k in KINDS]
    together(folder, ranks, jobs)
    expected = {name: alone(folder, name, *changes) for name, changes in settings.items()}
    for name in settings:
        for kind in KINDS:
            assert_same(curve(folder / f"{name}-{kind}"), expected[name])
    return expected


OPTIMISERS = {
    "adamw": ("loop.accumulate=2", "loop.eval_batches=100"),  # the last batch of an evaluation is ragged
    "muon": ("optim.kind=muon", "optim.ema=0.9", "optim.clip=0.1"),
}


@pytest.mark.parametrize("optimiser", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_ranks_give_the_curve_of_one_process_which_resumes_what_they_wrote(tmp_path, optimiser):
    expected = compare(tmp_path, 2, {"it": OPTIMISERS[optimiser]})["it"]
    for kind in KINDS:
        half = tmp_path / f"it-{kind}" / "checkpoints" / "step-00000010"
        session = resume_session(str(half), (f'out="{tmp_path / kind}-1"',))
        with muon_in_float32():
            train(session.run, session.data, resume=session.resume)
        assert_same(curve(tmp_path / f"{kind}-1"), expected, first=11)
        model = gf.load(tmp_path / f"it-{kind}" / "last")
        assert sum(p.numel() for p in model.parameters()) == gf.size(model.config).parameters


def tuning_cases(folder: Path) -> dict[str, tuple[str, ...]]:
    """Fine-tuning by text, by conversations and by preferences, each with the changes to a run of 4 steps."""
    text = f'data.corpus="{corpus(folder)}"'
    words = " ".join(WORDS)
    asked = [{"prompt": words[i : i + 4 + i % 5], "completion": words[2 * i : 2 * i + 9]} for i in range(23)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "the red van"} for row in asked[:11]]
    for name, rows in (("asked", asked), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "turns.jinja").write_text("{% for m in messages %}{{ m.content }}. {% endfor %}")
    chat = (f'data.corpus="{folder / "asked.jsonl"}"', f'chat.template="{folder / "turns.jinja"}"')
    dpo = (f'data.corpus="{folder / "pairs.jsonl"}"', chat[1], "chat.loss=dpo", "optim.lr=1e-2")
    return {
        "lora-ddp": (text, "lora.rank=2", "optim.lr=1e-2"),
        "dora-ddp": (text, "lora.rank=2", "lora.dora=true", "lora.quantize=nf4", "loop.accumulate=2"),
        "freeze-ddp": (text, 'optim.freeze=["embed", "norms"]', "optim.lr=1e-2"),
        "padding-ddp": (text, "optim.lr=1e-2", "optim.weight_decay=0.5"),
        "chat-ddp": (*chat, "optim.lr=1e-2"),
        "chat-fsdp": (*chat, "optim.lr=1e-2"),
        "dpo-ddp": dpo,
        "dpo-fsdp": dpo,
        "both-ddp": (*dpo, "lora.rank=2"),
    }


@pytest.mark.parametrize(
    "names",
    [
        ("lora-ddp", "chat-fsdp", "dpo-ddp"),
        pytest.param(
            ("dora-ddp", "freeze-ddp", "padding-ddp", "chat-ddp", "dpo-fsdp", "both-ddp"), marks=pytest.mark.slow
        ),
    ],
    ids=["some", "others"],
)
def test_fine_tuning_by_two_ranks_gives_the_curve_of_one_process(tmp_path, names):
    base = character_model(tmp_path / "base", max_len=32)
    small = ("loop.steps=4", "loop.batch=4", "loop.eval_every=2", "loop.eval_batches=9", "loop.log_every=1")
    small += ("machine.device=cpu", "machine.precision=float32", "machine.compile=no", "schedule.warmup=1")
    small += (
        "loop.sample_every=0",
        "model.dropout=0.0",
        f'start.model="{base}"',
        f'data.cache="{tmp_path / "tokens"}"',
    )
    cases = {name: changes for name, changes in tuning_cases(tmp_path).items() if name in names}
    assert len(cases) == len(names)
    jobs = []
    for name, changes in cases.items():
        out = (f'out="{tmp_path / name}"', f"machine.parallel={name.partition('-')[2]}")
        jobs.append({"resume": None, "changes": (*small, *changes, *out)})
    together(tmp_path, 2, jobs)
    for name, changes in cases.items():
        session = open_session(read_run("", (*small, *changes, f'out="{tmp_path / "one" / name}"')))
        train(session.run, session.data)
        found, expected = curve(tmp_path / name), curve(tmp_path / "one" / name)
        assert found.keys() == expected.keys() >= {1, 2, 3, 4, -2, -4}
        assert max(abs(found[i] - expected[i]) for i in found) <= BOUND, name
        assert expected[4] != expected[1]
        held = (gf.load(tmp_path / place / "last").state_dict() for place in (name, f"one/{name}"))
        for ours, theirs in zip(*(state.values() for state in held), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_three_ranks_resume_what_two_wrote(tmp_path, optimiser):
    expected = compare(tmp_path, 2, {"it": OPTIMISERS[optimiser]})["it"]
    halves = {kind: f"it-{kind}/checkpoints/step-00000010" for kind in KINDS}
    together(tmp_path, 3, [job(tmp_path, f"{k}-3", "loop.accumulate=1", resume=half) for k, half in halves.items()])
    for kind in KINDS:
        assert_same(curve(tmp_path / f"{kind}-3"), expected, first=11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("model.preset=bert_base", "model.vocab_size=50", "model.pooler=true", "model.dropout=0.0"),
        ("model.preset=t5_small", "model.n_encoder_layers=2", "model.dropout=0.0"),
        ("model.preset=transformer_base", "model.n_encoder_layers=2", "model.dropout=0.0"),
        ("model.preset=moe_tiny", "model.n_heads=4", "loss.balance=0.0"),
        ("loss.label_smoothing=0.1", "loss.z_loss=1e-3", "data.order=epoch", "optim.clip=none"),
    ],
    ids=["masked", "t5", "seq2seq", "experts", "losses"],
)
def test_every_objective_gives_the_curve_of_one_process(tmp_path, changes):
    compare(tmp_path, 2, {"it": changes})


@pytest.mark.slow
def test_the_command_line_speaks_with_one_voice(tmp_path):
    corpus(tmp_path)
    changes = (*SHORT, *where(tmp_path, "run"), "machine.parallel=fsdp", "loop.sample_every=20", "model.dropout=0.1")
    done = launch(2, "-m", "glassformer", "train", "--no-latest", "--json", *settings(*changes))
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["event"] for e in events].count("start") == 1
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 21))
    assert events[0]["ranks"] == 2
    assert [e["text"] != "" for e in events if e["event"] == "sample"] == [True]
    assert events[-1]["event"] == "end"


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


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_one_sentence(tmp_path):
    corpus(tmp_path)
    first, second = ranks_by_hand(2, *SHORT, *where(tmp_path, "run"), "loop.batch=9")
    sentence = "glass: loop.batch=9 is not a multiple of 2 ranks: they cannot take equal shares. Use 8 or 10.\n"
    assert first == (2, "", sentence)
    assert second == (2, "", "")


def test_a_process_by_itself_has_no_group(monkeypatch):
    run = read_run("", ("loop.batch=9",))
    assert start(run) is ALONE
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert start(run) is ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"loop.batch=9 is not a multiple of 4 ranks.*Use 8 or 12"):
        start(run)
    with pytest.raises(ConfigError, match=r"4 ranks x loop.accumulate=3: .* Use 12 or 24"):
        check(read_run("", ("loop.batch=9", "loop.accumulate=3")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_that_is_no_number_stops_all_ranks_with_one_sentence(tmp_path, kind):
    corpus(tmp_path)
    changes = (*SHORT, *where(tmp_path, "run"), f"machine.parallel={kind}", "optim.lr=1e30", "loop.steps=2000")
    began = time.monotonic()
    done = launch(2, "-m", "glassformer", "train", "--no-latest", "--json", *settings(*changes, "schedule.warmup=0"))
    assert time.monotonic() - began < 240
    assert done.returncode != 0
    assert done.stderr.count("Nothing was updated") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_dies_takes_the_others_with_it(tmp_path, kind):
    corpus(tmp_path)
    changes = (*SHORT, *where(tmp_path, "run"), f"machine.parallel={kind}", "loop.steps=100000")
    words = [*TORCHRUN, "2", "-m", "glassformer", "train", "--no-latest", "--json", *settings(*changes)]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as agent:
        assert agent.stdout is not None
        for line in agent.stdout:
            if json.loads(line).get("step") == 30:
                break
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        agent.stdout.read()
        assert agent.wait(timeout=60) != 0
    assert resume_session(str(tmp_path / "run")).resume[0]["step"] >= 20


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_stops_all_ranks_with_one_sentence(tmp_path):
    corpus(tmp_path)
    (tmp_path / "run").write_text("in the way")
    done = launch(2, "-m", "glassformer", "train", "--no-latest", *settings(*SHORT, *where(tmp_path, "run")))
    assert done.returncode != 0
    assert done.stderr.count("cannot be written") == 1
    assert "Error: " not in done.stderr.replace("ChildFailedError: ", "")


def main() -> None:
    for given in json.loads(Path(sys.argv[1]).read_text()):
        changes = tuple(given["changes"])
        session = resume_session(given["resume"], changes) if given["resume"] else open_session(read_run("", changes))
        with muon_in_float32():
            group = train(session.run, session.data, resume=session.resume).group
    group.close()
    leave(0)


if __name__ == "__main__":
    main()
