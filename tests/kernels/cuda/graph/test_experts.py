"""The matmuls of experts, emulated on a CPU: each pair reads the matrices, biases and scales of its own expert."""

import pytest
import torch

from glassformer import config as c
from glassformer.kernels.cuda.graph.experts import expert_linear
from glassformer.kernels.cuda.graph.linear import Shape, operand
from tests.emulated_cuda import needs_compiler
from tests.kernels.cuda.graph.emulated import PROCESSORS, on_cpu  # noqa: F401
from tests.kernels.cuda.graph.test_fused import FP16, config, error

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_cpu")]


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_each_pair_reads_its_own_expert(precision):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(24, 64, generator=generator).half() * (e + 1) for e in range(3)]
    biases = [torch.randn(24, generator=generator) for _ in weights]
    experts = [[operand(w, b, precision)] for w, b in zip(weights, biases, strict=True)]
    x, choice, out = torch.randn(2, 64, generator=generator).half(), torch.tensor([[2, 0], [1, 2]]), torch.zeros(4, 24)
    shape = Shape(1, (24,), 64, "float", precision, experts=True)
    expert_linear(x, experts, shape, out, choice, PROCESSORS, slots=2).run()
    wanted = torch.stack([weights[e].float() @ x[i // 2].float() + biases[e] for i, e in enumerate([2, 0, 1, 2])])
    assert float((out - wanted).abs().max() / wanted.abs().max()) < (1e-3 if precision == "float16" else 1e-2)


@pytest.mark.slow
def test_experts_in_8_bits():
    assert error(config(feedforward=c.MoE(4, 2, c.Gated(64))), 2, torch.float16, "int8") < FP16
