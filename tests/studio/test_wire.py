import json
import struct

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.studio.wire import Packet, decode, to_json


@given(hnp.arrays(np.float32, hnp.array_shapes(max_dims=4, max_side=5), elements=st.floats(-1e4, 1e4, width=32)))
def test_floats_come_back_as_they_were_sent(array):
    arrays, meta = decode(Packet({"x": (array, "f32")}, {"a": 1}).encode())
    assert np.array_equal(arrays["x"], array)
    assert meta == {"a": 1}


def test_bytes_are_within_half_a_step_of_the_value():
    pattern = torch.rand(3, 2, 7, 7).softmax(-1)
    arrays, _ = decode(Packet({"p": (pattern, "u8")}, {}, {"p": (0.0, 1.0)}).encode())
    assert np.abs(arrays["p"] - pattern.numpy()).max() <= 0.5 / 255 + 1e-7


def test_the_layout_is_the_one_documented():
    data = Packet({"a": (np.arange(3), "u8"), "b": (np.arange(2), "i32")}, {"é": 1}).encode()
    assert data[:4] == b"GLAS"
    (length,) = struct.unpack("<I", data[4:8])
    assert (8 + length) % 4 == 0
    header = json.loads(data[8 : 8 + length])
    first, second = header["tensors"]
    assert (first["offset"], first["shape"], first["low"], first["high"]) == (0, [3], 0.0, 2.0)
    assert second["offset"] == 4
    payload = data[8 + length :]
    assert struct.unpack("<2i", payload[4:12]) == (0, 1)


def test_half_precision_widens_where_a_value_does_not_fit():
    arrays, _ = decode(Packet({"x": (np.array([1.0, 1e5]), "f16"), "y": (np.array([1.0, -np.inf]), "f16")}).encode())
    assert arrays["x"].dtype == np.float32
    assert arrays["x"][1] == 1e5
    assert arrays["y"].dtype == np.float16
    assert np.isneginf(arrays["y"][1])


def test_json_is_ascii_and_has_no_nan():
    assert json.loads(to_json({"a": [float("nan"), 1.0, float("inf")]})) == {"a": [None, 1.0, None]}
    assert to_json("\ud800é") == b'"\\ud800\\u00e9"'


def test_what_is_no_message_is_refused():
    with pytest.raises(ValueError, match="GLAS"):
        decode(b"nonsense")
