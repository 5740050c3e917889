"""A saved model reads back bit for bit, in one file or many, and replaces another only completely."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from tokenizers import Tokenizer, models

from glassformer.config import Learned, NoFeedForward, QueryKeyPosition, presets
from glassformer.model import build
from glassformer.weights import WeightsError, export, load, load_tokenizer, save
from tests.weights.test_gpt2 import config
from tests.weights.tiny import random_model, reopen, saved

ROOT = Path(__file__).parents[2]
CONFIG = presets.gpt2(d_model=24, n_layers=2, n_heads=3, vocab_size=31, max_len=16)


def model(seed=1, dtype=torch.float32):
    return build(CONFIG, seed=seed, dtype=dtype).eval()


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


@pytest.mark.parametrize("position", [QueryKeyPosition(), QueryKeyPosition(Learned())], ids=["waves", "table"])
def test_attention_only_with_query_key_positions_reads_back_from_our_own_format(tmp_path, position):
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
    save(ours, out, format=format, overwrite=True)
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
    """The model is in memory, so it may replace the folder it was loaded from; its tokenizer comes along."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    out = save(model(seed=7), tmp_path / "out", tokenizer=words)
    for format in ("glass", "hf", "glass"):
        save(load(out), out, format=format, overwrite=True)
    assert same(load(out), model(seed=7))
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "model.toml", "tokenizer.json"]


def test_a_model_is_replaced_only_when_asked_and_then_as_a_whole(tmp_path):
    out = save(model(seed=1), tmp_path / "out")
    (out / "generation_config.json").write_text('{"eos_token_id": 3}')
    (out / "vocab.json").write_text("{}")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(WeightsError, match=r"already holds a model: pass --force"):
        save(model(seed=2), out, format="glass")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    save(model(seed=2), out, format="glass", overwrite=True)
    assert same(load(out), model(seed=2))
    assert sorted(p.name for p in out.iterdir()) == ["model.safetensors", "model.toml"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_and_missing_parents_are_accepted(tmp_path):
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        assert same(load(save(model(), target)), model())


def test_files_that_appear_while_a_model_is_written_are_not_replaced(tmp_path):
    out = save(model(seed=1), tmp_path / "out")

    def put(folder):
        (out / "notes.txt").write_text("mine")

    with pytest.raises(WeightsError, match=r"notes\.txt"):
        export.write_folder(model(seed=2), out, overwrite=True, check=put)
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()
    assert same(load(out), model(seed=1))


def test_a_check_that_raises_replaces_nothing(tmp_path):
    out = save(model(seed=1), tmp_path / "out")

    def refuse(folder):
        assert same(load(folder), model(seed=2))
        raise KeyError

    with pytest.raises(KeyError):
        export.write_folder(model(seed=2), out, overwrite=True, check=refuse)
    assert same(load(out), model(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"format": "pickle"}, "pickle"), ({"max_shard_bytes": 0}, "max_shard_bytes")],
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
        save(model(seed=2), out, overwrite=True)
    assert same(load(out), model(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("room", [0, 100, 1000, 9000])
def test_a_full_disk_replaces_nothing(tmp_path, room):
    """The system refuses files of more than `room` bytes: the config, the tokenizer or the weights, whichever it is."""
    words = Tokenizer(models.WordLevel({f"word {i}": i for i in range(31)}, unk_token="word 0"))
    out = save(model(seed=1), tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(WeightsError, match=r"out could not be written \(File too large\): what was there"):
            save(model(seed=2), out, tokenizer=words, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(load(out), model(seed=1))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def crashes(folder, *orders):
    """Lines of tests/weights/crash.py as dictionaries."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.weights.crash", str(folder), *orders]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="crash.py forks the processes that it kills")


STEPS = [f"{action}:{how}" for action in ("save", "convert", "renames") for how in ("kill", "full")]


@FORKS
@pytest.mark.parametrize(
    ("steps", "moments"),
    [(["renames:kill"], 1), pytest.param(STEPS, 300, marks=pytest.mark.slow)],
)
def test_a_crash_or_a_full_disk_at_any_step_leaves_the_old_folder_or_the_new_one(tmp_path, steps, moments):
    """crash.py asserts it; here is asserted that the crashes came before, between and after the steps that matter."""
    *results, by_save, by_convert = crashes(tmp_path, *steps, f"save:{moments}", f"convert:{moments}")
    for order, ended in zip(steps, results, strict=True):
        assert ended["old"] >= 5, order
        assert ended["new"] >= 1, order
        assert (ended["leftovers"] > 0) == order.endswith("kill"), order
        assert ("missing" in ended) == (order == "renames:kill"), order
    for ended in (by_save, by_convert):
        assert ended.get("old", 0) + ended.get("new", 0) == moments
        assert moments < 100 or min(ended.values()) > 10


@pytest.mark.slow
def test_readers_see_a_whole_folder_while_it_is_replaced(tmp_path):
    """Loading in a loop next to a saving process: every load succeeds and is one of the saved models."""
    out = save(model(seed=0), tmp_path / "out", format="glass")
    script = (
        "from tests.weights.test_export import model\nfrom glassformer.weights import save\n"
        f"for seed in range(1, 8): save(model(seed % 3), {str(out)!r}, format='glass', overwrite=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    saver = subprocess.Popen([sys.executable, "-c", script], env=environment, cwd=ROOT)
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
