"""Orders travel as JSON; a model's files are read as they are."""

import numpy as np
import pytest

import glassformer as gf
from glassformer.bench.peers.base import Order, arrays, config_of, convert_once, library
from tests.bench import tiny


def test_an_order_survives_its_way():
    order = Order("a", "ours", "decode", "int8", "folder", 2, ((1, 2), (3, 4)), 5, "checkout", {"batch": 3})
    assert Order.from_json(order.to_json()) == order
    assert order.length == 7


def test_config_and_tensors_of_the_folder(subject):
    order = tiny.order(subject, "x", "ours")
    assert config_of(order)["n_embd"] == 64
    table = gf.load(subject.root / "hf").embed.tokens.weight.detach().numpy()
    assert np.array_equal(arrays(order)["wte.weight"], table)


def test_a_package_by_name():
    assert library("json").loads("1") == 1


def test_a_conversion_is_written_once_and_a_failed_one_leaves_nothing(tmp_path):
    target = tmp_path / "model.bin"
    with pytest.raises(OSError, match="disk full"):
        convert_once(target, failing)
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second"):
        convert_once(target, lambda made, text=text: made.write_text(text))
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]


def failing(made):
    made.write_text("half")
    raise OSError("disk full")
