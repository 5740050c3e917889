"""Fine-tune with LoRA: peft with transformers, and glassformer, in turns in one run.

    python -m glassformer.bench.developer.lora [--device cpu|cuda] [--precision bfloat16] [--compiled] [--cpu-time]

On a CPU the shape of GPT-2 (124M), on a GPU that of Qwen3-0.6B, with random weights; adapters of rank 16 on all linear
layers but the head, AdamW at 3e-4, clipping at 1. `--precision bfloat16` computes the matmuls of all in bfloat16, under
autocast. On a GPU, peft holds the frozen weights in bfloat16 and the adapters in float32, as its users do. All start
from the same folder and from adapters without effect, so the first losses are equal; if the losses at the end differ,
the benchmark fails. `--compiled` adds peft under torch.compile. `--cpu-time` counts the CPU time of one thread instead
of the time that passes: on a machine with other work, only that can be compared.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from glassformer.bench.commands import in_turns, parser, random_batch, spread
from glassformer.bench.gpu.device import require_gpu
from glassformer.bench.peers.base import wait
from glassformer.config import ModelConfig, presets
from glassformer.model import build
from glassformer.training.loop import prepare_state, stepper
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora
from glassformer.weights import save

RANK, RATE, USED = 16, 3e-4, 512
AGREE = 0.1
"""Nats by which the last losses may differ: adapters start from different random matrices."""
WARM_UP = 3
Precision = Literal["float32", "bfloat16"]
Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Setting:
    """What is measured on a device, unless an option changes it."""

    preset: str
    batch: int
    context: int
    precision: Precision
    steps: int
    machine: dict[str, Any]
    """Settings of our run."""
    frozen: torch.dtype
    """Dtype in which peft holds the frozen weights."""


SETTINGS = {
    "cpu": Setting("gpt2", 4, 256, "float32", 3, {}, torch.float32),
    "cuda": Setting("qwen3_0_6b", 8, 1024, "bfloat16", 10, {"stream": "bfloat16", "compile": "yes"}, torch.bfloat16),
}


def ours(config: ModelConfig, folder: Path, given: argparse.Namespace) -> Step:
    """Return our training step."""
    run = Run(
        model=config,
        start=Start(model=str(folder)),
        lora=Lora(rank=RANK),
        optim=Optim(lr=RATE, weight_decay=0.01),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=given.batch),
        machine=Machine(device=given.device, precision=given.precision, **SETTINGS[given.device].machine),
    )
    state = prepare_state(run)
    step = stepper(state)
    return lambda batch: float(step(state, batch)["loss"])


def peers(folder: Path, compiled: bool, given: argparse.Namespace) -> Step:
    """Return the step of peft and transformers."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=SETTINGS[given.device].frozen, attn_implementation="sdpa"
    )
    # "all-linear" means every linear layer but the head, and GPT-2 stores them as (inputs, outputs)
    options: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    options["fan_in_fan_out"] = base.config.model_type == "gpt2"
    adapters = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, **options)
    model: Any = peft.get_peft_model(base.to(given.device), adapters).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01, fused=True)
    run = torch.compile(model) if compiled else model

    def step(batch: Batch) -> float:
        with torch.autocast(given.device, torch.bfloat16, enabled=given.precision == "bfloat16"):
            logits = run(input_ids=batch.inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def report(contenders: dict[str, Step], batches: list[Batch], given: argparse.Namespace) -> None:
    """Measure in turns, and print tokens per second and the ratio to the fastest peer."""
    clock = time.process_time if given.cpu_time else time.perf_counter
    losses: dict[str, float] = {}

    def timed(name: str) -> float:
        wait(given.device)
        start = clock()
        for number in range(given.steps):
            losses[name] = contenders[name](batches[number % len(batches)])
        wait(given.device)
        return (clock() - start) / given.steps

    times = in_turns({name: partial(timed, name) for name in contenders}, given.rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    best = min(medians[name] for name in contenders if name != "glassformer")
    for name, t in times.items():
        rate = batches[0].inputs.numel() / medians[name]
        print(
            f"{name:<14}{rate:>12,.0f} tokens/s  {1000 * medians[name]:.1f} ms  spread {spread(t):.1%}  "
            f"loss {losses[name]:.3f}  ratio {best / medians[name]:.3f}",
            flush=True,
        )
    if max(losses.values()) - min(losses.values()) > AGREE:
        sys.exit(f"the last losses differ by more than {AGREE} nats, so the times have no meaning.")


def arguments() -> argparse.Namespace:
    """Read the command line; what is not given has the value of the device."""
    options = parser(__doc__)
    options.add_argument("--device", choices=SETTINGS, default="cpu", help="Where all compute. Default: cpu.")
    options.add_argument("--batch", type=int, help="Sequences per step. Default: 4, on a GPU 8.")
    options.add_argument("--context", type=int, help="Tokens per sequence. Default: 256, on a GPU 1024.")
    options.add_argument("--layers", type=int, help="Layers of the model. Default: as the preset.")
    options.add_argument("--rounds", type=int, default=5, help="Rounds in which all take turns. Default: 5.")
    options.add_argument("--steps", type=int, help="Steps per round. Default: 3, on a GPU 10.")
    precision = "Dtype of the matmuls. Default: float32, on a GPU bfloat16."
    options.add_argument("--precision", choices=get_args(Precision), help=precision)
    options.add_argument("--compiled", action="store_true", help="Also measure peft under torch.compile.")
    options.add_argument("--cpu-time", action="store_true", help="Count the CPU time of one thread.")
    given = options.parse_args()
    for name in ("batch", "context", "precision", "steps"):
        if getattr(given, name) is None:
            setattr(given, name, getattr(SETTINGS[given.device], name))
    return given


def main() -> None:
    given = arguments()
    if given.device == "cuda":
        require_gpu()
        torch.backends.cuda.matmul.allow_tf32 = True
    if given.cpu_time:
        torch.set_num_threads(1)
    layers = {"n_layers": given.layers} if given.layers else {}
    config = presets.get(SETTINGS[given.device].preset, dropout=0.0, **layers)
    batches = [random_batch(given.batch, given.context, USED, seed, given.device) for seed in range(4)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save(build(config, seed=0), folder, format="hf")
        contenders = {"glassformer": ours(config, folder, given), "peft": peers(folder, False, given)}
        if given.compiled:
            contenders["peft compiled"] = peers(folder, True, given)
        for contender, step in contenders.items():
            start = time.perf_counter()
            loss = step(batches[0])
            for _ in range(WARM_UP if given.device == "cuda" else 0):  # a CUDA graph is captured after three steps
                step(batches[1])
            print(f"{contender}: first loss {loss:.4f}, start-up {time.perf_counter() - start:.0f} s", flush=True)
        report(contenders, batches, given)


if __name__ == "__main__":
    main()
