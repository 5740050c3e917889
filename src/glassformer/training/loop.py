"""The training loop: `train_step` over one `TrainState`, and `train`, which runs a whole run and reports events."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer import sizing
from glassformer.kernels.cpu import training as native
from glassformer.kernels.cuda.training import fp8, fp8_layers, joined, products
from glassformer.model import Model, build
from glassformer.model.device import choose_for_training, measure_matmul
from glassformer.training import checkpoint
from glassformer.training.data.batches import IGNORED, eval_batches
from glassformer.training.data.source import Source
from glassformer.training.distributed.parallel import ALONE, Group, start
from glassformer.training.health import NonFinite, explain_non_finite, require_gradient
from glassformer.training.interrupt import interrupts
from glassformer.training.log import Log, Pace, Report
from glassformer.training.memory import keep_freed
from glassformer.training.objective import Batch, float8_head, make_batch, summed_loss
from glassformer.training.optimizers import Average, Optimizer, clip, gradient_norm
from glassformer.training.probes import Probe, chosen_probes
from glassformer.training.run import Run
from glassformer.training.sample import can_sample, sample_text
from glassformer.training.schedule import factor


@dataclass
class TrainState:
    """All that changes while training, and what is needed to change it."""

    run: Run
    model: Model
    optimizer: Optimizer
    device: torch.device
    dtype: torch.dtype
    average: Average | None = None
    step: int = 0
    """Steps done."""
    best: float = math.inf
    """Lowest validation loss so far."""
    loss_function: Callable[..., tuple[Tensor, Tensor]] = summed_loss
    """`summed_loss`, or a compiled one."""
    parameters: list[torch.nn.Parameter] = field(default_factory=list)
    group: Group = ALONE
    """The processes that train together."""
    compiled: bool = False
    kernels: bool = False
    """Whether parts of the model train in our own compiled kernels."""
    settle: Callable[[], None] = lambda: None
    """Wait until the steps begun so far are done, and raise if one of them was not sound."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward passes: products in `dtype`."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def prepare_state(run: Run, group: Group | None = None) -> TrainState:
    """A fresh state on the chosen device, the model distributed over the group (that of torchrun, or none)."""
    group = start(run) if group is None else group
    device, dtype, compiled = group.agree(choose_machine(run))  # ranks on unlike machines must not differ
    torch.manual_seed(run.seed)  # dropout; everything else draws from its own generators
    # where the model is to be cut up, no device holds the whole of it
    model = build(run.model, seed=run.seed, device="cpu" if group.sharded else device).train()
    function: Callable[..., tuple[Tensor, Tensor]] = summed_loss
    if dtype is torch.bfloat16 and run.machine.stream == "bfloat16":
        function = functools.partial(summed_loss, stream=torch.bfloat16)
    if run.machine.products == "float8":
        fp8.require_device(device)
        fp8_layers.enable(model)
        function = functools.partial(function, float8=True)
    if device.type == "cuda" and compiled and not group.sharded:
        joined.enable(model)  # measured: a small model gains 3 %, GPT-2 neither gains nor loses
        products.enable(model)
    if device.type == "cpu":
        keep_freed()
    # kernels of our own are called from Python: nothing that torch could compile, nor can it cut up what they read
    asked = wants_kernels(run, device) and not group.sharded
    kernels = asked and native.enable(model, native.multiplies(run.model))
    loss_function = group.wrap(model, function, compiled)
    optimizer = Optimizer(model, run.optim)
    group.adopt(optimizer)
    average = Average(model, run.optim.ema) if run.optim.ema is not None else None
    parameters = list(model.parameters())
    return TrainState(
        run, model, optimizer, device, dtype, average, 0, math.inf, loss_function, parameters, group, compiled, kernels
    )


