"""What all verbs share: usage errors, being a module, a reader who goes away."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import glassformer as gf
from glassformer import cli
from glassformer.cli import main
from glassformer.cli.common import (
    InputError,
    check_writable,
    fitted,
    free_name,
    token_ids,
    wrapped,
)
from tests.cli.asking import run


def test_wrong_usage_is_exit_2(capsys):
    assert run(capsys, "paint")[0] == 2
    assert run(capsys, "size")[0] == 2
    assert run(capsys, "size", "gpt2", "--batch", "many")[0] == 2


@pytest.mark.parametrize("words", ["--version", "version"])
def test_the_version_is_printed(capsys, words):
    assert run(capsys, words) == (0, f"glassformer {gf.__version__}\n", "")


def test_an_error_of_the_system_names_its_path_and_a_remedy(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "there/x")

    monkeypatch.setattr("glassformer.sizing.size", full)
    code, out, err = run(capsys, "size", "gpt2")
    assert (code, out) == (2, "")
    assert err == "glass: there/x cannot be used (No space left on device): give another path, or fix this one.\n"


def test_module_and_broken_pipe():
    """`python -m glassformer` is `glass`. A reader that leaves early is met in silence, with the usual exit code."""
    command = f"{sys.executable} -m glassformer size gpt2 | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        pytest.param("sample ROMEO: --max-new-tokens 20 | true", 141, "", marks=pytest.mark.slow),
        ("sample --help | true", 141, ""),
        ("size gpt2 --json | true", 141, ""),
        ("size gpt2 >&-", 2, "standard output is closed"),
        ("size gpt2 --json > /dev/full", 2, "No space left on device"),
    ],
)
def test_the_exit_status_when_standard_output_closes(command, code, words):
    """SIGPIPE's, as of other programs; never a traceback, and never 0 where the output was lost."""
    verb, then = re.split(r" (?=[|>])", command)
    script = f"{sys.executable} -m glassformer {verb} {then}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


UNUSED = {
    "of chinchilla to a model": (("size", "gpt2", "--flops", "3"), "glass size gpt2 has no use for --flops"),
    "of a model to chinchilla": (("size", "chinchilla", "--flops", "1e20", "--context", "4"), "for --context"),
    "of plan to jl": (("size", "jl", "--points", "9", "--gpus", "4"), "glass size jl has no use for --gpus"),
    "devices without a model": (("size", "plan", "--gpus", "4"), "plan without --model has no use for --gpus"),
    "a search's without one": (("sample", "hi", "--length-penalty", "2"), "no use for --length-penalty"),
    "a draft's without one": (("sample", "hi", "--draft-tokens", "3"), "no use for --draft-tokens"),
    "a race's to growth": (("bench", "growth", "--against", "nanogpt"), "growth has no use for --against"),
}


@pytest.mark.parametrize("option", UNUSED)
def test_an_option_that_would_be_ignored_is_refused(capsys, option):
    arguments, words = UNUSED[option]
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.endswith(": leave it out.\n")


OUTSIDE = {
    "a seed of 77 bits": ("sample", "hi", "--seed", 10**23),
    "a negative seed": ("look", "heads", "--seed", -1),
    "a seed that claims cannot take": ("check", "softmax-row-stochastic", "--seed", 10**23),
    "a penalty that is not a number": ("sample", "hi", "--beams", 2, "--length-penalty", "nan"),
    "no tokens to train on": ("size", "plan", "--model", "gpt2", "--tokens", 0),
    "tokens that are not a number": ("size", "plan", "--tokens", "nan"),
    "a vocabulary of none": ("doctor", "no/subject", "--vocab-size", 0),
}


@pytest.mark.parametrize("value", OUTSIDE)
def test_a_value_outside_its_range_is_one_sentence(capsys, value):
    code, out, err = run(capsys, *OUTSIDE[value])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert " must be " in err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000) and data type float64"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 25344 bytes. x"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139 GiB"),
    ],
)
def test_too_little_memory_is_one_sentence(capsys, monkeypatch, error):
    def huge(*_, **__):
        raise error

    monkeypatch.setattr("glassformer.sizing.size", huge)
    code, out, err = run(capsys, "size", "gpt2")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("glass: there is not enough memory")
    assert ("20.00 GiB" in err, "25344 bytes" in err) == ("20.00" in str(error), "25344" in str(error))


def test_another_error_of_the_program_is_not_taken_for_little_memory(monkeypatch):
    def wrong(*_, **__):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("glassformer.sizing.size", wrong)
    with pytest.raises(RuntimeError, match="mat1"):
        main(["size", "gpt2"])


@pytest.fixture
def closed(tmp_path):
    """A folder in which no user can make a file, not even the superuser, where there is a /proc."""
    if Path("/proc/self").is_dir():
        yield Path("/proc")
        return
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o500)
    yield folder
    folder.chmod(0o700)


