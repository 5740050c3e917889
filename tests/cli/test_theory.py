"""`glass check` and `glass exercise` as users meet them: verdicts, exit codes, a sentence for each mistake."""

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

import glassformer as gf
from glassformer.theory import exercises
from glassformer.theory.claims.claim import Kind
from tests.cli.asking import run, run_json
from tests.theory.claims.invented import invented

ONE = "rope-relative"


def test_a_claim_is_run_and_its_verdict_shown(capsys):
    code, out, err = run(capsys, "check", ONE)
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if ONE in line)
    assert re.search(r"pass +rope-relative +proved +.*<=.* +\d+\.\d", row)
    assert "Positions" in out
    assert "Every verdict is the expected one." in out


def test_chapters_and_sources_choose_claims(capsys):
    code, result = run_json(capsys, "check", "heads", "--workers", "1")
    assert code == 0
    assert [c["id"] for c in result["claims"]] == [id for id, c in gf.claims.ALL.items() if c.chapter == "heads"]
    code, result = run_json(capsys, "check", "--source", "BISHOP 12.3")
    assert [c["id"] for c in result["claims"]] == ["orthogonal-inputs-fixed-point"]
    assert result["sources"] == [
        {"cite": "Bishop 12.3", "says": "orthogonal inputs => y = x", "verdict": "FALSE", "note": ""}
    ]
    code, out, _ = run(capsys, "check", "--source", "ch13 ex 8")
    assert out.startswith("Ch. 13 ex. 8: ")


def test_json_is_one_object_with_the_evidence(capsys):
    code, result = run_json(capsys, "check", ONE, "--seed", "3")
    assert code == 0
    assert (result["seed"], result["slow"], result["broken"], result["held"]) == (3, False, False, True)
    (claim,) = result["claims"]
    assert (claim["verdict"], claim["expected"]) == ("pass", "pass")
    assert {part["evidence"]["kind"] for part in claim["parts"]} == {"exact", "numerical", "erratum"}
    json.dumps(result, allow_nan=False)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_object(capsys):
    first, second = (run_json(capsys, "check", "high-dim-orthogonality")[1] for _ in range(2))
    assert first["claims"][0]["parts"] == second["claims"][0]["parts"]


def test_breaking_a_claim_turns_it_and_that_is_success(capsys):
    code, out, _ = run(capsys, "check", ONE, "--break")
    assert code == 0
    assert "fails" in out
    assert "1 of 1 control made the check fail" in out
    code, result = run_json(capsys, "check", ONE, "--break")
    assert (code, result["claims"][0]["verdict"], result["claims"][0]["held"]) == (0, "fail", True)


def test_a_failure_a_crash_and_an_unexamined_claim_are_exit_1(capsys, monkeypatch):
    def fails(lab):
        yield lab.numerical("size", 2.0, 1.0)

    def crashes(lab):
        raise RuntimeError("oh no")
        yield

    def nothing(lab):
        yield lab.skipped("by z3", Kind.EXACT, "z3 is not installed", "install it")

    for check, words in (
        (fails, "size: the reason for size"),
        (crashes, "crashed: RuntimeError: oh no"),
        (nothing, "z3 is not"),
    ):
        with invented(monkeypatch, check):
            code, out, err = run(capsys, "check", "invented")
            assert (code, err) == (1, "")
            assert words in out
            assert "Traceback" not in out
            assert "1 verdict not as expected" in out
            code, result = run_json(capsys, "check", "invented")
            assert (code, result["held"]) == (1, False)


def test_a_control_that_does_not_turn_is_exit_1(capsys, monkeypatch):
    def stubborn(lab):
        yield lab.exact("always", True)

    with invented(monkeypatch, stubborn):
        code, out, _ = run(capsys, "check", "invented", "--break")
    assert code == 1
    assert "its negative control did not make it fail" in out


def test_what_trains_is_skipped_as_recorded(capsys):
    code, result = run_json(capsys, "check", "pe-extrapolation")
    assert (code, result["claims"][0]["verdict"], result["claims"][0]["expected"]) == (0, "skip", "skip")


