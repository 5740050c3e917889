"""Names become folders quickly, or one sentence says why not and what to do."""

import re
import sys
import time
from pathlib import Path

import pytest
import torch

from glassformer.config import presets
from glassformer.model import build
from glassformer.weights import WeightsError, hub, load, load_config, resolve, save


@pytest.fixture
def cache(tmp_path, monkeypatch):
    for name in ("HF_HOME", "HTTPS_PROXY", "https_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline(cache, monkeypatch):
    monkeypatch.setattr(hub, "_reachable", lambda: False)


def refusal(name):
    start = time.monotonic()
    with pytest.raises(WeightsError) as refused:
        resolve(name)
    assert time.monotonic() - start < 60
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


def test_a_file_is_refused_with_its_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    assert f"give {tmp_path}" in refusal(str(tmp_path / "model.safetensors"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "plan.md").touch()
    assert "give a folder with config.json" in refusal(str(tmp_path / "notes" / "plan.md"))


@pytest.mark.parametrize("name", ["ckpt.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "weights.PKL"])
@pytest.mark.parametrize("with_config", [False, True])
def test_a_pickle_given_as_a_file_is_refused_with_what_to_do(tmp_path, name, with_config):
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    for read in (load, load_config) if name == "ckpt.pt" else (resolve, load, load_config):  # nanoGPT writes .pt
        with pytest.raises(WeightsError, match="is a pickle, and pickles are never loaded") as refused:
            read(str(tmp_path / name))
        loads = with_config and name == "pytorch_model.bin"
        assert ("save_pretrained" in str(refused.value)) == loads
        assert ("torch.load(file, weights_only=True)" in str(refused.value)) != loads


@pytest.mark.parametrize(
    "name",
    ["./out", "/no/such/folder", "runs/a/b", "~/nothing-here", "out/", "../x", "C:\\models", "a b", "", "x.safetensors",
     "ckpt.pt", "a.ckpt", "run--1", Path("gpt2")],
)  # fmt: skip
def test_a_mistyped_path_never_asks_the_network(cache, monkeypatch, name):
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail("asked the network"))
    assert "does not exist" in refusal(name)


def test_a_missing_subfolder_of_a_local_folder_is_a_mistyped_path(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(hub, "_download", lambda name: pytest.fail("asked the network"))
    assert "does not exist" in refusal("runs/lost")


def test_without_network_the_files_to_put_where_are_named(offline):
    text = refusal("gpt2")
    assert "cannot be reached" in text
    assert "config.json, model.safetensors and tokenizer.json" in text


def test_offline_mode_is_respected(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal("org/model")


def test_without_huggingface_hub_the_way_to_get_it_is_named(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert re.search(r"pip install '\S*\[hub\]'", refusal("gpt2"))


def test_a_name_that_cannot_be_looked_up_fails_soon(cache, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")
    assert "cannot be reached" in refusal("gpt2")


def test_a_download_that_fails_is_one_sentence(cache, monkeypatch):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise RuntimeError("404 Client Error.\nRepository Not Found\nlong advice")

    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert "404 Client Error" in refusal("org/typo")


def test_only_what_is_needed_is_downloaded(cache, monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.setattr(hub, "_reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **k: asked.update(k, name=name) or tmp_path)
    assert resolve("org/model") == tmp_path
    assert asked["name"] == "org/model"
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])


def test_the_cache_is_used_without_the_network(cache, offline):
    config = presets.gpt2(d_model=24, n_layers=1, n_heads=3, vocab_size=31, max_len=16)
    repository = cache / "models--org--tiny"
    save(build(config), repository / "snapshots" / "abc")
    assert resolve("org/tiny") == repository / "snapshots" / "abc"
    (repository / "snapshots" / "def").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def")
    assert resolve("org/tiny").name == "abc", "a snapshot without weights is not whole"
    assert load("org/tiny").config.d_model == 24