WRITERS = {
    "doctor --html": ("doctor", "no/subject", "--html", "a.html"),
    "doctor --junit": ("doctor", "no/subject", "--junit", "a.xml"),
    "compare --html": ("compare", "no/a", "no/b", "--html", "a.html"),
    "check --report": ("check", "no-claim", "--report", "a.html"),
    "check --figure": ("check", "no-claim", "--figure", "a.png"),
    "look --out": ("look", "heads", "--model", "no/model", "--out", "a.png"),
    "bench --json": ("bench", "decode", "--model", "no/model", "--json", "a.json"),
    "convert DST": ("convert", "no/model", "a"),
    "data --out": ("data", "prepare", "no/corpus", "--out", "a"),
    "exercise --stub": ("exercise", "rope", "--stub", "a.py"),
    "serve --folder": ("serve", "--port", "0", "--no-open", "--folder", "a"),
}
"""Each with a subject that does not exist: a refusal of the file shows that nothing was looked at before it."""


@pytest.mark.parametrize("verb", WRITERS)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(capsys, closed, verb):
    *asked, name = WRITERS[verb]
    code, out, err = run(capsys, *asked, closed / name)
    assert (code, out) == (2, "")
    assert err.startswith(f"glass: {verb.split()[1]} {closed / name} cannot be written (")
    assert err.endswith("): give another path.\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "verb", ["doctor --html", "doctor --junit", "compare --html", "check --report", "bench --json"]
)
def test_a_folder_that_is_not_there_is_refused_before_any_work(capsys, tmp_path, verb):
    *asked, name = WRITERS[verb]
    code, out, err = run(capsys, *asked, tmp_path / "no" / name)
    assert (code, out) == (2, "")
    assert (
        err
        == f"glass: {verb.split()[1]} {tmp_path / 'no' / name}: there is no folder {tmp_path / 'no'}; make it first.\n"
    )


def test_what_is_asked_whether_it_can_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "old.html").write_text("old")
    check_writable("--html", tmp_path / "new.html", suffixes=(".html", ".htm"))
    check_writable("--html", tmp_path / "old.html", suffixes=(".html", ".htm"), force=True)
    check_writable("--out", tmp_path / "a" / "b" / "new.png", makes_folders=True)
    assert [p.name for p in tmp_path.iterdir()] == ["old.html"]
    assert (tmp_path / "old.html").read_text() == "old"


def test_what_is_no_place_for_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, options, words in (
        (tmp_path, {}, "is a folder"),
        (tmp_path / "a.txt", {"suffixes": (".html", ".htm")}, "must be an .html file"),
        (tmp_path / "file" / "a.html", {}, "file is not a folder"),
        (tmp_path / "file" / "b" / "a.html", {"makes_folders": True}, "file is not a folder"),
        (tmp_path / ("a" * 250 + ".html"), {}, "File name too long"),
    ):
        with pytest.raises(InputError, match=words):
            check_writable("--html", path, **options)


REPLACING = [verb for verb in WRITERS if verb.split()[0] not in ("convert", "data", "exercise", "serve")]


@pytest.mark.parametrize("verb", REPLACING)
def test_a_file_that_exists_is_replaced_only_with_force(capsys, tmp_path, verb):
    *asked, name = WRITERS[verb]
    file = tmp_path / name
    file.write_text("mine")
    code, out, err = run(capsys, *asked, file)
    assert (code, out) == (2, "")
    assert err == (
        f"glass: {verb.split()[1]} {file} already exists: pass --force to replace it, or give another path.\n"
    )
    code, out, err = run(capsys, *asked, file, "--force")
    assert (code, out) == (2, "")  # its subject does not exist
    assert "--force" not in err
    assert file.read_text() == "mine"


