"""Files that are not what they should be are refused in one sentence; good ones are read lazily."""

import json
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import Tensors, no_weights, open_folder, open_safetensors, read_json

INDEX = "model.safetensors.index.json"


def shards(folder, weight_map):
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(call, *args):
    with pytest.raises(WeightsError) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_shape_dtype_and_values(tmp_path):
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    save_file({"a": value}, tmp_path / "x.safetensors")
    tensors = Tensors.of(tmp_path / "x.safetensors")
    assert (list(tensors), len(tensors), "a" in tensors) == (["a"], 1, True)
    assert (tensors.shape("a"), tensors.dtype("a")) == ((2, 3), torch.bfloat16)
    assert torch.equal(tensors.read("a"), value)


def test_renaming_keeps_values_and_refuses_two_of_a_name(tmp_path):
    save_file({"a": torch.ones(1), "b": torch.zeros(1)}, tmp_path / "x.safetensors")
    tensors = Tensors.of(tmp_path / "x.safetensors")
    assert torch.equal(tensors.rename(str.upper).read("B"), torch.zeros(1))
    assert "two names" in refusal(tensors.rename, lambda name: "same")


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_truncated_file(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(5, 7)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    assert "truncated or corrupt" in refusal(open_folder, tmp_path)


@pytest.mark.parametrize("junk", [b"hello world, no tensors", b"<html>404</html>", struct.pack("<Q", 10**15) + b"{}"])
def test_junk(tmp_path, junk):
    (tmp_path / "model.safetensors").write_bytes(junk)
    assert "truncated or corrupt" in refusal(open_folder, tmp_path)


def test_pickles_under_another_name_are_recognised_by_their_first_bytes(tmp_path):
    file = tmp_path / "model.safetensors"
    for content in (pickle.dumps({"a": [1, 2, 3]}), None):
        if content is None:
            torch.save({"a": torch.ones(3)}, file)
        else:
            file.write_bytes(content)
        message = refusal(open_safetensors, file)
        assert "is a pickle (a torch.save file) under another name" in message
        assert "torch.load(file, weights_only=True)" in message


def test_a_header_whose_length_begins_like_a_pickle_is_no_pickle(tmp_path):
    """Regression: the length of the header stands first, and 0x80 is its low byte in one file of 32."""
    file = tmp_path / "model.safetensors"
    for pad in range(300):
        save_file({"a": torch.ones(1)}, file, metadata={"pad": "x" * pad})
        if file.read_bytes()[:1] == b"\x80":
            break
    assert file.read_bytes()[:1] == b"\x80"
    assert torch.equal(Tensors.of(file).read("a"), torch.ones(1))
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated" in refusal(open_safetensors, file)


def test_git_lfs_pointer(tmp_path):
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal(open_folder, tmp_path)


def test_unsupported_dtype(tmp_path):
    save_file({"a": torch.ones(3, dtype=torch.int8)}, tmp_path / "x.safetensors")
    assert "I8" in refusal(Tensors.of(tmp_path / "x.safetensors").dtype, "a")


def test_shards_are_read_and_checked_against_the_index(tmp_path):
    folder = shards(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    assert "two.safetensors" in refusal(open_folder, folder)
    save_file({"c": torch.ones(1)}, folder / "two.safetensors")
    assert "b in two.safetensors" in refusal(open_folder, folder)
    save_file({"b": torch.ones(1), "c": torch.ones(1)}, folder / "two.safetensors")
    assert "c in two.safetensors" in refusal(open_folder, folder)
    save_file({"b": torch.ones(1)}, folder / "two.safetensors")
    assert sorted(open_folder(folder)) == ["a", "b"]


def test_an_index_cannot_reach_outside_its_folder(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    assert "outside" in refusal(open_folder, shards(tmp_path / "m", {"a": "../x.safetensors"}))


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    assert "weight_map" in refusal(open_folder, tmp_path)


@pytest.mark.parametrize(("content", "word"), [("{", "not JSON"), ("[1]", "list"), ("", "not JSON"), ("\xff", "JSON")])
def test_json_that_is_not_an_object(tmp_path, content, word):
    (tmp_path / "config.json").write_bytes(content.encode("latin1"))
    assert word in refusal(read_json, tmp_path / "config.json")


def test_a_folder_without_weights_says_what_lies_there_instead(tmp_path):
    assert open_folder(tmp_path) is None
    assert "no weights" in str(no_weights(tmp_path))
    for part in ("last", "best"):  # a run of `glass train`
        (tmp_path / part).mkdir()
        (tmp_path / part / "model.safetensors").touch()
    assert f"such as {tmp_path / 'best'}." in str(no_weights(tmp_path))
    (tmp_path / "adapter.safetensors").touch()
    assert "adapter.safetensors" in str(no_weights(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    assert "never loaded" in str(no_weights(tmp_path))


def test_transformers_is_advised_only_for_pickles_that_it_loads(tmp_path):
    """It looks for pytorch_model*.bin next to a config.json; every other pickle the user has to read in Python."""
    for name in ("model.pt", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.PTH"):
        for with_config in (False, True):
            folder = tmp_path / f"{name} {with_config}"
            folder.mkdir()
            (folder / name).touch()
            if with_config:
                (folder / "config.json").touch()
            message = str(no_weights(folder))
            assert f"{folder} holds only pickled weights (1: {name}), and pickles are never loaded" in message
            loads = with_config and name.startswith("pytorch_model")
            assert ("call save_pretrained" in message) == loads
            assert ("torch.load(file, weights_only=True)" in message) != loads
            assert ("safetensors.torch.save_file" in message) != loads


def test_of_a_folder_with_a_nanogpt_checkpoint_the_file_is_asked_for(tmp_path):
    (tmp_path / "ckpt.pt").touch()
    assert f"give the file itself, {tmp_path / 'ckpt.pt'}" in str(no_weights(tmp_path))
