"""Copies in bfloat16 of parameters: where they are in memory, when they are renewed, and what their gradients are."""

import torch

from glassformer.kernels.cuda.training import copies


def parameters(*shapes):
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]


def test_parameters_that_are_read_together_have_copies_in_one_matrix():
    first, second, third = parameters((3, 4), (5, 4), (2, 4))
    wanted = torch.cat([first, second, third]).bfloat16()
    assert torch.equal(copies.in_bfloat16(first, second, third), wanted)
    assert not any(hasattr(p, copies.COPY) for p in (first, second, third))
    copies.make([first, second, third])
    whole = copies.in_bfloat16(first, second, third)
    assert torch.equal(whole, wanted)
    assert whole.data_ptr() == getattr(first, copies.COPY).data_ptr()
    for others in ((second, first, third), (first, second), (second, third), (first, second, third, first)):
        assert torch.equal(copies.in_bfloat16(*others), torch.cat(others).bfloat16())


def test_copies_that_were_not_made_together_are_joined():
    first, second = parameters((3, 4), (5, 4))
    copies.in_bfloat16(first)
    copies.make([first])
    assert torch.equal(copies.in_bfloat16(first, second), torch.cat([first, second]).bfloat16())
    copies.make([first, second])
    assert torch.equal(copies.in_bfloat16(first, second), torch.cat([first, second]).bfloat16())


def test_changed_parameters():
    """A step that is not captured reads what the parameters are; a block that is used twice can be differentiated."""
    (weight,) = parameters((3, 4))
    copies.in_bfloat16(weight)
    copies.make([weight])
    saved = copies.in_bfloat16(weight)
    version = saved._version
    assert torch.equal(copies.in_bfloat16(weight), saved)
    assert saved._version == version
    with torch.no_grad():
        weight.mul_(2)
    assert not torch.equal(getattr(weight, copies.COPY), weight.bfloat16())
    copies.renew([weight])
    assert torch.equal(getattr(weight, copies.COPY), weight.bfloat16())
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(copies.in_bfloat16(weight), weight.bfloat16())


def test_dtypes_of_gradients():
    weight, bias, frozen = parameters((3, 4), (3,), (3, 4))
    for p in (weight, bias):
        copies.in_bfloat16(p)
    copies.make([weight, bias, frozen])
    assert not hasattr(frozen, copies.COPY)  # which no matmul has asked for
    for p in (weight, bias):
        copies.in_bfloat16(p)
    assert copies.gradient_dtype(weight) is torch.bfloat16
    assert copies.gradient_dtype(bias) is torch.float32


def test_copies_of_heads():
    """Their gradients stay float32, and rows are filled up with zeros where matmuls need more of them."""
    weight = torch.nn.Parameter(torch.randn(8, 3))
    assert torch.equal(copies.of_head(weight, 8), weight.bfloat16())
    copies.make([weight])
    assert copies.of_head(weight, 8).data_ptr() == getattr(weight, copies.COPY).data_ptr()
    assert weight.grad_dtype is torch.float32
    padded = copies.of_head(weight, 16)
    assert torch.equal(padded[:8], weight.bfloat16())
    assert not padded[8:].any()
    assert not hasattr(copies.of_head(weight.detach(), 8), copies.ROOM)