def test_explain_prints_the_whole_claim(capsys):
    code, out, _ = run(capsys, "check", ONE, "--explain")
    assert code == 0
    for part in ("Statement", "Derivation", "Evidence", "Negative control", "Errata", "E30", "qᵀ R"):
        assert part in out
    code, result = run_json(capsys, "check", ONE, "--explain")
    assert result["explained"][ONE].startswith(f"{ONE}: ")


def test_list_shows_claims_without_running_them(capsys):
    code, out, _ = run(capsys, "check", "--list")
    assert code == 0
    assert all(id in out for id in gf.claims.ALL)
    assert "Bishop 12.14: ABSENT" in out
    code, result = run_json(capsys, "check", "--list", "positions")
    assert {claim["chapter"] for claim in result["claims"]} == {"positions"}


def test_a_figure_is_drawn_for_one_claim(capsys, tmp_path):
    assert run(capsys, "check", ONE, "--figure", tmp_path / "a.svg")[0] == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    _, result = run_json(capsys, "check", ONE, "--figure", tmp_path / "b.png")
    assert result == {"id": ONE, "written": str(tmp_path / "b.png")}


def test_the_report_is_one_page(capsys, tmp_path):
    page = tmp_path / "claims.html"
    code, out, _ = run(capsys, "check", ONE, "softmax-shift-invariance", "--workers", "1", "--report", page)
    assert code == 0
    assert f"{page}: 2 claims on one page" in out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rope-relativ"], "Did you mean rope-relative"),
        (["convex"], "convex-weights-upper-bound or attention-output-convex-hull?"),
        (["--source", "Bishp 12.3"], "Did you mean 'Bishop 12.3'"),
        (["--source", ""], "no source is called ''"),
        ([ONE, "--figure", "a.bmp"], "cannot be written"),
        (["heads", "--figure", "a.png"], "draws one claim and 3 are named"),
        (["softmax-shift-invariance", "--figure", "a.png"], "has no figure"),
        ([ONE, "--report", "a.pdf"], "must be an .html file"),
        ([ONE, "--report", "no/such/a.html"], "there is no folder"),
        ([ONE, "--break", "--explain"], "--break and --explain do not go together"),
        ([ONE, "--list", "--figure", "a.png"], "do not go together"),
        ([ONE, "--seed", "-1"], "--seed -1 must be between 0 and"),
        ([ONE, "--workers", "0"], "must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "check", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_z3_a_claim_is_not_proved_and_says_what_to_install(capsys, monkeypatch, tmp_path):
    """In the table, in JSON, with --explain and on the page."""
    monkeypatch.setitem(sys.modules, "z3", None)
    asked = ["check", "convex-weights-upper-bound", "--workers", "1"]
    code, out, _ = run(capsys, *asked, "--report", tmp_path / "a.html")
    assert code == 0
    assert re.search(r"pass +convex-weights-upper-bound +verified +1 exact; 4 not examined", out)
    assert "proved" not in out
    assert "not examined: no weight above 1, " in out
    assert re.search(r"z3 is not installed, so this proof did not run; .* pip install '\S*\[theory\]'", out)
    assert "The badge of 1 claim is lower than recorded" in out
    assert "<strong>verified on stated ranges</strong>" in (tmp_path / "a.html").read_text()
    code, result = run_json(capsys, *asked)
    assert (code, result["claims"][0]["badge"]) == (0, "verified on stated ranges")
    _, out, _ = run(capsys, *asked, "--explain")
    assert "pass · verified on stated ranges ·" in out
    assert "[theory]'" in out


ON_A_TERMINAL = """
import shlex, sys
from glassformer.cli import main
for words in sys.argv[1:]:
    print("$", words)
    main(shlex.split(words))
"""


def on_a_terminal(columns, *commands):
    """What a terminal of so many columns shows, as lines without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | {"TERM": "xterm"}
    command = [sys.executable, "-c", ON_A_TERMINAL, *commands]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # on Linux the end of the output is an error
            while piece := os.read(ours, 1 << 16):
                text += piece
    os.close(ours)
    assert process.returncode == 0, text.decode()
    moved = re.sub(r"\x1b\[\d*[AK]|\r", "\n", text.decode())
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", moved).splitlines()


@pytest.mark.slow
def test_a_terminal_of_80_columns_is_enough():
    shown = on_a_terminal(
        80, f"check {ONE} --explain", "check pe-extrapolation", "check --list", "check --source 'ch13 ex 8'",
        "exercise", *(f"exercise {id}" for id in exercises.ALL),
    )  # fmt: skip
    assert len(shown) > 500
    code = {line.strip() for erratum in gf.claims.ALL[ONE].errata for line in erratum.example.splitlines()}
    assert not [line for line in shown if len(line) > 80 and line.strip() not in code]


@pytest.mark.parametrize("words", [["check", ONE], ["check", "--list"], ["check", ONE, "--break"], ["exercise"]])
def test_what_is_piped_has_no_trailing_blanks(capsys, words):
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_one_claim_is_no_claims(capsys, tmp_path):
    _, out, _ = run(capsys, "check", ONE, "--report", tmp_path / "a.html")
    assert "a.html: 1 claim on one page" in out


def test_exercises_are_listed_shown_and_started(capsys, tmp_path):
    code, out, _ = run(capsys, "exercise")
    assert code == 0
    assert "kv-cache" in out
    code, out, _ = run(capsys, "exercise", "rope")
    assert "def rope(x, positions, base):" in out
    assert "--grade FILE" in out
    stub = tmp_path / "my.py"
    assert run(capsys, "exercise", "rope", "--stub", stub)[0] == 0
    assert "def rope(" in stub.read_text()
    stub.write_text("mine")
    code, _, err = run(capsys, "exercise", "rope", "--stub", stub)
    assert (code, stub.read_text()) == (2, "mine")
    assert "exists already" in err
    code, result = run_json(capsys, "exercise")
    assert len(result["exercises"]) == len(exercises.ALL)
    assert run_json(capsys, "exercise", "rope")[1]["function"] == "rope"


def test_the_reference_solution_is_shown_on_request_and_named_after_success(capsys, tmp_path):
    code, out, _ = run(capsys, "exercise", "rope", "--solution")
    assert code == 0
    assert "rotated[:, 1::2] = first * sin + second * cos" in out
    assert "rotated[:, 1::2]" not in run(capsys, "exercise", "rope")[1]
    (tmp_path / "my.py").write_text(out)
    code, out, _ = run(capsys, "exercise", "rope", "--grade", tmp_path / "my.py", "--seed", 7)
    assert code == 0
    assert "glass exercise rope --solution" in out
    (tmp_path / "my.py").write_text("def rope(x, positions, base):\n    return x\n")
    code, out, _ = run(capsys, "exercise", "rope", "--grade", tmp_path / "my.py")
    assert code == 1
    assert "--solution" not in out
    assert run_json(capsys, "exercise", "rope", "--solution")[1]["solution"].startswith("import numpy")


def test_a_grade_says_what_is_wrong_and_how(capsys, tmp_path):
    file = tmp_path / "my.py"
    right = (
        "import numpy as np\n\ndef temperature(z, tau):\n    e = np.exp((z - z.max()) / tau)\n    return e / e.sum()\n"
    )
    file.write_text(right)
    assert run(capsys, "exercise", "temperature", "--grade", file)[0] == 0
    file.write_text(right.replace("/ tau", "* tau"))
    code, out, _ = run(capsys, "exercise", "temperature", "--grade", file)
    assert code == 1
    assert "you multiply the logits by tau: divide by it" in out
    file.write_text("def temperature(")
    code, result = run_json(capsys, "exercise", "temperature", "--grade", file)
    assert (code, result["result"]) == (2, "ungraded")
    assert "not valid Python" in result["wrong"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rop"], "Did you mean"),
        (["rope", "--grade", "no.py"], "no.py is not a file"),
        (["rope", "--grade", "a.py", "--stub", "b.py"], "do not go together"),
        (["--grade", "a.py"], "which exercise?"),
        (["--solution"], "which exercise?"),
        (["rope", "--solution", "--stub", "b.py"], "do not go together"),
        (["rope", "--grade", "a.py", "--seed", "-1"], "seed"),
        (["rope", "--stub", "no/folder/a.py"], "there is no folder no/folder; make it first"),
    ],
)
def test_bad_exercise_input_is_one_sentence_and_exit_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, "exercise", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
