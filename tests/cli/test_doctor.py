"""`glass doctor` as a user meets it: exit codes, forms of output, and a sentence for each mistake."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import glassformer as gf
from tests.cli.asking import run

ROOT = Path(__file__).parents[2]
BAD = """
import time
import torch
from torch import nn
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
class Nothing(Base):
    def forward(self, idx): return None
class Words(Base):
    def forward(self, idx): return {"text": "hello"}
class Pair(Base):
    def forward(self, idx): return (1, 2)
class Crash(Base):
    def forward(self, idx): raise KeyError("weights")
class Loop(Base):
    def forward(self, idx):
        while True: time.sleep(0.01)
class More(Base):
    def forward(self, idx, image): return self.table(idx)
class Writes(Base):
    def forward(self, idx):
        idx[:] = 0
        return self.table(idx)
class Cuda(Base):
    def forward(self, idx): return self.table(idx).to("cuda")
class Prints(Base):
    def forward(self, idx):
        print("debug")
        return self.table(idx)
class Leaves(Base):
    def forward(self, idx): raise SystemExit(7)
class LeavesLate(Base):
    def forward(self, idx):
        if idx.shape == (2, 13): raise SystemExit(7)
        return self.table(idx)
class Speaks(Base):
    def forward(self, idx):
        import os, sys
        os.write(1, b"past python")
        print("aloud", file=sys.stderr)
        return self.table(idx)
class Needs(Base):
    def __init__(self, width): super().__init__()
class OnlyCuda(Base):
    def __init__(self):
        super().__init__()
        self.table.cuda()
class Empty(Base):
    def forward(self, idx): return ()
class Flat(Base):
    def forward(self, idx): return self.table(idx).argmax(-1)
class NoInput(Base):
    def forward(self): return self.table.weight
def loud():
    print("built")
    return Prints()
def mystery(idx): return torch.zeros(*idx.shape, 5)
class Constant(Base):
    def forward(self, idx): return torch.full((*idx.shape, 11), 2.5)
class ByPosition(Base):
    def forward(self, idx): return self.table(torch.arange(idx.shape[1]) % 11).expand(len(idx), -1, -1)
class ZeroTable(Base):
    def forward(self, idx): return self.table(idx) * 3
    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.table.weight)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("subject") / "bad_models.py"
    path.write_text(BAD)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("model") / "tiny"
    gf.save(
        gf.build(gf.presets.gpt2(vocab_size=61, d_model=32, n_layers=1, n_heads=4, max_len=40)), target, format="glass"
    )
    return target


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nothing", "returned None"),
        ("Words", "a dictionary with 'text'"),
        ("Pair", "a tuple"),
        ("Crash", "weights"),
        ("More", "needs the argument 'image'"),
        ("Writes", "changes its input"),
        ("Cuda", "CPU copy"),
        ("nowhere", "has no nowhere"),
        ("Leaves", "SystemExit: 7"),
        ("Needs", "needs width to be built"),
        ("OnlyCuda", "failed when it was called to build a model"),
        ("Empty", "a tuple of nothing"),
        ("Flat", "a tensor of shape (2, 5) and type torch.int64"),
        ("NoInput", "takes no arguments"),
        ("ZeroTable", "every logit is 0); they must depend on the input to be examined: table.weight is all zero"),
    ],
)
def test_what_cannot_be_examined_is_a_sentence_and_exit_2(capsys, file, name, words):
    code, out, err = run(capsys, "doctor", f"{file}:{name}")
    assert code == 2
    assert out == ""
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mystery", "every logit is 0"),
        ("Constant", "every logit is 2.5"),
        ("ByPosition", "only the position changes them"),
    ],
)
def test_logits_that_ignore_the_tokens_are_a_diagnosis(capsys, file, name, words):
    code, out, _ = run(capsys, "doctor", f"{file}:{name}", "--vocab-size", "5", "--json")
    report = json.loads(out)
    assert code == 1
    assert [d["id"] for d in report["diagnoses"]] == ["constant_logits"]
    assert words in report["diagnoses"][0]["evidence"][0]["why"]


def test_the_device_is_checked_and_reported(capfd, file):
    _, out, _ = run(capfd, "doctor", f"{file}:Prints", "--quick", "--device", "cpu", "--json")
    assert json.loads(out)["device"] == "cpu"
    code, out, err = run(capfd, "doctor", f"{file}:Prints", "--device", "cuda:99")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "device 'cuda:99' was requested" in err


def test_a_loop_ends_at_the_time_limit(capsys, file):
    code, _, err = run(capsys, "doctor", f"{file}:Loop", "--seconds", "0.3")
    assert code == 2
    assert "took more than 0.3 s" in err


@pytest.mark.parametrize("name", ["Prints", "loud", "Speaks", "LeavesLate"])
def test_a_model_that_only_speaks_is_examined_and_stdout_is_the_report_alone(capfd, file, name):
    code, out, err = run(capfd, "doctor", f"{file}:{name}", "--json")
    assert code == 0
    report = json.loads(out)
    assert (err == "") == (name != "Speaks")
    if name == "LeavesLate":
        assert any("stopped with SystemExit: 7" in note for note in report["notes"])
    else:
        assert any("prints" in note for note in report["notes"])


