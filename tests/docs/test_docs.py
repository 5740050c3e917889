"""Every block and every command of README.md and docs/ works as it is printed."""

import ast
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.cli.parse import VERBS, parse
from tests import folders
from tests.cli.asking import run, settings
from tests.docs.blocks import FILES, LANGUAGES, ROOT, blocks, commands
from tests.evaluation import peers
from tests.straight_path import SOURCE, trace_to_attention
from tests.studio.serving import serving
from tests.training import tiny

TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
PYTHON = {name: [b for b in blocks(text) if b.language == "python"] for name, text in TEXTS.items()}
PYTHON = {name: found for name, found in PYTHON.items() if found}
COMMANDS = {name: commands(text) for name, text in TEXTS.items()}
README = COMMANDS["README.md"]
EXAMPLES = COMMANDS["docs/examples.md"]
NEEDS_A_SERVER = "docs/studio.md"
LONG_PAGES = ("docs/guides/compare_a_port.md", "docs/tutorials/load_and_check.md")
"""Guides and tutorials whose Python takes more than 2 s."""
GUIDES = {name for name in PYTHON if name.startswith(("docs/guides/", "docs/tutorials/"))}
QUICK_PAGES = {"README.md", "docs/python.md", *GUIDES} - set(LONG_PAGES)
SNIPPETS = "docs/diagnoses/"
"""Pages of fragments, which test_diagnosis_snippets.py runs."""
QUICK = ("sample", "eval", "size", "look", "check", "exercise", "course", "compare", "convert", "env")
"""Verbs whose commands in README.md and docs/examples.md are executed in the default suite."""


def test_there_are_blocks_and_commands():
    assert {"README.md", "docs/doctor.md", "docs/errata.md", "docs/studio.md"} <= set(PYTHON)
    assert len(EXAMPLES) >= 15
    assert set(VERBS) <= {command.words[0] for command in EXAMPLES}
    assert len([command for command in README if len(command.words) > 1]) >= 6
    assert sum(map(len, COMMANDS.values())) > 100


@pytest.mark.parametrize("name", TEXTS)
def test_every_block_has_a_language(name):
    for block in blocks(TEXTS[name]):
        assert block.language in LANGUAGES, f"{name}:{block.line}: ```{block.language}"


@pytest.mark.parametrize("name", PYTHON)
def test_every_block_of_python_is_python(name):
    for block in PYTHON[name]:
        ast.parse(block.text, f"{name}:{block.line}")


def test_every_block_of_toml_is_toml():
    found = [block for text in TEXTS.values() for block in blocks(text) if block.language == "toml"]
    assert found
    assert all(tomllib.loads(block.text) for block in found)


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_is_one_that_glass_understands(name):
    for command in COMMANDS[name]:
        if len(command.words) == 1:  # a verb that is mentioned
            assert command.words[0] in {*VERBS, "help", "version", "--help"}, f"{name}:{command.line}"
            continue
        try:
            parse(command.words)
        except (SystemExit, ValueError) as error:
            if getattr(error, "code", 1):
                raise AssertionError(f"{name}:{command.line}: glass {' '.join(command.words)}: {error}") from None


