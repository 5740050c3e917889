"""Mixtures of experts in GGUF: what llama.cpp always computes must exist, and files of its converters are read."""

import gguf
import pytest
import torch
import transformers as hf

import glassformer as gf
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf import check
from glassformer.weights.formats.gguf.architectures import ARCHITECTURES
from glassformer.weights.formats.gguf.dense import DENSE
from glassformer.weights.formats.gguf.file import open_gguf
from glassformer.weights.formats.gguf.latent import DEEPSEEK2
from glassformer.weights.formats.gguf.mixtures import DOTS1, GLM4_MOE, MIXTURES, QWEN2_MOE
from tests.weights.formats.gguf.test_families import CASES
from tests.weights.tiny import random_model, saved


def test_each_has_its_own_name_and_type():
    assert len({one.name for one in ARCHITECTURES}) == len(ARCHITECTURES)
    types = [kind for one in ARCHITECTURES for kind in one.types]
    assert len(set(types)) == len(types)
    assert all(one in ARCHITECTURES for one in (*DENSE, *MIXTURES, DEEPSEEK2))


@pytest.mark.parametrize(
    ("architecture", "key"), [(QWEN2_MOE, "shared_expert_intermediate_size"), (DOTS1, "n_shared_experts")]
)
def test_a_shared_expert_is_required(architecture, key):
    data = {one.hf: 1 for one in architecture.keys} | {"model_type": architecture.types[0], "hidden_size": 1}
    data |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "norm_topk_prob": False}
    assert architecture.metadata(data)
    with pytest.raises(WeightsError, match=f"{key}=0 cannot be written as GGUF"):
        architecture.metadata({**data, key: 0})


def test_keys_that_a_file_lacks_have_the_values_of_llama_cpp_and_another_score_is_refused():
    metadata = {f"glm4moe.{one.gguf}": 3 for one in GLM4_MOE.keys if one.required}
    back = GLM4_MOE.config(metadata, ())
    assert (back["norm_topk_prob"], back["routed_scaling_factor"], back["n_group"]) == (False, 1.0, 1)
    assert back["first_k_dense_replace"] == 0
    assert GLM4_MOE.config(metadata | {"glm4moe.expert_gating_func": 2}, ()) == back
    with pytest.raises(WeightsError, match=r"expert_gating_func=1: only 2 \(sigmoid\) is supported"):
        GLM4_MOE.config(metadata | {"glm4moe.expert_gating_func": 1}, ())


def copied(source, target, changed, added=()):
    """Write the tensors and metadata of a GGUF file again, some of them changed."""
    file = open_gguf(source)
    writer = gguf.GGUFWriter(target, file.metadata["general.architecture"])
    values = {**file.metadata, **changed.get("metadata", {})}
    for key, value in values.items():
        if not key.startswith(("general.", "tokenizer.", "GGUF.")):
            kind = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            kind(key, value)
    for name, tensor in file.tensors.items():
        writer.add_tensor(name, changed.get("tensor", lambda name, x: x)(name, tensor.read().float().numpy()))
    for name in added:
        writer.add_tensor(name, torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)

    def case(name):
        kind, settings = CASES[name]
        cls = getattr(hf, kind + "ForCausalLM")
        model = gf.load(saved(random_model(cls, cls.config_class(**settings)), tmp_path / "hf"))
        return model, gf.save(model, tmp_path / "m.gguf", format="gguf")

    return case


def test_the_gate_of_a_shared_expert_may_be_a_matrix_of_one_row(write, tmp_path):
    """Both are the same in llama.cpp, and its converter has written both."""
    model, path = write("qwen2moe")
    gate = "ffn_gate_inp_shexp.weight"
    assert len(open_gguf(path).tensors[f"blk.0.{gate}"].shape) == 1
    row = copied(path, tmp_path / "row.gguf", {"tensor": lambda name, x: x[None] if name.endswith(gate) else x})
    assert open_gguf(row).tensors[f"blk.0.{gate}"].shape[0] == 1
    back = gf.load(row)
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_layers_that_predict_several_tokens_at_once_are_dropped(write, tmp_path):
    model, path = write("glm4_moe")
    extra = ("blk.3.nextn.eh_proj.weight", "blk.3.attn_q.weight")
    several = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    back = gf.load(copied(path, tmp_path / "several.gguf", {"metadata": several}, extra))
    assert back.config.n_layers == model.config.n_layers == 3
    with pytest.raises(WeightsError, match=r"blk\.3\.nextn\.eh_proj\.weight"):
        gf.load(copied(path, tmp_path / "not_named.gguf", {}, extra))
