"""Look into a decode step on a GPU: the time of every kind of operation, and the error of its logits.

    PYTHONPATH=src python -m glassformer.bench.gpu.decode_parts [--models llama3_2_1b llama3_8b:8] [--batch 1 16]
        [--prompt 512] [--precision bfloat16 int8 fp8]

Models are presets with random weights; `NAME:8` has 8 layers. Each kind of operation of a captured step is captured and
timed alone, then all of them together. Logits of 24 steps, and those of the eager engine in bfloat16, are compared with
the engine in float32. `glass bench decode --device cuda` compares whole generations with other libraries.
"""

import statistics
from typing import Any

import torch

from glassformer.bench.commands import parser
from glassformer.bench.gpu.device import gpu_seconds, require_gpu
from glassformer.config import ModelConfig, presets, replace
from glassformer.kernels.cuda.graph.launches import Launch
from glassformer.kernels.cuda.graph.steps import CapturedSteps, captured_steps
from glassformer.model import build


def config_of(name: str) -> ModelConfig:
    """Return the config of a preset; `NAME:8` has 8 layers."""
    name, _, layers = name.partition(":")
    return replace(presets.get(name), n_layers=int(layers)) if layers else presets.get(name)


def prompts_of(config: ModelConfig, batch: int, length: int) -> torch.Tensor:
    ids = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
    return ids.expand(batch, -1).cuda()


@torch.no_grad()
def steps_of(model: Any, batch: int, length: int, precision: str) -> CapturedSteps:
    """Return the captured steps after a prompt."""
    cache = model.new_cache("static", capacity=-(-(length + 160) // 256) * 256)
    model(prompts_of(model.config, batch, length), cache=cache)
    return captured_steps(model, cache, batch, cache.capacity, precision)


@torch.no_grad()
def check(model: Any, batch: int, precision: str, count: int = 24) -> str:
    """Compare logits of captured steps, and of the engine in the same dtype, with those of the engine in float32."""
    length = 40
    steps = steps_of(model, batch, length, precision)
    more = torch.randint(0, model.config.vocab_size, (batch, count), device="cuda")
    found = torch.stack([steps.step(more[:, i]) for i in range(count)], 1)
    whole = torch.cat([prompts_of(model.config, batch, length), more], 1)
    eager = model(whole)[:, length:].float()
    exact = model.float()(whole)[:, length:]
    model.bfloat16()
    scale = exact.abs().max()
    errors = [float((x - exact).norm() / exact.norm()) for x in (found, eager)]
    return (
        f"logits: relative error of the steps {errors[0]:.2e}, of the eager engine {errors[1]:.2e}; largest difference "
        f"{float((found - exact).abs().max() / scale):.2e}; fused: {steps.fused}"
    )


def kind_of(operation: Any) -> str:
    """Return the name of an operation of a step; a matmul has its widths in it."""
    if not isinstance(operation, Launch):
        return "torch"
    macros = operation.macros
    detail = f" {macros['INNER']} -> {sum(macros[f'ROWS{i}'] for i in range(3))}" if "INNER" in macros else ""
    return operation.kernel + detail


@torch.no_grad()
def parts(model: Any, batch: int, length: int, precision: str) -> None:
    """Print the time of each kind of operation of a step, captured alone, and of the whole step."""
    steps = steps_of(model, batch, length, precision)
    steps.compile()
    operations = steps.body.operations
    kinds = list(dict.fromkeys(map(kind_of, operations)))
    for name in [*kinds, "all"]:
        chosen = [op for op in operations if name in ("all", kind_of(op))]

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
    options.add_argument("--models", nargs="*", default=["llama3_2_1b"], help="Presets. Default: llama3_2_1b.")
    options.add_argument("--batch", type=int, nargs="*", default=[1], help="Numbers of sequences. Default: 1.")
    options.add_argument("--prompt", type=int, default=512, help="Tokens before the step. Default: 512.")
    options.add_argument("--precision", nargs="*", default=["bfloat16"], help="Of the weights. Default: bfloat16.")
    given = options.parse_args()
    require_gpu()
    for name in given.models:
        model = build(config_of(name), seed=0, dtype=torch.bfloat16, device="cuda").eval()
        length = min(given.prompt, (model.config.max_len or 10**9) - 160)
        for batch in given.batch:
            for precision in given.precision:
                print(f"{name} batch {batch} {precision}: {check(model, batch, precision)}", flush=True)
                parts(model, batch, length, precision)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
