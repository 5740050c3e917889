"""What is saved reads back bit for bit, in one file or many, and never half."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from tokenizers import Tokenizer, models

from glassformer.config import Infused, Learned, NoFeedForward, presets
from glassformer.model import build
from glassformer.weights import WeightsError, export, load, load_tokenizer, save
from tests.weights.test_gpt2 import config
from tests.weights.tiny import random_model, reopen, saved

CONFIG = presets.gpt2(d_model=24, n_layers=2, n_heads=3, vocab_size=31, max_len=16)


def model(seed=1, dtype=torch.float32):
    return build(CONFIG, seed=seed, dtype=dtype).eval()


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.mark.parametrize("position", [Infused(), Infused(Learned())], ids=["waves", "table"])
def test_attention_only_with_infused_positions_reads_back_from_our_own_format(tmp_path, position):
    fields = {"d_model": 24, "n_layers": 2, "n_heads": 3, "vocab_size": 31, "max_len": 16}
    ours = build(presets.gpt2(**fields, feedforward=NoFeedForward(), position=position), seed=1).eval()
    back, ids = load(save(ours, tmp_path / "out", format="glass")), torch.arange(12)[None]
    assert back.config == ours.config
    assert same(back, ours)
    assert torch.equal(back(ids), ours(ids))


@pytest.mark.parametrize("format", ["hf", "glass"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_saved_models_read_back_bit_for_bit_in_their_dtype(tmp_path, format, dtype):
    ours = model(dtype=dtype)
    assert same(load(save(ours, tmp_path / "out", format=format)), ours)


@pytest.mark.parametrize(
    "name", ["nano", "llama_tiny", "moe_tiny", "bloom_560m", "gptj_6b", "transformer_base", "t5_small"]
)
def test_our_folder_holds_every_kind_of_model(tmp_path, name):
    small = {"d_model": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 31}
    small |= {"n_encoder_layers": 2} if name in ("transformer_base", "t5_small") else {}
    if name == "gptj_6b":
        small |= {"d_head": 8}
    ours = build(presets.ALL[name](**small), seed=2)
    back = load(save(ours, tmp_path / "out", format="glass"))
    assert back.config == ours.config
    assert same(back, ours)


@pytest.mark.parametrize("format", ["hf", "glass"])
def test_large_models_are_split_and_read_again(tmp_path, format):
    ours = model()
    out = save(ours, tmp_path / "out", format=format, max_shard_bytes=5000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in ours.parameters())
    assert same(load(out), ours)
    if format == "hf":
        tokens = torch.randint(31, (2, 9))
        with torch.no_grad():
            assert (reopen(out)(tokens).logits - ours(tokens)).abs().max() <= 1e-5
    save(ours, out, format=format)
    assert [p.name for p in out.glob("model*.safetensors*")] == ["model.safetensors"]


def test_metadata_and_dtype_are_what_transformers_reads(tmp_path):
    out = save(model(dtype=torch.bfloat16), tmp_path / "out")
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert reopen(out).dtype == torch.bfloat16


def test_nan_and_negative_zero_survive(tmp_path):
    ours = model()
    with torch.no_grad():
        ours.embed.tokens.weight[0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])
    back = load(save(ours, tmp_path / "out"))
    bits = [m.embed.tokens.weight.detach().view(torch.int32) for m in (ours, back)]
    assert torch.equal(*bits)


def test_tokenizer_given_found_or_inherited(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    first = save(model(), tmp_path / "first", tokenizer=words)
    assert load_tokenizer(first).encode("b").ids == [1]
    (first / "tokenizer_config.json").write_text("{}")
    second = save(load(first), tmp_path / "second", format="glass")
    assert load_tokenizer(second).encode("b").ids == [1]
    assert (second / "tokenizer_config.json").exists()
    third = save(model(), tmp_path / "third", tokenizer=first / "tokenizer.json")
    assert load_tokenizer(third).encode("b").ids == [1]
    with pytest.raises(WeightsError, match="does not exist"):
        save(model(), tmp_path / "fourth", tokenizer=tmp_path / "nowhere.json")
    assert not (tmp_path / "fourth").exists()


def test_a_model_saved_over_itself_stays_whole(tmp_path):
    """Its parameters are views of the very file that is replaced."""
    out = save(model(seed=7), tmp_path / "out")
    for format in ("glass", "hf", "glass"):
        save(load(out), out, format=format)
    assert same(load(out), model(seed=7))
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "model.toml"]


def test_a_model_folder_is_replaced_and_its_other_files_kept(tmp_path):
    out = save(model(seed=1), tmp_path / "out")
    (out / "README.md").write_text("mine")
    (out / "train_state").mkdir()
    (out / "train_state" / "step").write_text("7")
    save(model(seed=2), out, format="glass")
    assert same(load(out), model(seed=2))
    assert (out / "README.md").read_text() == "mine"
    assert (out / "train_state" / "step").read_text() == "7"
    assert not (out / "config.json").exists()


def test_what_is_not_a_model_folder_is_not_overwritten(tmp_path):
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(WeightsError, match="not a model folder"):
        save(model(), tmp_path)
    with pytest.raises(WeightsError, match="is a file"):
        save(model(), tmp_path / "photo.jpg")
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]
    (tmp_path / "empty").mkdir()
    assert same(load(save(model(), tmp_path / "empty")), model())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"format": "onnx"}, "onnx"), ({"max_shard_bytes": 0}, "max_shard_bytes")],
)
def test_wrong_arguments(tmp_path, arguments, word):
    with pytest.raises(WeightsError, match=word):
        save(model(), tmp_path / "out", **arguments)


def test_only_models_built_here_are_saved(tmp_path):
    with pytest.raises(WeightsError, match="Linear"):
        save(torch.nn.Linear(2, 2), tmp_path / "out")
    with pytest.raises(WeightsError, match="GPT2Model"):
        save(hf.GPT2Model(config()), tmp_path / "out")


def test_a_write_that_reads_back_differently_replaces_nothing(tmp_path, monkeypatch):
    out = save(model(seed=1), tmp_path / "out")
    real = export.save_file

    def corrupt(tensors, path, metadata):
        real({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr(export, "save_file", corrupt)
    with pytest.raises(WeightsError, match="reads back differently"):
        save(model(seed=2), out)
    assert same(load(out), model(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_replaces_nothing(tmp_path, monkeypatch):
    out = save(model(seed=1), tmp_path / "out")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(WeightsError, match="No space left"):
        save(model(seed=2), out)
    assert same(load(out), model(seed=1))


KILLED = """
import sys, os, signal
import glassformer.weights.export as module
import glassformer.weights.swap as swap
from glassformer import presets
from glassformer.model import build
from glassformer.weights import save

