"""Packing: int8 within half a step of each group, float32 not copied at all."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.generate.native.pack import GROUPS, Store, group_of, matrix, quantise, room


@given(st.integers(1, 5), st.sampled_from([16, 32, 48, 64, 128, 160]), st.integers(0, 99))
def test_int8_is_within_half_a_step_of_every_weight(rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0  # a row of zeros has no scale of its own
    group = group_of(columns)
    whole, scales = quantise(weight, group)
    back = (whole.float().unflatten(1, (-1, group)) * scales[..., None]).flatten(1)
    assert float(((back - weight).abs() - 0.5001 * scales.repeat_interleave(group, 1)).max()) <= 0


def test_the_largest_group_that_divides_a_row():
    assert [group_of(n) for n in (768, 64, 96, 48, 20)] == [128, 64, 32, 16, None]
    assert list(GROUPS) == sorted(GROUPS, reverse=True)


def test_float32_is_read_where_it_lies_and_other_layouts_are_copied():
    weight = torch.randn(4, 32)
    store = Store(0)
    assert matrix(store, weight, None, "float32").weights == weight.data_ptr()
    assert matrix(store, weight.T, None, "float32").weights != weight.data_ptr()
    assert store.used == 0


def test_there_is_room_for_what_is_packed():
    weights = [torch.randn(7, 48), torch.randn(5, 20), torch.randn(64, 256)]
    for precision in ("bfloat16", "int8"):
        store = Store(room(weights, precision))
        for weight in weights:
            matrix(store, weight, None, precision)
        assert store.used <= room(weights, precision)
