"""Start from a model: its config and tokenizer, defaults, hash, longer tables, and what is refused."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.loop import evaluate, prepare_state
from glassformer.training.tuning.start import hash_weights, load_start, stored
from tests.training import tiny
from tests.training.test_loop import files
from tests.training.tuning.models import CHARACTERS, PLAIN, RUN, character_model, transformers_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return character_model(tmp_path_factory.mktemp("base") / "model")


def session(folder, model, *changes, name="run"):
    where = (f'data.corpus="{tiny.corpus(folder)}"', f'data.cache="{folder / "tokens"}"', f'out="{folder / name}"')
    return open_session(read_run("", (f'start.model="{model}"', *RUN, *PLAIN, *where, *changes)))


def test_the_defaults_of_fine_tuning(base):
    run = read_run("", (f'start.model="{base}"',))
    assert (run.optim.lr, run.optim.weight_decay) == (3e-5, 0.01)
    assert (run.schedule.kind, run.schedule.warmup) == ("constant", 10)
    assert run.data.tokenizer == "start"
    assert run.model == gf.load(base).config
    assert read_run("", (f'start.model="{base}"', "lora.rank=4")).optim.lr == 3e-4
    assert read_run("", (f'start.model="{base}"', "optim.lr=1e-2", "model.dropout=0.0")).optim.lr == 1e-2


def test_the_loss_before_the_first_step_is_that_of_the_model(base, tmp_path):
    made = session(tmp_path, base, "loop.eval_batches=100000", "loop.context=16")
    events = []
    train(made.run, made.data, events.append)
    first = next(event["loss"] for event in events if event["event"] == "validation")
    score = gf.evaluate(gf.load(base), made.data.val, stride=16)
    assert abs(first - score.nats_per_token) < 1e-6
    assert next(event for event in events if event["event"] == "validation")["step"] == 0


def test_a_run_records_the_model_and_refuses_another(base, tmp_path):
    made = session(tmp_path, base)
    train(made.run, made.data)
    recorded = read_run((tmp_path / "run" / "run.toml").read_text())
    assert recorded.start.model == str(base)
    assert recorded.start.sha256 == hash_weights(gf.load(base).state_dict())
    assert recorded == made.run
    other = character_model(tmp_path / "other", init_std=0.3)
    text = (tmp_path / "run" / "run.toml").read_text().replace(str(base), str(other))
    with pytest.raises(ConfigError, match="has other weights than the run was started from"):
        open_session(read_run(text))
    edited = (tmp_path / "run" / "run.toml").read_text().replace("d_ff = 48", "d_ff = 64")
    with pytest.raises(ConfigError, match=r"model\.feedforward=.* is not that of start\.model"):
        open_session(read_run(edited))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("model.n_layers=3",), "model.n_layers=3 contradicts start.model"),
        (("model.position.base=500.0",), "scales rotary positions, and start.model has learned positions"),
        (("model.max_len=8",), "model.max_len=8 is less than the 16 of start.model"),
        (("data.tokenizer=byte",), "is another tokenizer than that of start.model"),
        (("data.corpus=task:copy",), "has tokens of its own"),
        (('optim.freeze=["embed"]', "lora.rank=2"), "leave out optim.freeze"),
        (("optim.kind=muon", "lora.rank=2"), "needs optim.kind='adamw'"),
        (("machine.parallel=fsdp", "lora.quantize=nf4", "lora.rank=2"), "nf4"),
        (("lora.quantize=nf4", "machine.compile=yes"), "use 'auto' or 'no'"),
        (("lora.targets=q",), "must be 'linear' or a list"),
        (("lora.rank=0",), "rank=0 must be"),
    ],
)
def test_what_a_run_with_a_start_cannot_change(base, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_run("", (f'start.model="{base}"', *changes))


def test_adapters_and_added_tokens_need_a_model():
    with pytest.raises(ConfigError, match="adapts an existing model"):
        read_run("", ("lora.rank=4",))
    with pytest.raises(ConfigError, match="extends the tokenizer of an existing model"):
        read_run("", ('data.add_tokens=["<x>"]',))
    with pytest.raises(ConfigError, match="cannot be used"):
        read_run("", ("start.model=no/such/model/anywhere",))


def test_a_model_without_tokenizer_needs_one_that_fits(tmp_path):
    folder = gf.save(gf.build("nano"), tmp_path / "model", format="glass")
    with pytest.raises(ConfigError, match=r"has no tokenizer: set data\.tokenizer"):
        read_run("", (f'start.model="{folder}"',))
    with pytest.raises(ConfigError, match=r"'byte' has 256 tokens, but start\.model only 65"):
        session(tmp_path, folder, "data.tokenizer=byte")
    assert session(tmp_path, folder, "data.tokenizer=char").run.model.vocab_size == 65


def test_added_tokens_fill_the_table_before_it_grows(base, tmp_path):
    old = gf.load(base)
    assert session(tmp_path, base).run.start.n_tokens == len(CHARACTERS)
    one = session(tmp_path, base, 'data.add_tokens=["<user>"]').run
    assert one.start.n_tokens == len(CHARACTERS) + 1
    assert one.model.vocab_size == old.config.vocab_size == len(CHARACTERS) + 1
    made = session(tmp_path, base, 'data.add_tokens=["<user>", "<end>"]')
    model = load_start(made.run, "cpu")
    table, before, n = model.embed.tokens.weight, old.embed.tokens.weight, len(CHARACTERS)
    assert table.shape[0] == n + 2
    assert torch.equal(table[:n], before[:n])
    assert not torch.equal(table[n], before[n])
    spread = before[:n].std(0)
    assert bool(((table[n:] - before[:n].mean(0)).abs() < 5 * spread).all())
    assert torch.equal(table, load_start(made.run, "cpu").embed.tokens.weight)
    marked = session(tmp_path, base, 'data.add_tokens=["a"]')
    assert "'a' of the vocabulary becomes a special token and keeps its id" in marked.notes
    assert torch.equal(load_start(marked.run, "cpu").embed.tokens.weight, before)
    train(made.run, made.data)
    tokenizer = gf.load_tokenizer(tmp_path / "run" / "last")
    assert tokenizer.encode("cat<end>").ids[-1] == n + 1


def test_a_longer_position_table_is_interpolated(base, tmp_path):
    made = session(tmp_path, base, "model.max_len=31")
    old, new = gf.load(base).decoder.position.weight, load_start(made.run, "cpu").decoder.position.weight
    assert torch.equal(new[:16], old)
    assert torch.allclose(new[30], old[15])
    assert torch.allclose(new[25], (old[12] + old[13]) / 2, atol=1e-6)
    assert made.notes == ("the position table grows from 16 to 31 rows, which are interpolated",)


def test_rotary_positions_are_scaled_and_saved(tmp_path):
    _, folder = transformers_model("llama", tmp_path / "llama")
    plain = session(tmp_path, folder, "model.max_len=64")
    assert "set model.position.scaling" in plain.notes[0]
    scaled = session(
        tmp_path, folder, "model.max_len=64", "model.position.scaling.kind=linear", "model.position.scaling.factor=2.0"
    )
    assert scaled.notes == ()
    train(scaled.run, scaled.data)
    out = gf.save(gf.load(tmp_path / "run" / "last"), tmp_path / "hf")
    written = json.loads((out / "config.json").read_text())
    assert written["max_position_embeddings"] == 64
    assert "'factor': 2.0" in str(written)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["gpt2", "bert", *(pytest.param(k, marks=SLOW) for k in ("llama", "qwen2", "t5", "opt"))]
)
def test_families_train_and_save_back(kind, tmp_path):
    import transformers

    original, folder = transformers_model(kind, tmp_path / kind)
    made = session(tmp_path, folder, "optim.lr=0.01", "loop.context=12")
    train(made.run, made.data)
    model = gf.load(tmp_path / "run" / "last")
    out = gf.save(model, tmp_path / "hf")
    again = type(original).from_pretrained(out).eval()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == kind
    assert (out / "tokenizer_config.json").exists()
    assert len(transformers.AutoTokenizer.from_pretrained(out)) > 5
    tokens = torch.randint(4, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        if kind == "t5":
            theirs, ours = again(input_ids=tokens, decoder_input_ids=tokens[:, :5]).logits, model(tokens, tokens[:, :5])
            before = original(input_ids=tokens, decoder_input_ids=tokens[:, :5]).logits
        else:
            theirs, ours, before = again(tokens).logits, model(tokens), original(tokens).logits
    assert float((theirs - ours).abs().max()) < 1e-5
    assert float((before - ours).abs().max()) > 1e-3


def test_an_encoder_is_masked_with_the_mask_token_of_its_tokenizer(tmp_path):
    _, folder = transformers_model("bert", tmp_path / "bert")
    run = session(tmp_path, folder).run
    assert run.loss.mask_token == 2
    assert run.model.vocab_size == 61


KILLED = """
import os, sys
from pathlib import Path
from glassformer.training import train
from tests.training.tuning.test_start import session
folder, base, *changes = sys.argv[1:]
made = session(Path(folder), base, *changes, name="killed")
def listen(event):
    if event["event"] == "validation" and event["step"] == 6:
        os.kill(os.getpid(), 9)
