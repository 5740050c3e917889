"""From a data file to rows: the tokenizer and the template, what is learned, what is left out, and what is refused."""

import json

import numpy as np
import pytest

import glassformer as gf
from glassformer.chat.errors import ChatError
from glassformer.chat.render import load_renderer
from glassformer.chat.template import CHATML
from glassformer.config import ConfigError
from glassformer.training import open_session, read_run
from glassformer.training.data.chats import show
from glassformer.training.data.corpus import DataError
from tests import folders
from tests.chat import models


def row(question, answer, **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


ROWS = [row(f"what is {i}?", f"it is {i} and no other number") for i in range(12)]


def write(folder, rows=ROWS, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(json.dumps(one) for one in rows), encoding="utf-8")
    return path


def opened(path, *changes):
    corpus = f"data.corpus={json.dumps(str(path))}"
    small = ("model.n_layers=1", "model.d_model=32", "model.max_len=96", "loop.batch=4", "loop.steps=20")
    return open_session(read_run("", (corpus, "chat.format='auto'", *small, *changes)))


def learned_texts(data, rows):
    decode = data.renderer.tokenizer.decode
    return [decode(ids[mask].tolist(), skip_special_tokens=False) for one in rows for ids, mask in one.parts]


def test_answers_are_learned_and_the_template_is_chatml(tmp_path):
    session = opened(write(tmp_path))
    data = session.data
    assert (len(data.train), len(data.val)) == (11, 1)
    found = learned_texts(data, data.train) + learned_texts(data, data.val)
    assert sorted(found) == sorted(f"{one['messages'][1]['content']}<|im_end|>" for one in ROWS)
    assert data.renderer.template.source == CHATML
    assert session.run.model.special.eos == (data.renderer.tokenizer.token_to_id("<|im_end|>"),)
    assert session.run.model.vocab_size == data.tokenizer.vocab_size
    assert session.notes[0].startswith("12 rows with 12 answers and ")
    assert data.facts(session.run)["chat"]["rows"] == 12


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_any_tokenizer_of_the_run_serves(tmp_path, tokenizer):
    changes = (f"data.tokenizer='{tokenizer}'", *(["data.vocab_size=270"] if tokenizer == "bpe" else []))
    data = opened(write(tmp_path), *changes).data
    assert all(text.endswith("<|im_end|>") for text in learned_texts(data, data.train))
    again = opened(write(tmp_path), *changes).data
    assert again.tokenizer.to_json() == data.tokenizer.to_json()


def test_all_last_and_plain_text(tmp_path):
    talk = [*row("a", "b")["messages"], *row("c", "d")["messages"]]
    mixed = write(tmp_path, [{"messages": talk}, {"text": "plain <|im_end|> text"}, *ROWS])
    rows = opened(mixed, "chat.loss='last'", "data.validation=0.01")
    found = learned_texts(rows.data, rows.data.train) + learned_texts(rows.data, rows.data.val)
    assert "d<|im_end|>" in found
    assert "plain <|im_end|> text<|im_end|>" in found
    end = rows.data.renderer.tokenizer.token_to_id("<|im_end|>")
    (text,) = (ids for one in rows.data.train + rows.data.val for ids, mask in one.parts if mask.all())
    assert text.tolist().index(end) == len(text) - 1  # the end of the text, not what the text says
    data = opened(mixed, "chat.loss='all'").data
    assert all(mask.all() for one in data.train for _, mask in one.parts)


def test_validation_is_chosen_by_content_or_given(tmp_path):
    path, shuffled = write(tmp_path), write(tmp_path, ROWS[::-1], "other.jsonl")
    first, second = (sorted(learned_texts(s.data, s.data.val)) for s in (opened(path), opened(shuffled)))
    assert first == second
    doubled = opened(write(tmp_path, ROWS * 2, "doubled.jsonl"), "data.validation=0.3").data
    assert not set(learned_texts(doubled, doubled.train)) & set(learned_texts(doubled, doubled.val))
    given = opened(path, f"chat.validation={json.dumps(str(path))}")
    assert (len(given.data.train), len(given.data.val)) == (12, 12)
    assert "12 rows of the validation data are also training data" in given.notes


def test_long_rows_are_left_out_cut_or_refused_and_counted(tmp_path):
    path = write(tmp_path, [*ROWS, row("long", "so " * 60)])
    dropped = opened(path)
    assert dropped.data.summary.dropped == 1
    assert "1 row was left out, longer than the context of 96" in dropped.notes[0]
    cut = opened(path, "chat.too_long='cut'")
    assert max(len(ids) for one in cut.data.train + cut.data.val for ids, _ in one.parts) == 97
    assert "1 row was cut, longer than the context of 96" in cut.notes[0]
    with pytest.raises(ChatError, match=r"data.jsonl, line 13, has \d+ tokens, and the context is 96"):
        opened(path, "chat.too_long='error'")
    with pytest.raises(DataError, match=r"no row of .* is left for training"):
        opened(path, "loop.context=8")


@pytest.mark.parametrize(
    ("bad", "changes", "sentence"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, (), r"line 13, has no token to learn"),
        (row("x", ""), (), "line 13, message 2, is an empty answer"),
        ({"prompt": "x"}, (), "line 13, has the keys prompt"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, (), "line 13: chat.loss='assistant' needs conversations"),
        (row("x", "y"), ("chat.loss='dpo'",), "line 1: chat.loss='dpo' needs chosen and rejected answers"),
        (row("x", "y"), ("chat.template='/nothing.jinja'",), "chat.template='/nothing.jinja' cannot be read"),
        (row("x", "y"), ("chat.loss='half'",), "chat.loss='half' has the wrong type"),
        (row("x", "y"), ("data.tokenizer='nothing.json'",), r"the tokenizer nothing.json cannot be read"),
        (row("x", "y"), ("model.preset='bert_base'", "model.d_model=48"), "chat. needs a decoder"),
    ],
)
def test_what_cannot_be_learned_is_one_sentence(tmp_path, bad, changes, sentence):
    path = write(tmp_path, [*ROWS, bad])
    with pytest.raises((ChatError, ConfigError, DataError), match=sentence) as caught:
        opened(path, *changes)
    assert "\n" not in str(caught.value)


