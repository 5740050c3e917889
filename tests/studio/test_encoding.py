import json
import struct

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from glassformer.studio.encoding import TensorResponse, to_json
from tests.studio.serving import decode


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=5), elements=st.floats(-1e4, 1e4, width=32)))
def test_floats_are_transferred_exactly(array):
    arrays, meta = decode(TensorResponse({"x": (array, "float32")}, {"a": 1}).encode())
    assert np.array_equal(arrays["x"], array)
    assert meta == {"a": 1}


def test_quantised_values_are_within_half_a_step():
    pattern = torch.rand(3, 2, 7, 7).softmax(-1)
    data = TensorResponse({"p": (pattern, "uint8")}, {}, {"p": (0.0, 1.0)}).encode()
    arrays, _ = decode(data)
    assert np.abs(arrays["p"] - pattern.numpy()).max() <= 0.5 / 255 + 1e-7
    assert len(data) < pattern.numel() + 250  # one byte per weight


def test_the_body_is_a_safetensors_file_with_aligned_tensors():
    """The page reads typed arrays without a copy only if each tensor starts at a multiple of its element size."""
    tensors = {
        "a": (np.arange(3), "uint8"), "b": (np.arange(2), "int32"), "c": (np.arange(5), "float16"),
        "d": (torch.arange(6.0).reshape(2, 3).T, "float32"),
    }  # fmt: skip
    data = TensorResponse(tensors, {"é": 1}).encode()
    arrays = load(data)
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "a": ("uint8", (3,)), "b": ("int32", (2,)), "c": ("float16", (5,)), "d": ("float32", (3, 2)),
    }  # fmt: skip
    assert np.array_equal(arrays["d"], np.arange(6.0).reshape(2, 3).T)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert json.loads(metadata["meta"]) == {"é": 1}
    assert json.loads(metadata["ranges"])["a"] == [0.0, 2.0]
    for name, entry in header.items():
        assert (8 + length + entry["data_offsets"][0]) % arrays[name].dtype.itemsize == 0


def test_float16_becomes_float32_if_a_value_does_not_fit():
    tensors = {"x": (np.array([1.0, 1e5]), "float16"), "y": (np.array([1.0, -np.inf]), "float16")}
    arrays, _ = decode(TensorResponse(tensors).encode())
    assert arrays["x"].dtype == np.float32
    assert arrays["x"][1] == 1e5
    assert arrays["y"].dtype == np.float16
    assert np.isneginf(arrays["y"][1])


def test_json_is_ascii_and_has_no_nan():
    assert json.loads(to_json({"a": [float("nan"), 1.0, float("inf")]})) == {"a": [None, 1.0, None]}
    assert to_json("\ud800é") == b'"\\ud800\\u00e9"'
