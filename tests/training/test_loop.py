"""The loop: accumulation, resume bit for bit, non-finite steps, logs, and that it learns."""

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.training import checkpoint
from glassformer.training.data.batches import Batches
from glassformer.training.distributed.group import ALONE, Group
from glassformer.training.loop import evaluate, prepare_state, train, train_step
from glassformer.training.objective import Batch, make_batch
from glassformer.training.session import resume_session
from tests.training import tiny


def batches(session, n):
    run = session.run
    order = Batches(session.data.train, run.context, run.loop.batch, seed=run.seed)
    return [make_batch(run, order.batch(step), step) for step in range(n)]


@pytest.mark.parametrize("preset", ["nano", "bert_base", "transformer_base"])
def test_accumulation_equals_the_large_batch(tmp_path, preset):
    """1 x 6, 3 x 2 and 6 x 1 rows: the same losses to 1e-6 for five steps."""
    curves = []
    for parts in (1, 3, 6):
        extra = ("model.n_encoder_layers=1",) if preset == "transformer_base" else ()
        changes = (f"model.preset={preset}", f"loop.accumulate={parts}", "model.dropout=0.0", *extra)
        session = tiny.session(tmp_path, *changes)
        state = prepare_state(session.run)
        curves.append([train_step(state, b)["loss"] for b in batches(session, 5)])
    assert max(abs(a - b) for curve in curves[1:] for a, b in zip(curves[0], curve, strict=True)) < 1e-6
    assert curves[0][-1] < curves[0][0]


def test_initial_loss_is_ln_v(tmp_path):
    session = tiny.session(tmp_path)
    state = prepare_state(session.run)
    assert abs(evaluate(state, session.data.val) / math.log(session.run.model.vocab_size) - 1) < 0.02


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_overfits_one_batch_below_a_hundredth(tmp_path, kind):
    session = tiny.session(
        tmp_path, f"optim.kind={kind}", "optim.lr=3e-3", "optim.weight_decay=0", "loop.steps=400", "loop.batch=2"
    )
    state = prepare_state(session.run)
    (batch,) = batches(session, 1)
    assert any(train_step(state, batch)["loss"] < 0.01 for _ in range(300))


@pytest.mark.sample(2)
@pytest.mark.parametrize("preset", ["nano", "llama_tiny", "bert_base", "transformer_base"])
def test_every_objective_learns(tmp_path, preset):
    """Sixty steps take the validation loss well below that of the untrained model."""
    extra = ("model.n_encoder_layers=2", "optim.lr=3e-3") if preset == "transformer_base" else ("optim.lr=3e-3",)
    if preset == "llama_tiny":
        extra += ("model.n_kv_heads=3",)
    session = tiny.session(tmp_path, f"model.preset={preset}", "loop.steps=60", "loop.batch=12", *extra)
    state = prepare_state(session.run)
    before = evaluate(state, session.data.val)
    for batch in batches(session, 60):
        train_step(state, batch)
    # a masked model sees one target in seven, and post-norm starts slowly
    assert evaluate(state, session.data.val) < before - {"bert_base": 0.1, "transformer_base": 0.3}.get(preset, 0.4)


