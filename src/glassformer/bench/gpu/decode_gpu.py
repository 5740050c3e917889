"""Decode GPT-2 small in bfloat16 on one GPU: our kernels and gpt-fast in turns, at batch 1 and 64.

    PYTHONPATH=src python -m glassformer.bench.gpu.decode_gpu [--gpt-fast CHECKOUT] [--batch 1 64] [--new 128]

First the kernels are checked: greedy tokens in float32 must equal those of the torch engine, and logits in bfloat16
must agree within its rounding. gpt-fast is compiled as its README describes; it has its own architecture with as many
parameters. Times are those of the tokens after a prompt of 32.
"""

import statistics
import sys
import types
from collections.abc import Callable, Iterator

import torch

from glassformer.bench.commands import in_turns, parser
from glassformer.bench.gpu.device import gpu_seconds, require_gpu
from glassformer.config import presets
from glassformer.finding import Finding
from glassformer.kernels.cuda.decode.batch import CudaBatch
from glassformer.kernels.cuda.decode.decoder import CudaDecoder
from glassformer.model import Cache, DecoderLM, build
from glassformer.model.cache import KV, Growing

PROMPT, SHORT = 32, 8


def model_of(seed: int = 0) -> DecoderLM:
    """Return GPT-2 small with seeded weights."""
    model = build(presets.gpt2(), seed=seed).cuda().eval()
    assert isinstance(model, DecoderLM)
    return model


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(0, 50257, (rows, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()


def keys_and_values(cache: Cache) -> list[KV]:
    """Return k and v of each layer of a growing cache, (B,G,S,K) and (B,G,S,U)."""
    found: list[KV] = []
    for layer in cache.layers:
        assert isinstance(layer, Growing)
        assert layer.k is not None
        assert layer.v is not None
        found.append((layer.k, layer.v))
    return found


@torch.no_grad()
def single_decoder(model: DecoderLM, dtype: torch.dtype, blocks: int | None = None) -> tuple[CudaDecoder, list[int]]:
    """Return a decoder of one sequence that has read a prompt, and the prompt."""
    tokens = prompts(1)[0].tolist()
    cache = model.new_cache("growing")
    model(torch.tensor([tokens[:-1]], device="cuda"), cache=cache)
    native = CudaDecoder(model, 1024, blocks, dtype)
    native.take(tokens, [(k[0], v[0]) for k, v in keys_and_values(cache)])
    return native, tokens


@torch.no_grad()
def batch_decoder(model: DecoderLM, dtype: torch.dtype, rows: int) -> tuple[CudaBatch, torch.Tensor]:
    """Return a decoder of several sequences that have read prompts, and the prompts."""
    tokens = prompts(rows)
    cache = model.new_cache("growing")
    model(tokens[:, :-1], cache=cache)
    native = CudaBatch(model, rows, 1024, dtype)
    native.take(list(range(rows)), PROMPT - 1, keys_and_values(cache))
    return native, tokens


def rounded() -> DecoderLM:
    """Return a model whose matrices bfloat16 can represent exactly."""
    model = model_of()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16().float())
    return model


@torch.no_grad()
def same_tokens(count: int = 48) -> Iterator[Finding]:
    """Compare tokens and logits of the kernels with those of the model."""
    for name, model, dtype, limit, why in (
        ("float32", model_of(), torch.float32, 1e-4, "float32 sums in another order over 12 layers"),
        (
            "bfloat16",
            rounded(),
            torch.bfloat16,
            4e-2,
            "keys, values and activations have 8 significant bits",
        ),
    ):
        one, tokens = single_decoder(model, dtype)
        ids = one.greedy(count).tolist()
        wanted = model(torch.tensor([tokens + ids[:-1]], device="cuda"))[:, PROMPT - 1 :]
        generated = torch.tensor([ids]).cuda()
        yield from _compare(f"{name}, one sequence", generated, wanted, one.logits[None], limit, why)
        some, asked = batch_decoder(model, dtype, 5)
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
    yield Finding.judge(
        f"{name}: greedy tokens that differ",
        float(differ.sum()),
        0,
        "where the lead is clear",
    )
    error = float((last - wanted[:, -1]).abs().max() / wanted.abs().max())
    yield Finding.judge(f"{name}: last logits", error, limit, why)


def ours(batch: int, count: int) -> Callable[[], float]:
    """Return a function that measures seconds per step."""
    if batch == 1:
        one, _ = single_decoder(model_of(), torch.bfloat16)

        def single() -> float:
            one.position = PROMPT - 1
            return gpu_seconds(lambda: one.greedy(count)) / count

        return single
    some, asked = batch_decoder(model_of(), torch.bfloat16, batch)

    def several() -> float:
        some.lengths.fill_(PROMPT - 1)
        return gpu_seconds(lambda: some.greedy(asked[:, -1], count)) / count

    return several


def gpt_fast(folder: str, batch: int, count: int) -> Callable[[], float]:
    """Return the same for gpt-fast: a long generation minus a short one with the same prompt."""
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
        # Both use caches of the same size; another size would compile another graph.
        return (gpu_seconds(lambda: generate(count + SHORT)) - gpu_seconds(lambda: generate(SHORT))) / count

    return step


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--new", type=int, default=128, help="New tokens per round. Default: 128.")
    options.add_argument("--rounds", type=int, default=7, help="Rounds in which both take turns. Default: 7.")
    options.add_argument("--batch", type=int, nargs="*", default=[1, 64], help="Batch sizes. Default: 1 and 64.")
    options.add_argument("--gpt-fast", metavar="CHECKOUT", help="A checkout of gpt-fast. Default: only our kernels.")
    given = options.parse_args()
    require_gpu()
    for finding in same_tokens():
        print(finding.text(), flush=True)
        assert finding.passed
    for batch in given.batch:
        contenders = {"glassformer": ours(batch, given.new)}
        if given.gpt_fast:
            contenders["gpt-fast"] = gpt_fast(given.gpt_fast, batch, given.new)
            print(f"batch {batch}: gpt-fast is compiling", flush=True)
            print(f"batch {batch}: gpt-fast compiled, {contenders['gpt-fast']() * 1e6:.1f} µs", flush=True)
        times = in_turns(contenders, given.rounds, warm_up=2)
        middle = {name: statistics.median(t) for name, t in times.items()}
        for name, t in times.items():
            ratio = f"  {middle['gpt-fast'] / middle[name]:.2f} x gpt-fast" if given.gpt_fast else ""
            print(
                f"batch {batch:<3} {name:<12} {batch / middle[name]:>10,.0f} tokens/s  {middle[name] * 1e6:7.1f} µs "
                f"per step ({min(t) * 1e6:.1f} to {max(t) * 1e6:.1f}){ratio}",
                flush=True,
            )


if __name__ == "__main__":
    main()
