"""An operator is its definition on a CPU and its kernel on a GPU; the definition tells the compiler the shapes."""

import subprocess
import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from glassformer.kernels.toolchain.operator import operator


def on_gpu(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    raise AssertionError("not on a CPU")


@operator(on_gpu)
def rows_and_columns(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return x.new_ones(rows, 2), x.T.clone()


def test_a_cpu_runs_the_definition():
    x = torch.arange(6.0).view(3, 2)
    first, turned = rows_and_columns(x, 2)
    assert torch.equal(first, torch.ones(2, 2))
    assert torch.equal(turned, x.T)
    torch.library.opcheck(rows_and_columns, (x, 2), test_utils=("test_schema", "test_autograd_registration"))


def test_the_name_says_where_it_is_defined():
    assert rows_and_columns.name() == "glassformer::test_operator_rows_and_columns"


def test_results_are_known_without_values_and_are_contiguous():
    with FakeTensorMode():
        first, turned = rows_and_columns(torch.empty(3, 2), 5)
    assert (first.shape, turned.shape) == ((5, 2), (2, 3))
    assert turned.is_contiguous()  # as kernels write it; that of the definition is not
    assert not rows_and_columns(torch.ones(3, 2), 5)[1].is_contiguous()


def test_a_call_imports_no_compiler():
    code = """
import sys
import torch
from glassformer.kernels.cuda.training import causal, loss
loss.loss_rows(torch.randn(4, 16).bfloat16(), torch.arange(4), -1, 0.0, 0.0, 16)
queries = [torch.randn(1, 8, 64) for _ in range(3)]
out, logs = causal.forward(queries, 1, 0.1)
causal.backward(queries, out, logs, out, 1, 0.1)
heavy = ("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"]
