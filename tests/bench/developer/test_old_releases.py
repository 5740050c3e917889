"""The benchmark of old releases: its own probe, its environments and its way with workers that die."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from glassformer.bench.developer import old_releases, old_releases_subjects
from glassformer.bench.developer.old_releases import LEAKS, ROOT, CannotPrepareError, Row

if find_spec("transformers") is None:
    pytest.skip("needs a release of transformers to stand on", allow_module_level=True)
INSTALLED = version("transformers")
HEALTHY = {"diagnoses": [], "error": None, "causality": {"future-token": [0.0, 1e-8]}, "notes": []}
SICK = {**HEALTHY, "diagnoses": ["causal_leak"], "leak": "input 8 moves output 1 by 2.8", "where": "layer 0"}


class Reaching(nn.Module):
    """Output i sees inputs 0..i, and output 2 sees input 7 too."""

    def __init__(self, leaks: bool):
        super().__init__()
        self.table, self.leaks = nn.Embedding(old_releases_subjects.VOCAB, 8), leaks

    def forward(self, input_ids):
        logits = self.table(input_ids).cumsum(1)
        if self.leaks:
            logits[:, 2] += 1e-3 * self.table(input_ids)[:, 7]
        self.logits = logits
        return self


def unmasked(model):
    """As in the releases that leak: attention gets no mask."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, given: (args, {**given, "attention_mask": None}), with_kwargs=True
        )
    return model


def test_the_probe_names_the_input_and_the_output_of_a_leak():
    leak = old_releases_subjects.probe(Reaching(leaks=True))
    assert leak.real
    assert (leak.source, leak.target) == (7, 2)
    assert not old_releases_subjects.probe(Reaching(leaks=False)).real


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", old_releases_subjects.CLASSES)
def test_no_class_of_the_installed_release_leaks(name):
    for attention in old_releases_subjects.attentions(name):
        model = old_releases_subjects.build(name, attention)
        assert model.config._attn_implementation == attention
        leak = old_releases_subjects.probe(model)
        assert not leak.real, f"{attention}: {leak.text()}"


@pytest.mark.slow
def test_the_doctor_names_a_class_without_a_mask_and_the_probe_sees_it(monkeypatch):
    build = old_releases_subjects.build
    monkeypatch.setattr(old_releases_subjects, "build", lambda *subject: unmasked(build(*subject)))
    found = old_releases_subjects.examine("Llama/eager", 120)
    assert found["error"] is None
    assert found["kind"] == "decoder"
    assert found["diagnoses"][0] == "causal_leak"
    assert found["probe"]["leaks"]
    assert found["leak"].startswith("input ")
    assert "unmasked in layers [0, 1]" in found["where"]


def test_a_class_that_cannot_be_built_is_a_line_of_the_table_and_does_not_agree():
    found = old_releases_subjects.examine("Falcon/telepathy", 10)
    assert "telepathy" in found["error"]
    assert not Row("5.22.2", "Falcon/telepathy", found).agrees


def test_a_row_agrees_only_when_the_leak_is_named_first_and_nothing_else_is():
    assert Row("5.8.1", "Doge/sdpa", SICK).agrees
    assert not Row("5.8.1", "Doge/sdpa", HEALTHY).agrees
    assert not Row("5.8.1", "Doge/sdpa", {**SICK, "diagnoses": ["pad_leak", "causal_leak"]}).agrees
    assert Row("5.8.1", "Doge/eager", HEALTHY).agrees
    assert not Row("5.8.1", "Doge/eager", SICK).agrees
    assert not Row("5.8.1", "Doge/eager", {**SICK, "diagnoses": ["pad_leak"]}).agrees
    assert not Row("5.8.1", "Doge/eager", {"error": "no answer within 360 s"}).agrees


def test_for_an_unlisted_release_the_plain_probe_gives_the_expectation():
    seen = {"probe": {"leaks": True, "text": "input 8 moves output 1 by 2.8"}}
    assert "5.9.0" not in LEAKS
    assert Row("5.9.0", "RoFormer/eager", {**SICK, **seen}).agrees
    assert not Row("5.9.0", "RoFormer/eager", {**HEALTHY, **seen}).agrees
    assert Row("5.9.0", "RoFormer/eager", HEALTHY).agrees