def choose_machine(run: Run) -> tuple[torch.device, torch.dtype, bool]:
    """Return the device, the dtype of the matmuls, and whether to compile with torch.compile."""
    wanted = run.machine
    choice = choose_for_training(wanted.device, wanted.precision, run.model.d_model)
    # on a CPU, torch's compiler was measured to be about neutral and takes half a minute, our own kernels take seconds,
    # once: it compiles only when asked to
    compiled = wanted.compile == "yes" or (wanted.compile == "auto" and choice.device == "cuda")
    return torch.device(choice.device), choice.dtype, compiled


def wants_kernels(run: Run, device: torch.device) -> bool:
    """Return whether training uses our compiled CPU kernels, where there is a compiler for them."""
    return device.type == "cpu" and run.machine.compile == "auto" and native.pays()


def train_step(state: TrainState, batch: Batch) -> dict[str, Tensor | float]:
    """One update. Gradients of the parts of an accumulated batch, and of the ranks, add up to those of the whole batch.

    `batch` is this rank's share; the loss is that of all ranks. Raises NonFinite before the optimiser touches anything.
    """
    run, group, parts = state.run, state.group, state.run.loop.accumulate
    rows = batch.inputs.shape[0] // parts
    (counted,) = group.totals(batch.n_targets())
    n_targets = max(1, int(counted))
    group.reseed(run.seed, state.step)
    state.optimizer.zero_grad()
    plain = torch.zeros((), device=state.device)
    for part in range(parts):
        share = batch.rows(part * rows, (part + 1) * rows) if parts > 1 else batch
        with group.accumulating(more=part + 1 < parts):
            with state.autocast():
                total, summed = state.loss_function(state.model, share, run.loss, True)
            (total / (n_targets / group.world)).backward()  # ranks take the mean of their gradients, not the sum
        plain += summed.detach() / n_targets
    norm = group.full(gradient_norm(state.parameters))
    (value,) = group.totals(float(plain))
    if not (math.isfinite(value) and math.isfinite(float(norm))):
        raise NonFinite(explain_non_finite(state, batch, value))
    require_gradient(state.step + 1, value, float(norm))
    clip(state.parameters, norm, run.optim.clip)
    scale = factor(run.schedule, state.step, run.loop.steps)
    state.optimizer.step(scale)
    state.step += 1
    if state.average is not None:
        state.average.update(state.model, state.step)
    return {"loss": value, "gradient_norm": float(norm), "lr": scale * run.optim.lr}


@torch.no_grad()
def evaluate(state: TrainState, tokens: np.ndarray | Iterable[tuple[Tensor, Tensor]]) -> float:
    """Cross-entropy per target on fixed windows of tokens, or on those given; of averaged weights if there are any."""
    state.settle()
    run, group = state.run, state.group
    if state.average is not None:
        state.average.swap(state.model)
    state.model.eval()
    total, count = 0.0, 0.0
    try:
        if isinstance(tokens, np.ndarray):
            tokens = eval_batches(tokens, run.context, run.loop.batch, run.loop.eval_batches)
        for number, window in enumerate(tokens):
            batch = _share(make_batch(run, window, step=number), group)
            with state.autocast():
                _, summed = group.run(summed_loss, state.model, batch.to(state.device), run.loss, False)
            total += float(summed)
            count += batch.n_targets()
    finally:
        state.model.train()
        if state.average is not None:
            state.average.swap(state.model)
    total, count = group.totals(total, count)
    return total / count


def _share(batch: Batch, group: Group) -> Batch:
    """This rank's rows of a batch that all ranks have; a rank without any takes one and is asked nothing about it."""
    if group.world == 1:
        return batch
    n = batch.inputs.shape[0]
    first, last = n * group.rank // group.world, n * (group.rank + 1) // group.world
    if first < last:
        return batch.rows(first, last)
    row = batch.rows(0, 1)
    return dataclasses.replace(row, targets=torch.full_like(row.targets, IGNORED))


