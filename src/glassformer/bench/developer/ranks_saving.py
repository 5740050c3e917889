"""What a checkpoint costs the steps of two sharded ranks on this machine: none, in the background, and at once.

    python -m glassformer.bench.developer.ranks_saving [--rounds 3] [--steps 20]

Two ranks of torchrun with one thread each train GPT-2's shape at 384 x 6 (11M parameters, 132 MB of weights and
moments). Each round is a number of steps that begins with a checkpoint, and ends when that is written. The longest step
of the round is reported too: with a checkpoint in the background, it is the one that copies what is to be written.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from glassformer.bench.commands import in_turns, parser, random_batch, spread
from glassformer.bench.developer import in_ranks
from glassformer.config import presets

RANKS, CONTEXT, VOCAB, EACH = 2, 256, 1024, 4
WAYS = ("none", "background", "at once")


def rank(folder: Path, rounds: int, steps: int) -> None:
    """Measure on one rank; rank 0 prints the rounds."""
    from glassformer.training.distributed.group import leave
    from glassformer.training.loop import TrainState, prepare_state, save, train_step
    from glassformer.training.run import Loop, Machine, Run
    from glassformer.training.sections import Checkpoint

    torch.set_num_threads(1)
    config = presets.gpt2(vocab_size=VOCAB, d_model=384, n_layers=6, n_heads=6, d_ff=1536, max_len=CONTEXT, dropout=0.0)
    machine = Machine(device="cpu", precision="float32", compile="no", parallel="fsdp")
    states: dict[str, TrainState] = {}
    for name in WAYS:
        run = Run(
            model=config, loop=Loop(steps=10**6, batch=RANKS * EACH), machine=machine, out=str(folder / name),
            checkpoint=Checkpoint(background=name == "background"),
        )  # fmt: skip
        states[name] = prepare_state(run)
        Path(run.out).mkdir(exist_ok=True)
    batch = random_batch(EACH, CONTEXT, VOCAB)
    longest: dict[str, list[float]] = {name: [] for name in WAYS}

    def one_round(name: str) -> float:
        state, times = states[name], list[float]()
        state.group.totals(0)
        began = time.perf_counter()
        for number in range(steps):
            start = time.perf_counter()
            train_step(state, batch)
            if number == 0 and name != "none":
                save(state, "{}", 0.0, False)
            state.writer.check()
            times.append(time.perf_counter() - start)
        state.writer.settle()
        longest[name].append(max(times))
        return (time.perf_counter() - began) / steps

    found = in_turns({name: (lambda name=name: one_round(name)) for name in WAYS}, rounds, warm_up=1)  # type: ignore[misc]
    group = states["none"].group
    if group.is_main:
        print(json.dumps({"steps": found, "longest": {name: times[1:] for name, times in longest.items()}}), flush=True)
    group.totals(0)
    leave(0)


def show(found: dict[str, Any]) -> None:
    medians = {name: statistics.median(times) for name, times in found["steps"].items()}
    for name, times in found["steps"].items():
        print(
            f"{name:<12}{1e3 * medians[name]:8.1f} ms per step, {medians[name] / medians['none']:.3f} of none, "
            f"longest step {1e3 * statistics.median(found['longest'][name]):8.1f} ms, spread {spread(times):.1%}"
        )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="Rounds in which all take turns. Default: 3.")
    options.add_argument("--steps", type=int, default=20, help="Steps of a round. Default: 20.")
    options.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        return rank(Path(given.rank), given.rounds, given.steps)
    with tempfile.TemporaryDirectory() as name:
        module = "glassformer.bench.developer.ranks_saving"
        words = ("--rank", name, "--rounds", str(given.rounds), "--steps", str(given.steps))
        show(in_ranks(module, RANKS, *words)[0])


if __name__ == "__main__":
    main()
