"""Packing: int8 within half a step of each group, float32 not copied at all."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.generate.native.pack import (
    Store,
    collapse,
    group_of,
    halves,
    matrix,
    neighbours,
    packed_as,
    quantise,
    room,
)


@given(st.integers(1, 5), st.sampled_from([128, 256, 384]), st.sampled_from(["int8", "int4"]), st.integers(0, 99))
def test_whole_numbers_are_within_half_a_step_of_every_weight(rows, columns, precision, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0  # a row of zeros has no scale of its own
    group = group_of(columns, precision)
    whole, scales = quantise(weight, group, precision)
    back = (whole.float().unflatten(1, (-1, group)) * scales[..., None]).flatten(1)
    assert float(((back - weight).abs() - 0.5001 * scales.repeat_interleave(group, 1)).max()) <= 0


def test_the_largest_group_that_divides_a_row():
    assert [group_of(n) for n in (768, 64, 96, 48, 20)] == [256, 64, None, None, None]
    assert [group_of(n, "int4") for n in (768, 64, 96)] == [64, None, None]


def test_what_cannot_be_packed_is_kept_more_exactly():
    assert [packed_as(n, "int4") for n in (768, 192, 80)] == ["int4", "int8", "bfloat16"]
    assert [packed_as(n, "int8") for n in (768, 192, 80)] == ["int8", "int8", "bfloat16"]
    assert packed_as(768, "float32") == "float32"


def test_layouts_hold_every_weight_once():
    weight = torch.arange(2 * 70).view(2, 70).bfloat16()
    paired = neighbours(weight)
    assert paired[0, :4].tolist() == [0, 16, 1, 17]
    assert torch.equal(paired[:, 64:], weight[:, 64:])
    assert torch.equal(paired.sort(1).values, weight.sort(1).values)
    whole = torch.randint(-7, 8, (3, 256), dtype=torch.int8)
    packed = halves(whole)
    assert packed.shape == (3, 128)
    assert torch.equal((packed & 15).to(torch.int8)[:, :64] - 8, whole[:, :64])
    assert torch.equal((packed >> 4).to(torch.int8)[:, 64:] - 8, whole[:, 192:])


def test_memory_in_huge_pages_holds_what_it_held():
    numbers = torch.arange(3_000_000)
    collapse(numbers.data_ptr(), numbers.data_ptr() + numbers.nbytes)  # whether it was granted is the system's affair
    assert torch.equal(numbers, torch.arange(3_000_000))
    assert not collapse(numbers.data_ptr(), numbers.data_ptr() + 100)  # no whole page inside


def test_float32_is_read_where_it_lies_and_other_layouts_are_copied():
    weight = torch.randn(4, 32)
    store = Store(0)
    assert matrix(store, weight, None, "float32").weights == weight.data_ptr()
    assert matrix(store, weight.T, None, "float32").weights != weight.data_ptr()
    assert store.used == 0


def test_there_is_room_for_what_is_packed():
    weights = [torch.randn(7, 48), torch.randn(5, 20), torch.randn(64, 256), torch.randn(3, 192)]
    for precision in ("bfloat16", "int8", "int4"):
        store = Store(room(weights, precision))
        for weight in weights:
            matrix(store, weight, None, precision)
        assert store.used <= room(weights, precision)
