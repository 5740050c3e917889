"""Fine-tune with LoRA on a GPU: peft with transformers, eager and compiled, and glassformer, in turns in one run.

    PYTHONPATH=src:.carry/peft python -m glassformer.bench.gpu.lora_gpu [--batch 8] [--context 1024]

A model of the shape of Qwen3-0.6B with random weights, adapters of rank 16 on all linear layers but the head, AdamW at
3e-4, clipping at 1, bf16 matmuls. peft holds the frozen weights in bf16 and the adapters in float32, as its users do.
All start from the same folder and from adapters without effect, so the first losses are equal; if the losses at the end
differ, the benchmark fails.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from glassformer.bench.commands import in_turns, parser, spread
from glassformer.bench.gpu.device import require_gpu
from glassformer.bench.gpu.train_gpu import measure
from glassformer.config import presets
from glassformer.model import build
from glassformer.training.graph import CapturedStep
from glassformer.training.loop import prepare_state
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule
from glassformer.training.sections import Start
from glassformer.training.tuning.section import Lora
from glassformer.weights import save

RANK, RATE, USED = 16, 3e-4, 512
AGREE = 0.1
"""Nats by which the last losses may differ: adapters start from different random matrices."""
Step = Callable[[Batch], float]


def ours(folder: Path, batch: int) -> Step:
    """Return our training step."""
    run = Run(
        model=presets.qwen3_0_6b(),
        start=Start(model=str(folder)),
        lora=Lora(rank=RANK),
        optim=Optim(lr=RATE, weight_decay=0.01),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=batch),
        machine=Machine(device="cuda", precision="bfloat16", stream="bfloat16", compile="yes"),
    )
    state = prepare_state(run)
    step = CapturedStep(state)
    return lambda b: float(step(state, b)["loss"])


def peers(folder: Path, compiled: bool) -> Step:
    """Return the step of peft and transformers."""
    import peft
    import transformers

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(base.cuda(), config).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01, fused=True)
    run = torch.compile(model) if compiled else model

    def step(b: Batch) -> float:
        with torch.autocast("cuda", torch.bfloat16):
            logits = run(input_ids=b.inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), b.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--batch", type=int, default=8, help="Sequences per step. Default: 8.")
    options.add_argument("--context", type=int, default=1024, help="Tokens per sequence. Default: 1024.")
    options.add_argument("--rounds", type=int, default=5, help="Rounds in which all take turns. Default: 5.")
    options.add_argument("--steps", type=int, default=10, help="Steps per round. Default: 10.")
    given = options.parse_args()
    require_gpu()
    torch.backends.cuda.matmul.allow_tf32 = True
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        ids = torch.randint(0, USED, (given.batch, given.context + 1), generator=generator)
        batches.append(Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(torch.device("cuda")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save(build(presets.qwen3_0_6b(), seed=0), folder, format="hf")
        contenders: dict[str, Step] = {
            "glassformer": ours(folder, given.batch),
            "peft": peers(folder, False),
            "peft compiled": peers(folder, True),
        }
        for contender, step in contenders.items():
            start = time.perf_counter()
            loss = step(batches[0])
            for _ in range(3):
                step(batches[1])
            print(f"{contender}: first loss {loss:.4f}, start-up {time.perf_counter() - start:.0f} s", flush=True)
        report(contenders, batches, given.rounds, given.steps)


def report(contenders: dict[str, Step], batches: list[Batch], rounds: int, steps: int) -> None:
    """Measure in turns, and print tokens per second and the ratio to the fastest peer."""
    losses: dict[str, float] = {}

    def timed(name: str) -> float:
        seconds, losses[name] = measure(contenders[name], batches, steps)
        return seconds

    times = in_turns({name: partial(timed, name) for name in contenders}, rounds)
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


if __name__ == "__main__":
    main()