def test_the_listed_leaks_are_subjects_of_the_benchmark():
    have = {f"{n}/{a}" for n in old_releases_subjects.CLASSES for a in old_releases_subjects.attentions(n)}
    assert frozenset().union(*LEAKS.values()) <= have
    assert len(old_releases_subjects.CLASSES) >= 20


def test_the_table_has_one_line_a_row_and_shows_the_probe_when_asked():
    rows = [Row("5.8.1", "Doge/sdpa", SICK), Row("5.8.1", "Doge/eager", {"error": "it died"})]
    for probed in (False, True):
        lines = old_releases.table(rows, probed).splitlines()
        assert len(lines) == 4
        assert {line.count("|") for line in lines} == {8 + probed}
    assert "input 8 moves output 1 by 2.8; layer 0 | causal_leak | yes" in lines[2]
    assert "it died | healthy | NO" in lines[3]
    assert "2 subjects, 1 leak (Doge/sdpa), 1 agree" in old_releases.verdict(rows)


WORKER = """
import json, os, sys, time
for subject in sys.argv[3:]:
    print("chatter", flush=True)
    if subject == "dies": os._exit(3)
    if subject == "hangs": time.sleep(600)
    print(json.dumps({"subject": subject, "diagnoses": [], "error": None}), flush=True)
"""


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_costs_one_subject():
    waiting = ["a", "dies", "b", "hangs", "c"]
    found = list(old_releases.examined([sys.executable, "-c", WORKER], waiting, seconds=1, grace=3))
    assert [one["subject"] for one in found] == waiting
    assert [one["error"] for one in found] == [
        None,
        "it ended with code 3",
        None,
        "it gave no answer in 4 s",
        None,
    ]


def test_an_environment_shares_what_is_installed_here(tmp_path):
    python = old_releases.prepare(tmp_path / "env", INSTALLED)
    assert old_releases.installed(python) == INSTALLED
    code = (
        "import sys; from importlib.util import find_spec as f; print(sys.prefix, *(f(n).origin for n in sys.argv[1:]))"
    )
    done = subprocess.run(
        [python, "-c", code, "torch", "glassformer"],
        capture_output=True,
        text=True,
        env=old_releases.environment(),
        check=True,
    )
    prefix, shared, ours = done.stdout.split()
    assert prefix == str(tmp_path / "env")
    assert shared == torch.__file__
    assert ours == str(ROOT / "src" / "glassformer" / "__init__.py")
    assert sum(f.stat().st_size for f in (tmp_path / "env").rglob("*") if not f.is_symlink()) < 1 << 20


def test_a_release_that_cannot_be_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        CannotPrepareError, match=r"transformers 0\.0\.1 could not be installed: .*transformers==0\.0\.1"
    ):
        old_releases.prepare(tmp_path / "env", "0.0.1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "glassformer.bench.developer.old_releases",
        "--releases",
        INSTALLED,
        "--classes",
        "Doge",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("glass-releases-*/*/bin/python")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(tmp_path.iterdir())
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 128 + number)
    assert "Traceback" not in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--releases", "newest"], "'newest' is not a release such as 5.12.1."),
        (["--classes", "Dodge"], "invalid choice: 'Dodge'"),
        (["--json", "nowhere/at/all.json"], "there is no folder 'nowhere/at'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_installed(words, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["old_releases", *words])
    with pytest.raises(SystemExit) as stopped:
        old_releases.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.net
def test_the_leak_of_5_8_1_is_named_and_its_healthy_neighbours_are_not():
    command = [
        sys.executable,
        "-m",
        "glassformer.bench.developer.old_releases",
        "--releases",
        "5.8.1",
        "--classes",
        "Doge",
        "GPT2",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 leak (Doge/sdpa), 4 agree" in done.stdout