def test_a_file_that_prints_or_exits_while_it_is_imported(capsys, tmp_path):
    (tmp_path / "talks.py").write_text("print('loading')\n" + BAD)
    code, out, err = run(capsys, "doctor", f"{tmp_path / 'talks.py'}:Base", "--quick", "--json")
    assert (code, out) == (2, "")
    assert "loading" not in err
    (tmp_path / "leaves.py").write_text("import sys\nprint('loading')\nsys.exit(0)")
    code, out, err = run(capsys, "doctor", f"{tmp_path / 'leaves.py'}:Base", "--json")
    assert (code, out) == (2, "")
    assert err.strip().endswith("leaves.py cannot be imported: SystemExit: 0.")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_person_sees_the_table_fill_and_a_machine_does_not(capsys, monkeypatch, file):
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    code, out, _ = run(capsys, "doctor", f"{file}:Prints", "--quick")
    assert code == 2  # a table of rows gives too few probes of a quick examination a subject
    assert "not examined: only 7 probes could be made" in out
    shown = screen.getvalue()
    assert "debug" not in shown
    # a family stands there alone before the next one comes
    assert 0 < shown.index("modes") < shown.index("causality") < shown.index("weights")
    screen.truncate(0)
    run(capsys, "doctor", f"{file}:Prints", "--quick", "--json")
    assert screen.getvalue().strip("\0") == ""


@pytest.mark.slow
def test_a_report_fits_the_terminal_and_no_line_ends_in_blanks(capsys, monkeypatch):
    subject = f"{ROOT / 'tests/cli/sick_model.py'}:build"
    monkeypatch.setattr("glassformer.cli.doctor.terminal_width", lambda: 80)
    code, out, _ = run(capsys, "doctor", subject, "--quick")
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert [line for line in out.splitlines() if line != line.rstrip()] == []
    monkeypatch.setattr("glassformer.cli.doctor.terminal_width", lambda: None)
    _, wide, _ = run(capsys, "doctor", subject, "--quick")
    assert max(map(len, wide.splitlines())) > 80
    assert [line for line in wide.splitlines() if line != line.rstrip()] == []


def test_a_healthy_folder_is_exit_0_and_says_whose_engine(capsys, folder):
    code, out, err = run(capsys, "doctor", folder, "--quick")
    assert (code, err) == (0, "")
    assert "healthy as far as" in out
    assert "own engine" in out


def test_a_sick_model_is_exit_1_in_every_form(capsys, tmp_path):
    page, xml = tmp_path / "a.html", tmp_path / "a.xml"
    subject = f"{ROOT / 'tests/cli/sick_model.py'}:build"
    code, out, _ = run(capsys, "doctor", subject, "--quick", "--json", "--html", page, "--junit", xml)
    assert code == 1
    data = json.loads(out)
    assert data["diagnoses"][0]["id"] == "causal_leak"
    assert data["diagnoses"][0]["location"]["layer"] == 0
    assert [len(row) for row in data["pictures"]["leak"]] == [12] * 12
    assert int(ET.fromstring(xml.read_bytes()).get("failures")) >= 1
    assert "causal_leak" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--expect", "window"], "must be KEY=VALUE"),
        (["--expect", "sliding-windw=128"], "no probe reads that name. Did you mean sliding_window"),
        (["--expect", "qqq=1"], "Known are activation, capacity"),
        (["--seconds", "0"], "--seconds 0 must be a positive number"),
        (["--seconds", "nan"], "--seconds nan must be a positive number"),
        (["--html", "no/such/folder/a.html"], "no folder"),
        (["--junit", "no/such/folder/a.xml"], "no folder"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(capsys, file, arguments, words):
    code, _, err = run(capsys, "doctor", f"{file}:Crash", *arguments)
    assert code == 2
    assert words in err


def test_every_name_that_the_planted_bugs_declare_can_be_expected():
    from glassformer.cli.doctor import expected
    from tests.bugs.zoo import ZOO

    for key in {key for bug in ZOO for key in bug.expect}:
        assert expected([f"{key}=1"]) == {key: 1}


def test_expectations_are_read_as_what_they_are():
    from glassformer.cli.doctor import expected

    assert expected(["window=128", "scale=0.5", "causal=false", "kind=a=b"]) == {
        "window": 128,
        "scale": 0.5,
        "causal": False,
        "kind": "a=b",
    }


def test_sarif_places_the_diagnosis_in_the_file(capsys, file, monkeypatch):
    monkeypatch.chdir(Path(file).parent)
    code, out, _ = run(capsys, "doctor", f"{file}:Constant", "--vocab-size", "5", "--format", "sarif")
    assert code == 1
    (result,) = json.loads(out)["runs"][0]["results"]
    assert result["ruleId"] == "constant_logits"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == Path(file).name
    assert "class Constant" in Path(file).read_text().splitlines()[place["region"]["startLine"] - 1]


def test_junit_and_json_are_printed(capsys, file):
    code, out, _ = run(capsys, "doctor", f"{file}:Constant", "--vocab-size", "5", "--format", "junit")
    assert code == 1
    assert ET.fromstring(out).get("failures") == "1"
    code, out, _ = run(capsys, "doctor", f"{file}:Constant", "--vocab-size", "5", "--format", "json")
    assert json.loads(out)["healthy"] is False


@pytest.mark.slow
def test_markdown_has_a_script_that_was_run(capsys, file, monkeypatch):
    monkeypatch.chdir(Path(file).parent)
    code, out, _ = run(capsys, "doctor", f"{Path(file).name}:Constant", "--vocab-size", "5", "--format", "markdown")
    assert code == 1
    script = out.split("```python\n")[1].split("```")[0]
    assert "from " + Path(file).stem + " import Constant" in script
    assert "glassformer" not in script
