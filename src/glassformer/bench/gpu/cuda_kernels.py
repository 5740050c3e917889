"""Compare each training kernel on a CUDA device with its definition; cuda_check.py runs these checks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from glassformer.finding import Finding


def cuda_loss_equals_plain() -> Iterator[Finding]:
    """The CUDA chunk kernel, which takes bfloat16, against the plain one."""
    from glassformer.kernels.cuda.training import loss
    from glassformer.training import chunked_loss

    generator = torch.Generator("cuda").manual_seed(0)
    for columns, stride in ((50304, 50304), (904, 904), (50257, 50304), (128255, 128256)):
        logits = (torch.randn(37, stride, generator=generator, device="cuda") * 4).bfloat16()
        targets = torch.randint(0, columns, (37,), generator=generator, device="cuda")
        targets[5] = -100
        for smoothing, z_loss in ((0.0, 0.0), (0.1, 0.01)):
            plain = chunked_loss.chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
            losses, gradient = loss.loss_rows(logits, targets, -100, smoothing, z_loss, columns)
            fast = (*losses.sum(1), gradient)
            pairs = [(a.float(), b.float()) for a, b in zip(plain, fast, strict=True)]
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
            yield Finding.judge(
                f"CUDA loss = plain: {columns}, {smoothing}, {z_loss}", worst, 2**-8, "bfloat16 rounding"
            )


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, str]:
    """Return how far two tensors differ, and an example as text.

    For 8-bit dtypes: the fraction of elements that are one step off; infinite if an element is more than one step off,
    or NaN in only one of the two. For other dtypes: the relative difference.
    """
    found, a, b = found.cpu(), found.cpu().float(), wanted.float()
    seen = a.isnan() == b.isnan()
    if wanted.element_size() > 1:
        return float((a - b).nan_to_num(0).norm() / b.nan_to_num(0).norm()) if seen.all() else float("inf"), ""
    codes = (t.view(torch.uint8).short() for t in (found, wanted))
    steps = torch.sub(*(torch.where(c < 128, c, 128 - c) for c in codes)).abs()
    steps = torch.where(a.isnan() & seen, 0, torch.where(seen, steps, 1000))
    worst = int(steps.argmax())
    example = f", {float(a.flatten()[worst])} for {float(b.flatten()[worst])}" if steps.any() else ""
    return float("inf") if steps.max() > 1 else float((steps > 0).float().mean()), example


def _on_gpu(given: object) -> object:
    """Return a tensor, or each tensor of a list, on the GPU; anything else as it is."""
    if isinstance(given, list):
        return [_on_gpu(t) for t in given]
    return given.cuda() if isinstance(given, torch.Tensor) else given


def float8_kernels_equal_their_definitions() -> Iterator[Finding]:
    """Compare every operator of fp8 matmuls on the GPU with its definition on the CPU."""
    from glassformer.kernels.cuda.training import fp8

    generator = torch.Generator().manual_seed(0)
    rows, columns, unit = 272, 1040, torch.tensor(0.25)
    x, d = (torch.randn(rows, columns, generator=generator).bfloat16() for _ in range(2))
    x[0, :5] = torch.tensor([float("nan"), float("inf"), 1e9, 1e-9, -float("inf")])
    finite, targets = x.nan_to_num(0, 0, 0).clamp(-9, 9), torch.arange(rows)
    targets[7] = -100
    a8, b8 = fp8.cast(finite, unit, fp8.E5M2)[0], fp8.cast(d, unit, fp8.E4M3)[0]
    long, few = 4 * torch.randn(32, 65536, generator=generator).bfloat16(), targets[:32].clone()
    kinds = ("relu", "relu2", "silu", "gelu_tanh", "gelu", "tanh")
    cases: list[tuple[str, Callable[..., Any], tuple[Any, ...], float]] = [
        ("cast e4m3", fp8.cast, (x, unit, fp8.E4M3), 0.0),
        ("cast e5m2", fp8.cast, (x, unit, fp8.E5M2), 0.0),
        ("cast of several", fp8.cast_all, ([x, d, finite], unit, fp8.E5M2, True, None), 0.0),
        ("cast of several, filled up", fp8.cast_all, ([d, x[:201]], unit, fp8.E4M3, False, 512), 0.0),
        ("transpose", fp8.transpose, (a8,), 0.0),
        ("mean squares", fp8.mean_squares, ([finite, d.float()], False), 1e-5),
        ("mean squares of a sample", fp8.mean_squares, ([long, long[:31].float()], True), 1e-5),
        ("cast e4m3 of float32", fp8.cast, (x.float(), unit, fp8.E4M3), 0.0),
        ("cast e5m2 of float32", fp8.cast, (x.float(), unit, fp8.E5M2), 0.0),
        *((f"activate {kind}", fp8.activate, (x, unit, kind), 1e-3) for kind in kinds),
        *((f"backward {k}", fp8.activate_backward, (d, finite, unit, unit, k, k != "relu"), 1e-3) for k in kinds),
        *((f"backward {k}, not finite", fp8.activate_backward, (d, x, unit, unit, k, False), 1e-3) for k in kinds),
        ("product", fp8.matmul, (a8, b8, unit, unit, None), 5e-3),
        ("product with bias", fp8.matmul, (b8, b8, unit, unit, d[0, :rows].clone()), 5e-3),
        *((f"loss {s}", fp8.loss_gradients, (4 * finite, targets, -100, s, s / 10, 1031), 1e-3) for s in (0.0, 0.1)),
        ("loss of long rows", fp8.loss_gradients, (long, few, -100, 0.0, 0.0, 65500), 1e-3),
    ]
    for name, operator, given, limit in cases:
        on_gpu = operator(*(_on_gpu(t) for t in given))
        both = ((t,) if isinstance(t, torch.Tensor) else t for t in (on_gpu, operator(*given)))
        worst, example = max((_apart(a, b) for a, b in zip(*both, strict=True) if b.numel()), key=lambda pair: pair[0])
        yield Finding.judge(f"float8 on the GPU = its definition: {name}", worst, limit, f"share or relative{example}")


def causal_attention_equals_its_definition() -> Iterator[Finding]:
    """Compare the gradient with float64 on a CPU, and print the error of cuDNN's next to ours."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from glassformer.kernels.cuda.training import causal

    if not causal.available():
        return
    sizes = ((2, 1024, 3, True), (3, 256, 50, False), (4, 128, 50, True), (2, 512, 64, True), (1, 4096, 2, False))
    for B, T, H, sliced in sizes:  # sliced: queries, keys and values are parts of wider rows
        given = torch.randn(B, T, 3 * H * 64, generator=torch.Generator().manual_seed(T)).bfloat16()
        parts = [t if sliced else t.contiguous() for t in given.chunk(3, -1)]
        d_out = torch.randn(B, T, H * 64, generator=torch.Generator().manual_seed(H)).bfloat16()
        exact = [t.double() for t in parts]
        on_gpu = list(given.cuda().chunk(3, -1)) if sliced else [t.cuda() for t in parts]
        out, logs = causal.forward(exact, H, 0.125)
        wanted = causal.backward(exact, out, logs, d_out.double(), H, 0.125)
        found_out, found_logs = causal.forward(on_gpu, H, 0.125)
        found = causal.backward(on_gpu, found_out, found_logs, d_out.cuda(), H, 0.125)
        again = causal.backward(on_gpu, found_out, found_logs, d_out.cuda(), H, 0.125)
        q, k, v = (t.unflatten(-1, (H, 64)).transpose(1, 2).cuda().requires_grad_() for t in given.chunk(3, -1))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)
        peer = torch.autograd.grad(o, (q, k, v), d_out.cuda().unflatten(-1, (H, 64)).transpose(1, 2))
        name = f"causal attention, {B} x {T}, {H} heads"
        far = float((found_logs.cpu() - logs).abs().max())
        yield Finding.judge(f"{name}: logarithms", far, 1e-5, "against float64")
        for which, a, b, p in zip("qkv", found, wanted, peer, strict=True):
            there = p.transpose(1, 2).flatten(2).cpu()
            apart, peers = (float((t.cpu() - b).norm() / b.norm()) for t in (a, there))
            yield Finding.judge(f"{name}: d{which}", apart, 2**-7, f"against float64; cuDNN {peers:.1e}")
        yield Finding.judge(f"{name}: repeated", float((found != again).sum()), 0, "differing elements")


