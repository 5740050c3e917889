"""A GGUF file becomes a config and a state dict; files of other models are refused."""

import gguf
import numpy as np
import pytest
import torch

import glassformer as gf
from glassformer.weights import WeightsError, load_config
from glassformer.weights.formats.gguf import check
from glassformer.weights.formats.gguf.read import read_gguf, special_ids
from tests.weights.formats.gguf.models import CASES, random

NORMS = ("blk.0.attn_norm", "blk.0.ffn_norm")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@pytest.fixture(autouse=True)
def _without_llama(monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)


def made(path, metadata, tensors, architecture="llama"):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path, call=read_gguf):
    with pytest.raises(WeightsError) as refused:
        call(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
    return str(refused.value)


def test_stacked_experts_are_divided(tmp_path):
    model = random(CASES["mixtral"])
    source = read_gguf(gf.save(model, tmp_path / "m.gguf", format="gguf"))
    state = source.read()[1]
    name = "decoder.blocks.2.feedforward.experts.4.down.weight"
    assert torch.equal(state[name], model.blocks[2].feedforward.experts[4].down.weight)
    assert source.data["model_type"] == "mixtral"
    assert load_config(tmp_path / "m.gguf").feedforward == CASES["mixtral"].feedforward


def test_special_ids():
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}
    assert special_ids(ids) == {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": None}
    assert special_ids({"tokenizer.ggml.eos_token_id": 2})["eos_token_id"] == 2
    assert special_ids({})["eos_token_id"] is None


def test_files_that_are_not_such_models(tmp_path):
    assert "general.architecture='clip'" in refusal(made(tmp_path / "a.gguf", {}, {"x": (2, 2)}, "clip"))
    assert "no token_embd.weight" in refusal(made(tmp_path / "b.gguf", {}, {"x": (2, 2)}))
    assert "lacks llama.context_length" in refusal(made(tmp_path / "c.gguf", {}, {"token_embd.weight": (2, 2)}))
    split = made(tmp_path / "d.gguf", {"split.count": 3}, {"token_embd.weight": (2, 2)})
    assert "one of 3 parts" in refusal(split)
    sizes = {"context_length": 8, "embedding_length": 4, "block_count": 1, "feed_forward_length": 4}
    sizes |= {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1}
    metadata = {f"llama.{key}": value for key, value in sizes.items()}
    tensors = {"token_embd.weight": (9, 4)} | {f"{n}.weight": (4,) for n in ("output_norm", *NORMS)}
    tensors |= {f"blk.0.{name}.weight": (4, 4) for name in MATRICES}
    odd = made(tmp_path / "e.gguf", metadata, {**tensors, "blk.0.lora.weight": (2, 2)})
    assert "its metadata does not have (1: blk.0.lora.weight [2, 2])" in refusal(odd, gf.load)
    assert gf.load(made(tmp_path / "whole.gguf", metadata, tensors)).config.d_model == 4
    many = made(tmp_path / "g.gguf", {**metadata, "llama.block_count": 10**9}, tensors)
    assert "its metadata has 1000000000 layers" in refusal(many, load_config)
    lacking = made(tmp_path / "f.gguf", metadata, {"token_embd.weight": (9, 4), "output_norm.weight": (4,)})
    assert "lack tensors that its metadata requires" in refusal(lacking, gf.load)


def test_the_message_of_a_folder_with_only_a_gguf_file_names_it(tmp_path):
    gf.save(random(CASES["llama"]), tmp_path / "m.gguf", format="gguf")
    assert f"give {tmp_path / 'm.gguf'}" in refusal(tmp_path, gf.load)