def save(state: TrainState, tokenizer_json: str, seconds: float, is_best: bool) -> Path:
    """A checkpoint of the state, published. With averaging, `model.safetensors` holds the average."""
    state.settle()
    group = state.group
    weights = group.whole({name: p.detach() for name, p in state.model.named_parameters()})
    extra = {f"optimizer/{k}": v for k, v in group.whole(state.optimizer.state()).items()}
    extra |= checkpoint.random_state(state.device)
    if state.average is not None:
        extra |= {f"weights/{name}": value for name, value in weights.items()}
        weights = group.whole(state.average.weights)
    meta = {"best": None if math.isinf(state.best) else state.best, "seconds": seconds, "torch": torch.__version__}

    def write() -> Path:
        path = checkpoint.write(state.run, state.step, weights, extra, tokenizer_json, meta)
        checkpoint.publish(state.run, path, is_best)
        return path

    return group.on_main(write)


def restore(state: TrainState, meta: dict[str, Any], model: dict[str, Tensor], extra: dict[str, Tensor]) -> None:
    """Put a checkpoint's contents into a fresh state."""
    raw = {name.removeprefix("weights/"): t for name, t in extra.items() if name.startswith("weights/")}
    held = {n.removeprefix("optimizer/"): t for n, t in extra.items() if n.startswith("optimizer/")}
    raw, model, held = (state.group.spread(tensors, state.model) for tensors in (raw, model, held))
    try:
        state.model.load_state_dict(raw or model)
        state.optimizer.load_state(held)
        if state.average is not None:
            state.average.weights = {name: model[name].to(state.device) for name in state.average.weights}
    except (RuntimeError, KeyError, ValueError) as error:
        raise checkpoint.CheckpointError(f"the checkpoint does not fit its own run.toml: {error}.") from None
    checkpoint.set_random_state(extra, state.device)
    state.step = meta["step"]
    state.best = math.inf if meta["best"] is None else meta["best"]


def train(
    run: Run,
    data: Source,
    listen: Report | None = None,
    resume: tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]] | None = None,
    baselines: dict[str, float] | None = None,
    force: bool = False,
) -> TrainState:
    """Train to the end of the run. Events, samples and probes go to RUN/log.jsonl and to `listen`.

    The first event names the folder RUN. `resume` holds the contents of a checkpoint to continue from. `baselines` are
    written into the `start` event. `force` replaces a run that the folder `out` already holds.
    """
    probes = chosen_probes(run.probe)
    state = prepare_state(run)
    if resume is not None:
        restore(state, *resume)
    run = state.run = state.group.on_main(lambda: checkpoint.start_run(run, resume is not None, force))
    with contextlib.closing(
        Log(Path(run.out, "log.jsonl"), listen, state.step, state.group.is_main, run.loop.tensorboard)
    ) as log:
        log(event="start", **_facts(state, data, baselines))
        _run(state, data, log, probes, resume[0] if resume else {})
    return state


def _run(
    state: TrainState,
    data: Source,
    log: Log,
    probes: dict[str, Probe],
    resumed: dict[str, Any],
) -> None:
    run = state.run
    tokenizer_json = data.tokenizer.to_json()
    pace = Pace(state.step, run.loop.steps, resumed.get("seconds", 0.0))

    def check() -> None:
        loss = evaluate(state, data.validation(run))
        is_best = loss < state.best
        state.best = min(state.best, loss)
        log(event="validation", step=state.step, loss=loss, best=is_best, seconds=pace.seconds())
        if is_best or state.step % run.loop.checkpoint_every == 0 or state.step == run.loop.steps:
            save(state, tokenizer_json, pace.seconds(), is_best)

    def look() -> None:
        log(event="probe", step=state.step, **measure(state, data, probes))

    def between() -> Iterator[Callable[[], object]]:
        """What is due after a step."""
        step, every = state.step, run.loop
        if every.sample_every and step % every.sample_every == 0 and can_sample(state.model):
            yield lambda: log(event="sample", step=step, text=_sample(state, data))
        if probes and step % run.probe.every == 0:
            yield look
        if step % every.eval_every == 0 or step == every.steps:
            yield check
        elif step % every.checkpoint_every == 0:
            yield lambda: save(state, tokenizer_json, pace.seconds(), False)

    one_step = stepper(state)
    if state.step == 0:
        with pace.paused():
            check()
            if probes:
                look()
    with interrupts(active=state.group.world == 1) as asked_to_stop:
        for batch in _batches(state, data):
            event = one_step(state, batch)
            if state.step % run.loop.log_every == 0 or state.step == 1:
                state.settle()
                event = {name: float(value) for name, value in event.items()}
                log(event="step", step=state.step, **event, **pace.read(state.step), seconds=pace.seconds())
            if due := list(between()):
                state.settle()  # steps that the device still has to do are steps
                with pace.paused():
                    for work in due:
                        work()
            if asked_to_stop() and state.step < run.loop.steps:
                save(state, tokenizer_json, pace.seconds(), False)
                raise KeyboardInterrupt
    log(event="end", step=state.step, best=state.best, seconds=pace.seconds())


