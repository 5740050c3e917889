"""Files that are not what they should be are refused in one sentence; good ones are read lazily."""

import contextlib
import struct

import gguf
import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf import check
from glassformer.weights.formats.gguf.file import is_gguf, library, open_gguf
from tests.weights.formats.gguf.models import bpe, random, wide


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "is_installed", lambda: False)
        path = tmp_path_factory.mktemp("gguf") / "m.gguf"
        return gf.save(random(wide(vocab_size=300)), path, format="gguf", tokenizer=bpe(300), quantization="q8_0")


def refusal(path, call=open_gguf):
    with pytest.raises(WeightsError) as refused:
        call(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_every_truncated_file_is_refused(good, tmp_path):
    data, file = good.read_bytes(), tmp_path / "cut.gguf"
    for kept in [*range(0, 60), 100, 1000, 3000, len(data) // 2, len(data) - 200]:
        file.write_bytes(data[:kept])
        text = refusal(file)
        assert "not a GGUF file" in text if kept < 4 else "truncated or corrupt" in text, kept
    file.write_bytes(data[: len(data) // 2])
    assert "truncated or corrupt" in refusal(file, gf.load)


def test_counts_that_a_file_cannot_hold_end_at_once(good, tmp_path):
    """The reader of the library takes what lies behind the end of a file as empty, and would count to 2^60."""
    data, file = bytearray(good.read_bytes()), tmp_path / "count.gguf"
    at = data.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    data[at : at + 8] = struct.pack("<Q", 2**60)
    file.write_bytes(data)
    assert "truncated or corrupt" in refusal(file)


@pytest.mark.parametrize(("version", "word"), [(1, "of version 1"), (4, "of version 4"), (3 << 24, "big-endian")])
def test_other_versions(good, tmp_path, version, word):
    data = bytearray(good.read_bytes())
    data[4:8] = struct.pack("<I", version)
    (tmp_path / "old.gguf").write_bytes(data)
    text = refusal(tmp_path / "old.gguf")
    assert word in text
    assert "versions 2 and 3" in text


def test_random_changes_of_the_header_load_or_are_refused(good, tmp_path):
    data, file = good.read_bytes(), tmp_path / "changed.gguf"
    generator = np.random.default_rng(0)
    loaded = 0
    for _ in range(150):
        changed = bytearray(data)
        for at in generator.integers(8, 2000, 3):
            changed[at] = generator.integers(256)
        file.write_bytes(changed)
        with contextlib.suppress(WeightsError):  # and no other error
            gf.load(file)
            loaded += 1
    assert loaded < 120


def test_unknown_quantisation(good, tmp_path):
    data = bytearray(good.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 16  # the number of dimensions, two dimensions, then the type
    assert struct.unpack("<I", data[at : at + 4]) == (int(gguf.GGMLQuantizationType.Q8_0),)
    data[at : at + 4] = struct.pack("<I", 999)
    (tmp_path / "new.gguf").write_bytes(data)
    assert "quantisation that is not known" in refusal(tmp_path / "new.gguf")
    data[at : at + 4] = struct.pack("<I", int(gguf.GGMLQuantizationType.I8))
    (tmp_path / "new.gguf").write_bytes(data)
    assert "has the type I8, which cannot be dequantised" in refusal(tmp_path / "new.gguf", gf.load)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_are_those_of_the_library(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("experts", quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = open_gguf(tmp_path / "x.gguf").tensors["experts"]
    expected = torch.from_numpy(gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind]))
    assert (tensor.shape, tensor.dtype, tensor.is_view) == ((3, 5, 64), torch.float32, False)
    assert torch.equal(tensor.read(), expected)


def test_numbers_read_as_they_were_written(good):
    metadata = open_gguf(good).metadata
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert metadata["general.architecture"] == "llama"
    assert is_gguf(good)
    assert not is_gguf(good.parent)


def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(WeightsError, match="need the package gguf: run pip install"):
        library()


def test_memory_is_mapped_and_not_held(good):
    model = gf.load(good)
    assert model.origin.notes == ("Q8_0 tensors were dequantised.",)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in gf.load(good, dtype="bfloat16").parameters()} == {torch.bfloat16}
