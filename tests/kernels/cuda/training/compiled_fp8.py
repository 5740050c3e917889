"""In a process of its own, where annotations are not checked: a model in 8 bits, as it is and compiled."""

import json

import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.training import objective
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss
from tests.kernels.cuda.training.installing import install
from tests.variants import decoder, lively


def compare() -> tuple[float, float]:
    """Relative difference of the losses, and the least cosine between gradients of a matrix."""
    attention = c.Attention(n_heads=6, n_kv_heads=2, d_head=16, d_value=16)
    config = decoder(d_model=48, vocab_size=61, feedforward=c.Dense(96), head=c.Head(), attention=attention)
    model = lively(config)[0].float().train()
    install(model)
    ids = torch.randint(0, 61, (8, 14), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1], ids[:, 1:])
    found = []
    for function in (summed_loss, torch.compile(summed_loss, fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            total, _ = function(model, batch, Loss(), True, float8=True)
        total.backward()
        found.append([total.detach(), *(p.grad.clone() for p in model.parameters())])
    pairs = [(a.flatten(), b.flatten()) for a, b in zip(*found, strict=True) if a.dim() > 1]
    return abs(float(found[0][0] / found[1][0]) - 1), min(float(F.cosine_similarity(a, b, 0)) for a, b in pairs)


if __name__ == "__main__":
    objective.CHUNKED_FROM = 16
    print(json.dumps(compare()))
