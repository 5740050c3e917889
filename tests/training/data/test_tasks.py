"""Synthetic tasks: they ask what can be known, rows depend on (seed, step, row) alone, the lines to beat are right."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.config import ConfigError, to_toml
from glassformer.training import checkpoint, open_session, read_run, resume_session, train
from glassformer.training.data.batches import IGNORED
from glassformer.training.data.tasks import TASKS, Copy, Listed, Markov, ModularAddition, Repeat, Stream, TaskData
from glassformer.training.run import run_to_dict
from tests.sampled import examples

SMALL = (
    "model.n_layers=1",
    "model.d_model=12",
    "model.n_heads=3",
    "model.d_ff=24",
    "model.max_len=12",
    "loop.steps=8",
    "loop.batch=6",
    "loop.eval_every=4",
    "loop.eval_batches=2",
    "loop.checkpoint_every=4",
    "schedule.kind=constant",  # so that a run made longer takes the same steps
    "schedule.warmup=2",
    "machine.device=cpu",
    "machine.precision=float32",
)
FIT = {"repeat": ("task.shortest=3", "task.longest=5"), "modular-addition": ("task.p=5",), "copy": (), "markov": ()}


def run_of(name, *changes):
    return read_run("", (*SMALL, f"data.corpus=task:{name}", *FIT[name], *changes))


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_a_function_of_seed_and_step_and_ranks_share_them(name):
    run, data = run_of(name), TaskData(run_of(name).task)
    for step in (0, 5):
        whole = data.order(run).batch(step)
        again = data.order(run).batch(step)
        shares = [data.order(run, rank, 3).batch(step) for rank in range(3)]
        for part, same, pieces in zip(whole, again, zip(*shares, strict=True), strict=True):
            assert torch.equal(part, same)
            assert torch.equal(part, torch.cat(pieces))
    first, later = data.order(run).batch(0)[0], data.order(run).batch(1)[0]
    assert not torch.equal(first, later)
    other = TaskData(run.task).order(dataclasses.replace(run, seed=1)).batch(0)[0]
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", TASKS)
def test_inputs_and_targets_fit_the_vocabulary_and_each_other(name):
    run, data = run_of(name), TaskData(run_of(name).task)
    for inputs, targets in (data.order(run).batch(0), next(iter(data.validation(run)))):
        assert inputs.shape == targets.shape == (6, run.context)
        assert inputs.dtype == targets.dtype == torch.int64
        assert 0 <= int(inputs.min()) <= int(inputs.max()) < data.tokenizer.vocab_size
        asked = targets[:, :-1] != IGNORED
        assert torch.equal(targets[:, :-1][asked], inputs[:, 1:][asked])
        assert (targets != IGNORED).any(1).all()


@pytest.mark.parametrize("name", ["repeat", "copy", "markov"])
def test_validation_rows_are_fixed_and_not_those_of_training(name):
    run, data = run_of(name), TaskData(run_of(name).task)
    batches = [inputs for inputs, _ in data.validation(run)]
    assert len(batches) == run.loop.eval_batches
    assert all(torch.equal(a, b) for a, (b, _) in zip(batches, data.validation(run), strict=True))
    trained = {tuple(row) for step in range(50) for row in data.order(run).batch(step)[0].tolist()}
    assert not trained & {tuple(row) for batch in batches for row in batch.tolist()}


@settings(max_examples=examples(50))
@given(shortest=st.integers(2, 7), more=st.integers(0, 5), room=st.integers(0, 9), seed=st.integers(0, 99))
def test_a_repeated_row_ends_with_its_block_twice_and_asks_for_the_second(shortest, more, room, seed):
    task = Repeat(vocab=50, shortest=shortest, longest=shortest + more)
    T = 2 * task.longest - 1 + room
    inputs, targets = Stream(task, T, 8, seed).batch(3)
    for row, asked in zip(inputs, targets, strict=True):
        places = torch.where(asked != IGNORED)[0]
        block = len(places) + 1  # its first token cannot be known
        assert shortest <= block <= task.longest
        assert places.tolist() == list(range(T + 1 - block, T))
        whole = torch.cat([row, asked[-1:]])
        assert torch.equal(whole[-block:], whole[-2 * block : -block])


def test_block_lengths_are_uniform():
    _, targets = Stream(Repeat(), 40, 11_000).batch(0)
    lengths = 1 + (targets != IGNORED).sum(1)
    counts = torch.bincount(lengths, minlength=19)[8:]
    assert counts.sum() == 11_000
    assert ((counts - 1000).abs() < 5 * math.sqrt(1000)).all()  # five standard deviations


@settings(max_examples=examples(30))
@given(T=st.integers(2, 20), seed=st.integers(0, 99), vary=st.booleans())
def test_a_copied_row_is_block_separator_block(T, seed, vary):
    inputs, targets = Stream(Copy(vocab=9, shortest=1 if vary else None), T, 8, seed).batch(0)
    for row, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        n = row.index(9)
        block = row[:n]
        assert [x for x in asked if x != IGNORED] == block
        assert asked[n : 2 * n] == block
        assert n == T // 2 or vary


def test_the_chain_has_the_entropies_that_were_published_for_it():
    lines = Markov().baselines()
    assert lines["entropy rate"] == pytest.approx(1.5247, abs=5e-5)
    assert lines["bigram"] == pytest.approx(3.0195, abs=5e-5)
    assert lines["unigram"] == pytest.approx(3.1717, abs=5e-5)


def test_drawn_chains_have_the_entropy_of_the_table():
    """20,000 rows of 12: the mean surprise under the true table is the entropy rate, within 5 standard errors."""
    from glassformer.training.data.tasks import _chain

    task = Markov(vocab=6, seed=3)
    table, pairs = _chain(task)
    assert pairs.sum() == pytest.approx(1)
    assert np.abs(np.einsum("xy,xyz->yz", pairs, table) - pairs).max() < 1e-15
    inputs, targets = (x.numpy() for x in Stream(task, 12, 20_000).batch(0))
    surprise = -np.log(table[inputs[:, :-1], inputs[:, 1:], targets[:, 1:]])
    by_row = surprise.mean(1)
    error = by_row.std() / math.sqrt(len(by_row))
    assert abs(by_row.mean() - task.baselines()["entropy rate"]) < 5 * error
    assert (targets[:, 0] == IGNORED).all()


@given(p=st.integers(2, 12), fraction=st.floats(0.3, 0.7), seed=st.integers(0, 9))
def test_every_sum_is_trained_on_or_judged_by_never_both(p, fraction, seed):
    task = ModularAddition(p, fraction)
    train_rows, left = task.split(seed)
    assert len(train_rows) == task.n_train
    rows = np.concatenate([train_rows, left])
    assert len({(a, b) for a, b, _, _ in rows.tolist()}) == p * p == len(rows)
    assert ((rows[:, 0] + rows[:, 1]) % p == rows[:, 3]).all()
    assert (rows[:, 2] == p).all()


def test_a_batch_as_large_as_the_list_is_all_of_it_every_step():
    rows, _ = ModularAddition(7, 0.5).split(0)
    for step in (0, 1, 9):
        inputs, targets = Listed(rows, len(rows)).batch(step)
        assert sorted(map(tuple, inputs.tolist())) == sorted(map(tuple, rows[:, :3].tolist()))
        assert torch.equal((inputs[:, 0] + inputs[:, 1]) % 7, targets[:, -1])
        assert (targets[:, :-1] == IGNORED).all()
    seen = [tuple(r) for step in range(12) for r in Listed(rows, 2).batch(step)[0].tolist()]
    assert len(set(seen)) == len(seen) == 24  # a round of 24 rows in twelve steps of two


@pytest.mark.parametrize("name", TASKS)
def test_a_run_with_a_task_reads_back_as_itself(name):
    run = run_of(name)
    assert run.task.kind == name
    assert read_run(to_toml(run_to_dict(run))) == run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (("data.corpus=task:repaet",), "'task:repaet' names no task. Did you mean task:repeat"),
        (("data.corpus=task:zzz",), "Use one of repeat, copy, markov, modular-addition"),
        (("data.corpus=task:repeat", "task.longst=9"), "task.longst is not a field. Did you mean longest"),
        (("data.corpus=task:repeat", "task.longest=33"), "use a loop.context of at least 65"),
        (("data.corpus=task:repeat", "task.shortest=30"), "task.shortest=30 must be at least 2"),
        (("data.corpus=task:repeat", "task.vocab=9000"), "task.vocab=9000 exceeds"),
        (("data.corpus=task:repeat", "task=3"), "task must be a table"),
        (("data.corpus=task:repeat", "task.kind=copy"), "task.kind='copy', but data.corpus='task:repeat'"),
        (("task.vocab=9",), "[task] is for a synthetic task"),
        (("data.corpus=task:markov", "task.concentration=0"), "task.concentration=0.0 must be positive"),
        (("data.corpus=task:markov", "task.vocab=1"), "task.vocab=1 must be between 2 and 200"),
        (("data.corpus=task:modular-addition", "task.p=1"), "task.p=1 must be between"),
        (("data.corpus=task:modular-addition", "task.fraction=1.0"), "task.fraction=1.0 must be between 0 and 1"),
        (("data.corpus=task:modular-addition", "loop.context=5"), "have 3 tokens, so leave it out"),
        (("data.corpus=task:copy", "task.shortest=40"), "need a loop.context of at least 80"),
        (("data.corpus=task:copy", "model.preset=bert_base", "loop.context=8"), "use a decoder"),
    ],
)
def test_tasks_that_cannot_be_are_refused_in_words(changes, words):
    with pytest.raises(ConfigError) as caught:
        read_run("", changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TASKS)
def test_a_task_trains_and_resumes_bit_for_bit(tmp_path, name):
    def out(folder):
        return f'out="{tmp_path / folder}"'

    session = open_session(run_of(name, out("whole")))
    assert session.run.model.vocab_size == session.data.tokenizer.vocab_size
    events = []
    straight = train(session.run, session.data, events.append)
    start = events[0]
    assert start["task"] == name
    assert start["validation_tokens"] > 0

    half = open_session(run_of(name, out("half")))
    train(dataclasses.replace(half.run, loop=dataclasses.replace(half.run.loop, steps=4)), half.data)
    resumed = resume_session(str(tmp_path / "half"), ("loop.steps=8",))
    assert resumed.run.task == session.run.task
    assert resumed.resume[0]["step"] == 4
    state = train(resumed.run, resumed.data, resume=resumed.resume)
    assert state.step == straight.step == 8
    for name_of, value in straight.model.state_dict().items():
        assert torch.equal(value, state.model.state_dict()[name_of]), name_of
    other = "task.p=6" if name == "modular-addition" else "task.vocab=9"
    with pytest.raises(checkpoint.CheckpointError, match="keeps its model and data"):
        resume_session(str(tmp_path / "half"), ("loop.steps=9", other))


def test_the_lines_to_beat_of_a_task_are_those_it_knows():
    assert TaskData(Markov()).baselines(24) == Markov().baselines()
    assert TaskData(Repeat()).baselines(40) == {}
