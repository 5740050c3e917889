"""NF4: equal to bitsandbytes bit for bit, and to the definition."""

import pytest
import torch

from glassformer.model.nf4 import BLOCK, LEVELS, quantize, quantized_linear


def matrices():
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 64), (24, 40), (7, 13), (128, 100), (1, 1)):
        for size in (0.02, 1.0, 3e-8):
            yield torch.randn(shape, generator=generator) * size
    yield torch.zeros(16, 16)
    mixed = torch.randn(4, BLOCK, generator=generator)
    mixed[1] = 0
    yield mixed


def test_every_weight_becomes_the_nearest_level():
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    for weight in matrices():
        found = quantize(weight)
        n = weight.numel()
        flat = torch.nn.functional.pad(weight.flatten(), (0, -n % BLOCK)).view(-1, BLOCK)
        largest = flat.abs().amax(1)
        assert torch.equal(found.largest, largest)
        scaled = flat / torch.where(largest > 0, largest, 1.0)[:, None]
        nearest = (scaled.double()[..., None] - levels).abs().argmin(-1)
        wanted = (torch.tensor(LEVELS)[nearest] * largest[:, None]).flatten()[:n].view(weight.shape)
        assert torch.equal(found.dequantize(), wanted)
        assert found.codes.numel() == (n + 1) // 2


@pytest.mark.slow
def test_equal_to_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    settings = {"blocksize": BLOCK, "quant_type": "nf4", "compress_statistics": False}
    for weight in matrices():
        # bitsandbytes compiles its CPU code with torch.compile for every shape, which takes 20 s; here it runs as it is
        with torch.compiler.set_stance("force_eager"):
            codes, state = functional.quantize_4bit(weight, **settings)
            theirs = functional.dequantize_4bit(codes, state)
        ours = quantize(weight)
        assert torch.equal(ours.dequantize(), theirs)
        assert torch.equal(ours.largest, state.absmax)
        if weight.any():
            assert torch.equal(ours.codes, codes.flatten())


def test_the_gradient_of_the_input_is_that_of_the_dequantized_matrix():
    weight = quantize(torch.randn(12, 20, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(3, 5, 20, generator=torch.Generator().manual_seed(2))
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, wanted = quantized_linear(ours, weight), torch.nn.functional.linear(plain, weight.dequantize())
    assert torch.equal(out, wanted)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(ours.grad, plain.grad, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert quantized_linear(x, weight).dtype is torch.bfloat16
