import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.chat import models
from tests.cli.asking import has_compiler, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.write(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture
def type_lines(monkeypatch, capsys, folder):
    """Run `glass chat` with these lines on standard input."""

    def typed(*lines, options=("--temperature", "0", "--max-new-tokens", "5"), model=folder):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        return run(capsys, "chat", "--model", model, *options)

    return typed


ENGINE = "engine: torch on cpu in float32 (GLASSFORMER_NATIVE=0 is set)\n"


def test_lines_are_answered_and_json_says_what_was_done(type_lines):
    code, out, err = type_lines("the cat", "", "sat")
    assert (code, err) == (0, ENGINE)
    _, lines, _ = type_lines("the cat", "sat", options=("--temperature", "0", "--max-new-tokens", "5", "--json"))
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["user"] for row in rows] == ["the cat", "sat"]
    assert "".join(row["assistant"] + "\n" for row in rows) == out
    assert rows[0]["reused_tokens"] == 0 < rows[1]["reused_tokens"]
    assert {row["finished"] for row in rows} <= {"stop", "length"}
    assert all(0 < row["new_tokens"] <= 5 for row in rows)
    assert [row["engine"]["engine"] for row in rows] == ["torch", "torch"]


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
def test_engine_and_precision_are_those_of_glass_sample(type_lines):
    options = ("--temperature", "0", "--max-new-tokens", "5", "--json", "--engine", "native", "--precision")
    exact, near = (json.loads(type_lines("the cat", options=(*options, name))[1]) for name in ("float32", "int8"))
    assert (exact["engine"]["engine"], exact["engine"]["precision"]) == ("native", "float32")
    assert near["engine"]["precision"] == "int8"
    assert exact["assistant"] == json.loads(type_lines("the cat", options=options[:5])[1])["assistant"]
    code, _, err = type_lines("the cat", options=("--engine", "torch", "--precision", "int8"))
    assert code == 2
    assert "needs the compiled kernels" in err


def test_commands_change_the_conversation(type_lines, tmp_path):
    saved = tmp_path / "talk.jsonl"
    code, _, err = type_lines("/help", "one", "two", "/undo", "//three", "/system be", "/system", f"/save {saved}")
    assert code == 0
    assert "/undo" in err
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == ["be", "one", "/three"]
    code, _, err = type_lines("/reset", f"/save {saved}")
    assert (code, f"/save {saved} already exists: give another name." in err) == (2, True)
    assert json.loads(saved.read_text())["messages"] == messages
    code, out, _ = type_lines("/quit", "never")
    assert (code, out) == (0, "")


def test_set_changes_how_answers_are_drawn(type_lines):
    options = ("--temperature", "0", "--json")
    change = ("/set max_new_tokens=2", "/set temperature=1.5", "/set seed=9", "/set top_k=3", "one")
    _, lines, _ = type_lines(*change, options=options)
    row = json.loads(lines)
    assert (row["seed"], row["new_tokens"] <= 2) == (9, True)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/nonsense", "/nonsense is not a command: use /help"),
        ("/undo", "/undo has nothing to forget"),
        ("/set", "must read NAME=VALUE"),
        ("/set colour=1", "NAME must be temperature"),
        ("/set top_k=1.5", "top_k must be a whole number"),
        ("/set temperature=hot", "temperature must be a number"),
        ("/set temperature=-1", "temperature=-1.0 must be 0"),
        ("/set seed=-1", "seed must be 0 or more"),
        ("/save", "/save needs the name of a file"),
        ("the mat " * 80, "the last message needs"),
    ],
)
def test_a_wrong_line_is_one_sentence(type_lines, line, sentence):
    code, _, err = type_lines(line)
    assert code == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_without_a_template_is_announced_once(type_lines, tmp_path):
    plain = models.write(tmp_path / "plain", style=None)
    code, out, err = type_lines("the cat", "sat", model=plain)
    assert code == 0
    assert out
    note = f"note: {plain} has no chat template, so it continues your text instead of answering.\n"
    assert err == note + ENGINE


def test_a_broken_template_and_wrong_options_are_one_sentence(type_lines, tmp_path, capsys):
    broken = models.write(tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    code, _, err = type_lines("one", model=broken)
    assert (code, err.strip().endswith("the chat template refuses these messages: no.")) == (2, True)
    assert run(capsys, "chat", "--seed", "-1")[0] == 2
    assert run(capsys, "chat", "--model", tmp_path / "nothing")[0] == 2


def test_ctrl_c_stops_the_answer_and_not_the_program(tmp_path):
    """A terminal: an answer that would take long is interrupted, and the program still answers, saves and ends."""
    folder = models.write(tmp_path / "endless", max_len=100_000)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "glassformer", "chat", "--model", folder, "--max-new-tokens", "90000"]
    environment = os.environ | {"TERM": "dumb"}
    program = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    seen = bytearray()

    def wait_for(text, seconds=60):
        begin = len(seen)
        limit = time.monotonic() + seconds
        while text not in seen[begin:]:
            assert time.monotonic() < limit, seen.decode(errors="replace")
            if select.select([ours], [], [], 0.2)[0]:
                seen.extend(os.read(ours, 4096))

    try:
        wait_for(b"> ")
        os.write(ours, b"hello\n")
        wait_for(b"hello\r\n")
        while len(seen) <= seen.index(b"hello\r\n") + len(b"hello\r\n"):  # until the answer begins
            seen.extend(os.read(ours, 4096))
        time.sleep(0.3)
        program.send_signal(signal.SIGINT)
        wait_for(b"> ")
        os.write(ours, b"/set max_new_tokens=3\nagain\n")
        wait_for(b"again\r\n")
        wait_for(b"> ")
        os.write(ours, f"/save {tmp_path / 'talk.json'}\n/quit\n".encode())
        assert program.wait(30) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["hello", "again"]
    assert messages[1]["content"]
