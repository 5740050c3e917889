"""How the rows of a matmul are distributed, and weights in 8 bits. What the kernel computes: test_fused.py."""

import dataclasses
import shutil
import struct
import subprocess

import pytest
import torch
from torch import nn

from glassformer import config as c
from glassformer.kernels.cuda.graph import linear
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.cuda.graph.linear import Operand, Shape
from glassformer.model.layers import Unchanged, build_norm


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "out", "plan"),
    [
        (1, (2048, 512, 512), 2048, "float", (1, 4, 1, 132)),
        (1, (2048,), 2048, "add", (1, 4, 1, 132)),
        (1, (8192, 8192), 2048, "gated", (2, 1, 1, 132)),
        (1, (128256,), 2048, "logits", (2, 1, 1, 132)),
        (1, (64,), 2048, "add", (1, 8, 1, 8)),
        (16, (2048,), 8192, "add", (1, 2, 2, 66)),
        (16, (4096,), 14336, "add", (1, 1, 8, 15)),
    ],
)
def test_the_plan_keeps_processors_and_warps_busy(batch, rows, columns, out, plan):
    found = Shape(batch, rows, columns, out, "bfloat16").plan(132)
    assert (found.tiles, found.split, found.cluster, found.clusters) == plan
    assert found.shared <= linear.SHARED_MEMORY
    assert 2 * found.shared > linear.SHARED_MEMORY  # no processor gets two blocks


def test_cublas_computes_what_does_not_fit_unless_the_weights_have_8_bits():
    wide = Shape(64, (2048,), 8192, "add", "bfloat16")
    assert wide.plan(132) is None
    assert not dataclasses.replace(wide, columns=65536, precision="int8").plan(132).in_shared
    assert Shape(64, (2048,), 2048, "add", "bfloat16").plan(132).cluster == 2


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_quantised_rows_are_within_half_a_step(precision):
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    stored, scale = linear.quantise(weight, precision)
    assert stored.dtype is torch.uint8
    exact = stored.float() - 128 if precision == "int8" else stored.view(torch.float8_e4m3fn).float()
    error = (exact * scale[:, None] - weight).abs()
    step = scale[:, None] if precision == "int8" else weight.abs() / 8 + scale[:, None] * 2**-9
    assert bool((error <= step / 2 * 1.001).all())
    assert float(exact.abs().max()) == (127 if precision == "int8" else 448)


@pytest.mark.parametrize("out", ["float", "activation", "gated", "add", "logits"])
def test_the_matmul_of_the_library_computes_the_same(out):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 8, generator=generator)
    matrices = [Operand(torch.randn(6, 8, generator=generator), torch.randn(6, generator=generator)) for _ in range(2)]
    y = [x @ m.weight.T + m.bias for m in matrices]
    silu = nn.functional.silu
    if out == "gated":
        into, more = torch.zeros(3, 6), {"limit": 0.5, "up_offset": 1.0}
        wanted = silu(y[0].clamp(max=0.5)) * (y[1].clamp(-0.5, 0.5) + 1)
    elif out == "float":
        into, more, wanted = torch.zeros(3, 12), {}, torch.cat(y, 1)
    else:
        matrices, into, best = matrices[:1], torch.ones(3, 6), torch.zeros(3, dtype=torch.long)
        more = {"factor": 0.5, "softcap": 2.0, "best": best}
        wanted = {"activation": silu(y[0]), "add": 1 + 0.5 * y[0], "logits": 2 * torch.tanh(0.5 * y[0] / 2)}[out]
    linear.library_matmul(x, matrices, out, into, linear.ACTIVATION_NAMES.index("silu"), more)()
    torch.testing.assert_close(into, wanted)
    if out == "logits":
        assert (0xFFFFFFFF - best).tolist() == wanted.argmax(-1).tolist()


def test_norms_are_read_with_their_offset():
    norm = build_norm(4, c.RMSNorm(eps=0.1, offset=1.0))
    nn.init.constant_(norm.weight, 0.25)
    read = linear.norm_factors(norm)
    assert (read.kind, read.eps, read.weight.tolist(), read.bias) == (1, 0.1, [1.25] * 4, None)
    assert linear.norm_factors(Unchanged()).kind == linear.norm_factors(None).kind == 0
    assert linear.norm_factors(build_norm(4, c.LayerNorm())).kind == 2


def test_only_plain_layers_of_whole_chunks_suit():
    assert linear.suits(nn.Linear(64, 3), torch.float32)
    assert not linear.suits(nn.Linear(63, 3), torch.float32)
    assert not linear.suits(nn.Linear(64, 3), torch.bfloat16)
    assert not linear.suits(nn.Identity(), torch.float32)


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc, which compiles for a GPU that is not here, is not installed"
)
def test_no_copy_adds_a_uniform_register_to_its_address(tmp_path):
    """ptxas 13.0 made LDGSTS [R7+UR0] of the first one of this shape, and no instruction sets UR0."""
    shape = Shape(1, (2048, 1024, 1024), 1024, "float", "int8", norm=1)
    plan = shape.plan(132)
    text = Launch("linear", "linear", shape.macros(plan), {}, 132, plan.cluster, plan.shared).text()
    source, code = tmp_path / "linear.cu", tmp_path / "linear.cubin"
    source.write_text(text)
    subprocess.run(
        ["nvcc", "-arch=sm_90a", "-cubin", "-std=c++17", "-o", code, source], check=True, capture_output=True
    )
    found = code.read_bytes()
    opcodes = [struct.unpack_from("<Q", found, at)[0] & 0xFFF for at in range(0, len(found) - 15, 16)]
    assert 0xFAE in opcodes  # LDGSTS, an instruction of 16 bytes
    assert 0xDAE not in opcodes  # the same with a uniform register
