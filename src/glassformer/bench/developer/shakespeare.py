"""Train character Shakespeare with nanoGPT and glassformer in one run: validation loss by seconds of training.

    python -m glassformer.bench.developer.shakespeare --nanogpt .carry/nanoGPT \
        --text ../shared/data/tinyshakespeare.txt \
        --setting cpu|gpu [--recipes recipes/shakespeare_cpu.toml,...] [--target 1.905]

Both models are evaluated by the same function on the whole validation split. Only training steps are timed, including
the making of batches; compilation is reported separately. nanoGPT's settings are those of its README. The speed of a
step alone is compared by `glass bench train --nanogpt FOLDER`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.bench.commands import parser
from glassformer.bench.peers.nanogpt import training_step
from glassformer.training.data.batches import Batches, eval_batches
from glassformer.training.loop import prepare_state, stepper
from glassformer.training.objective import make_batch
from glassformer.training.optimizers import evaluating
from glassformer.training.run import read_run, with_model


@dataclass(frozen=True)
class Setting:
    """nanoGPT's settings, from its README."""

    block: int
    batch: int
    layers: int
    heads: int
    width: int
    dropout: float
    decay: int
    steps: int = 2000


NANOGPT = {
    "cpu": Setting(block=64, batch=12, layers=4, heads=4, width=128, dropout=0.0, decay=2000),
    "gpu": Setting(block=256, batch=64, layers=6, heads=6, width=384, dropout=0.2, decay=5000),
}
WARM_UP = 6
Point = tuple[int, float, float]
"""Step, seconds of training, validation loss."""


