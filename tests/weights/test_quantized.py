"""Quantised weights are dequantised by the formula of their source, and files that lack a part are refused."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from glassformer.weights import WeightsError, load, load_config
from glassformer.weights.quantized import dequantize
from glassformer.weights.tensors import Tensors
from tests.weights.test_llama import CASES
from tests.weights.tiny import edit, random_model, saved

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 16]}}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}


def opened(path, tensors, config, dtype=None):
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "x.safetensors")
    return dequantize(Tensors.of(path / "x.safetensors"), config, dtype)


def refusal(call, *args):
    with pytest.raises(WeightsError) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def scaled(rows, columns, seed=0):
    """A float8 matrix and its block scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 8), -(-columns // 16), generator=generator) + 0.01
    return weight, scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_in_blocks_equals_transformers(tmp_path, dtype):
    weight, scale = scaled(24, 48)
    held = opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale, "b": torch.ones(2)}, FP8, dtype)
    assert sorted(held) == ["a.weight", "b"]
    assert (held.shape("a.weight"), held.dtype("a.weight")) == ((24, 48), dtype)
    assert torch.equal(held.read("a.weight"), Fp8Dequantize(None)._dequantize_one(weight, scale, dtype))
    assert held.dtype("b") == torch.float32


def test_float8_with_incomplete_blocks_and_integer_exponents(tmp_path):
    weight, scale = scaled(21, 37)
    held = opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, FP8, torch.float32)
    factors = scale.repeat_interleave(8, 0).repeat_interleave(16, 1)[:21, :37]
    assert torch.equal(held.read("a.weight"), weight.float() * factors)
    exponents = torch.randint(120, 130, scale.shape, dtype=torch.uint8)
    held = opened(tmp_path, {"a.weight": weight, "a.weight_scale_inv": exponents}, FP8, torch.float32)
    factors = (2.0 ** (exponents.float() - 127)).repeat_interleave(8, 0).repeat_interleave(16, 1)[:21, :37]
    assert torch.equal(held.read("a.weight"), weight.float() * factors)


def test_mxfp4_equals_transformers(tmp_path):
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(115, 135, (3, 10, 2), dtype=torch.uint8, generator=generator)
    held = opened(tmp_path, {"mlp.gate_up_proj_blocks": blocks, "mlp.gate_up_proj_scales": scales}, MXFP4)
    assert (list(held), held.shape("mlp.gate_up_proj")) == (["mlp.gate_up_proj"], (3, 64, 10))
    assert held.dtype("mlp.gate_up_proj") == torch.bfloat16
    assert torch.equal(held.read("mlp.gate_up_proj"), convert_moe_packed_tensors(blocks, scales))


def test_the_dtype_is_that_of_the_config_unless_one_is_asked_for(tmp_path):
    weight, scale = scaled(8, 16)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    assert opened(tmp_path, tensors, FP8).dtype("a.weight") == torch.bfloat16
    assert opened(tmp_path, tensors, FP8 | {"torch_dtype": "float16"}).dtype("a.weight") == torch.float16
    assert opened(tmp_path, tensors, FP8 | {"dtype": "float16"}, torch.float64).dtype("a.weight") == torch.float64


def test_a_whole_model_in_float8(tmp_path):
    folder = saved(random_model(*CASES["llama"]()), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    before, quantised = load(folder), {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            scale = tensor.abs().max() / 448
            grid = (-(-tensor.shape[0] // 8), -(-tensor.shape[1] // 16))
            quantised |= {
                name: (tensor / scale).to(torch.float8_e4m3fn),
                name + "_scale_inv": scale.expand(grid).clone(),
            }
        else:
            quantised[name] = tensor
    save_file(quantised, folder / "model.safetensors")
    edit(folder, **FP8)
    after = load(folder, dtype="float32")
    name = "decoder.blocks.1.feedforward.up.weight"
    difference = (before.get_parameter(name) - after.get_parameter(name)).abs().max()
    assert 0 < difference <= before.get_parameter(name).abs().max() / 16  # 3 bits after the leading one
    assert torch.equal(before.embed.tokens.weight, after.embed.tokens.weight)
    assert load_config(folder) == before.config


def test_unknown_kinds_and_missing_parts(tmp_path):
    weight, scale = scaled(8, 16)
    for kind in ("gptq", "awq", "bitsandbytes", None, 3):
        config = {"quantization_config": {"quant_method": kind}}
        assert f"quant_method={kind!r}, which is not known" in refusal(opened, tmp_path, {"a": weight}, config)
    assert "quant_method=None" in refusal(opened, tmp_path, {"a": weight}, {"quantization_config": "yes"})
    assert "no a.weight_scale_inv" in refusal(opened, tmp_path, {"a.weight": weight}, FP8)
    assert "no a.weight," in refusal(opened, tmp_path, {"a.weight_scale_inv": scale}, FP8)
    wrong = {"a.weight": weight, "a.weight_scale_inv": torch.ones(2, 2)}
    assert "needs [1, 1]" in refusal(opened, tmp_path, wrong, FP8)
    odd = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    assert "weight_block_size=None" in refusal(opened, tmp_path, wrong, odd)
    blocks = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    assert "no x_scales" in refusal(opened, tmp_path, {"x_blocks": blocks}, MXFP4)
    assert "no x_blocks" in refusal(opened, tmp_path, {"x_scales": blocks[..., 0]}, MXFP4)
    assert "16 bytes" in refusal(opened, tmp_path, {"x_blocks": blocks, "x_scales": blocks[:1, ..., 0]}, MXFP4)


def test_a_folder_of_an_unknown_kind_is_refused_with_its_path(tmp_path):
    folder = saved(random_model(hf.LlamaForCausalLM, CASES["llama"]()[1]), tmp_path / "model")
    edit(folder, quantization_config={"quant_method": "gptq"})
    for call in (load, load_config):
        assert str(folder) in refusal(call, folder)
