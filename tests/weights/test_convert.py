"""Every source is used once and every target filled once, or the offenders are listed."""

import pytest
import torch
from safetensors.torch import save_file

from glassformer.weights.convert import CONV1D, IDENTITY, Drop, Row, linear, plan, read, write
from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import Tensors

ROWS = (
    Row("{p}words", ("embed",), aliases=("old_words",)),
    Row("{p}h.{i}.qkv", ("b.{i}.q", "b.{i}.k", "b.{i}.v"), CONV1D),
    Row("out", ("head",), tied_to="{p}words"),
)
DROPS = (Drop("{p}h.{i}.mask", "a mask"), Drop("trained", "a trained part", notice=True))
TARGETS = {"embed": (5, 3), **{f"b.{i}.{x}": (2, 3) for i in range(2) for x in "qkv"}}
SOURCE = {"m.words": torch.randn(5, 3), "m.h.0.qkv": torch.randn(3, 6), "m.h.1.qkv": torch.randn(3, 6)}


@pytest.fixture
def convert(tmp_path):
    def run(tensors, targets=TARGETS, rows=ROWS, **options):
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "x.safetensors")
        moves = plan(rows, targets, "m.")
        return read(Tensors.of(tmp_path / "x.safetensors"), moves, rows, DROPS, "m.", **options)

    return run


def refusal(call, *args):
    with pytest.raises(WeightsError) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_there_and_back(convert):
    state, notes = convert(SOURCE)
    assert notes == []
    assert torch.equal(state["b.1.k"], SOURCE["m.h.1.qkv"][:, 2:4].T)
    back = write(state, plan(ROWS, TARGETS, "m."))
    assert back.keys() == SOURCE.keys()
    assert all(torch.equal(back[name], SOURCE[name]) for name in back)


def test_one_matrix_is_transposed_and_a_bias_is_not():
    matrix, bias = torch.randn(3, 7), torch.randn(7)
    assert torch.equal(CONV1D.ours(matrix, [(7, 3)])[0], matrix.T)
    assert torch.equal(CONV1D.theirs([matrix.T]), matrix)
    assert torch.equal(CONV1D.ours(bias, [(7,)])[0], bias)
    assert IDENTITY.theirs(IDENTITY.ours(matrix, [])) is matrix


@pytest.mark.parametrize("transform", [IDENTITY, CONV1D])
@pytest.mark.parametrize("parts", [[(7, 3)], [(7, 3), (2, 3), (2, 3)], [(7,)], [(7,), (2,), (2,)]])
def test_shapes_are_known_without_tensors(transform, parts):
    parts = parts[:1] if transform is IDENTITY else parts
    made = transform.theirs([torch.zeros(shape) for shape in parts])
    assert transform.shape(parts) == tuple(made.shape)


def test_missing_extra_and_misshaped_tensors_are_listed_with_shapes(convert):
    text = refusal(convert, {k: v for k, v in SOURCE.items() if "h" not in k})
    assert "2: m.h.0.qkv [3, 6], m.h.1.qkv [3, 6]" in text
    assert "m.h.2.qkv [3, 6]" in refusal(convert, SOURCE | {"m.h.2.qkv": torch.randn(3, 6)})
    text = refusal(convert, SOURCE | {"m.words": torch.randn(4, 3)})
    assert "m.words is [4, 3], expected [5, 3]" in text


def test_known_tensors_are_dropped_and_trained_ones_with_a_notice(convert):
    state, notes = convert(SOURCE | {"m.h.0.mask": torch.ones(1), "trained": torch.ones(1)})
    assert state.keys() == TARGETS.keys()
    assert notes == ["dropped 1: trained (a trained part)."]


def test_a_tied_duplicate_must_be_equal(convert):
    state, _ = convert(SOURCE | {"out": SOURCE["m.words"].clone()})
    assert "head" not in state
    assert "out" in refusal(convert, SOURCE | {"out": SOURCE["m.words"] + 1})


def test_an_alias_stands_in_and_must_agree(convert):
    words = SOURCE["m.words"]
    rest = {name: tensor for name, tensor in SOURCE.items() if name != "m.words"}
    assert torch.equal(convert(rest | {"old_words": words})[0]["embed"], words)
    assert torch.equal(convert(SOURCE | {"old_words": words.clone()})[0]["embed"], words)
    assert "old_words differs" in refusal(convert, SOURCE | {"old_words": words + 1})


def test_mixed_dtypes_are_widened_without_loss_and_reported(convert):
    mixed = SOURCE | {"m.words": SOURCE["m.words"].half(), "m.h.0.qkv": SOURCE["m.h.0.qkv"].bfloat16()}
    state, notes = convert(mixed)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert "mixes" in notes[0]
    state, notes = convert(mixed, dtype=torch.float64)
    assert state["embed"].dtype == torch.float64
    assert notes == []


def test_a_target_without_a_row_or_with_two_is_an_error_of_the_table():
    assert "exactly one row" in refusal(plan, ROWS, TARGETS | {"unheard.of": (1,)}, "")
    assert "embed" in refusal(plan, (*ROWS, Row("twice", ("embed",))), TARGETS, "")


def test_state_that_no_row_takes_is_not_lost():
    assert "extra" in refusal(
        write, {"embed": torch.ones(1), "extra": torch.ones(1)}, plan(ROWS[:1], {"embed": (1,)}, "")
    )


def test_linear_names_weight_and_bias():
    assert [row.theirs for row in linear("a.{i}", "b.{i}")] == ["a.{i}.weight", "a.{i}.bias"]
