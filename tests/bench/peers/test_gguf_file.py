"""GGUF: llama.cpp's names and shapes, and numbers that read back within their precision."""

import numpy as np
import pytest

from glassformer.bench.peers import gguf_file
from glassformer.bench.peers.base import arrays, config_of
from tests.bench import tiny


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("wte.weight", "token_embd.weight"),
        ("wpe.weight", "position_embd.weight"),
        ("ln_f.bias", "output_norm.bias"),
        ("h.3.attn.c_attn.weight", "blk.3.attn_qkv.weight"),
        ("h.11.mlp.c_proj.bias", "blk.11.ffn_down.bias"),
    ],
)
def test_names(name, theirs):
    assert gguf_file.name_of(name) == theirs


@pytest.mark.parametrize(("precision", "bound"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 0.01), ("int4", 0.2)])
def test_matrices_read_back(subject, tmp_path, precision, bound):
    gguf = pytest.importorskip("gguf", reason="a peer that is not installed here")
    order = tiny.order(subject, "llama.cpp", "llama", precision)
    tensors = arrays(order)
    gguf_file.write(tmp_path / "m.gguf", config_of(order), tensors, precision)
    read = gguf.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in read.tensors}
    assert len(found) == len(tensors)
    for name in ("h.0.mlp.c_fc.weight", "wte.weight", "h.1.ln_2.bias", "wpe.weight"):
        tensor = found[gguf_file.name_of(name)]
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = tensors[name].T if "c_fc" in name else tensors[name]
        exact = name in ("h.1.ln_2.bias", "wpe.weight")
        limit = 0.0 if exact else bound * np.abs(expected).max()
        assert np.abs(numbers.reshape(expected.shape) - expected).max() <= limit, name
