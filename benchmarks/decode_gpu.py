"""Batch-1 decoding of GPT-2 small on one GPU: the persistent kernel against the engine in a CUDA graph.

    python benchmarks/decode_gpu.py [--new 128] [--rounds 7]

First the two must say the same: greedy tokens of a float32 kernel equal the engine's, and the bfloat16 kernel's logits
lie within bfloat16's rounding of the engine's with the same rounded weights.
"""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from glassformer import presets
from glassformer.finding import Finding
from glassformer.generate.cuda.decoder import CudaDecoder
from glassformer.model import DecoderLM, build

PROMPT = 32


def model_of(seed: int = 0) -> DecoderLM:
    made = build(presets.gpt2(), seed=seed).cuda().eval()
    assert isinstance(made, DecoderLM)
    return made


@torch.no_grad()
def primed(model: DecoderLM, dtype: torch.dtype, programs: int | None = None) -> tuple[CudaDecoder, list[int]]:
    """A decoder that has read a prompt."""
    tokens = torch.randint(0, 50257, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = model.new_cache("growing")
    model(torch.tensor([tokens[:-1]], device="cuda"), cache=cache)
    native = CudaDecoder(model, 1024, programs, dtype)
    native.take(tokens, [(layer.k[0], layer.v[0]) for layer in cache.layers])  # type: ignore[index]
    return native, tokens


@torch.no_grad()
def same_tokens(count: int = 64) -> Iterator[Finding]:
    model = model_of()
    native, tokens = primed(model, torch.float32)
    new = native.greedy(count).tolist()
    wanted = model(torch.tensor([tokens + new[:-1]], device="cuda"))[0, PROMPT - 1 :]
    lead = wanted.topk(2).values
    clear = (lead[:, 0] - lead[:, 1]) > 1e-3
    differ = (torch.tensor(new, device="cuda") != wanted.argmax(-1)) & clear
    yield Finding.judge("float32: greedy tokens that differ", float(differ.sum()), 0, "all, where the lead is clear")
    error = float((native.logits - wanted[-1]).abs().max() / wanted.abs().max())
    yield Finding.judge("float32: last logits", error, 1e-4, "float32 sums in another order over 12 layers")
    rounded = model_of()
    for parameter in rounded.parameters():
        if parameter.dim() == 2:
            parameter.copy_(parameter.bfloat16().float())
    brain, tokens = primed(rounded, torch.bfloat16)
    new = brain.greedy(count).tolist()
    wanted = rounded(torch.tensor([tokens + new[:-1]], device="cuda"))[0, -1]
    error = float((brain.logits - wanted).abs().max() / wanted.abs().max())
    yield Finding.judge("bfloat16: last logits", error, 2e-2, "keys and values are kept in bfloat16, 2^-9 each")


def seconds(count: int, rounds: int, programs: int | None) -> list[float]:
    """Of `count` tokens each time, from the same place."""
    native, _ = primed(model_of(), torch.bfloat16, programs)
    found = []
    for _ in range(rounds + 2):
        native.place = PROMPT - 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        native.greedy(count)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", type=int, nargs="*", default=[132])
    given = parser.parse_args()
    for finding in same_tokens():
        print(finding.text(), flush=True)
        assert finding.passed
    for programs in given.programs:
        times = seconds(given.new, given.rounds, programs)
        middle = statistics.median(times)
        print(
            f"{programs} programs: {given.new / middle:,.0f} tokens/s, {middle / given.new * 1e6:.1f} µs a token "
            f"({min(times) * 1e3:.2f} to {max(times) * 1e3:.2f} ms)",
            flush=True,
        )


if __name__ == "__main__":
    main()
