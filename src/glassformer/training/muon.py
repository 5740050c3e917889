"""Muon (Jordan et al. 2024): momentum, then the nearest orthogonal matrix, as the update of a hidden matrix.

The arithmetic is that of `torch.optim.Muon`, which treats one matrix after the other. Here matrices of one shape are
stacked and orthogonalised together: a Transformer has a handful of shapes and dozens of matrices, so this is dozens of
kernel launches instead of thousands. test_optimizers.py compares the two. On a GPU, the elementwise passes before and
after the orthogonalization can be one kernel each (`accelerate.muon_kernel`).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from glassformer.training import accelerate

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the quintic a x + b x^3 + c x^5, whose iteration brings singular values close to 1."""
STEPS = 5
EPS = 1e-7


def orthogonalize(stack: Tensor) -> Tensor:
    """Bring the singular values of (n, rows, columns) to about 1 by x <- a x + (b x x^T + c (x x^T)^2) x, in bf16."""
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


def orthogonalize_all(stacks: dict[torch.Size, Tensor]) -> dict[torch.Size, Tensor]:
    """Orthogonalize stacks by matrix shape. Shapes that are transposes of each other share a call: O(x^T) = O(x)^T."""
    sides: dict[tuple[int, ...], list[torch.Size]] = {}
    for shape in stacks:
        sides.setdefault(tuple(sorted(shape)), []).append(shape)
    made: dict[torch.Size, Tensor] = {}
    for (rows, _), shapes in sides.items():
        wide = [stacks[s] if s[0] == rows else stacks[s].mT for s in shapes]
        parts = orthogonalize(torch.cat(wide)).split([len(part) for part in wide])
        made |= {s: part if s[0] == rows else part.mT for s, part in zip(shapes, parts, strict=True)}
    return made


class Muon:
    """Nesterov momentum m <- mu m + (1 - mu) g, update O((1 - mu) g + mu m), decoupled weight decay.

    The learning rate, a number or a tensor on the device (which a CUDA graph reads in each replay), is multiplied by
    sqrt(max(1, rows / columns)), as in the original.
    """

    local: Callable[[Tensor], Tensor] = staticmethod(lambda tensor: tensor)
    """Returns the part of a tensor that this process holds (`distributed.muon`)."""
    orthogonalize: Callable[[dict[torch.Size, Tensor]], dict[torch.Size, Tensor]] = staticmethod(orthogonalize_all)

    def __init__(self, params: Iterable[Tensor], lr: float | Tensor, momentum: float, weight_decay: float):
        group = {"params": list(params), "lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [group]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self, found_inf: Tensor | None = None, shrink: Tensor | None = None) -> None:
        """Update all matrices that have a gradient, unless the tensor `found_inf` is 1.

        Gradients are multiplied by the tensor `shrink`. As in `AdamW`, both are read on the device.
        """
        scale = None if shrink is None else 1 / shrink
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            kernels = {
                shape: accelerate.muon_kernel(list(map(self.local, matrices)), group["lr"])
                for shape, matrices in shapes.items()
            }
            ahead = {
                shape: self._look_ahead(matrices, group["momentum"], kernels[shape], found_inf, scale)
                for shape, matrices in shapes.items()
            }
            for shape, updates in self.orthogonalize(ahead).items():
                factor, matrices = math.sqrt(max(1.0, shape[0] / shape[1])), list(map(self.local, shapes[shape]))
                if kernel := kernels[shape]:
                    kernel.move(matrices, updates, group["lr"], group["weight_decay"], factor, found_inf)
                    continue
                lr = group["lr"] if found_inf is None else group["lr"] * (1 - found_inf)
                torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
                torch._foreach_add_(matrices, (updates.to(matrices[0].dtype) * (-lr * factor)).unbind())

    def _look_ahead(
        self,
        matrices: list[Tensor],
        momentum: float,
        kernel: ModuleType | None,
        found_inf: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        """Update the momentum m and return the stack of (1 - mu) g + mu m in bfloat16. `scale` divides g."""
        for p in matrices:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.local(self.state[p]["momentum_buffer"]) for p in matrices]
        given = [self.local(p.grad) for p in matrices if p.grad is not None]
        if kernel is not None:
            stack: Tensor = kernel.look_ahead(given, buffers, momentum, scale, found_inf)
            return stack
        gradients = torch.stack(given)
        if scale is not None:
            gradients /= scale
        new: float | Tensor = 1 - momentum
        if found_inf is not None:  # select, not multiply: NaN times zero is NaN
            gradients = torch.where(found_inf > 0, 0.0, gradients)
            new = new * (1 - found_inf)
        moved = torch.stack(buffers).lerp_(gradients, new)
        torch._foreach_copy_(buffers, moved.unbind())
        return gradients.lerp_(moved, momentum).bfloat16()
