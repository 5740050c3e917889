"""`glass look` as a user meets it: a picture or numbers for each kind, a sentence for each mistake, and the gallery."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import glassformer as gf
from glassformer.cli import look as module
from glassformer.lens.views import KINDS
from tests import folders
from tests.cli.asking import run, run_json, settings
from tests.variants import seq2seq

ROOT = Path(__file__).parents[2]
PATCH = ["--text", "the cat sat", "--against", "the dog sat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    config = gf.presets.bert_base(vocab_size=300, n_layers=2, d_model=24, n_heads=2, d_ff=32, max_len=64)
    target = tmp_path_factory.mktemp("encoder") / "bert"
    gf.save(gf.build(config), target, format="glass", tokenizer=folders.tokenizer())
    return target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target = tmp_path_factory.mktemp("pair") / "t5"
    gf.save(gf.build(seq2seq()), target, format="glass")
    return target


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_writes_a_picture_and_says_what_is_seen(capsys, folder, tmp_path, kind):
    text = PATCH if kind == "patch" else ["--text", "the cat sat on the mat. the cat sat"]
    out = tmp_path / f"{kind}.png"
    code, message, err = run(capsys, "look", kind, "--model", folder, *text, "--out", out)
    assert (code, err) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert message.startswith(f"{out}: ")
    assert len(message.strip().splitlines()) == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("format", ["svg", "pdf", "html"])
def test_the_suffix_chooses_the_format(capsys, folder, tmp_path, format):
    out = tmp_path / f"a.{format}"
    assert run(capsys, "look", "attention", "--model", folder, "--text", "the cat", "--out", out)[0] == 0
    assert out.stat().st_size > 1000


def test_json_prints_the_numbers_and_draws_nothing_unless_asked(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, result = run_json(
        capsys, "look", "attention", "--model", folder, "--text", "the cat sat", "--layer", "1", "--head", "2"
    )
    assert code == 0
    (((rows),),) = result["pattern"]
    assert [sum(row) for row in rows] == pytest.approx([1] * len(rows), abs=1e-5)
    assert result["queries"] == ["the", " cat", " sat"]
    assert not list(tmp_path.iterdir())
    code, result = run_json(capsys, "look", "rank", "--model", folder, "--text", "the cat sat", "--out", "rank.png")
    assert result["written"] == "rank.png"
    assert (tmp_path / "rank.png").exists()


def test_no_out_is_a_file_named_after_the_kind(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "look", "positions", "--model", folder)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["positions.png"]
    (tmp_path / "positions.png").write_text("mine")
    assert run(capsys, "look", "positions", "--model", folder)[0] == 0
    assert (tmp_path / "positions.png").read_text() == "mine"
    assert (tmp_path / "positions-2.png").exists()
    assert run(capsys, "look", "positions", "--model", folder, "--force")[0] == 0
    assert (tmp_path / "positions.png").read_bytes() == (tmp_path / "positions-2.png").read_bytes()


def test_ids_are_read_and_shown_as_ids(capsys, folder):
    _, result = run_json(capsys, "look", "logit-lens", "--model", folder, "--ids", "--text", "5, 6 7")
    assert result["tokens"] == ["#5", "#6", "#7"]


def test_the_answer_is_a_token_and_has_an_alias(capsys, folder):
    asked = ("look", "attribution", "--model", folder, "--text", "the cat")
    _, first = run_json(capsys, *asked, "--answer", " cat", "--wrong", "the", "--position", "0")
    _, second = run_json(capsys, *asked, "--token", " cat", "--wrong", "the", "--position", "-2")
    assert first == second
    assert first["answer"] == " cat"
    assert sum(first["parts"].values()) == pytest.approx(first["logit"], abs=1e-4)


def test_words_of_exotic_tokens(capsys, folder):
    _, result = run_json(capsys, "look", "logit-lens", "--model", folder, "--text", "猫 😀")
    assert all(word.startswith("#") or "�" not in word for word in result["tokens"])
    assert any(word.startswith("#") for word in result["tokens"])  # a token that is no whole character


def test_an_encoder_and_an_encoder_decoder_are_looked_at(capsys, encoder, pair, tmp_path):
    _, result = run_json(
        capsys, "look", "attention", "--model", encoder, "--text", "the cat sat", "--layer", "0", "--head", "0"
    )
    assert result["shape"] == [1, 1, 3, 3]
    _, result = run_json(capsys, "look", "attention", "--model", pair, "--ids", "--text", "5 6 7 8")
    T = result["shape"][2]
    assert result["shape"] == [2, 6, T, 4]  # cross-attention of its own answer
    assert result["queries"][0] == "#3"  # the start token
    _, result = run_json(capsys, "look", "attention", "--model", pair, "--ids", "--text", "5 6 7 8", "--target", "9 9")
    assert result["queries"] == ["#3", "#9", "#9"]


def test_the_bundled_model_is_looked_at_without_a_word(capsys, tmp_path):
    code, message, _ = run(capsys, "look", "attention", "--out", tmp_path / "a.png")
    assert code == 0
    assert "bard: attention of all 30 heads" in message


def test_a_checkpoint_is_named_after_its_run(capsys, folder, tmp_path):
    checkpoint = shutil.copytree(folder, tmp_path / "code" / "checkpoints" / "step-00000200")
    (checkpoint / "meta.json").write_text('{"step": 200}')
    (tmp_path / "code" / "best").symlink_to("checkpoints/step-00000200")
    (tmp_path / "latest").symlink_to("code")
    code, message, _ = run(
        capsys, "look", "attention", "--model", tmp_path / "latest" / "best", *CAT, "--out", tmp_path / "a.png"
    )
    assert code == 0
    assert "code/best: attention of all 8 heads, 2 queries (down) by 2 keys (right)" in message
    one = ["--model", folder, "--ids", "--text", "5", "--out", tmp_path / "b.png"]
    assert "1 query (down) by 1 key (right)" in run(capsys, "look", "attention", *one)[1]


def test_training_draws_a_run_s_log(capsys, tmp_path):
    events = [{"event": "step", "step": i, "loss": 2.0 - i / 10} for i in range(5)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert run(capsys, "look", "training", "--model", tmp_path, "--out", tmp_path / "t.png")[0] == 0
    _, result = run_json(capsys, "look", "training", "--model", tmp_path)
    assert result["training"]["values"][0] == 2.0


def spoilt(folder: Path) -> Path:
    target = folder.parent / "headless"
    config = gf.config.replace(gf.load(folder).config, head=None)
    gf.save(gf.build(config), target, format="glass", tokenizer=folders.tokenizer())
    return target


def unspoken(folder: Path) -> Path:
    (folder / "tokenizer.json").unlink()
    return folder


CAT = ("--text", "the cat")
MISTAKES = {
    "unknown kind": (lambda f: ["atention"], "Did you mean attention"),
    "a kind like no other": (lambda f: ["zzzz"], "knows no 'zzzz'. It draws attention, attribution, heads"),
    "text too long": (
        lambda f: ["logit-lens", "--model", f, "--ids", "--text", "1 " * 65],
        "--text has 65 tokens, more than the model's context of 64: shorten it",
    ),
    "layer out of range": (lambda f: ["attention", "--model", f, *CAT, "--layer", "2"], "its layers are 0 to 1"),
    "head out of range": (
        lambda f: ["attention", "--model", f, *CAT, "--layer", "0", "--head", "9"],
        "its heads are 0 to 3",
    ),
    "position out of range": (lambda f: ["attribution", "--model", f, *CAT, "--position", "2"], "use -2 to 1"),
    "unknown format": (
        lambda f: ["attention", "--model", f, *CAT, "--out", "a.bmp"],
        "use one of .png, .svg, .pdf, .html",
    ),
    "empty text": (lambda f: ["attention", "--model", f, "--text", ""], "--text is empty"),
    "no text": (lambda f: ["attention", "--model", f], "give --text"),
    "patch without against": (lambda f: ["patch", "--model", f, *CAT], "give --against"),
    "patch of unequal texts": (
        lambda f: ["patch", "--model", f, *CAT, "--against", "a", "--answer", "a", "--wrong", "b", "--position", "0"],
        "--text has 2 tokens and --against has 1 token: patching replaces",
    ),
    "patch of unequal texts whose answers agree": (  # which was reported instead
        lambda f: ["patch", "--model", f, *CAT, "--against", "the the the"],
        "--text has 2 tokens and --against has 3 tokens: patching replaces",
    ),
    "patch against a text too long": (
        lambda f: ["patch", "--model", f, "--ids", "--text", "1 2", "--against", "1 " * 65],
        "--against has 65 tokens, more than the model's context of 64",
    ),
    "patch between one token and itself": (
        lambda f: ["patch", "--model", f, *CAT, "--against", "the the", "--answer", "a", "--wrong", "a"],
        "--answer and --wrong are the same token",
    ),
    "one token less itself": (
        lambda f: ["attribution", "--model", f, *CAT, "--answer", "a", "--wrong", "a"],
        "--answer and --wrong are the same token",
    ),
    "unknown picture": (
        lambda f: ["rank", "--model", f, *CAT, "--show", "x"],
        "spectrum, deviation, norms or variants",
    ),
    "unknown score": (lambda f: ["heads", "--model", f, "--show", "inductoin"], "Did you mean induction"),
    "cross without it": (lambda f: ["attention", "--model", f, *CAT, "--show", "cross"], "encoder-decoder"),
    "an option without use": (lambda f: ["rank", "--model", f, *CAT, "--layer", "1"], "has no use for --layer"),
    "an answer of many tokens": (lambda f: ["attribution", "--model", f, *CAT, "--answer", "the cat"], "is 2 tokens"),
    "an answer of no token": (lambda f: ["attribution", "--answer", "½"], "is no token of this model"),
    "an empty answer": (lambda f: ["attribution", "--model", f, *CAT, "--answer", ""], "the token is empty"),
    "an unknown character": (lambda f: ["attention", "--text", "ROMEO: ½"], "U+00BD"),
    "too many weights": (lambda f: ["attention", "--text", "a" * 200, "--json"], "too many attention weights"),
    "a place that cannot be written": (
        lambda f: ["attention", "--model", f, *CAT, "--out", f / "model.toml" / "a.png"],
        "cannot be written",
    ),
    "no tokenizer": (lambda f: ["attention", "--model", unspoken(f), *CAT], "--ids"),
    "an id outside": (lambda f: ["attention", "--model", f, "--ids", "--text", "5 300"], "token id 300"),
    "no head": (lambda f: ["attribution", "--model", spoilt(f), *CAT], "no head"),
    "no folder": (lambda f: ["attention", "--model", f / "nowhere", *CAT], "nowhere"),
    "target for one stack": (lambda f: ["attention", "--model", f, *CAT, "--target", "a"], "one stack"),
    "no run": (lambda f: ["training"], "give its folder with --model"),
    "a run without a log": (lambda f: ["training", "--model", f], "log.jsonl cannot be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_gets_one_sentence_and_exit_2(capsys, folder, tmp_path, monkeypatch, mistake):
    own = shutil.copytree(folder, tmp_path / "tiny")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    arguments, words = MISTAKES[mistake]
    code, out, err = run(capsys, "look", *arguments(own))
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
    assert not list((tmp_path / "here").iterdir())


def test_induction_on_an_encoder_and_its_unknown_words_are_refused(capsys, encoder):
    code, _, err = run(capsys, "look", "induction", "--model", encoder)
    assert code == 2
    assert "bert is not a decoder" in err


def test_every_kind_says_which_options_it_uses():
    assert set(module.USES) == {*KINDS, "training"}


def test_help_imports_neither_torch_nor_matplotlib():
    code = """