def die(*given, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def cut(tensors, file, metadata, real=module.save_file):
    real(tensors, file, metadata=metadata)
    os.truncate(file, 1000)
    die()

config = presets.gpt2(d_model=24, n_layers=2, n_heads=3, vocab_size=31, max_len=16)
deaths = {"before the tensors": (module, "save_file", die), "half way through": (module, "save_file", cut),
          "before the exchange": (swap, "_publish", die), "after the exchange": (swap.shutil, "rmtree", die)}
for moment, death in deaths.items():
    if (child := os.fork()) == 0:
        setattr(*death)
        save(build(config, seed=2), f"{sys.argv[1]}/{moment}/out")
        os._exit(0)
    print(moment, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked to be killed")
def test_kill_9_leaves_the_old_folder_or_the_new_one(tmp_path):
    moments = ("before the tensors", "half way through", "before the exchange", "after the exchange")
    for moment in moments:
        save(model(seed=1), tmp_path / moment / "out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == [f"{moment}:{-signal.SIGKILL}" for moment in moments], ended.stderr
    for moment in moments:
        out = tmp_path / moment / "out"
        assert same(load(out), model(seed=2 if moment == "after the exchange" else 1))
        save(model(seed=3), out)
        assert same(load(out), model(seed=3))
        assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
def test_readers_see_a_whole_folder_while_it_is_replaced(tmp_path):
    """Loading in a loop beside a saving process: every load succeeds and is one of the saved models."""
    out = save(model(seed=0), tmp_path / "out", format="glass")
    script = (
        "from tests.weights.test_export import model\nfrom glassformer.weights import save\n"
        f"for seed in range(1, 8): save(model(seed % 3), {str(out)!r}, format='glass')\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    saver = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=root)
    known = [model(seed) for seed in range(3)]
    deadline = time.monotonic() + 60
    loads = 0
    while saver.poll() is None and time.monotonic() < deadline:
        read = load(out)
        assert any(same(read, one) for one in known)
        loads += 1
    assert saver.wait(60) == 0
    assert loads > 0


def test_saved_by_transformers_saved_by_us(tmp_path):
    folder = saved(random_model(hf.GPT2LMHeadModel, config()), tmp_path / "in")
    glass = save(load(folder), tmp_path / "glass", format="glass")
    assert same(load(save(load(glass), tmp_path / "hf")), load(folder))
