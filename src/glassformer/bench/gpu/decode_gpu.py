"""Decode on one GPU: `gf.generate` as a user finds it, gpt-fast compiled, and our eager engine, in turns.

    PYTHONPATH=src python -m glassformer.bench.gpu.decode_gpu [--gpt-fast CHECKOUT] [--shapes llama_1b qwen3_0_6b]
        [--batch 1 16] [--prompt 512] [--new 128] [--rounds 5] [--precision bfloat16] [--eager] [--check] [--parts]

`--shapes` are names of the table below or of presets; `NAME:8` has 8 layers. The weights are random. Times are those of
a step: a generation of `--new` tokens minus a short one with the same prompt, over the difference of their tokens.
gpt-fast is compiled as its README describes, with its own architecture of as many parameters. `--check` compares logits
with the engine in float32, `--parts` times every kind of operation of a step alone.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from glassformer import config as c
from glassformer.bench.commands import in_turns, parser, spread
from glassformer.bench.gpu.device import gpu_seconds, require_gpu
from glassformer.bench.peers import gptfast
from glassformer.config import presets
from glassformer.generation import generate
from glassformer.kernels import decode
from glassformer.kernels.cuda.graph import linear
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.cuda.graph.steps import CapturedSteps, captured_steps
from glassformer.model import DecoderLM, Model, Seq2Seq, build

SHORT = 8


def _llama(layers: int, width: int, heads: int, groups: int, hidden: int, vocab: int = 128256) -> c.DecoderConfig:
    return c.DecoderConfig(
        vocab_size=vocab, d_model=width, n_layers=layers, attention=c.Attention(heads, groups, bias=False),
        feedforward=c.Gated(hidden), norm=c.RMSNorm(1e-5), position=c.Rotary(base=500000.0), head=c.Head(tied=False),
        max_len=32768,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], c.ModelConfig]] = {
    "llama_1b": lambda: _llama(16, 2048, 32, 8, 8192),
    "llama_8b_widths": lambda: _llama(8, 4096, 32, 8, 14336),
    "llama_3b": lambda: _llama(28, 3072, 24, 8, 8192),
    "small_moe": lambda: replace(_llama(8, 1024, 16, 4, 2048, 32000), feedforward=c.MoE(16, 2, c.Gated(1024))),
}


def config_of(name: str) -> c.ModelConfig:
    """Return the config of a shape or preset; `NAME:8` has 8 layers."""
    name, _, layers = name.partition(":")
    made = SHAPES[name]() if name in SHAPES else presets.get(name)
    return replace(made, n_layers=int(layers)) if layers else made


def model_of(config: c.ModelConfig, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Return a model with random weights, drawn on the GPU."""
    with torch.device("meta"):
        made = build(config, device="meta")
    made = made.to(dtype).to_empty(device="cuda").eval()
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        for buffer in made.buffers():
            buffer.zero_()
    return made


def prompts_of(config: c.ModelConfig, batch: int, length: int) -> list[list[int]]:
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    found: list[list[int]] = ids.expand(batch, -1).tolist()
    return found


def ours(model: Model, batch: int, prompt: int, new: int, **options: Any) -> Callable[[], float]:
    """Return a function that measures seconds per step."""
    prompts = prompts_of(model.config, batch, prompt)

    def run(count: int) -> float:
        return gpu_seconds(lambda: generate(model, prompts, count, stop=[], **options))

    return lambda: (
        (run(new + SHORT) - run(SHORT if options.get("engine") == "torch" else 32))
        / (new + SHORT - (SHORT if options.get("engine") == "torch" else 32))
    )


def gpt_fast(folder: str, config: c.ModelConfig, batch: int, length: int, new: int) -> Callable[[], float]:
    """Return the same for gpt-fast."""
    theirs, program = gptfast.modules(folder)
    torch._dynamo.reset()
    model = gptfast.build(theirs, gptfast.shape(config, length + new + SHORT), "cuda")
    if not hasattr(program, "plain_step"):
        program.plain_step = program.decode_one_token
    program.decode_one_token = torch.compile(program.plain_step, mode="reduce-overhead", fullgraph=True)
    prompt = torch.tensor(prompts_of(config, 1, length)[0], device="cuda", dtype=torch.int)

    def run(count: int) -> float:
        def work() -> None:
            with torch.no_grad():
                program.generate(
                    model, prompt, count, batch_size=batch, interactive=False, draft_model=None,
                    callback=lambda _: None, temperature=1.0, top_k=1,
                )  # fmt: skip

        return gpu_seconds(work)

    run(new + SHORT)
    return lambda: (run(new + SHORT) - run(SHORT)) / new