def test_every_target_of_make_exists():
    named = {target for text in TEXTS.values() for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)}
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"tour", "test"} <= named <= set(phony[1].split())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # tiny models of docs/findings.md
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK_PAGES else pytest.mark.slow) for name in PYTHON
     if name != NEEDS_A_SERVER and not name.startswith(SNIPPETS)],
)  # fmt: skip
def test_the_python_of_a_file_runs_from_top_to_bottom(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = "\n".join(block.text for block in PYTHON[name])
    exec(compile(script, name, "exec"), {"__name__": "__main__"})
    assert name in ("README.md", "docs/errata.md") or capsys.readouterr().out


PATH = re.compile(r"`([\w./*-]+/(?:[\w.*-]+\.(?:py|toml|md|js))?)`")
PLACEHOLDERS = ("CHAPTER", "NAME", "MODULE")


@pytest.mark.skipif(not (SOURCE / "kernels").is_dir(), reason="the guides name files of kernels/")
@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_every_path_that_a_guide_names_exists(name):
    named = [path for path in PATH.findall(TEXTS[name]) if not any(word in path for word in PLACEHOLDERS)]
    assert len(named) > 20
    for path in named:
        assert any([*ROOT.glob(path), *(ROOT / "src/glassformer").glob(path)]), f"{name}: {path}"


def test_the_architecture_shows_the_path_that_is_traced():
    model = gf.build(gf.presets.gpt2(n_layers=1, d_model=16, n_heads=2, d_ff=16, vocab_size=31, max_len=8), seed=0)
    stack, _ = trace_to_attention(lambda: model(torch.tensor([[1, 2]])))
    shown = re.findall(r"^ +\d+ (model/\w+\.py) +(\w+\.\w+) ", TEXTS["docs/architecture.md"], re.MULTILINE)
    assert shown == [(Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname) for code in stack]


@pytest.mark.slow
def test_the_client_of_the_studio_reads_what_the_studio_writes(tmp_path, capsys):
    pytest.importorskip("openai")
    with serving(tmp_path / "studio") as server:
        script = "".join(block.text for block in PYTHON[NEEDS_A_SERVER])
        address = "http://127.0.0.1:8000"
        assert address in script
        exec(compile(script.replace(address, server.address), NEEDS_A_SERVER, "exec"), {})
    assert "bard" in capsys.readouterr().out


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with everything that the commands of README.md name."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("DIR", "SRC", "A", "B"):
        folders.write(folder / name)
    (folder / "file.py").write_text(PYTHON["README.md"][0].text)
    (folder / "my.py").write_text(
        "import numpy as np\n\n\ndef attention(q, k, v):\n    scores = q @ k.T / np.sqrt(q.shape[-1])\n"
        "    weights = np.exp(scores - scores.max(-1, keepdims=True))\n"
        "    weights /= weights.sum(-1, keepdims=True)\n    return weights @ v, weights\n"
    )
    (folder / "mytext.txt").write_text("the cat sat on the mat.\n" * 400)
    (folder / "TEXT").write_text("the cat sat on the mat. the dog sat on the log.\n" * 9)
    (folder / "held_out.txt").write_text("ROMEO:\nShall I hear more, or shall I speak at this?\n" * 12)
    (folder / "questions.jsonl").write_text(
        '{"context": "ROMEO:", "choices": ["I will", "Xq zk"], "answer": 0}\n'
        '{"context": "JULIET: Good", "choices": ["kzq", "night"], "answer": "night"}\n'
    )
    peers.task_files(folder)
    (folder / "RUN.toml").write_text(f'out = "runs/tiny"\n[data]\ncorpus = "{tiny.corpus(folder)}"\ncache = "tokens"\n')
    return folder


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=" ".join(c.words)[:50])
     for c in (*README, *EXAMPLES) if len(c.words) > 1 and c.words[0] in QUICK],
)  # fmt: skip
def test_a_command_of_the_readme_or_the_examples_succeeds(command, desk, monkeypatch, capsys):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(desk / "course.json"))
    monkeypatch.chdir(desk)
    code, out, err = run(capsys, *command.words)
    assert code == 0, err + out
    assert out


EVALUATION = [c.words for c in COMMANDS["docs/evaluate.md"] if len(c.words) > 1]


def test_the_page_of_evaluation_runs_from_top_to_bottom(desk, monkeypatch, capsys):
    pytest.importorskip("gguf")
    monkeypatch.chdir(desk)
    assert len(EVALUATION) >= 5
    for words in EVALUATION:
        if "--tasks" not in words:
            code, out, err = run(capsys, *words)
            assert code == 0, err + out
            assert out


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_evaluation_runs_a_task(desk, monkeypatch, capsys):
    peers.run_offline(monkeypatch, desk / "cache")
    monkeypatch.chdir(desk)
    (words,) = (words for words in EVALUATION if "--tasks" in words)
    code, out, err = run(capsys, *words)
    assert code == 0, err + out
    assert "acc_norm" in out


