"""Decoding of GPT-2 small in bfloat16 on one GPU: our kernels and gpt-fast in turns, at batch 1 and 64.

    python src/glassformer/bench/gpu/decode_gpu.py [--gpt-fast CHECKOUT] [--batch 1 64] [--new 128] [--rounds 7]

First the kernels must say what the engine says: greedy tokens in float32 equal the engine's, and logits in bfloat16 lie
within its rounding. gpt-fast is compiled as its README says and has an architecture of its own with as many parameters.
Times are of the tokens after the prompt of 32.
"""

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from glassformer.config import presets
from glassformer.finding import Finding
from glassformer.kernels.cuda.decode.batch import CudaBatch
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.model import DecoderLM, build

PROMPT, SHORT = 32, 8


def model_of(seed: int = 0) -> DecoderLM:
    made = build(presets.gpt2(), seed=seed).cuda().eval()
    assert isinstance(made, DecoderLM)
    return made


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(0, 50257, (rows, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()


@torch.no_grad()
def alone(model: DecoderLM, dtype: torch.dtype, blocks: int | None = None) -> tuple[CudaDecoder, list[int]]:
    """A decoder of one sequence that has read a prompt."""
    tokens = prompts(1)[0].tolist()
    cache = model.new_cache("growing")
    model(torch.tensor([tokens[:-1]], device="cuda"), cache=cache)
    native = CudaDecoder(model, 1024, blocks, dtype)
    native.take(tokens, [(layer.k[0], layer.v[0]) for layer in cache.layers])  # type: ignore[index]
    return native, tokens


@torch.no_grad()
def many(model: DecoderLM, dtype: torch.dtype, rows: int) -> tuple[CudaBatch, torch.Tensor]:
    """A decoder of many sequences that have read prompts."""
    tokens = prompts(rows)
    cache = model.new_cache("growing")
    model(tokens[:, :-1], cache=cache)
    native = CudaBatch(model, rows, 1024, dtype)
    native.take(list(range(rows)), PROMPT - 1, [(layer.k, layer.v) for layer in cache.layers])  # type: ignore[misc]
    return native, tokens


def rounded() -> DecoderLM:
    """A model whose matrices bfloat16 holds exactly."""
    model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16().float())
    return model


@torch.no_grad()
def same_tokens(count: int = 48) -> Iterator[Finding]:
    for name, model, dtype, limit, why in (
        ("float32", model_of(), torch.float32, 1e-4, "float32 sums in another order over 12 layers"),
        ("bfloat16", rounded(), torch.bfloat16, 4e-2, "keys, values and what lies between products keep 8 bits"),
    ):
        one, tokens = alone(model, dtype)
        new = one.greedy(count).tolist()
        wanted = model(torch.tensor([tokens + new[:-1]], device="cuda"))[0, PROMPT - 1 :]
        said = torch.tensor([new]).cuda()
        yield from _compare(f"{name}, one sequence", said, wanted[None], one.logits[None], limit, why)
        some, asked = many(model, dtype, 5)
        new = some.greedy(asked[:, -1], count)
        wanted = model(torch.cat([asked, new[:, :-1].long()], 1))[:, PROMPT - 1 :]
        yield from _compare(
            f"{name}, five sequences", new, wanted, some.logits[:, : model.config.vocab_size].float(), limit, why
        )


def _compare(
    name: str, new: torch.Tensor, wanted: torch.Tensor, last: torch.Tensor, limit: float, why: str
) -> Iterator[Finding]:
    lead = wanted.topk(2).values
    clear = (lead[..., 0] - lead[..., 1]) > 2 * limit * wanted.abs().max()
    differ = (new != wanted.argmax(-1)) & clear
    yield Finding.judge(f"{name}: greedy tokens that differ", float(differ.sum()), 0, "where the lead is clear")
    error = float((last - wanted[:, -1]).abs().max() / wanted.abs().max())
    yield Finding.judge(f"{name}: last logits", error, limit, why)


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ours(batch: int, count: int) -> Callable[[], float]:
    """Seconds a step."""
    if batch == 1:
        one, _ = alone(model_of(), torch.bfloat16)

        def single() -> float:
            one.position = PROMPT - 1
            return timed(lambda: one.greedy(count)) / count

        return single
    some, asked = many(model_of(), torch.bfloat16, batch)

    def several() -> float:
        some.lengths.fill_(PROMPT - 1)
        return timed(lambda: some.greedy(asked[:, -1], count)) / count

    return several


def gpt_fast(folder: str, batch: int, count: int) -> Callable[[], float]:
    """Seconds a step: a long generation less a short one, which read the same prompt."""
    sys.path.insert(0, folder)
    sys.modules["tokenizer"] = types.ModuleType("tokenizer")
    sys.modules["tokenizer"].get_tokenizer = None  # type: ignore[attr-defined]
    import generate as theirs  # type: ignore[import-not-found]
    from model import ModelArgs, Transformer  # type: ignore[import-not-found]

    torch.manual_seed(0)
    shape = ModelArgs(block_size=1024, vocab_size=50257, n_layer=12, n_head=12, dim=768, intermediate_size=2048)
    model = Transformer(shape).to(torch.bfloat16).cuda().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    if not hasattr(theirs, "compiled_here"):
        theirs.decode_one_token = torch.compile(theirs.decode_one_token, mode="reduce-overhead", fullgraph=True)
        theirs.compiled_here = True
    prompt = prompts(1)[0].int()

    def generate(new: int) -> None:
        with torch.no_grad():
            theirs.generate(
                model, prompt, new, batch_size=batch, interactive=False, draft_model=None,
                callback=lambda _: None, temperature=1.0, top_k=1,
            )  # fmt: skip

    def step() -> float:
        # both with caches of one size: another would be another graph
        return (timed(lambda: generate(count + SHORT)) - timed(lambda: generate(SHORT))) / count

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--gpt-fast")
    given = parser.parse_args()
    for finding in same_tokens():
        print(finding.text(), flush=True)
        assert finding.passed
    for batch in given.batch:
        contenders = {"glassformer": ours(batch, given.new)}
        if given.gpt_fast:
            contenders["gpt-fast"] = gpt_fast(given.gpt_fast, batch, given.new)
            print(f"batch {batch}: gpt-fast is compiling", flush=True)
            print(f"batch {batch}: gpt-fast compiled, {contenders['gpt-fast']() * 1e6:.1f} µs", flush=True)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(given.rounds + 2):
            for name, step in contenders.items():
                seconds = step()
                if turn > 1:
                    times[name].append(seconds)
        middle = {name: statistics.median(t) for name, t in times.items()}
        for name, t in times.items():
            ratio = f"  {middle['gpt-fast'] / middle[name]:.2f} x gpt-fast" if given.gpt_fast else ""
            print(
                f"batch {batch:<3} {name:<12} {batch / middle[name]:>10,.0f} tokens/s  {middle[name] * 1e6:7.1f} µs a "
                f"step ({min(t) * 1e6:.1f} to {max(t) * 1e6:.1f}){ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
