"""Every command that reads a model accepts the same names: a folder, a bundled model, a name of the hub."""

import shutil
import sys
from pathlib import Path

import pytest

import glassformer as gf
from glassformer import pretrained
from glassformer.bench import processes
from glassformer.cli.serve import model_folders
from glassformer.doctor.report import Report
from glassformer.studio import Settings
from glassformer.studio.models import ModelStore
from tests import folders
from tests.cli.asking import run, run_json

FAKE = Path(__file__).parents[1] / "bench" / "fake_worker.py"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of the hub with one model. `bard` is the same tiny model here: the real one takes seconds to examine."""
    cache = tmp_path_factory.mktemp("hub")
    folders.write(cache / "models--owner--tiny" / "snapshots" / "4f1a", format="hf")
    return cache


@pytest.fixture(params=["FOLDER", "bard", "owner/tiny"])
def name(request, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    snapshot = hub / "models--owner--tiny" / "snapshots" / "4f1a"
    monkeypatch.setitem(pretrained.FOLDERS, "bard", snapshot)
    shutil.copytree(snapshot, "FOLDER")
    return request.param


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "words",
    [
        "sample --ids 5 --model NAME --max-new-tokens 2",
        "sample --ids 5 --model NAME --draft NAME --max-new-tokens 2",
        "look attention --model NAME --ids --text 5 --layer 0 --head 0 --json",
        "eval NAME text.txt",
        "eval NAME text.txt --against NAME",
        "convert NAME new",
        "compare NAME NAME",
        "size NAME",
        "size plan --model NAME",
    ],
)
def test_every_command_takes_every_name(capsys, name, words):
    Path("text.txt").write_text("the cat sat on the mat")
    code, _, err = run(capsys, *words.replace("NAME", name).split())
    assert code == 0, err


def test_the_doctor_examines_every_name_and_compares_with_it(capsys, name, monkeypatch):
    examined = []

    def diagnose(model, kind, reference, *_, **given):
        examined.extend((model, reference))
        return Report(given["name"], "decoder", (), (), (), 0.0)

    monkeypatch.setattr("glassformer.doctor.diagnose", diagnose)
    code, report = run_json(capsys, "doctor", name, "--reference", name)
    assert code == 2  # this report has no findings: nothing was examined
    assert report["subject"] == f"{name} (loaded into glassformer's own engine, float32)"
    assert {type(model) for model in examined} == {gf.DecoderLM}


def test_bench_takes_every_name(capsys, name, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "COMMAND", [sys.executable, str(FAKE)])
    code, out, err = run(
        capsys, "bench", "decode", "--model", name, "--against", "gpt-fast", "--precision", "float32", "--prompt", 4,
        "--new", 3, "--rounds", 1, "--keep", tmp_path / "kept",
    )  # fmt: skip
    assert code == 0, err
    assert "glassformer" in out


def test_the_studio_serves_every_name(name, tmp_path):
    settings = Settings(model_folders([name]), folder=tmp_path / "studio")
    assert name in ModelStore(settings.models).entries()