train(made.run, made.data, listen)
"""


def kill_at_6(folder, base, *changes):
    """Train in another process, which kills itself (kill -9) after step 6: before its checkpoint, after that of 4."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(folder), str(base), *changes]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == -9, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [pytest.param((), marks=SLOW), ('optim.freeze=["block.0"]',)])
def test_killed_and_resumed_equals_never_killed(tmp_path, freeze):
    """The same bytes as without the interruption, and without the model of [start]: the checkpoint is whole."""
    base = character_model(tmp_path / "base")
    changes = ("loop.steps=8", "loop.checkpoint_every=2", "optim.lr=0.01", *freeze)
    whole = session(tmp_path, base, *changes, name="whole")
    train(whole.run, whole.data)
    kill_at_6(tmp_path, base, *changes)
    base.rename(tmp_path / "moved")
    again = resume_session(str(tmp_path / "killed"))
    assert again.resume[0]["step"] == 4
    train(again.run, again.data, resume=again.resume)
    assert files(tmp_path / "whole" / "last") == files(tmp_path / "killed" / "last")


def test_a_model_in_memory_is_stored(base, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    model = gf.load(base)
    assert stored(model) == str(base)
    with torch.no_grad():
        model.embed.tokens.weight.mul_(2)
    other = stored(model)
    assert other != str(base)
    assert torch.equal(gf.load(other).embed.tokens.weight, model.embed.tokens.weight)
    assert gf.load_tokenizer(other) is not None


def test_train_takes_a_model(base, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "cache"))
    text = tiny.corpus(tmp_path)
    quick = {"loop": {"steps": 2, "batch": 2, "eval_batches": 1}, "out": tmp_path / "run", "machine": {"compile": "no"}}
    result = gf.train(text, start=gf.load(base), **quick)
    assert result.model.config == gf.load(base).config
    with pytest.raises(ConfigError, match="has a model of its own"):
        gf.train(gf.Run(gf.presets.nano()), start="bard")