@torch.no_grad()
def steps_of(model: Any, batch: int, length: int, precision: str) -> CapturedSteps:
    """Return the captured steps after a prompt."""
    tokens = torch.tensor(prompts_of(model.config, batch, length), device="cuda")
    cache = model.new_cache("static", capacity=-(-(length + 160) // 256) * 256)
    model(tokens, cache=cache)
    return captured_steps(model, cache, batch, cache.capacity, precision)


@torch.no_grad()
def check(model: Any, batch: int, precision: str, count: int = 24) -> str:
    """Compare logits of captured steps, and of the engine in the same dtype, with those of the engine in float32."""
    length = 40
    steps = steps_of(model, batch, length, precision)
    tokens = torch.tensor(prompts_of(model.config, batch, length), device="cuda")
    more = torch.randint(0, model.config.vocab_size, (batch, count), device="cuda")
    found = torch.stack([steps.step(more[:, i]) for i in range(count)], 1)
    whole = torch.cat([tokens, more], 1)
    eager = model(whole)[:, length:].float()
    exact = model.float()(whole)[:, length:]
    model.bfloat16()
    scale = exact.abs().max()
    errors = [float((x - exact).norm() / exact.norm()) for x in (found, eager)]
    return (
        f"logits: relative error of the steps {errors[0]:.2e}, of the eager engine {errors[1]:.2e}; largest difference "
        f"{float((found - exact).abs().max() / scale):.2e}; fused: {steps.fused}"
    )


@torch.no_grad()
def parts(model: Any, batch: int, length: int, precision: str) -> None:
    """Print the time of each kind of operation of a step, captured alone, and of the whole step."""
    steps = steps_of(model, batch, length, precision)
    steps.compile()
    operations = steps.body.operations

    def kind(operation: Any) -> str:
        if not isinstance(operation, Launch):
            return "torch"
        macros = operation.macros
        detail = f" {macros['INNER']} -> {sum(macros[f'ROWS{i}'] for i in range(3))}" if "INNER" in macros else ""
        return operation.kernel + detail

    kinds = list(dict.fromkeys(map(kind, operations)))
    for name in [*kinds, "all"]:
        chosen = [op for op in operations if name in ("all", kind(op))]

        def run(chosen: list[Any] = chosen) -> None:
            for op in chosen:
                op.run() if isinstance(op, Launch) else op()

        steps.cache.slot.fill_(length)
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        times = []
        for _ in range(12):
            steps.cache.slot.fill_(length)
            times.append(gpu_seconds(graph.replay))
        middle = statistics.median(times[2:])
        size = sum(_bytes(op) for op in chosen if isinstance(op, Launch))
        print(f"  {name:<28} x{len(chosen):<4} {middle * 1e6:8.1f} us  {size / middle / 1e12:5.2f} TB/s", flush=True)


def _bytes(launch: Launch) -> int:
    if launch.kernel != "linear":
        return 0
    macros = launch.macros
    rows = sum(macros[f"ROWS{i}"] for i in range(3))
    return rows * macros["INNER"] * (1 if macros["WEIGHTS"] else 2)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--new", type=int, default=128)
    options.add_argument("--prompt", type=int, default=512)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batch", type=int, nargs="*", default=[1])
    options.add_argument("--shapes", nargs="*", default=["gpt2", "llama_1b", "qwen3_0_6b", "llama_8b_widths"])
    options.add_argument("--gpt-fast", metavar="CHECKOUT")
    options.add_argument("--precision", nargs="*", default=["auto"])
    options.add_argument("--small", type=int, help="Largest bytes of weights for the kernels of small models.")
    options.add_argument("--kernel-batch", type=int, help="Largest batch of our matmuls; above it, cuBLAS.")
    for flag in ("eager", "check", "parts"):
        options.add_argument(f"--{flag}", action="store_true")
    given = options.parse_args()
    require_gpu()
    if given.small is not None:
        decode.SMALL_MODEL = given.small
    if given.kernel_batch:
        linear.KERNEL_BATCH = given.kernel_batch
    for name in given.shapes:
        config = config_of(name)
        length = min(given.prompt, (config.max_len or 10**9) - given.new - SHORT)
        model = model_of(config)
        for batch in given.batch:
            measure(name, model, batch, length, given)
        del model
        torch.cuda.empty_cache()


def measure(name: str, model: Model, batch: int, length: int, given: Any) -> None:
    """Print one table: a shape at one batch size."""
    if given.check and isinstance(model, DecoderLM):
        print(f"{name} batch {batch}: {check(model, batch, 'bfloat16')}", flush=True)
    if given.parts and isinstance(model, DecoderLM):
        for precision in given.precision:
            parts(model, batch, length, "bfloat16" if precision == "auto" else precision)
    if not given.rounds:
        return
    start = time.perf_counter()
    first = generate(model, prompts_of(model.config, batch, length), 32, stop=[], precision=given.precision[0])
    torch.cuda.synchronize()
    print(f"{name} batch {batch}: first call {time.perf_counter() - start:.2f} s, {first.engine.text()}", flush=True)
    contenders: dict[str, Callable[[], float]] = {
        f"ours {precision}": ours(model, batch, length, given.new, precision=precision) for precision in given.precision
    }
    if given.eager:
        contenders["eager"] = ours(model, batch, length, 16, engine="torch")
    if given.gpt_fast and not isinstance(model, Seq2Seq):
        contenders["gpt-fast"] = gpt_fast(given.gpt_fast, model.config, batch, length, given.new)
    times = in_turns(contenders, given.rounds, warm_up=1)
    middle = {which: statistics.median(t) for which, t in times.items()}
    for which, t in times.items():
        ratios = [f"{middle[peer] / middle[which]:.2f} x {peer}" for peer in ("gpt-fast", "eager") if peer in middle]
        print(
            f"{name:<16} batch {batch:<3} {which:<14} {batch / middle[which]:>10,.0f} tokens/s  "
            f"{middle[which] * 1e6:8.1f} us per step (spread {spread(t):.0%})  {', '.join(ratios)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
