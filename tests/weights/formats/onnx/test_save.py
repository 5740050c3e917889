"""What is saved as ONNX computes the same in onnxruntime and here, or nothing is written."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.config import Attention
from glassformer.weights import WeightsError
from glassformer.weights.formats.onnx import save
from glassformer.weights.formats.onnx.check import Session, next_past
from glassformer.weights.formats.unverified import UnverifiedError
from tests.weights.formats.gguf.models import bpe, gpt2, llama, random
from tests.weights.formats.onnx.export import MODELS

pytest.importorskip("onnxruntime")
ROOT = Path(__file__).parents[4]


def exported(folder, *names):
    """What export.py prints for each model: findings and notes. The annotations of the package are not checked there,
    because the exporter traces with numbers that are not of the type int."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.weights.formats.onnx.export", str(folder / "exported"), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.slow
def test_onnxruntime_computes_the_same(tmp_path):
    results = exported(tmp_path, *MODELS)
    assert results.keys() == MODELS.keys()
    for name, ((finding,), notes) in results.items():
        assert finding["verdict"] == "pass", name
        assert finding["measured"] <= 1e-5 * max(1.0, finding["bound"] / 1e-4), name
        assert finding["evidence"]["outputs_compared"] > 500, name
        assert bool(notes) == (name in ("mixtral", "experts in groups")), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder with a window that is shorter than the tokens compared, in half precision, with a tokenizer.

    It is exported once for all processes of a test run.
    """
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported-onnx"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            export(tmp_path_factory.mktemp("onnx")).rename(root)
    return root / "onnx"


def export(root):
    config = llama(Attention(6, n_kv_heads=2, bias=False, window=9), vocab_size=300, n_layers=1)
    source = gf.save(random(config).half(), root / "hf", tokenizer=bpe(300))
    (source / "chat_template.jinja").write_text("{{ x }}")
    (finding,), notes = exported(root, str(source))[str(source)]
    assert (finding["id"], finding["verdict"]) == ("onnxruntime-outputs", "pass")
    assert "float32" in notes[0]
    (root / "exported").rename(root / "onnx")
    return root


def test_the_folder_has_what_a_reader_needs(folder):
    names = {"model.onnx", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == names
    assert json.loads((folder / "config.json").read_text())["model_type"] == "mistral"
    inputs = Session(folder / "model.onnx").inputs
    assert inputs["input_ids"] == ["batch", "sequence"]
    assert inputs["attention_mask"] == ["batch", "total"]
    assert inputs["past_key_values.0.key"] == ["batch", 2, "past", 10]
    with pytest.raises(WeightsError, match=r"holds an ONNX model \(1: model.onnx\), which only onnxruntime reads"):
        gf.load(folder)


def test_generation_by_onnxruntime_equals_ours(folder):
    model, session = gf.load(folder.parent / "hf", dtype="float32"), Session(folder / "model.onnx")
    tokens = [5, 17, 200, 33]
    ours = gf.generate(model, [tokens], max_new_tokens=50, engine="torch").new[0]
    past, new, text = session.empty_past(1), tokens, list(tokens)
    for _ in range(50):
        total = len(text)
        outputs = session.run(
            input_ids=torch.tensor([new]),
            attention_mask=torch.ones(1, total, dtype=torch.long),
            position_ids=torch.arange(total - len(new), total)[None],
            **past,
        )
        new, past = [int(outputs["logits"][0, -1].argmax())], next_past(outputs)
        text += new
    assert text[4:] == ours


def test_a_graph_that_computes_something_else_is_not_put_in_place(tmp_path, monkeypatch, folder):
    """The graph of another model takes the place of the exported one."""
    content = (folder / "model.onnx").read_bytes()
    monkeypatch.setattr(save, "_export", lambda graph, file: file.write_bytes(content))
    other = random(llama(Attention(6, n_kv_heads=2, bias=False, window=9), vocab_size=300, n_layers=1), seed=5)
    with pytest.raises(UnverifiedError, match="onnxruntime-outputs"):
        gf.save(other, tmp_path / "m", format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_with_force(tmp_path, monkeypatch, folder):
    content, model = (folder / "model.onnx").read_bytes(), gf.load(folder.parent / "hf")
    monkeypatch.setattr(save, "_export", lambda graph, file: file.write_bytes(content))
    gf.save(model, tmp_path / "m", format="onnx")
    with pytest.raises(WeightsError, match="already holds a model: pass --force"):
        gf.save(model, tmp_path / "m", format="onnx")
    gf.save(model, tmp_path / "m", format="onnx", overwrite=True)
    gf.save(model, tmp_path / "m", format="glass", overwrite=True)
    assert gf.load(tmp_path / "m").config == model.config
    (tmp_path / "m" / "thesis.tex").write_text("mine")
    with pytest.raises(WeightsError, match=r"thesis\.tex"):
        gf.save(model, tmp_path / "m", format="onnx", overwrite=True)


def test_errors_of_the_exporter_and_missing_packages_are_one_sentence(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(torch.onnx, "export", fail)
    with pytest.raises(WeightsError, match=r"could not export the model as ONNX \(first line\)") as refused:
        gf.save(random(gpt2()), tmp_path / "m", format="onnx")
    assert "\n" not in str(refused.value)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(WeightsError, match="ONNX needs onnxscript: run pip install"):
        gf.save(random(gpt2()), tmp_path / "m", format="onnx")
    with pytest.raises(WeightsError, match="no glassformer config"):
        gf.save(torch.nn.Linear(2, 2), tmp_path / "m", format="onnx")
    assert list(tmp_path.iterdir()) == []