@pytest.mark.parametrize("force", [False, True])
def test_what_is_not_a_regular_file_is_never_replaced(tmp_path, force):
    """Renaming a file over /dev/null would break the machine for everybody."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (Path(os.devnull), tmp_path / "pipe", tmp_path / "link"):
        with pytest.raises(InputError, match="is not a regular file: give another path"):
            check_writable("--json", path, force=force)


def test_an_output_without_a_name_takes_the_first_free_name(tmp_path):
    assert free_name(tmp_path / "a.png", force=False) == tmp_path / "a.png"
    for name in ("a.png", "a-2.png", "tour"):
        (tmp_path / name).touch()
    assert free_name(tmp_path / "a.png", force=False) == tmp_path / "a-3.png"
    assert free_name(tmp_path / "tour", force=False) == tmp_path / "tour-2"
    assert free_name(tmp_path / "a.png", force=True) == tmp_path / "a.png"


def test_token_ids_are_separated_by_blanks_or_commas():
    assert token_ids("--tokens", ["5 17, 3", "4"]) == [5, 17, 3, 4]
    assert token_ids("--tokens", []) == []
    with pytest.raises(InputError, match="--tokens 5 x must be token ids such as '5 17 3'"):
        token_ids("--tokens", ["5", "x"])


def test_a_text_fits_a_terminal_and_stays_as_it_is_elsewhere(monkeypatch):
    text = "one two three four five six seven\neight nine\n\n  indented words that are too long\nso"
    monkeypatch.setattr("glassformer.cli.terminal_width", lambda stream: None)
    assert fitted(text) == text
    monkeypatch.setattr("glassformer.cli.terminal_width", lambda stream: 20)
    assert fitted(text).splitlines() == [
        "one two three four",
        "five six seven eight",
        "nine",
        "",
        "  indented words",
        "  that are too long",
        "so",
    ]


REPORTS = (
    "check rope-relative", "check rope-relative --break", "check --list", "check --source 'Bishop 12.3'", "exercise",
    "exercise attention", "convert MODEL new", "compare MODEL MODEL",
    "check rope-relative --figure a/path/of/some/length/and/a/name/that/is/rather/long.svg",
    "look attention --model MODEL --ids --text 5 --layer 0 --head 0 --out a/path/of/some/length/and/a/long/name.svg",
)  # fmt: skip
"""Commands that print a report; `glass size`, `env` and `doctor` have tests of their own."""


@pytest.mark.sample(5)
@pytest.mark.parametrize("report", REPORTS)
def test_a_report_fits_eighty_columns_and_ends_no_line_in_blanks(capsys, monkeypatch, folder, tmp_path, report):
    monkeypatch.chdir(tmp_path)
    words = [str(folder) if word == "MODEL" else word for word in shlex.split(report)]
    code, piped, _ = run(capsys, *words)
    assert code == 0
    assert [line for line in piped.splitlines() if line != line.rstrip()] == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *(word.replace("new", "newer").replace(".svg", "2.svg") for word in words))
    assert code == 0
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in out.splitlines()]
    assert [line for line in lines if len(line) > 80 and "/" not in line.split(" ")[-1]] == []


INTERRUPTED = """
import os, signal, sys
from glassformer.cli import main

assert "tyro" not in sys.modules, "what is imported here is imported where Ctrl-C shows a traceback"
module = sys.argv.pop(1)


class Interrupting:
    def find_spec(self, name, *_):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["tyro", "tyro._cli", "glassformer.cli.size", "glassformer.sizing", "torch._C"])
def test_ctrl_c_in_any_import_is_exit_130_without_a_word(module):
    verb = ["env"] if module.startswith("torch") else ["size", "gpt2"]
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, *verb], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_while_torch_is_imported_raises_nothing_into_its_c(monkeypatch):
    """pybind11 ends the process in a crash where a KeyboardInterrupt meets it."""
    left = []
    monkeypatch.setattr(cli, "_leave", lambda *_: left.append(True))
    with pytest.raises(KeyboardInterrupt):
        cli._interrupt(signal.SIGINT, None)
    assert not left
    half = type("Half", (), {"__spec__": type("Spec", (), {"_initializing": True})})
    monkeypatch.setitem(sys.modules, "torch", half)
    with pytest.raises(KeyboardInterrupt):  # _leave would not have come back
        cli._interrupt(signal.SIGINT, None)
    assert left


@pytest.mark.sample(2)
@pytest.mark.parametrize("delay", [0.03, 0.1, 0.2, 0.4, 0.8])
def test_ctrl_c_at_any_moment_is_quiet(delay):
    code = "import sys; from glassformer.cli import main; print(flush=True); sys.exit(main())"
    command = [sys.executable, "-c", code, "env", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # Python itself is up
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert err == ""
    if out:  # it had ended before: then it is whole
        assert process.returncode in (0, 130, -signal.SIGINT)
        assert out.endswith("}\n")
    else:
        assert process.returncode == 130


def test_an_interrupt_that_was_ignored_from_outside_stays_ignored():
    """`nohup`, or a shell's background job."""
    code = "import os, signal, sys; from glassformer.cli import main; sys.argv[1:] = ['size', 'gpt2']; "
    code += "signal.signal(signal.SIGINT, signal.SIG_IGN); main(); os.kill(os.getpid(), signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_main_called_by_a_program_leaves_its_handler_alone(capsys):
    before = signal.getsignal(signal.SIGINT)
    assert run(capsys, "size", "gpt2")[0] == 0
    assert signal.getsignal(signal.SIGINT) is before


TEXT = "a verdict of some length that goes on and on\n  seen by probe: words and more words that do not fit   \nx"


@pytest.mark.parametrize("width", [40, 47, 80])
def test_no_line_is_wider_and_no_word_is_lost(width):
    out = wrapped(TEXT, width)
    assert max(map(len, out.splitlines())) <= width
    assert out.split() == TEXT.split()
    assert all(line == line.rstrip() for line in out.splitlines())


def test_what_continues_a_line_is_indented_further_than_the_line():
    first, second, third = wrapped("  seen by probe: words and more words that do not fit", 24).splitlines()
    assert first.startswith("  seen")
    assert second.startswith("    ")
    assert third.startswith("    ")


def test_without_a_terminal_lines_stay_and_trailing_blanks_go():
    assert wrapped(TEXT, None).splitlines() == [line.rstrip() for line in TEXT.splitlines()]


def test_a_word_wider_than_the_terminal_is_broken():
    assert max(map(len, wrapped("a" * 100, 40).splitlines())) == 40
