"""Packing: int8 within half a step of each group, float32 not copied at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.kernels.cpu.decode import pack
from glassformer.kernels.cpu.decode.pack import (
    Store,
    collapse,
    empty,
    group_of,
    halves,
    matrix,
    packed_as,
    panels,
    quantise,
    room,
    stretch,
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
    assert [group_of(n, "int4") for n in (768, 64, 96)] == [64, 64, None]


def test_what_cannot_be_packed_is_kept_more_exactly():
    assert [packed_as(n, "int4") for n in (768, 192, 80)] == ["int4", "int4", "bfloat16"]
    assert [packed_as(n, "int8") for n in (768, 192, 80)] == ["int8", "int8", "bfloat16"]
    assert packed_as(768, "float32") == "float32"


def test_a_panel_is_32_rows_of_which_each_column_is_stored_together():
    weight = torch.arange(40 * 7).view(40, 7) + 1
    arranged = panels(weight)
    assert arranged.shape == (2, 7, 32)
    for row, column in [(0, 0), (31, 3), (32, 4), (39, 6)]:
        assert arranged[row // 32, column, row % 32] == weight[row, column]
    assert int(arranged.sum()) == int(weight.sum())  # filled up with zeros


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("rows", "columns"), [(33, 64), (7, 130), (1, 65), (1000, 192), (64, 20480), (5, 768)])
@pytest.mark.parametrize("block", [1, 6144, 1 << 18])
def test_a_matrix_is_packed_in_blocks_of_rows_to_the_same_bytes(precision, rows, columns, block, monkeypatch):
    """Each element is where operands.h reads it, whatever the size of a block, and room for it was not exceeded."""
    monkeypatch.setattr(pack, "_BLOCK", block)
    weight = torch.randn(columns, rows, generator=torch.Generator().manual_seed(0)).T  # as one head of latent attention
    store = Store(pack.room([weight], precision))
    made = matrix(store, weight, None, precision)
    used = packed_as(columns, precision)
    assert (made.rows, made.columns, made.kind) == (rows, columns, pack.KINDS[used])
    assert store.used <= len(store.memory)
    stored, *scales = store.held
    assert (made.weights, made.scales) == (stored.data_ptr(), scales[0].data_ptr() if scales else None)
    words = stored.view(-(-rows // 32), -1, 32).transpose(1, 2).flatten(0, 1)[:rows].contiguous()
    if used == "bfloat16":
        found = words.view(torch.bfloat16)
        assert torch.equal(found[:, :columns], weight.to(torch.bfloat16))
        assert not found[:, columns:].any()
        return
    whole, scale = quantise(weight.contiguous(), made.group, used)
    assert torch.equal(scales[0].view(-(-rows // 32), -1, 32).transpose(1, 2).flatten(0, 1)[:rows], scale)
    wanted = halves(whole) if used == "int4" else (whole.to(torch.int16) + 128).to(torch.uint8)
    assert torch.equal(words.view(torch.uint8), wanted)


def test_halves_hold_every_weight_once():
    whole = torch.randint(-7, 8, (3, 64), dtype=torch.int8)
    packed = halves(whole)
    assert packed.shape == (3, 32)
    assert torch.equal((packed & 15).to(torch.int8)[:, :4] - 8, whole[:, :4])
    assert torch.equal((packed >> 4).to(torch.int8)[:, -4:] - 8, whole[:, -4:])


def test_memory_in_huge_pages_holds_what_it_held():
    numbers = torch.arange(3_000_000)
    collapse(numbers.data_ptr(), numbers.data_ptr() + numbers.nbytes)  # whether it was granted is the system's affair
    assert torch.equal(numbers, torch.arange(3_000_000))
    assert not collapse(numbers.data_ptr(), numbers.data_ptr() + 100)  # no whole page inside


def test_a_large_cache_is_in_whole_huge_pages():
    large, small = empty(2, 1 << 19), empty(10)
    assert large.data_ptr() % (2 << 20) == 0
    assert large.shape == (2, 1 << 19)
    assert small.shape == (10,)


def test_memory_of_a_cache_is_used_again_when_its_last_view_is_gone():
    first = empty(1 << 20).fill_(7)
    at, part = first.data_ptr(), first[:10]
    del first
    assert empty(1 << 20).data_ptr() != at  # `part` still uses it
    assert torch.equal(part, torch.full((10,), 7.0))
    del part
    again = empty(1 << 19)
    assert again.data_ptr() == at
    assert not stretch(4 << 20).any()


def test_float32_is_read_where_it_lies_and_other_layouts_are_copied():
    weight = torch.randn(4, 32)
    store = Store(0)
    start = store.used
    assert matrix(store, weight, None, "float32").weights == weight.data_ptr()
    assert matrix(store, weight.T, None, "float32").weights != weight.data_ptr()
    assert store.used == start


def test_there_is_room_for_what_is_packed():
    weights = [torch.randn(7, 48), torch.randn(5, 20), torch.randn(64, 256), torch.randn(3, 192)]
    for precision in ("bfloat16", "int8", "int4"):
        store = Store(room(weights, precision))
        start = store.used
        for weight in weights:
            matrix(store, weight, None, precision)
        assert store.used - start <= room(weights, precision)
