"""Train GPT-2 124M on a GPU: compiled nanoGPT and glassformer, the same model, in turns in one run.

    PYTHONPATH=src python -m glassformer.bench.gpu.train_gpu --nanogpt .carry/nanoGPT [--batch 64] [--fp8]

Context 1024, bf16 matmuls with float32 weights, fused AdamW, clipping at 1: nanoGPT's own step. The tokens are drawn
from the first 512 ids, which a model learns within the run. If the losses at the end differ, the benchmark fails: the
time of a step that does not learn has no meaning. Mean power and clock of the GPU are printed as well, because bf16
matmuls reach the power limit.
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from glassformer.bench.commands import in_turns, parser, spread
from glassformer.bench.gpu.device import require_gpu
from glassformer.bench.gpu.power import Meter
from glassformer.bench.peers.nanogpt import training_step
from glassformer.config import LayerNorm, presets, replace
from glassformer.training.graph import CapturedStep
from glassformer.training.loop import prepare_state
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

CONTEXT, VOCAB, USED = 1024, 50304, 512
AGREE = 0.1
"""Nats by which the last losses may differ, because of seeds and rounding."""


PEER = "nanoGPT compiled"
Step = Callable[[Batch], Tensor | float]


def ours(
    batch: int, stream: Literal["float32", "bfloat16"], products: Literal["precision", "float8"] = "precision"
) -> tuple[Step, int]:
    """Return our training step, a function from a batch to its loss, and the number of parameters."""
    model = presets.gpt2(vocab_size=VOCAB, dropout=0.0, attention__bias=False, feedforward__bias=False)
    run = Run(
        model=replace(model, norm=LayerNorm(bias=False)),
        optim=Optim(lr=6e-4),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=batch),
        machine=Machine(device="cuda", precision="bfloat16", stream=stream, products=products, compile="yes"),
    )
    state = prepare_state(run)
    count = sum(p.numel() for p in state.model.parameters())
    one_step = CapturedStep(state)
    return lambda b: one_step(state, b)["loss"], count


def nanogpt(folder: str, compiled: bool) -> tuple[Step, int]:
    """Return the same for nanoGPT from a checkout."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    model = GPT(GPTConfig(block_size=CONTEXT, vocab_size=VOCAB, dropout=0.0, bias=False)).cuda()
    count = sum(p.numel() for p in model.parameters())
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    run = torch.compile(model) if compiled else model

    def step(b: Batch) -> Tensor:
        context = torch.autocast("cuda", torch.bfloat16)
        loss: Tensor = training_step(run, optimizer, context, b.inputs, b.targets)
        return loss.detach()

    return step, count


def measure(step: Step, batches: list[Batch], steps: int, meter: Meter | None = None) -> tuple[float, float]:
    """Return the seconds per step and the last loss, which alone is read: training does not wait for each step."""
    meter = meter or Meter()
    torch.cuda.synchronize()
    meter.begin()
    start = time.perf_counter()
    for i in range(steps):
        loss = step(batches[i % len(batches)])
        meter.look()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    meter.end()
    return seconds / steps, float(loss)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--nanogpt", required=True, metavar="FOLDER", help="A checkout of nanoGPT.")
    options.add_argument("--batch", type=int, default=64, help="Sequences per step. Default: 64.")
    options.add_argument("--rounds", type=int, default=5, help="Rounds in which all take turns. Default: 5.")
    options.add_argument("--steps", type=int, default=10, help="Steps per round. Default: 10.")
    options.add_argument("--fp8", action="store_true", help="Also measure matmuls of blocks and head in float8.")
    options.add_argument("--fast", action="store_true", help="Leave out the float32 residual stream: less to compile.")
    given = options.parse_args()
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    contenders = {
        **({} if given.fast else {"glassformer": ours(given.batch, "float32")}),
        "  bf16 stream": ours(given.batch, "bfloat16"),
        **({"  fp8": ours(given.batch, "bfloat16", "float8")} if given.fp8 else {}),
        PEER: nanogpt(given.nanogpt, True),
    }
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        ids = torch.randint(0, USED, (given.batch, CONTEXT + 1), generator=generator)
        batches.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(torch.device("cuda")))
    for name, (step, count) in contenders.items():
        start = time.perf_counter()
        loss = float(step(batches[0]))
        for _ in range(3):
            step(batches[1])
        seconds = time.perf_counter() - start
        print(f"{name.strip()}: {count:,} parameters, first loss {loss:.4f}, start-up {seconds:.0f} s", flush=True)
    losses: dict[str, float] = {}
    meters = {name: Meter() for name in contenders}

    def timed(name: str) -> float:
        seconds, losses[name] = measure(contenders[name][0], batches, given.steps, meters[name])
        return seconds

    times = in_turns({name: partial(timed, name) for name in contenders}, given.rounds)
    tokens = given.batch * CONTEXT
    medians = {name: statistics.median(t) for name, t in times.items()}
    for name, t in times.items():
        rate = tokens / medians[name]
        ratio = medians[PEER] / medians[name]
        print(
            f"{name:<18}{rate:>12,.0f} tokens/s  {1000 * medians[name]:.1f} ms  spread {spread(t):.1%}  "
            f"loss {losses[name]:.3f}  ratio {ratio:.3f}  {meters[name].text()}",
            flush=True,
        )
        if abs(losses[name] - losses[PEER]) > AGREE:
            sys.exit(
                f"{name}: its last loss is more than {AGREE} nats from that of {PEER}, so its time has no meaning."
            )
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB (all contenders together)")


if __name__ == "__main__":
    main()
