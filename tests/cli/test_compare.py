"""`glass compare` as a user meets it: exit codes, JSON, the page, and one sentence for each mistake."""

import pytest

import glassformer as gf
from glassformer import config as c
from tests import folders
from tests.cli.asking import run, run_json

SOURCE = """
import glassformer as gf
from glassformer import config as c

CONFIG = gf.presets.gpt2(vocab_size=31, d_model=24, n_layers=2, attention=c.Attention(n_heads=3),
                         feedforward=c.Dense(d_ff=40), max_len=64, init_std=0.3)
instance = gf.build(CONFIG)
number = 3

def build():
    return gf.build(CONFIG)

def exact():
    return gf.build(c.replace(CONFIG, feedforward=c.Dense(d_ff=40, activation="gelu")))

def broken():
    raise RuntimeError("no weights\\nhere")

def tokens_to_logits(tokens):
    return instance(tokens)

def wide():
    return gf.build(c.replace(CONFIG, vocab_size=32))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("code") / "mine.py"
    path.write_text(SOURCE)
    return path


def test_the_same_model_exits_0(capsys, file):
    code, out, err = run(capsys, "compare", f"{file}:build", f"{file}:instance")
    assert (code, err) == (0, "")
    assert "same: " in out
    code, out, _ = run(capsys, "compare", f"{file}:build", f"{file}:tokens_to_logits")
    assert code == 0


def test_different_models_exit_1_and_name_the_place(capsys, file, tmp_path):
    code, out, _ = run(capsys, "compare", f"{file}:build", f"{file}:exact", "--html", tmp_path / "p.html")
    assert code == 1
    assert "they differ at blocks.0.feedforward.post" in out
    assert "A applies tanh GELU, B applies exact GELU" in out
    assert "tanh GELU" in (tmp_path / "p.html").read_text()
    code, made = run_json(capsys, "compare", f"{file}:build", f"{file}:exact", "--tokens", "1 2,3", "--tokens", "4 5")
    assert code == 1
    assert made["explanation"]["convention"] == "gelu_variant"
    assert [f["id"] for f in made["findings"]] == ["same-logits:tokens-given"]


def test_models_of_another_number_of_attentions_are_compared_by_their_logits(capsys, tmp_path):
    (tmp_path / "two.py").write_text(
        "from tests.bugs.base import Config, make\nfrom tests.bugs.healthy_traps import TokensOnly\n"
        "short = lambda: TokensOnly(make(Config(n_layers=2)))\nlong = lambda: TokensOnly(make(Config()))\n"
    )
    code, out, err = run(capsys, "compare", f"{tmp_path / 'two.py'}:short", f"{tmp_path / 'two.py'}:long")
    assert (code, err) == (1, "")
    assert "A has 2 attentions and B has 3, so only logits were compared: B has " in out
    assert "1 more softmax" in out


def test_the_report_fits_the_terminal(capsys, file, monkeypatch):
    monkeypatch.setattr("glassformer.cli.compare.terminal_width", lambda: 80)
    _, out, _ = run(capsys, "compare", f"{file}:build", f"{file}:exact")
    assert max(map(len, out.splitlines())) <= 80
    assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_a_folder_against_another_format_of_it(capsys, tmp_path):
    folders.write(tmp_path / "glass", with_tokenizer=False)
    gf.save(gf.load(tmp_path / "glass"), tmp_path / "hf", format="hf")
    code, out, _ = run(capsys, "compare", tmp_path / "glass", tmp_path / "hf")
    assert code == 0
    assert "0.0e+00" in out


def test_a_module_by_its_name(capsys, file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert run(capsys, "compare", "mine:build", "mine:exact")[0] == 1


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "give that folder; or give file.py:name or package.module:name."),
        ("missing.py:build", "missing.py does not exist"),
        ("no.such.module:build", "no.such.module cannot be imported"),
        ("a b:build", "a b is neither a Python file nor a module"),
        ("FILE:biuld", "has no biuld. Did you mean build?"),
        ("FILE:broken", "failed when it was called to build a model: no weights here."),
        ("FILE:number", "int cannot be called"),
        ("FILE:wide", "the vocabularies differ, 31 ids in A and 32 in B"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(capsys, file, name, sentence):
    code, out, err = run(capsys, "compare", f"{file}:build", name.replace("FILE", str(file)))
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--vocab-size", "1"), "--vocab-size 1 must be at least 2"),
        (("--html", "page.txt"), "must be an .html file"),
        (("--html", "no/such/page.html"), "there is no folder"),
        (("--tokens", "99"), "token id 99 is outside the vocabulary of 31"),
    ],
)
def test_a_bad_flag_is_one_sentence(capsys, file, flags, sentence):
    code, _, err = run(capsys, "compare", f"{file}:build", f"{file}:build", *flags)
    assert code == 2
    assert sentence in err


def test_one_model_on_two_devices_and_in_two_dtypes(capsys, file):
    code, found = run_json(capsys, "compare", f"{file}:build", "--device-b", "cpu", "--dtype-b", "bfloat16")
    assert code == 0
    assert found["findings"][-1]["id"] == "rounding-error"
    code, _, err = run(capsys, "compare", f"{file}:build")
    assert code == 2
    assert "compare needs two models, or one with --device-b or --dtype-b" in err
    code, _, err = run(capsys, "compare", f"{file}:build", "--device-b", "nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "device 'nowhere' is not known" in err


def test_the_public_name_is_the_function():
    model = gf.build(
        gf.presets.gpt2(vocab_size=31, d_model=24, n_layers=1, attention=c.Attention(n_heads=3), max_len=64)
    )
    assert isinstance(gf.compare(model, model), gf.Comparison)
