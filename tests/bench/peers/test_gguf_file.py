"""GGUF: every matrix in one precision, and numbers that read back within it."""

import numpy as np
import pytest

import glassformer as gf
from glassformer.bench.peers import gguf_file
from glassformer.bench.peers.base import arrays
from tests.bench import tiny

NAMES = {
    "h.0.mlp.c_fc.weight": "blk.0.ffn_up.weight", "wte.weight": "token_embd.weight",
    "h.1.ln_2.bias": "blk.1.ffn_norm.bias", "wpe.weight": "position_embd.weight",
}  # fmt: skip


@pytest.mark.parametrize(("precision", "bound"), [("float32", 0.0), ("bfloat16", 2**-8), ("int8", 0.01), ("int4", 0.2)])
def test_matrices_read_back(subject, tmp_path, precision, bound):
    gguf = pytest.importorskip("gguf", reason="a peer that is not installed here")
    tensors = arrays(tiny.order(subject, "llama.cpp", "llama", precision))
    gguf_file.write(tmp_path / "m.gguf", gf.load(subject.root / "hf"), precision)
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert len(found) == len(tensors)
    for name, theirs in NAMES.items():
        tensor = found[theirs]
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = tensors[name].T if "c_fc" in name else tensors[name]
        exact = name in ("h.1.ln_2.bias", "wpe.weight")
        assert tensor.tensor_type.name == ("F32" if exact else gguf_file.KINDS[precision])
        limit = 0.0 if exact else bound * np.abs(expected).max()
        assert np.abs(numbers.reshape(expected.shape) - expected).max() <= limit, name
