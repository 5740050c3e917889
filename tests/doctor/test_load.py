"""Naming a model: each mistake is one sentence."""

import pytest

import glassformer as gf
from glassformer.checks import CannotExamineError
from glassformer.doctor.load import resolve

CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, size=11):
        super().__init__()
        self.table = nn.Embedding(size, size)
    def forward(self, idx):
        return self.table(idx)
class Needs(nn.Module):
    def __init__(self, size):
        super().__init__()
net = Net()
def build():
    return Net()
def nothing():
    pass
def crash():
    raise RuntimeError("no weights here")
def logits(idx):
    return torch.zeros(*idx.shape, 5)
number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("name", ["net", "Net", "build", "logits"])
def test_instances_classes_builders_and_functions_are_models(file, name):
    model, label = resolve(f"{file}:{name}")
    assert callable(model)
    assert label.endswith(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nte", "Did you mean net"),
        ("Needs", "needs size to be built"),
        ("nothing", "returns NoneType"),
        ("crash", "no weights here"),
        ("number", "is a int"),
    ],
)
def test_each_mistake_is_one_sentence(file, name, words):
    with pytest.raises(CannotExamineError, match=words) as error:
        resolve(f"{file}:{name}")
    assert "\n" not in str(error.value)


def test_missing_and_broken_files_and_modules_are_said(tmp_path):
    with pytest.raises(CannotExamineError, match="there is no file"):
        resolve(f"{tmp_path}/none.py:x")
    (tmp_path / "bad.py").write_text("1/0")
    with pytest.raises(CannotExamineError, match="ZeroDivisionError"):
        resolve(f"{tmp_path}/bad.py:x")
    with pytest.raises(CannotExamineError, match="there is no module"):
        resolve("no_such_package.module:x")
    assert resolve("glassformer.presets:gpt2".replace("presets:gpt2", "checks.measure:rms"))[0] is not None


def test_a_folder_is_loaded_into_our_engine_and_says_so(tmp_path):
    config = gf.presets.gpt2(vocab_size=61, d_model=32, n_layers=1, n_heads=4, max_len=16)
    gf.save(gf.build(config), tmp_path / "m", format="glass")
    model, label = resolve(str(tmp_path / "m"))
    assert "own engine" in label
    assert model.config == config
