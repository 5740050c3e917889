"""`glass train --chat` as a user meets it: from conversations to a model that answers them."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.training import open_session, read_run
from glassformer.training.loop import prepare_state, train_step
from tests import folders
from tests.chat import models
from tests.cli.asking import run, settings

ANIMALS = {"cat": "milk", "dog": "bones", "cow": "grass", "hen": "corn", "pig": "roots", "fox": "mice", "owl": "voles"}
ANIMALS |= {"bee": "nectar", "ant": "crumbs", "elk": "bark"}
SMALL = ("model.d_model=64", "model.n_layers=2", "model.max_len=128", "loop.batch=8", "loop.sample_every=0")


def dialogues(count):
    found = []
    for animal, food in ANIMALS.items():
        first = [("user", f"What does the {animal} eat?"), ("assistant", f"The {animal} eats {food}.")]
        second = [("user", f"Who eats {food}?"), ("assistant", f"That is the {animal}.")]
        second += [("user", "Are you sure?"), ("assistant", f"Yes, the {animal} it is.")]
        found += [[{"role": role, "content": text} for role, text in talk] for talk in (first, second)]
    return found[:count]


def write(folder, talks):
    path = folder / "talks.jsonl"
    path.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def answers(capsys, monkeypatch, model, talks):
    """What `glass chat` answers to the questions of each conversation."""
    lines = [line for talk in talks for line in (*(m["content"] for m in talk if m["role"] == "user"), "/reset")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    code, out, err = run(capsys, "chat", "--model", model, "--temperature", "0", "--json")
    assert (code, err) == (0, "")
    return [json.loads(line)["assistant"] for line in out.splitlines()]


@pytest.mark.parametrize(("count", "steps"), [(2, 60), pytest.param(20, 200, marks=pytest.mark.slow)])
def test_conversations_that_were_learned_are_answered_word_for_word(capsys, monkeypatch, tmp_path, count, steps):
    talks = dialogues(count)
    path = write(tmp_path, talks)
    more = (f"loop.steps={steps}", f"chat.validation='{path}'", "optim.lr=3e-3", f"loop.eval_every={steps}")
    code, out, err = run(capsys, "train", "--chat", path, "--out", "run", *settings(*SMALL, *more))
    assert code == 0
    assert "glass chat --model run/best" in out
    assert f"note: {2 * count} rows with " in err
    wanted = [m["content"] for talk in talks for m in talk if m["role"] == "assistant"]
    assert answers(capsys, monkeypatch, "run/best", talks) == wanted


def test_show_prints_what_is_learned_and_trains_nothing(capsys, tmp_path):
    path = write(tmp_path, dialogues(6))
    code, out, err = run(capsys, "train", "--chat", path, "--show", "2", *settings("model.max_len=128"))
    assert code == 0
    assert out.count("⟦") == out.count("⟧") >= 2
    assert "of which" in err
    assert not Path("runs").exists()


def test_a_resumed_run_gives_the_same_bytes(capsys, tmp_path):
    path = write(tmp_path, dialogues(8))
    more = ("loop.steps=8", "loop.checkpoint_every=4", "loop.keep=9", "model.dropout=0.1", "machine.compile='no'")
    code, _, _ = run(capsys, "train", "--chat", path, "--out", "run", *settings(*SMALL, *more, "schedule.warmup=1"))
    assert code == 0
    before = (Path("run") / "last" / "model.safetensors").read_bytes()
    code, _, _ = run(capsys, "train", "--resume", "run/checkpoints/step-00000004")
    assert code == 0
    last = (Path("run") / "last").resolve()
    assert last.name == "step-00000008-1"
    assert (last / "model.safetensors").read_bytes() == before
    assert (last / "chat_template.jinja").exists()


def test_accumulation_over_conversations_of_unequal_length_equals_the_large_batch(tmp_path):
    path, curves = write(tmp_path, dialogues(20)), []
    for parts in (1, 4):
        changes = (f"data.corpus='{path}'", "chat.format='auto'", f"loop.accumulate={parts}", "loop.steps=5", *SMALL)
        session = open_session(read_run("", (*changes, "model.dropout=0.0", "schedule.warmup=0")))
        state, order = prepare_state(session.run), session.data.order(session.run)
        targets = [
            int((batch.targets[row : row + 2] != -100).sum()) for batch in [order.batch(0)] for row in (0, 2, 4, 6)
        ]
        assert len(set(targets)) > 1
        curves.append([train_step(state, order.batch(step))["loss"] for step in range(5)])
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)


@pytest.mark.parametrize("has_template", [True, False])
def test_a_model_is_fine_tuned_on_conversations_and_exported(capsys, tmp_path, has_template):
    """With its own template, or with ChatML and two more tokens; the result works in transformers."""
    start = models.write(tmp_path / "start", style="headers") if has_template else folders.write(tmp_path / "start")
    path = write(tmp_path, dialogues(4))
    # a context of 64 or 96 tokens of this small tokenizer cuts the longer conversations
    small = ("loop.steps=3", "loop.batch=2", "chat.too_long='cut'", "schedule.warmup=1", "machine.compile='no'")
    code, _, err = run(capsys, "train", "--from", start, "--chat", path, "--out", "run", *settings(*small))
    assert code == 0, err
    tokenizer = gf.load_tokenizer("run/last")
    end = tokenizer.token_to_id("<|eot|>" if has_template else "<|im_end|>")
    assert end in gf.load("run/last").config.special.eos
    code, _, err = run(capsys, "convert", "run/last", "exported", "--to", "hf")
    assert code == 0, err
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained("exported")
    from glassformer.chat.render import load_renderer

    messages = dialogues(1)[0]
    wanted = load_renderer("run/last").prompt(messages[:1])
    assert theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"] == wanted
    model = transformers.AutoModelForCausalLM.from_pretrained("exported")
    ids = torch.tensor([wanted])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, gf.load("run/last")(ids), atol=1e-4, rtol=1e-4)
    ends = model.generation_config.eos_token_id
    assert end in (ends if isinstance(ends, list) else [ends])


def test_adapters_are_trained_on_conversations(capsys, monkeypatch, tmp_path):
    start = models.write(tmp_path / "start", style="headers")
    base = folders.write(tmp_path / "base")
    path = write(tmp_path, dialogues(4))
    small = settings("loop.steps=3", "loop.batch=2", "chat.too_long='cut'", "schedule.warmup=1", "machine.compile='no'")
    code, _, err = run(capsys, "train", "--from", start, "--lora", "2", "--chat", path, "--out", "run", *small)
    assert code == 0, err
    answered = []
    for words in (["--model", "run/last"], ["--model", start, "--adapter", "run/last"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who eats milk?\n"))
        answered.append(run(capsys, "chat", *words, "--temperature", "0", "--max-new-tokens", "6"))
    assert answered[0] == answered[1]
    engine = "engine: torch on cpu in float32 (GLASSFORMER_NATIVE=0 is set)\n"
    assert (answered[0][0], answered[0][2]) == (0, engine)
    lora = ["train", "--from", base, "--lora", "2", "--chat", path, "--out", "other", *small]
    for chosen in ([], settings("chat.template='chatml'")):
        code, _, err = run(capsys, *lora, *chosen)
        assert (code, "ChatML, the template for base, needs the tokens" in err) == (2, True)
        assert "set chat.template to plain" in err
    code, _, err = run(capsys, *lora, *settings("chat.template='plain'"))
    assert code == 0, err
    assert "Assistant: " in Path("other/last/chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--chat", "nothing.jsonl"], "nothing.jsonl does not exist: give a JSONL or Parquet file"),
        (["--chat", "talks.jsonl", "--resume", "run"], "a resumed run has its own data: leave out --chat"),
        (
            ["text.txt", "--chat", "talks.jsonl"],
            "text.txt is a text to train on and --chat talks.jsonl are conversations",
        ),
        (["text.txt", "--show", "2"], "--show 2 prints conversations, and this run has none"),
        (["--chat", "text.txt"], "text.txt is not a data file that is known by its name"),
        (["--chat", "bad.jsonl"], "bad.jsonl, line 2, is not JSON"),
        (["--chat", "talks.jsonl", "--set", "chat.pak=true"], "pak"),
        (["--chat", "talks.jsonl", "--set", "loop.context=3"], "no row of talks.jsonl is left for training"),
    ],
)
def test_mistakes_are_one_sentence(capsys, tmp_path, words, sentence):
    write(tmp_path, dialogues(4))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"messages": dialogues(1)[0]}) + "\n{\n")
    code, out, err = run(capsys, "train", *words, *settings("model.max_len=64") if "--resume" not in words else [])
    assert (code, out) == (2, "")
    assert sentence in err
    assert len([line for line in err.strip().splitlines() if not line.startswith("note: ")]) == 1
