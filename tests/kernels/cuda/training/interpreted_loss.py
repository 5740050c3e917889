"""In a process of its own with TRITON_INTERPRET=1: the Triton kernel of the loss, on the CPU, and the plain chunk."""

import json

import torch

from glassformer.kernels.cuda.training import fused_loss_triton
from glassformer.kernels.cuda.training.fused_loss import chunk_gradients


def compare(columns: int, stride: int, smoothing: float, z_loss: float) -> list[float]:
    """Relative differences of total, plain loss and gradient."""
    torch.manual_seed(0)
    logits = 4 * torch.randn(5, stride)
    targets = torch.tensor([7, -100, columns - 1, 3, 0])
    found = fused_loss_triton.chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
    wanted = chunk_gradients(logits, targets, -100, smoothing, z_loss, columns)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)]


if __name__ == "__main__":
    print(json.dumps([compare(300, 300, 0.0, 0.0), compare(5000, 5000, 0.1, 1e-3), compare(2047, 2112, 0.1, 1e-3)]))