def gelu_of_cublaslt_equals_its_definition() -> Iterator[Finding]:
    """Compare a linear layer with GELU, and the gradient through GELU, with float64."""
    from glassformer.kernels.toolchain import cublaslt

    if not cublaslt.is_available():
        return
    generator = torch.Generator("cuda").manual_seed(0)
    for M, D, F in ((256, 64, 192), (1000, 1024, 4096)):
        x, weight, bias, d_out, down = (
            torch.randn(*shape, generator=generator, device="cuda").mul(scale).bfloat16()
            for shape, scale in (((M, D), 1.0), ((F, D), D**-0.5), ((F,), 1.0), ((M, D), 1.0), ((D, F), D**-0.5))
        )
        for given in (bias, None):
            out, inner = cublaslt.gelu_linear(x, weight, given)
            y = x.double() @ weight.double().T + (0 if given is None else given.double())
            wanted = torch.nn.functional.gelu(y, approximate="tanh")
            worst = max(_apart(out, wanted.cpu())[0], _apart(inner, y.cpu())[0])
            yield Finding.judge(f"GELU of cuBLASLt, {M} x {D}: forward", worst, 2**-8, "relative, against float64")
        y = inner.double().requires_grad_()
        torch.nn.functional.gelu(y, approximate="tanh").backward(d_out.double() @ down.double())
        assert y.grad is not None
        worst = _apart(cublaslt.gelu_backward(d_out, down, inner), y.grad.cpu())[0]
        yield Finding.judge(f"GELU of cuBLASLt, {M} x {D}: gradient", worst, 2**-8, "relative, against float64")