def load(text: Path) -> tuple[np.ndarray, np.ndarray, int]:
    """Return training ids, validation ids and the number of different characters."""
    characters = text.read_text(encoding="utf-8")
    table = {c: i for i, c in enumerate(sorted(set(characters)))}
    ids = np.array([table[c] for c in characters], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    return ids[:cut], ids[cut:], len(table)


@torch.no_grad()
def validation(logits: Callable[[torch.Tensor], torch.Tensor], val: np.ndarray, context: int, device: str) -> float:
    """Return the mean loss over the validation split, in nats per character."""
    total, count = 0.0, 0
    for inputs, targets in eval_batches(val, context, 64):
        out = logits(inputs.to(device)).float()
        total += float(F.cross_entropy(out.flatten(0, 1), targets.to(device).flatten(), reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


@dataclass
class Contender:
    """A model with its training step and its evaluation."""

    step: Callable[[int], None]
    check: Callable[[], float]
    model: torch.nn.Module
    steps: int
    device: str

    def run(self, first: int, last: int) -> float:
        """Run steps `first` to `last` - 1 and return the seconds they took."""
        start = time.perf_counter()
        for number in range(first, last):
            self.step(number)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def nanogpt(folder: str, data: tuple[np.ndarray, np.ndarray, int], setting: str) -> Contender:
    """Return nanoGPT from a checkout, with the settings of its README."""
    sys.path.insert(0, folder)
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    s, device = NANOGPT[setting], "cuda" if setting == "gpu" else "cpu"
    torch.manual_seed(1337)
    config = GPTConfig(
        block_size=s.block, vocab_size=data[2], n_layer=s.layers, n_head=s.heads, n_embd=s.width,
        dropout=s.dropout, bias=False,
    )  # fmt: skip
    model = GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device)
    run = torch.compile(model) if device == "cuda" else model
    context = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else torch.autocast("cpu", enabled=False)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(data[0]) - s.block, (s.batch,))
        x = torch.stack([torch.from_numpy(data[0][i : i + s.block].astype(np.int64)) for i in at])
        y = torch.stack([torch.from_numpy(data[0][i + 1 : i + 1 + s.block].astype(np.int64)) for i in at])
        if device == "cuda":
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    def step(number: int) -> None:
        done = (number - 100) / (s.decay - 100)
        lr = 1e-3 * (number + 1) / 101 if number < 100 else 1e-4 + 0.5 * (1 + math.cos(math.pi * min(done, 1))) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = lr
        training_step(run, optimizer, context, *batch())

    def full(x: torch.Tensor) -> torch.Tensor:
        with context:
            return model(x, x)[0]

    return Contender(step, lambda: validation(full, data[1], s.block, device), model, s.steps, device)


def ours(recipe: str, data: tuple[np.ndarray, np.ndarray, int], changes: tuple[str, ...]) -> Contender:
    """Return a run file of ours, with changes."""
    run = with_model(read_run(Path(recipe).read_text(encoding="utf-8"), changes), vocab_size=data[2])
    state = prepare_state(run)
    order = Batches(data[0], run.context, run.loop.batch, seed=run.seed, mode=run.data.order)

    one_step = stepper(state)

    def step(number: int) -> None:
        one_step(state, make_batch(run, order.batch(number), number).to(state.device))

    def full(x: torch.Tensor) -> torch.Tensor:
        with state.autocast():
            return state.model(x)

    def check() -> float:
        state.settle()
        with evaluating(state.model, state.average):
            return validation(full, data[1], run.context, str(state.device))

    return Contender(step, check, state.model, run.loop.steps, str(state.device))


def curve(contender: Contender, every: int) -> Iterator[Point]:
    """Train, and yield the validation loss at intervals.

    The first steps compile and capture. They count as steps, but their time is printed separately.
    """
    clock, began = 0.0, time.perf_counter()
    contender.model.train()
    contender.run(0, WARM_UP)
    print(f"    start-up and first steps {time.perf_counter() - began:.1f} s", flush=True)
    for first in range(WARM_UP, contender.steps, every):
        last = min(first + every, contender.steps)
        clock += contender.run(first, last)
        contender.model.eval()
        loss = contender.check()
        contender.model.train()
        yield last, clock, loss


def show(name: str, points: Iterator[Point], target: float) -> tuple[float, float]:
    """Print the curve; return the seconds to the target and the best loss."""
    reached, best = math.inf, math.inf
    for step, seconds, loss in points:
        best = min(best, loss)
        if loss <= target and reached == math.inf:
            reached = seconds
        print(
            f"    {name:<28} step {step:>5}  {seconds:7.2f} s  {step / seconds:6.1f} it/s  validation {loss:.4f}",
            flush=True,
        )
    print(f"  {name}: {target} reached after {reached:.2f} s, best {best:.4f}", flush=True)
    return reached, best


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--nanogpt", default="", metavar="FOLDER", help="A checkout of nanoGPT. Default: only ours.")
    options.add_argument("--text", type=Path, required=True, help="The text, such as tinyshakespeare.txt.")
    options.add_argument("--setting", choices=["cpu", "gpu"], required=True, help="nanoGPT's setting to compare with.")
    options.add_argument("--recipes", default="", help="Run files, separated by commas. Default: the setting's own.")
    options.add_argument("--set", action="append", default=[], help="Changes to our runs. Repeat it for more variants.")
    options.add_argument("--target", type=float, help="Loss whose time is reported. Default: nanoGPT's.")
    options.add_argument("--every", type=int, default=250, help="Steps between evaluations. Default: 250.")
    return options.parse_args()


def main() -> None:
    given = arguments()
    data = load(given.text)
    target = given.target or {"cpu": 1.905, "gpu": 1.4697}[given.setting]
    contenders: dict[str, Callable[[], Contender]] = {}
    if given.nanogpt:
        contenders["nanoGPT"] = partial(nanogpt, given.nanogpt, data, given.setting)
    recipes = given.recipes.split(",") if given.recipes else [f"recipes/shakespeare_{given.setting}.toml"]
    for recipe in recipes:
        for changes in given.set or [""]:
            name = f"{Path(recipe).stem} {changes}".strip()
            contenders[name] = partial(ours, recipe, data, tuple(changes.split()))
    results = {name: show(name, curve(make(), given.every), target) for name, make in contenders.items()}
    for name, (seconds, best) in results.items():
        ratio = results["nanoGPT"][0] / seconds if "nanoGPT" in results else float("nan")
        print(f"{name:<60} {seconds:8.2f} s to {target}   best {best:.4f}   {ratio:.2f} times nanoGPT's speed")


if __name__ == "__main__":
    main()
