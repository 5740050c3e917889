"""`gf.train` returns what it trained; `gf.evaluate` is the cross-entropy, counted exactly."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import glassformer as gf
from glassformer.config import ConfigError, to_toml
from glassformer.training import open_session, read_run
from glassformer.training.api import Overrides, evaluate, train
from glassformer.training.checkpoint import CheckpointError
from glassformer.training.loop import evaluate as evaluate_state
from glassformer.training.loop import prepare_state
from glassformer.training.run import Run, run_to_dict
from glassformer.training.sections import Loop
from tests.training import tiny

CONFIG = gf.presets.nano(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=61, max_len=16)


@pytest.fixture(scope="module")
def model():
    return gf.build(CONFIG, seed=3)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_file(folder: Path, *changes: str) -> Path:
    path = folder / "run.toml"
    path.write_text(to_toml(run_to_dict(tiny.session(folder, *changes).run)))
    return path


def test_overrides_name_the_parts_of_a_run():
    parts = {field.name for field in dataclasses.fields(Run)}
    assert set(Overrides.__annotations__) == parts - {"start"}  # an argument of its own, which takes a model too


def test_train_returns_the_last_model_with_its_tokenizer_and_events(tmp_path):
    heard = []
    result = train(run_file(tmp_path), listen=heard.append, loop={"steps": 6}, schedule={"warmup": 1}, seed=4)
    assert heard == result.history
    assert result.folder == tmp_path / "run"
    lines = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    assert lines == result.history
    assert [event["step"] for event in lines if event["event"] == "validation"] == [0, 5, 6]
    last = gf.load(result.folder / "last").state_dict()
    assert all(torch.equal(last[name], tensor) for name, tensor in result.model.state_dict().items())
    assert not result.model.training
    assert result.tokenizer.decode(result.tokenizer.encode("the cat").ids) == "the cat"
    assert "seed = 4" in (result.folder / "run.toml").read_text()
    assert gf.generate(result.model, "the", max_new_tokens=2).texts[0].startswith("the")
    with pytest.raises(CheckpointError, match="already holds a run"):
        train(tmp_path / "run.toml")


def test_a_run_and_its_file_and_its_overrides_train_the_same(tmp_path):
    path = run_file(tmp_path, "loop.steps=3", "schedule.warmup=1")
    run = read_run(path.read_text())
    results = [
        train(path, out=tmp_path / "a"),
        train(run, out=str(tmp_path / "b")),
        train(dataclasses.replace(run, loop=Loop(steps=500)), loop=run.loop, out=str(tmp_path / "c")),
    ]
    losses = [[e["loss"] for e in r.history if e["event"] == "validation"] for r in results]
    assert losses[0] == losses[1] == losses[2]


def test_a_text_is_trained_on_with_the_default_settings(tmp_path):
    corpus = tiny.corpus(tmp_path)
    small = read_run("", tiny.SMALL)
    result = train(
        corpus, model=small.model, loop=small.loop, machine=small.machine, data={"cache": str(tmp_path / "t")}
    )
    assert [event["text"] for event in result.history if event["event"] == "note"]  # the warm-up was shortened
    assert result.folder == Path("runs/corpus-1")
    assert result.model.config.n_layers == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"lop": {"steps": 5}}, "lop is not a part of a run. Did you mean loop"),
        ({"loop": {"step": 5}}, "loop.step is not a field. Did you mean steps"),
        ({"loop": 5}, "loop must be a table"),
        ({"seed": "x"}, "seed='x' must be a whole number"),
    ],
)
def test_wrong_overrides_are_one_sentence(overrides, words):
    with pytest.raises(ConfigError, match=words):
        train(Run(CONFIG), **overrides)


def test_a_missing_run_file_is_one_sentence():
    with pytest.raises(ConfigError, match=r"nothing.toml does not exist: give a run file"):
        train("nothing.toml")


@torch.no_grad()
def by_hand(model, tokens: list[int], context: int, stride: int) -> tuple[float, list[list[float]]]:
    """Cross-entropies, one target at a time: of token t, in the window that scores it first."""
    windows, done, start, last = [], 0, 0, len(tokens) - 1 - context
    while done < len(tokens) - 1:
        start = min(start, last)
        seen = tokens[start : start + context]
        losses = []
        for target in range(done + 1, start + context + 1):
            logits = model(torch.tensor([seen[: target - start]]))[0, -1].double()
            losses.append(float(logits.logsumexp(0) - logits[tokens[target]]))
        windows.append(losses)
        done, start = start + context, start + stride
    flat = [loss for losses in windows for loss in losses]
    assert len(flat) == len(tokens) - 1
    return sum(flat) / len(flat), windows


@pytest.mark.parametrize(("context", "stride"), [(16, None), (16, 16), (7, 3), (7, 7), (7, 100), (5, 1)])
def test_evaluate_is_the_cross_entropy_of_every_token_but_the_first(model, context, stride):
    tokens = np.random.default_rng(0).integers(0, 61, 41).tolist()
    found = evaluate(model, tokens, context=context, stride=stride)
    stride = context // 2 if stride is None else min(stride, context)
    mean, windows = by_hand(model, tokens, context, stride)
    assert (found.tokens, found.context, found.stride) == (40, context, stride)
    assert found.nats_per_token == pytest.approx(mean, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
    squares = sum((sum(losses) - mean * len(losses)) ** 2 for losses in windows)
    expected = math.sqrt(len(windows) / (len(windows) - 1) * squares) / 40
    assert found.standard_error == pytest.approx(expected, rel=1e-3)
    assert found.bits_per_byte is None


def test_a_text_shorter_than_the_context_is_one_window(model):
    found = evaluate(model, torch.tensor([5, 6, 7]))
    assert (found.tokens, found.context, found.standard_error) == (2, 2, None)
    assert found.nats_per_token == pytest.approx(by_hand(model, [5, 6, 7], 2, 2)[0], rel=1e-5)


def test_evaluate_agrees_with_the_validation_of_training(tmp_path):
    session = tiny.session(tmp_path, "loop.eval_batches=10000")
    state = prepare_state(session.run)
    expected = evaluate_state(state, session.data.validation(session.run))
    state.model.train()
    found = evaluate(state.model, session.data.val, context=session.run.context, stride=session.run.context)
    assert state.model.training
    assert found.nats_per_token == pytest.approx(expected, rel=1e-6)
    assert found.tokens == len(session.data.val) - 1


def test_bits_per_byte_count_the_bytes_of_the_targets(tmp_path):
    session = open_session(
        read_run(
            "", (*tiny.SMALL, f'data.corpus="{text_of_two_byte_characters(tmp_path)}"', f'data.cache="{tmp_path}/t"')
        )
    )
    tokenizer = Tokenizer.from_str(session.data.tokenizer.to_json())
    model = gf.build(session.run.model)
    text = "äöa bö"
    found = evaluate(model, text, tokenizer)
    assert (found.tokens, found.n_bytes) == (5, 7)
    assert found.bits_per_byte == pytest.approx(found.nats_per_token * 5 / math.log(2) / 7)
    assert evaluate(model, tokenizer.encode(text).ids, tokenizer) == found


def text_of_two_byte_characters(folder: Path) -> Path:
    path = folder / "umlauts.txt"
    path.write_text("aä bö " * 500, encoding="utf-8")
    return path


def test_evaluate_refuses_what_it_cannot_score(model):
    for arguments, words in (
        (("text",), "a text needs a tokenizer"),
        (([1],), "has no target"),
        (([],), "has no target"),
        (([1, 61],), "token id 61 is outside the model's vocabulary of 61"),
        (([[1, 2]],), "not one sequence of ids"),
        (([0.5, 1.5],), "not one sequence of ids"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluate(model, *arguments)
    with pytest.raises(ConfigError, match="context=17 must be between 1 and the model's max_len, 16"):
        evaluate(model, list(range(30)), context=17)
    with pytest.raises(ConfigError, match="stride=0 must be at least 1"):
        evaluate(model, list(range(30)), stride=0)
    encoder = gf.build(gf.presets.bert_base(n_layers=1, d_model=16, n_heads=2, d_ff=32, vocab_size=61))
    with pytest.raises(ConfigError, match="EncoderLM does not predict"):
        evaluate(encoder, [1, 2, 3])
