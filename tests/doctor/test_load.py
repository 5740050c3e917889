"""Naming a model: each mistake is one sentence."""

import pytest
import torch

import glassformer as gf
from glassformer.doctor.load import resolve, source_of
from glassformer.doctor.probes import CannotExamineError
from glassformer.weights import WeightsError

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
        ("number", "int cannot be called"),
    ],
)
def test_each_mistake_is_one_sentence(file, name, words):
    with pytest.raises(CannotExamineError, match=words) as error:
        resolve(f"{file}:{name}")
    assert "\n" not in str(error.value)


def test_missing_and_broken_files_and_modules_are_reported(tmp_path):
    with pytest.raises(CannotExamineError, match="does not exist"):
        resolve(f"{tmp_path}/none.py:x")
    (tmp_path / "bad.py").write_text("1/0")
    with pytest.raises(CannotExamineError, match="ZeroDivisionError"):
        resolve(f"{tmp_path}/bad.py:x")
    with pytest.raises(CannotExamineError, match="cannot be imported: No module named"):
        resolve("no_such_package.module:x")
    with pytest.raises(CannotExamineError, match="is neither a Python file nor a module"):
        resolve("a b:x")
    for text in ("nowhere", "nowhere:", ":x"):
        with pytest.raises(WeightsError, match=r"; or give file\.py:name or package\.module:name\.$"):
            resolve(text)
    with pytest.raises(CannotExamineError, match=r"name the model in it, such as net\.py:build\.$"):
        resolve("net.py")
    assert resolve("glassformer.doctor.subject.measure:rms")[0] is not None


def test_a_folder_is_loaded_into_our_engine_and_says_so(tmp_path):
    config = gf.presets.gpt2(vocab_size=61, d_model=32, n_layers=1, n_heads=4, max_len=16)
    gf.save(gf.build(config), tmp_path / "m", format="glass")
    model, label = resolve(str(tmp_path / "m"))
    assert label == "m (loaded into glassformer's own engine, float32)"
    assert model.config == config


@pytest.mark.parametrize("as_stored", [False, True])
def test_weights_in_16_bits_are_widened_unless_asked_for_as_stored(tmp_path, as_stored):
    gf.save(gf.build(gf.presets.nano(n_layers=1, d_model=8, n_heads=2, vocab_size=11)).half(), tmp_path / "m")
    model, label = resolve(str(tmp_path / "m"), as_stored=as_stored)
    assert label.endswith("own engine, float16)" if as_stored else "own engine, float32)")
    assert next(model.parameters()).dtype == (torch.float16 if as_stored else torch.float32)


def test_an_adapter_that_does_not_load_is_no_reason_to_name_code(tmp_path):
    """The model was found: the error is about the adapter alone."""
    (tmp_path / "adapter").mkdir()
    for adapter in (tmp_path / "adapter", tmp_path / "nowhere"):
        with pytest.raises(WeightsError) as error:
            resolve("bard", adapter=str(adapter))
        assert adapter.name in str(error.value)
        assert "file.py:name" not in str(error.value)


def test_a_folder_that_cannot_be_loaded_is_not_taken_for_code(tmp_path):
    with pytest.raises(WeightsError) as refused:
        resolve(str(tmp_path))
    assert "file.py" not in str(refused.value)


def test_a_checkpoint_is_named_with_its_run(tmp_path):
    checkpoint = tmp_path / "code" / "checkpoints" / "step-00000200"
    gf.save(gf.build(gf.presets.nano(n_layers=1, d_model=8, n_heads=2, vocab_size=11)), checkpoint, format="glass")
    (checkpoint / "meta.json").write_text("{}")
    (tmp_path / "code" / "best").symlink_to("checkpoints/step-00000200")
    assert resolve(str(tmp_path / "code" / "best"))[1].startswith("code/best (")


def test_two_files_of_one_name_stay_apart(tmp_path):
    for size in (5, 7):
        (tmp_path / str(size)).mkdir()
        (tmp_path / str(size) / "neighbour.py").write_text(f"SIZE = {size}")
        code = CODE + f"\nfrom dataclasses import dataclass\n@dataclass\nclass Facts:\n    size: int = {size}\n"
        (tmp_path / str(size) / "model.py").write_text(code + "def made():\n    return Net(Facts().size)\n")
    one, two = (resolve(f"{tmp_path}/{size}/model.py:made")[0] for size in (5, 7))
    assert (one.table.num_embeddings, two.table.num_embeddings) == (5, 7)


def test_what_exits_or_prints_while_it_is_imported_is_kept(tmp_path, capsys):
    (tmp_path / "leaves.py").write_text("import sys\nprint('bye')\nsys.exit(3)")
    with pytest.raises(CannotExamineError, match="cannot be imported: SystemExit: 3"):
        resolve(f"{tmp_path}/leaves.py:x")
    assert capsys.readouterr().out == ""


def test_a_name_that_a_file_lacks_gets_the_nearest_or_all(file):
    with pytest.raises(CannotExamineError, match=r"has no biuld\. Did you mean build"):
        resolve(f"{file}:biuld")
    with pytest.raises(CannotExamineError, match=r"has no zzzz\. It has: .*Net.*build"):
        resolve(f"{file}:zzzz")


def test_the_source_of_a_subject_builds_it_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Linear(2, 3)\n\nheld = build()\n"
    )
    for name, wanted in (("build", "model = build()"), ("held", "model = held")):
        model, _ = resolve(f"made.py:{name}")
        source = source_of(f"made.py:{name}", model)
        assert source.splitlines()[-1] == wanted
        space = {}
        exec("import sys\n" + source, space)
        assert space["model"].weight.shape == (3, 2)
    assert "glassformer.load" in source_of(str(tmp_path), None)
    model, _ = resolve("torch.nn:Identity")
    assert source_of("torch.nn:Identity", model).splitlines() == [
        "from torch.nn import Identity",
        "",
        "model = Identity()",
    ]
