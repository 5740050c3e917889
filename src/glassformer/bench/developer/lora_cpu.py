"""Fine-tune GPT-2 with LoRA on a CPU: peft with transformers, and glassformer, in turns in one run.

    python -m glassformer.bench.developer.lora_cpu [--batch 4] [--context 256] [--layers 12] [--precision float32]
        [--compiled] [--cpu-time]

The shape of GPT-2 (124M) with random weights, adapters of rank 16 on all linear layers but the head, AdamW at 3e-4,
clipping at 1. `--precision bfloat16` computes the matmuls of all in bfloat16, under autocast. All start from the same
folder and from adapters without effect, so the first losses are equal; if the losses at the end differ, the benchmark
fails. `--compiled` adds peft under torch.compile. `--cpu-time` counts
the CPU time of one thread instead of the time that passes: on a machine with other work, only that can be compared.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from glassformer.bench.commands import parser
from glassformer.bench.gpu.lora_gpu import RANK, RATE, USED, Step, report
from glassformer.config import ModelConfig, presets
from glassformer.model import build
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora
from glassformer.weights import save

Precision = Literal["float32", "bfloat16"]


def ours(config: ModelConfig, folder: Path, batch: int, precision: Precision) -> Step:
    """Return our training step."""
    run = Run(
        model=config,
        start=Start(model=str(folder)),
        lora=Lora(rank=RANK),
        optim=Optim(lr=RATE, weight_decay=0.01),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=batch),
        machine=Machine(device="cpu", precision=precision),
    )
    state = prepare_state(run)
    return lambda b: float(train_step(state, b)["loss"])


def peers(folder: Path, compiled: bool, precision: Precision) -> Step:
    """Return the step of peft and transformers."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    # "all-linear" means every linear layer but the head, and GPT-2 stores them as (inputs, outputs)
    given: dict[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, **given)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01, fused=True)
    run = torch.compile(model) if compiled else model

    def step(b: Batch) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            logits = run(input_ids=b.inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), b.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def measure(
    step: Step, batches: list[Batch], steps: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Return the seconds per step and the last loss."""
    start = clock()
    for number in range(steps):
        loss = step(batches[number % len(batches)])
    return (clock() - start) / steps, loss


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=4, help="Sequences per step. Default: 4.")
    options.add_argument("--context", type=int, default=256, help="Tokens per sequence. Default: 256.")
    options.add_argument("--layers", type=int, default=12, help="Layers of the model. Default: 12, as GPT-2.")
    options.add_argument("--rounds", type=int, default=5, help="Rounds in which all take turns. Default: 5.")
    options.add_argument("--steps", type=int, default=3, help="Steps per round. Default: 3.")
    options.add_argument("--precision", choices=get_args(Precision), default="float32", help="Dtype of the matmuls.")
    options.add_argument("--compiled", action="store_true", help="Also measure peft under torch.compile.")
    options.add_argument("--cpu-time", action="store_true", help="Count the CPU time of one thread.")
    given = options.parse_args()
    clock = time.perf_counter
    if given.cpu_time:
        clock = time.process_time
        torch.set_num_threads(1)
    config = presets.gpt2(n_layers=given.layers, dropout=0.0)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        ids = torch.randint(0, USED, (given.batch, given.context + 1), generator=generator)
        batches.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save(build(config, seed=0), folder, format="hf")
        contenders: dict[str, Step] = {
            "glassformer": ours(config, folder, given.batch, given.precision),
            "peft": peers(folder, False, given.precision),
        }
        if given.compiled:
            contenders["peft compiled"] = peers(folder, True, given.precision)
        for contender, step in contenders.items():
            start = time.perf_counter()
            loss = step(batches[0])
            print(f"{contender}: first loss {loss:.4f}, first step {time.perf_counter() - start:.0f} s", flush=True)
        report(contenders, batches, given.rounds, given.steps, functools.partial(measure, clock=clock))


if __name__ == "__main__":
    main()