import sys
from glassformer.cli import main
try:
    main(["look", "--help"])
except SystemExit:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--against" in done.stdout
    assert not set(done.stdout.splitlines()[-1].split()) & {"torch", "matplotlib", "numpy"}


GALLERY = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^glass (.+)$", GALLERY, re.MULTILINE)
"""Each command line of the gallery."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("look") and "training" not in c])
def test_each_command_of_the_gallery_makes_its_picture(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)
    assert run(capsys, *arguments)[0] == 0
    made = Path(arguments[arguments.index("--out") + 1])
    assert made.exists()
    with Image.open(made) as new, Image.open(ROOT / made) as shown:  # the one in the gallery is of the same shape
        assert new.size == pytest.approx(shown.size, rel=0.02)


def test_the_training_picture_of_the_gallery_is_made_by_its_two_commands(capsys, tmp_path, monkeypatch):
    train, look = (next(c for c in COMMANDS if c.startswith(start)) for start in ("train", "look training"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    short = ["loop.steps=4", "loop.batch=2", "loop.eval_every=2", "loop.eval_batches=1", "probe.every=2"]
    assert run(capsys, *shlex.split(train), *settings(*short))[0] == 0
    code, message, _ = run(capsys, *shlex.split(look))
    assert code == 0
    assert ", and the probes" in message
    assert Path(look.split("--out ")[1]).exists()


def test_the_gallery_shows_every_picture_it_has_and_all_of_them_are_small():
    shown = set(re.findall(r"\]\((gallery/[\w-]+\.png)\)", GALLERY))
    files = {f"gallery/{path.name}": path.stat().st_size for path in (ROOT / "docs" / "gallery").iterdir()}
    assert shown == set(files)
    made = {command.split("--out docs/")[1].split()[0] for command in COMMANDS if "--out docs/" in command}
    assert shown == made
    assert max(files.values()) < 150_000
    assert sum(files.values()) < 1_500_000
    assert {command.split()[1] for command in COMMANDS if command.startswith("look")} == set(module.USES)
