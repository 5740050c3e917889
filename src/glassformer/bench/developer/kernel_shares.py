"""Measure what each training kernel gains end to end: the time of a step with all of them and without each, in turns.

    python -m glassformer.bench.developer.kernel_shares --set model.preset=gpt2 --set loop.batch=64 [--rounds 3]

Every variant runs in a process of its own, because kernels are chosen while a step is compiled. `--set` takes fields of
a run file; tokens are random. A kernel that gains less than 5 % of every number that a user sees is to be deleted.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial

import torch

from glassformer.bench.commands import in_process, in_turns, parser, random_batch, seconds_of, spread
from glassformer.bench.result import number
from glassformer.kernels import training as kernels
from glassformer.kernels.cuda.training import fp8, fp8_cuda, loss
from glassformer.training import accelerate
from glassformer.training.accelerate import choose_machine, kernel_request
from glassformer.training.loop import prepare_state, stepper
from glassformer.training.run import Run, read_run

MODULE = "glassformer.bench.developer.kernel_shares"
ALL = "all kernels"
WARM_UP = 8
"""Steps before the measurement: they compile, and a CUDA graph is captured after three of them."""


def _plain_float8_loss(
    logits: torch.Tensor, targets: torch.Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As fp8.loss_gradients, by operations that torch.compile fuses."""
    losses, gradient = loss.definition(logits, targets, ignored, smoothing, z_loss, columns)
    gradient8 = fp8.quantise(gradient, fp8.GRADIENT_SCALE, fp8.E5M2)
    total, plain = losses.sum(1)
    return total, plain, gradient8, fp8.transpose(gradient8)


def _plain_squares(tensors: list[torch.Tensor], sampled: bool) -> torch.Tensor:
    """As fp8.square_parts, by operations that torch.compile fuses."""
    large = [sampled and t.numel() >= fp8_cuda.SAMPLED_FROM for t in tensors]
    squares = [fp8.mean_square(fp8.sample(t) if some else t) for t, some in zip(tensors, large, strict=True)]
    return torch.stack(squares)[:, None]


PARTS: dict[str, Callable[[], None]] = {
    "CUDA loss": lambda: setattr(kernels, "head_kernel", lambda device, dtype, float8: None),
    "CUDA Muon": lambda: setattr(kernels, "muon_kernel", lambda matrices, rate: None),
    "CUDA AdamW": lambda: setattr(kernels, "adamw_kernel", lambda optimizer: None),
    "float8 head: the loss": lambda: setattr(fp8, "loss_gradients", _plain_float8_loss),
    "float8: mean squares": lambda: setattr(fp8, "square_parts", _plain_squares),
}
"""Kernels that replace no module, and parts of kernels: how each is switched off."""


def names(run: Run) -> list[str]:
    """Return what can be left out of a run on this machine."""
    device, dtype, compiled = choose_machine(run)
    found = accelerate.choose(run.model, **kernel_request(run, device, dtype, compiled))
    return [*found, *(part for part in PARTS if ":" in part and run.machine.products == "float8")]


def leave_out(name: str) -> None:
    """Switch a kernel off in this process."""
    if name in PARTS:
        PARTS[name]()
    kernels.TRAINING_KERNELS = tuple(kernel for kernel in kernels.TRAINING_KERNELS if kernel.name != name)


def seconds_per_step(run: Run, steps: int) -> float:
    """Return the median seconds of a step on random tokens."""
    state = prepare_state(run)
    one_step, sync = stepper(state), torch.cuda.synchronize if state.device.type == "cuda" else lambda: None
    batch = random_batch(run.loop.batch, run.context, run.model.vocab_size, device=str(state.device))

    def step() -> None:
        one_step(state, batch)
        state.settle()
        sync()

    times = [seconds_of(step) for _ in range(WARM_UP + steps)]
    return statistics.median(times[WARM_UP:])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="Change a field of the run.")
    options.add_argument("--rounds", type=int, default=3, help="Rounds in which all variants take turns. Default: 3.")
    options.add_argument("--steps", type=int, default=20, help="Steps per round. Default: 20.")
    options.add_argument("--without", help="Measure one variant in this process and print its seconds per step.")
    given = options.parse_args()
    run = read_run("", ("loop.steps=100000", *given.set))
    if given.without is not None:
        leave_out(given.without)
        print(json.dumps([seconds_per_step(run, given.steps)]))
        return
    words = ["--steps", str(given.steps), *(word for change in given.set for word in ("--set", change))]
    threads = str(torch.get_num_threads())

    def measured(name: str) -> float:
        ((seconds,),) = in_process(MODULE, *words, "--without", name, OMP_NUM_THREADS=threads)
        return float(seconds)

    times = in_turns({name: partial(measured, name) for name in (ALL, *names(run))}, given.rounds)
    whole = statistics.median(times[ALL])
    for name, found in times.items():
        seconds = statistics.median(found)
        label = name if name == ALL else f"without {name}"
        gain = "" if name == ALL else f"   it gains {1 - whole / seconds:.1%} of a step"
        print(f"{label:<32} {number(1000 * seconds)} ms (spread {spread(found):.0%}){gain}")


if __name__ == "__main__":
    main()