def stepper(state: TrainState) -> Callable[[TrainState, Batch], dict[str, Tensor | float]]:
    """`train_step`, or the same as one captured CUDA graph where that can be."""
    from glassformer.training.graph import CapturedStep, can_capture  # it is built on this module

    return CapturedStep(state) if can_capture(state) else train_step


def _batches(state: TrainState, data: Source) -> Iterator[Batch]:
    """The remaining batches of the run, each made while the device works on the one before."""
    run, group = state.run, state.group
    order = data.order(run, group.rank, group.world)
    first_row = group.rank * run.loop.batch // group.world
    for step in range(state.step, run.loop.steps):
        yield make_batch(run, order.batch(step), step, first_row).to(state.device)


def _sample(state: TrainState, data: Source) -> str:
    """Return a text sampled from the current model. The random state of the run does not change."""
    state.settle()
    held = checkpoint.random_state(state.device)
    model = state.group.whole_model(state.model)
    text = sample_text(model, data.tokenizer).strip("\n") if model is not None and state.group.is_main else ""
    checkpoint.set_random_state(held, state.device)
    return text


def measure(state: TrainState, data: Source, probes: dict[str, Probe]) -> dict[str, Any]:
    """What the probes find in the present model: averaged weights when there are any, no dropout, nothing changed."""
    state.settle()
    held, found = checkpoint.random_state(state.device), {}
    if state.average is not None:
        state.average.swap(state.model)
    state.model.eval()
    try:
        model = state.group.whole_model(state.model)
        if model is not None and state.group.is_main:
            with torch.no_grad(), state.autocast():
                found = {name: probe(model.eval(), data, state.run) for name, probe in probes.items()}
    finally:
        state.model.train()
        if state.average is not None:
            state.average.swap(state.model)
        checkpoint.set_random_state(held, state.device)
    return found


def _precision(state: TrainState) -> str:
    name = str(state.dtype).removeprefix("torch.")
    if state.run.machine.products != "float8":
        return name
    return f"{name}, products of blocks{' and head' if float8_head(state.model) else ''} in float8"


def _facts(state: TrainState, data: Source, baselines: dict[str, float] | None) -> dict[str, Any]:
    run = state.run
    counted = sizing.flops(run.model, batch=1, context=run.context)
    square, repeats = 4096 if state.device.type == "cuda" else 512, 25  # the first products of a process are slow
    # a step's operations are those of all ranks, and so is the rate they are held against
    (peak,) = state.group.totals(1e9 * measure_matmul(state.device.type, state.dtype, square, repeats))
    return {
        "step": state.step,
        "steps": run.loop.steps,
        "out": run.out,
        "parameters": sizing.count(run.model),
        "tokens_per_step": run.loop.batch * run.context,
        "flops_per_step": counted.training * run.loop.batch,
        "peak_flops": peak,
        "device": str(state.device),
        "precision": _precision(state),
        "compiled": state.compiled,
        "kernels": state.kernels,
        "ranks": state.group.world,
        **data.facts(run),
        "baselines": baselines or {},
        "uniform": math.log(run.model.vocab_size),
    }