def test_frozen_tensors_do_not_change(base, tmp_path):
    made = session(tmp_path, base, 'optim.freeze=["embed", "block.0", "norms"]', "optim.lr=0.01", "loop.steps=20")
    assert "the head is tied to the token table, so optim.freeze freezes both" in made.notes
    state = prepare_state(made.run)
    full = prepare_state(session(tmp_path, base, name="full").run)
    assert sum(p.numel() for p in state.parameters) < sum(p.numel() for p in full.parameters)
    done = train(made.run, made.data)
    held = sum(t.numel() for name, t in done.optimizer.state().items() if not name.endswith("/step"))
    assert held == 2 * sum(p.numel() for p in state.parameters), "two moments of what is trained, and nothing else"
    before, after = gf.load(base).state_dict(), done.model.state_dict()
    frozen = {name for name in before if "norm" in name or name.startswith(("embed.", "decoder.blocks.0."))}
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    kept = gf.load(tmp_path / "run" / "last").state_dict()
    assert all(torch.equal(kept[name], before[name]) for name in frozen)


def test_the_loss_is_evaluated_without_the_dropout_of_the_config(base, tmp_path):
    made = session(tmp_path, base)
    assert made.run.model.dropout == 0.1
    state = prepare_state(made.run)
    assert evaluate(state, made.data.val) == evaluate(state, made.data.val)
    assert read_run("", (f'start.model="{base}"', "model.dropout=0.0")).model.dropout == 0.0


@pytest.mark.slow
def test_a_start_from_bard_beats_a_start_from_nothing(tmp_path):
    """On another text (Python's manual), 200 steps from bard reach a lower loss than 200 steps from fresh weights."""
    import pydoc_data.topics

    known = set(gf.load_tokenizer("bard").get_vocab())
    text = "\n".join(pydoc_data.topics.topics.values())[:200_000]
    (tmp_path / "manual.txt").write_text("".join(c for c in text if c in known))
    shared = {"loop": {"steps": 200, "batch": 8, "context": 64, "eval_every": 200, "sample_every": 0}}
    tuned = gf.train(
        tmp_path / "manual.txt", start="bard", **shared, optim={"lr": 1e-3}, out=tmp_path / "tuned",
    )  # fmt: skip
    config = gf.load("bard").config
    fresh = gf.train(tmp_path / "manual.txt", model=config, **shared, optim={"lr": 1e-3}, out=tmp_path / "fresh")
    assert best(tuned) < best(fresh) - 0.1


def best(result):
    return min(event["loss"] for event in result.history if event["event"] == "validation")
