"""Muon (Jordan et al. 2024): momentum, then the nearest orthogonal matrix, as the update of a hidden matrix.

The arithmetic is that of `torch.optim.Muon`, which treats one matrix after the other. Here matrices of one shape are
stacked and orthogonalised together: a Transformer has a handful of shapes and dozens of matrices, so this is dozens of
kernel launches instead of thousands. tests/train/test_optim.py pins the two equal.
"""

import math
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic a x + b x^3 + c x^5 whose iteration carries singular values to about 1."""
STEPS = 5
EPS = 1e-7


def orthogonalize(stack: Tensor) -> Tensor:
    """(n, rows, columns), singular values brought near 1 by x <- a x + (b x x^T + c (x x^T)^2) x, in bf16."""
    a, b, c = COEFFICIENTS
    x = stack.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum m <- mu m + (1 - mu) g, update O((1 - mu) g + mu m), decoupled weight decay.

    The learning rate, a number or a tensor on the device (which a captured CUDA graph can read anew), is multiplied by
    sqrt(max(1, rows / columns)), as in the original. With `found_inf` set to a tensor of 1 nothing changes, as in
    torch's fused AdamW: a captured step can decide on the device not to happen.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Any, lr: float | Tensor, momentum: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, matrices in shapes.items():
                self._step_shape(shape, matrices, **{k: group[k] for k in ("lr", "momentum", "weight_decay")})

    def _step_shape(
        self, shape: torch.Size, matrices: list[Tensor], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in matrices]
        gradients = [p.grad for p in matrices if p.grad is not None]
        new: float | Tensor = 1 - momentum
        if self.found_inf is not None:
            happens = 1 - self.found_inf
            gradients = [torch.nan_to_num(g, 0.0, 0.0, 0.0) for g in gradients]
            new, lr = new * happens, lr * happens
        torch._foreach_mul_(buffers, 1 - new)
        torch._foreach_add_(buffers, torch._foreach_mul(gradients, new))
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        updates = orthogonalize(torch.stack(list(ahead))) * (-lr * math.sqrt(max(1.0, shape[0] / shape[1])))
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        torch._foreach_add_(matrices, [u.to(p.dtype) for u, p in zip(updates, matrices, strict=True)])