def test_a_template_of_the_run_is_used_and_its_errors_name_the_line(tmp_path):
    path, template = write(tmp_path), tmp_path / "own.jinja"
    turns = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}assistant:{% endif %}")
    data = opened(path, f"chat.template={json.dumps(str(template))}").data
    assert data.tokenizer.vocab_size == len(set(data.renderer.tokenizer.get_vocab().values()))
    assert learned_texts(data, data.train[:1])[0].endswith("and no other number\n")
    template.write_text("{{ raise_exception('no system please') }}")
    with pytest.raises(ChatError, match=r"data.jsonl, line 1: the chat template refuses these messages: no system"):
        opened(path, f"chat.template={json.dumps(str(template))}")


def test_conversations_are_packed_unless_the_run_says_no(tmp_path):
    assert opened(write(tmp_path), "model.window=16").data.packs
    assert not opened(write(tmp_path), "chat.pack=false").data.packs


def test_show_marks_what_is_learned(tmp_path):
    text = show(opened(write(tmp_path)).data, 1)
    assert "⟦it is " in text
    assert text.count("⟦") == 1
    assert "data.jsonl, line " in text


def test_a_model_with_a_template_keeps_it_and_its_tokens(tmp_path):
    start = models.write(tmp_path / "start", style="headers")
    path = write(tmp_path)
    session = open_session(
        read_run("", (f"start.model='{start}'", f"data.corpus='{path}'", "chat.format='auto'", "loop.steps=20"))
    )
    ids, mask = session.data.train[0].parts[0]
    renderer = load_renderer(start)
    messages = next(one["messages"] for one in ROWS if one["messages"][1]["content"] in renderer.tokenizer.decode(ids))
    wanted = renderer.render(messages)
    assert np.array_equal(ids, wanted.ids)
    assert np.array_equal(mask, wanted.mask)
    assert session.run.model.vocab_size == gf.load(start).config.vocab_size
    assert session.run.model.special.eos == tuple(renderer.ends)


def test_a_base_model_gets_the_two_tokens_of_chatml(tmp_path):
    start = folders.write(tmp_path / "base")
    size = gf.load_tokenizer(start).get_vocab_size()
    changes = (f"start.model='{start}'", f"data.corpus='{write(tmp_path)}'", "chat.format='auto'", "loop.steps=20")
    session = open_session(read_run("", changes))
    assert session.run.data.add_tokens == ("<|im_start|>", "<|im_end|>")
    assert session.data.tokenizer.vocab_size == size + 2
    assert session.run.model.vocab_size >= size + 2
    assert all(text.endswith("<|im_end|>") for text in learned_texts(session.data, session.data.train))
