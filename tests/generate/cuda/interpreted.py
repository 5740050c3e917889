"""Run in a process of its own with TRITON_INTERPRET=1: the persistent kernel, on the CPU, against the engine."""

import json
import sys

import torch

from glassformer import config as c
from glassformer.generate.cuda.decoder import CudaDecoder
from tests.variants import POSITIONS, decoder, lively


def compare(name: str, modern: bool, prompt: int) -> tuple[bool, float]:
    """Whether 9 greedy tokens are the engine's, and the relative difference of the last logits."""
    changes = {"window": 7, "feedforward": c.Gated(40), "norm": c.RMSNorm()} if modern else {}
    config = decoder(position=POSITIONS[name], head=c.Head(tied=False), n_layers=2, **changes)
    model = lively(config, std=0.4)[0].float()
    tokens = list(range(3, 3 + prompt))
    native = CudaDecoder(model, programs=1, dtype=torch.float32)
    with torch.no_grad():
        if prompt > 1:
            cache = model.new_cache("growing")
            model(torch.tensor([tokens[:-1]]), cache=cache)
            native.take(tokens, [(layer.k[0], layer.v[0]) for layer in cache.layers])
        else:
            native.take(tokens, [])
        new = native.greedy(9).tolist()
        wanted = model(torch.tensor([tokens + new[:-1]]))[0, prompt - 1 :]
    error = float((native.logits - wanted[-1]).abs().max() / wanted.abs().max())
    return new == wanted.argmax(-1).tolist(), error


if __name__ == "__main__":
    print(json.dumps([compare(name, modern, prompt) for name, modern, prompt in json.loads(sys.argv[1])]))