def files(path):
    return {name: (path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("average", ["none", "0.9"])
def test_resume_is_bit_for_bit(tmp_path, kind, average):
    """20 steps = 10, a new start from the checkpoint, 10 more; with dropout, whose generator must come back too."""
    changes = (f"optim.kind={kind}", f"optim.ema={average}", "model.dropout=0.1")
    whole = tiny.session(tmp_path, *changes, name="whole")
    train(whole.run, whole.data)
    parted = tiny.session(tmp_path, *changes, name="parted")

    class Stop(Exception):  # noqa: N818
        pass

    def stop_at_10(event):
        if event["event"] == "validation" and event["step"] == 10:
            raise Stop

    with pytest.raises(Stop):
        train(parted.run, parted.data, stop_at_10)
    # the validation event comes before its checkpoint: the newest one is that of step 5
    assert checkpoint.find(parted.run.out).name == "step-00000005"
    again = resume_session(parted.run.out)
    train(again.run, again.data, resume=again.resume)
    assert files(tmp_path / "whole" / "last") == files(tmp_path / "parted" / "last")
    log = [json.loads(line) for line in (tmp_path / "parted" / "log.jsonl").read_text().splitlines()]
    steps = [e["step"] for e in log if e["event"] == "validation"]
    assert steps == sorted(set(steps)) == [0, 5, 10, 15, 20]


KILLED = """
import sys
from pathlib import Path
from tests.training import tiny
from glassformer.training import resume_session, train
folder = Path(sys.argv[1])
if (folder / sys.argv[2] / "last").exists():
    session = resume_session(str(folder / sys.argv[2]))
else:
    session = tiny.session(folder, *sys.argv[3:], name=sys.argv[2])
print("ready", flush=True)
train(session.run, session.data, lambda e: print(e["event"], e.get("step"), flush=True), resume=session.resume)
"""


def start(tmp_path, name, *changes):
    command = [sys.executable, "-c", KILLED, str(tmp_path), name, *changes]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize("kind", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_killed_and_resumed_equals_never_killed(tmp_path, kind):
    """kill -9 after step 10, in another process, then resume here: the same bytes as 20 steps in one go."""
    whole = tiny.session(tmp_path, f"optim.kind={kind}", name="whole")
    train(whole.run, whole.data)
    with start(tmp_path, "killed", f"optim.kind={kind}") as process:
        for line in process.stdout:
            if line.split() == ["validation", "15"]:
                break
        process.kill()
    again = resume_session(str(tmp_path / "killed"))
    assert again.resume[0]["step"] in (10, 15)
    train(again.run, again.data, resume=again.resume)
    assert files(tmp_path / "whole" / "last") == files(tmp_path / "killed" / "last")


def kill_at_random_moments(tmp_path, times, seed):
    """Every kill must leave whole checkpoints, a `best` that exists once there was one, and no worse best."""
    draw = random.Random(seed)
    changes = (
        "loop.steps=100000",
        "loop.eval_every=1",
        "loop.checkpoint_every=1",
        "loop.eval_batches=1",
        "loop.keep=1",
    )
    best = math.inf
    for kill in range(times):
        with start(tmp_path, "run", *changes) as process:
            assert process.stdout.readline().strip() == "ready", process.stderr.read()
            process.stdout.readline()
            if kill == times - 1 and best == math.inf:  # a slow machine: the last process writes a checkpoint first
                assert any(line.split() == ["validation", "2"] for line in process.stdout)
            time.sleep(draw.uniform(0.0, 0.25))
            process.send_signal(signal.SIGKILL)
        root = tmp_path / "run"
        if not (root / "last").exists():
            assert best == math.inf
            continue
        for held in checkpoint.steps(root):
            checkpoint.read(held)
            gf.load(held)
        _, meta, _, _ = checkpoint.read(root / "best")
        assert meta["best"] <= best
        best = meta["best"]
    assert best < math.inf


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path):
    kill_at_random_moments(tmp_path, times=2, seed=0)


@pytest.mark.slow
def test_fifty_kills_at_random_moments(tmp_path):
    kill_at_random_moments(tmp_path, times=50, seed=1)


def test_the_log_tells_the_run(tmp_path):
    session = tiny.session(tmp_path, "loop.sample_every=10")
    events = []
    train(session.run, session.data, events.append, baselines=lambda: {"unigram": 2.5})
    assert events == [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    kinds = [e["event"] for e in events]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert kinds.count("sample") == 2
    assert all(event["text"] for event in events if event["event"] == "sample")
    assert events[0]["baselines"] == {"unigram": 2.5}
    assert events[0]["tokens_per_step"] == 6 * 16
    losses = [e["loss"] for e in events if e["event"] == "validation"]
    assert events[-1]["best"] == min(losses)


def test_sampling_does_not_change_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("glassformer.training.sample.sample_text", lambda model, tokenizer, engine: str(torch.rand(3)))
    curves = []
    for every in (0, 3):
        session = tiny.session(tmp_path, "model.dropout=0.2", f"loop.sample_every={every}", name=f"run{every}")
        events = []
        train(session.run, session.data, events.append)
        assert any(e["event"] == "sample" for e in events) == bool(every)
        curves.append([e["loss"] for e in events if e["event"] == "validation"])
    assert curves[0] == curves[1]


def test_an_encoder_trains_without_samples(tmp_path):
    session = tiny.session(tmp_path, "model.preset=bert_base", "loop.sample_every=5", "loop.steps=10")
    events = []
    train(session.run, session.data, events.append)
    assert events[-1]["event"] == "end"
    assert not any(event["event"] == "sample" for event in events)


def test_averaged_weights_are_what_is_evaluated_and_saved(tmp_path):
    session = tiny.session(tmp_path, "optim.ema=0.9")
    state = train(session.run, session.data)
    saved = gf.load(tmp_path / "run" / "last").state_dict()
    assert all(torch.equal(saved[n], w) for n, w in state.average.weights.items())
    assert any(not torch.equal(p, saved[n]) for n, p in state.model.named_parameters())


def test_the_rate_is_that_of_steps_and_the_time_left_that_of_all(tmp_path, monkeypatch):
    """Validation is no step, nor is a start-up, but a run takes as long as its validations, too."""
    from glassformer.training import events as reports
    from glassformer.training import loop

    session = tiny.session(tmp_path, "loop.steps=40", "loop.log_every=10", "loop.eval_every=10")
    clock = [1000.0]
    monkeypatch.setattr(reports, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    plain, judge = loop.train_step, loop.evaluate

    def step(state, batch):
        clock[0] += 100 if state.step == 0 else 2  # the first compiles
        return plain(state, batch)

    def evaluate(*given):
        clock[0] += 50
        return judge(*given)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(loop, "evaluate", evaluate)
    events = []
    train(session.run, session.data, events.append)
    steps = {e["step"]: e for e in events if e["event"] == "step"}
    assert list(steps) == [1, 10, 20, 30, 40]
    assert steps[1]["steps_per_second"] == 1 / 100
    assert "seconds_left" not in steps[1]
    assert all(steps[n]["steps_per_second"] == 1 / 2 for n in (10, 20, 30, 40))
    assert steps[10]["seconds_left"] == 30 * 2  # no validation since the first step
    assert steps[20]["seconds_left"] == pytest.approx(20 * (19 * 2 + 50) / 19)
    assert steps[40]["seconds_left"] == 0


def test_the_peak_next_to_the_rate_of_all_processes_is_that_of_all_processes(tmp_path, monkeypatch):
    """Operations of a step are everybody's, so what they are held against is the sum of what each one can do."""
    from glassformer.training import loop

    class Two(Group):
        world = 2

        def totals(self, *numbers):
            return tuple(number + 7e9 for number in numbers)  # the other process is slower

    monkeypatch.setattr(loop, "measure_matmul", lambda *_: 50.0)
    session = tiny.session(tmp_path)
    alone, both = (loop._facts(prepare_state(session.run, group), session.data, None) for group in (ALONE, Two()))
    assert both["flops_per_step"] == alone["flops_per_step"]
    assert alone["peak_flops"] == 50e9
    assert both["peak_flops"] == 57e9


def test_the_peak_is_not_that_of_the_first_slow_products(tmp_path, monkeypatch):
    """Measured in ten fresh processes: the best of the first 4 was 128 to 202 GFLOP/s, that of 26 was 173 to 206."""
    from glassformer.training import loop

    session = tiny.session(tmp_path)
    state = prepare_state(session.run)
    taken = (seconds for product in range(1000) for seconds in (0.0, 2e-3 if product < 12 else 1e-3))
    clock = itertools.accumulate(taken)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert loop._facts(state, session.data, None)["peak_flops"] == pytest.approx(2 * 512**3 / 1e-3)


def test_bf16_trains_close_to_float32(tmp_path):
    losses = []
    for precision in ("float32", "bfloat16"):
        session = tiny.session(tmp_path, f"machine.precision={precision}")
        state = prepare_state(session.run)
        losses.append([train_step(state, b)["loss"] for b in batches(session, 15)])
        assert next(state.model.parameters()).dtype == torch.float32
    assert np.abs(np.subtract(*losses)).max() < 0.05
    assert losses[0] != losses[1]


def test_products_in_8_bits_are_refused_without_a_gpu_and_named_with_one(tmp_path, monkeypatch):
    fp8 = pytest.importorskip("glassformer.kernels.cuda.training.fp8")
    float8 = ("machine.precision=bfloat16", "machine.products=float8", "machine.device=auto")
    session = tiny.session(tmp_path, *float8, "model.d_model=48", "loop.steps=4", "loop.log_every=1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA GPU, and this run is on the cpu"):
        prepare_state(session.run)
    monkeypatch.setattr(fp8, "unsupported_device", lambda device: None)
    events = []
    state = train(session.run, session.data, events.append)
    assert type(state.model.blocks[0].feedforward).__name__ == "Float8Dense"
    assert events[0]["precision"] == "bfloat16, matmuls of blocks in float8"
    assert events[-1]["step"] == 4


def test_batch_moves_and_splits():
    ids = torch.arange(12).view(3, 4)
    batch = Batch(ids, ids, ids)
    assert torch.equal(batch.rows(1, 3).source, ids[1:])
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.parametrize("chunked", [False, True])
def test_evaluation_runs_in_the_parts_of_a_step(tmp_path, monkeypatch, chunked):
    """The loss is that of the whole batch at once; no more sequences run together than in a step."""
    if chunked:
        monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", 2)
    sizes, found = [], []
    for accumulate in (1, 4):
        session = tiny.session(tmp_path, "loop.batch=8", f"loop.accumulate={accumulate}")
        state = prepare_state(session.run)
        hook = state.model.blocks[0].register_forward_pre_hook(lambda module, given: sizes.append(len(given[0])))
        found.append(evaluate(state, session.data.validation(session.run)))
        hook.remove()
        assert max(sizes) == 8 // accumulate
        sizes.clear()
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_evaluation_of_a_large_vocabulary_never_holds_all_logits(tmp_path, monkeypatch):
    session = tiny.session(tmp_path, "loop.batch=8")
    state, validation = prepare_state(session.run), session.data.validation
    wanted = evaluate(state, validation(session.run))
    vocabulary, chunks = session.run.model.vocab_size, []
    monkeypatch.setattr("glassformer.training.objective.CHUNKED_FROM", 2)
    monkeypatch.setattr("glassformer.training.chunked_loss.CHUNK_BYTES", 4 * vocabulary * 16)
    linear = torch.nn.functional.linear

    def spy(x, weight, bias=None):
        if len(weight) == vocabulary:
            chunks.append(len(x))
        return linear(x, weight, bias)

    monkeypatch.setattr("glassformer.training.chunked_loss.F.linear", spy)
    assert evaluate(state, validation(session.run)) == pytest.approx(wanted, rel=1e-6)
    assert max(chunks) == 16


@pytest.mark.parametrize("first", [False, True])
def test_fresh_weights_are_written_only_if_asked_for(tmp_path, first):
    """Their loss is reported, but they are not the best so far: that folder would not exist."""
    session = tiny.session(tmp_path, "loop.keep=9", f"checkpoint.first={str(first).lower()}")
    events = []
    train(session.run, session.data, listen=events.append)
    held = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert held[0] == ("step-00000000" if first else "step-00000005")
    start, second = [event for event in events if event["event"] == "validation"][:2]
    assert (start["step"], start["best"], second["best"]) == (0, first, True)
