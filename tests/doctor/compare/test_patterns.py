"""What logits alone can say."""

import torch

from glassformer.doctor.compare.patterns import describe


def logits():
    return torch.randn(2, 9, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_where_they_differ():
    a = logits()
    assert describe(a, a.clone()) == "the logits agree at every position"
    b = a.clone()
    b[:, 1:] += torch.rand(2, 8, 11, dtype=torch.float64)
    assert "first at position 1 (row 0), at every position but 0" in describe(a, b)
    b = a.clone()
    b[1, 6:] += torch.rand(3, 11, dtype=torch.float64)
    assert "first at position 6 (row 1), from position 6 on, only in row 1" in describe(a, b)


def test_a_padded_row_is_called_so_and_padding_itself_ignored():
    a, b = logits(), logits()
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    b[1] += torch.rand(9, 11, dtype=torch.float64)
    assert "only in row 1, the padded one" in describe(a, b, real)
    b = a.clone()
    b[1, :3] = 5
    assert describe(a, b, real) == "the logits agree at every position"


def test_disguises():
    a = logits()
    assert "B's logits are A's times 0.5" in describe(a, a / 2)
    assert "by a constant per position" in describe(a, a + torch.rand(2, 9, 1, dtype=torch.float64))
    assert "one position later" in describe(a, a.roll(1, 1))
    assert "one position earlier" in describe(a, a.roll(-1, 1))
    assert "reverse order" in describe(a, a.flip(1))
    assert "nan" not in describe(a, torch.full_like(a, torch.nan))
