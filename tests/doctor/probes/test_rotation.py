"""A rotation is read off one repeated vector."""

import pytest
import torch

from glassformer.doctor.probes.rotation import rotation_of, split_pairs

T, K = 40, 12


def rotated(pairing, base=10000.0, width=K, mixed=False):
    torch.manual_seed(1)
    x = torch.randn(K, dtype=torch.float64).expand(T, K).clone()
    angles = torch.arange(T)[:, None] * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    a, b = split_pairs(x[:, :width], pairing)
    one, two = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    if mixed:
        spread = angles.repeat_interleave(2, dim=1)
        one = a * spread[:, : width // 2].cos() - b * spread[:, : width // 2].sin()
        two = b * spread[:, width // 2 :].cos() + a * spread[:, width // 2 :].sin()
    part = torch.cat([one, two], -1) if pairing == "halves" else torch.stack([one, two], -1).flatten(-2)
    return torch.cat([part, x[:, width:]], -1)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
@pytest.mark.parametrize("width", [K, 6])
def test_pairing_width_and_angles_are_found(pairing, width):
    found = rotation_of(rotated(pairing, base=500.0, width=width))
    assert (found.pairing, found.width, found.moves) == (pairing, width, True)
    expected = 500.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    assert torch.allclose(found.angles, expected, rtol=1e-6)


def test_rotated_components_may_stand_last():
    found = rotation_of(rotated("halves", base=500.0, width=6).roll(6, dims=1))
    assert (found.pairing, found.width) == ("halves", 6)


def test_angles_of_one_layout_on_components_of_the_other_keep_no_length():
    assert rotation_of(rotated("halves", mixed=True)).pairing is None


def test_vectors_that_do_not_move_are_no_rotation():
    assert not rotation_of(torch.ones(5, 8)).moves


def test_rounding_of_earlier_layers_is_no_rotation():
    noise = 1 + 1e-5 * torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    assert not rotation_of(torch.ones(9, 8) * noise).moves