def test_the_doctor_reports_the_bug_that_the_readme_shows(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    (command,) = {c.words for c in README if c.words[0] == "doctor" and "file.py:build" in c.words}
    code, out, err = run(capsys, *command)
    assert code == 1, err + out
    shown = next(block.text for block in blocks(TEXTS["README.md"]) if block.text.startswith("file.py:build"))
    facts = re.findall(r"causal_leak|attention unmasked in layers .+\]|seen by [\w-]+", shown)
    assert len(facts) == 5
    assert all(fact in out for fact in facts)


@pytest.mark.filterwarnings("ignore")
def test_the_page_of_loggers_trains_and_replays(desk, monkeypatch, capsys):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(desk)
    train, replay = (c.words for c in COMMANDS["docs/loggers.md"] if len(c.words) > 1)
    small = settings(*tiny.SMALL, "loop.steps=4", 'out="runs/logged"')
    code, _, err = run(capsys, *train, *small)
    assert code == 0, err
    code, out, err = run(capsys, *replay)
    assert code == 0, err
    assert "events of runs/latest to tensorboard" in out
    assert len(list(Path("runs/logged/tensorboard").iterdir())) == 2


def test_the_page_of_data_prepares_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"text": "Row {number} of a corpus, with some words."}}\n' for number in range(300)]
    Path("texts.jsonl").write_text("".join(rows))
    shell = "\n".join(f"```sh\n{b.text}```" for b in blocks(TEXTS["docs/data.md"]) if b.language == "sh")
    prepare, train = (command.words for command in commands(shell))
    code, out, err = run(capsys, *prepare)
    assert code == 0, err
    assert "300 documents of 1 file" in out
    code, out, err = run(capsys, *train, *settings(*tiny.SMALL, "loop.steps=4", 'out="runs/data"'))
    assert code == 0, err
    assert "done: 4 steps" in out


@pytest.mark.slow
def test_the_readme_trains_and_resumes(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    found = [c.words for c in EXAMPLES if c.words[0] == "train" and len(c.words) > 1]
    train, resume = found[0], next(words for words in found if "--resume" in words)
    assert "--resume" in resume
    code, out, err = run(capsys, *train, *settings(*tiny.SMALL, "loop.steps=4"))
    assert code == 0, err
    latest = Path("runs/latest")
    if not os.path.lexists(latest):
        latest.symlink_to("tiny", target_is_directory=True)
    code, out, err = run(capsys, *resume, *settings("loop.steps=6"))
    assert code == 0, err
    assert "done: 6 steps" in out


@pytest.mark.slow
def test_the_commands_about_fine_tuning_succeed(tmp_path, monkeypatch, capsys):
    """The shell blocks of docs/finetune.md in their order, with short runs."""
    monkeypatch.chdir(tmp_path)
    known = gf.load_tokenizer("bard").get_vocab()
    text = "Once upon a time there was a king, and he had a daughter. " * 60
    for name in ("mytext.txt", "held_out.txt"):
        Path(name).write_text("".join(c for c in text if c in known))
    short = ("loop.steps=2", "loop.batch=2", "loop.context=32", "loop.eval_batches=1", "loop.sample_every=0")
    shell = "\n".join(f"```sh\n{b.text}```" for b in blocks(TEXTS["docs/finetune.md"]) if b.language == "sh")
    found = commands(shell)
    assert len(found) == 12
    for command in (command for command in found if command.words[0] != "serve"):  # which runs until it is stopped
        code, out, err = run(capsys, *command.words, *(settings(*short) if command.words[0] == "train" else ()))
        assert code == 0, f"{command.words}: {err}{out}"
