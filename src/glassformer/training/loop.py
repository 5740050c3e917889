"""The training loop: `train_step` over one `TrainState`, and `train`, which runs a whole run and reports events."""

import contextlib
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
from glassformer.model import Model
from glassformer.model.device import keep_freed, measure_matmul
from glassformer.training import accelerate, checkpoint, first_postponed, importing_compiler
from glassformer.training.accelerate import choose_machine, is_capturable, kernel_request
from glassformer.training.checkpoint import StoredTensors
from glassformer.training.data.batches import eval_batches
from glassformer.training.data.source import Source
from glassformer.training.distributed.group import ALONE, Group, Stopped, Writer, start
from glassformer.training.events import Log, Report, Throughput, implementation
from glassformer.training.health import NonFinite, explain_non_finite
from glassformer.training.objective import Batch, float8_head, make_batch, summed_loss
from glassformer.training.optimizers import Average, Optimizer, clip, evaluating, factor, require_gradient, trained
from glassformer.training.probes import Probe, chosen_probes, measure
from glassformer.training.run import Run, run_to_dict
from glassformer.training.session import Resume, load_weights, starting_model, starting_values
from glassformer.weights.tensors import Stored


@dataclass
class TrainState:
    """Everything that changes in training, and everything that a step needs."""

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
    kernels: list[str] = field(default_factory=list)
    """Names of the kernels that were installed (`kernels.training`)."""
    writer: Writer = Writer(ALONE)
    """Writes checkpoints: at once, or while training goes on."""
    settle: Callable[[], None] = lambda: None
    """Wait until all steps that were launched have finished; raise if the loss of one was NaN or infinite."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of forward passes: autocast of the matmuls to `dtype`."""
        if self.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def prepare_state(run: Run, group: Group | None = None, resumed: bool = False) -> TrainState:
    """Return a fresh state on the chosen device, with the model distributed over the group (default: torchrun's).

    The weights of a `resumed` run are loaded by `restore`.
    """
    group = start(run) if group is None else group
    alone = group is ALONE
    device, dtype, compiled = group.agree(choose_machine(run, alone))  # ranks on different machines must not differ
    torch.manual_seed(run.seed)  # dropout; everything else draws from its own generators

    def meanwhile(model: Model) -> None:
        if device.type == "cuda":
            measure_matmul(device.type, dtype, 64, repeats=0)  # loads cuBLAS
        if compiled or is_capturable(run, device, alone):
            accelerate.fill_tables(model, run.context, device)

    # a model that will be sharded may not fit on one device: it gets memory when it is sharded
    with importing_compiler() if compiled and not run.start.model else contextlib.nullcontext():
        model = starting_model(run, "meta" if group.sharded else device, resumed, meanwhile).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    function: Callable[..., tuple[Tensor, Tensor]] = summed_loss
    if dtype is torch.bfloat16 and run.machine.stream == "bfloat16":
        function = functools.partial(summed_loss, stream=torch.bfloat16)
    if run.machine.products == "float8":
        function = functools.partial(function, float8=True)
    if device.type == "cpu":
        keep_freed()
    kernels: list[str] = []
    wanted = run.machine.compile == "auto" or device.type == "cuda" or run.machine.products == "float8"
    if group.parts > 1:  # tensor parallelism works through hooks
        wanted = compiled = False
    if run.machine.recompute == "no" and wanted:
        frozen = len(parameters) < len(list(model.parameters()))
        request = kernel_request(run, device, dtype, compiled, group.sharded, alone) | {"frozen": frozen}
        kernels = accelerate.install(model, **request)
    if compiled or run.machine.recompute != "no":
        from glassformer.training.blocks import prepare_blocks  # not needed by other runs

        function = prepare_blocks(model, function, run, compiled, group.sharded)
    loss_function = group.wrap(model, function)
    if group.sharded:
        group.fill(model, starting_values(run, resumed))
    optimizer = Optimizer(model, run.optim)
    group.adopt(optimizer)
    average = Average(model, run.optim.ema) if run.optim.ema is not None else None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = (loss_function, parameters, group, compiled, kernels, group.writer(run))
    return TrainState(run, model, optimizer, device, dtype, average, 0, math.inf, *made)


def train_step(state: TrainState, batch: Batch) -> dict[str, Tensor | float]:
    """Do one update. Gradients of accumulated parts and of ranks add up to the gradient of the whole batch.

    `batch` is this rank's share; the loss is that of all ranks. Raises NonFinite before the optimizer changes anything.
    """
    run, group, parts = state.run, state.group, state.run.loop.accumulate
    size = batch.inputs.shape[0] // parts
    (counted,) = group.totals(batch.n_targets())
    n_targets = max(1, int(counted))
    group.reseed(run.seed, state.step)
    state.optimizer.zero_grad()
    plain = torch.zeros((), device=state.device)
    for part in range(parts):
        share = batch.rows(part * size, (part + 1) * size) if parts > 1 else batch
        with group.accumulating(more=part + 1 < parts):
            with state.autocast():
                total, summed = state.loss_function(state.model, share, run.loss, True)
            (total / (n_targets / group.data_world)).backward()  # ranks take the mean of their gradients, not the sum
        plain += summed.detach() / n_targets
    norm = group.gradient_norm(state.model)
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
    return {"loss": value, "gradient_norm": float(norm), **state.optimizer.rates(scale)}


@torch.no_grad()
def evaluate(state: TrainState, tokens: np.ndarray | Iterable[tuple[Tensor, Tensor] | Batch]) -> float:
    """Return the cross-entropy per target on fixed windows of tokens, or on the given ones.

    Averaged weights are used if there are any. As in a step, at most `batch // accumulate` sequences run at once.
    """
    state.settle()
    run, group = state.run, state.group
    total, count = 0.0, 0.0
    with evaluating(state.model, state.average):
        if isinstance(tokens, np.ndarray):
            tokens = eval_batches(tokens, run.context, run.loop.batch, run.loop.eval_batches)
        for number, window in enumerate(tokens):
            whole = make_batch(run, window, step=number)
            for batch in whole.parts(run.loop.batch // run.loop.accumulate):
                share = batch.share(group.data_rank, group.data_world)
                with state.autocast():
                    _, summed = group.run(summed_loss, state.model, share.to(state.device), run.loss, False)
                total += float(summed)
                count += share.n_targets()
    total, count = group.totals(total, count)
    return total / count


def save(state: TrainState, tokenizer_json: str, seconds: float, is_best: bool) -> None:
    """Write and publish a checkpoint. With averaged weights, `model.safetensors` holds the average.

    With `checkpoint.background` it is written while training goes on.
    """
    state.settle()
    group = state.group
    saved = state.model.named_parameters() if state.run.lora is None else trained(state.model)
    weights = {name: p.detach() for name, p in saved}
    extra = {f"optimizer/{k}": v for k, v in state.optimizer.state().items()}
    extra |= checkpoint.random_state(state.device)
    if state.average is not None:
        extra |= {f"weights/{name}": weights[name] for name in state.average.weights}
        weights = weights | state.average.weights
    meta = {"best": None if math.isinf(state.best) else state.best, "seconds": seconds, "torch": torch.__version__}
    run, step = state.run, state.step
    weights, extra = (group.hold(tensors, state.writer.copies) for tensors in (weights, extra))

    def write(group: Group) -> None:
        path = checkpoint.write(run, step, weights, extra, tokenizer_json, meta, group)
        group.on_main(lambda: checkpoint.publish(run, path, is_best))

    state.writer.submit(write)


def restore(state: TrainState, meta: dict[str, Any], model: StoredTensors, extra: StoredTensors) -> None:
    """Load the contents of a checkpoint into a fresh state, one tensor at a time; of each, the part of this rank."""
    parameters = dict(state.model.named_parameters())

    def on_demand(tensors: StoredTensors) -> checkpoint.OnDemand:
        """Tensors named `parameter` or `parameter/key` are sharded as the parameter is."""

        def read(name: str, stored: Stored) -> Tensor:
            return state.group.read(name, stored, parameters.get(name, parameters.get(name.rpartition("/")[0])))

        return checkpoint.OnDemand(tensors, read)

    raw = {name.removeprefix("weights/"): t for name, t in extra.items() if name.startswith("weights/")}
    held = {n.removeprefix("optimizer/"): t for n, t in extra.items() if n.startswith("optimizer/")}
    try:
        load_weights(state.run, state.model, on_demand({**model, **raw}))
        state.optimizer.load_state(on_demand(held))
        if state.average is not None:
            saved = on_demand(model)
            state.average.weights = {name: saved[name].to(state.device) for name in state.average.weights}
    except (RuntimeError, KeyError, ValueError) as error:
        raise checkpoint.CheckpointError(f"the checkpoint does not fit its own run.toml: {error}.") from None
    rng = {name: checkpoint.copy_stored(t) for name, t in extra.items() if name.startswith("rng/")}
    checkpoint.set_random_state(rng, state.device)
    state.step = meta["step"]
    state.best = math.inf if meta["best"] is None else meta["best"]


def train(
    run: Run,
    data: Source,
    listen: Report | None = None,
    resume: Resume | None = None,
    baselines: Callable[[], dict[str, float]] | None = None,
    force: bool = False,
) -> TrainState:
    """Train to the end of the run. Events, samples and probes go to RUN/log.jsonl and to `listen`.

    The first event names the folder RUN. `resume` holds the contents of a checkpoint to continue from. What `baselines`
    returns is written into the `start` event. `force` replaces a run that the folder `out` already holds.
    """
    probes = chosen_probes(run.probe) if run.probe.every else {}
    group = start(run)
    group.require_same(run, data, resume[0] if resume else None)
    state = prepare_state(run, group, resumed=resume is not None)
    if resume is not None:
        restore(state, *resume)
    run = state.run = state.group.on_main(lambda: checkpoint.start_run(run, resume is not None, force))
    if run.chat is not None:
        from glassformer.training.preference import prepare_chat_run  # not needed by other runs

        prepare_chat_run(state, data, resume is not None)
    log = Log(Path(run.out, "log.jsonl"), listen, state.step, group.is_main, run_to_dict(run))
    with group.interrupts() as asked_to_stop, group.watched(run), contextlib.closing(log):
        log(event="start", **_facts(state, data, baselines))
        _run(state, data, log, probes, asked_to_stop, resume[0] if resume else {})
    return state


def _run(
    state: TrainState,
    data: Source,
    log: Log,
    probes: dict[str, Probe],
    asked_to_stop: Callable[[], int],
    resumed: dict[str, Any],
) -> None:
    run = state.run
    tokenizer_json = data.tokenizer.to_json()
    throughput = Throughput(state.step, run.loop.steps, resumed.get("seconds", 0.0))

    def check() -> None:
        loss = evaluate(state, data.validation(run))
        kept = state.step > 0 or bool(run.start.model) or run.checkpoint.first  # fresh weights can be drawn again
        is_best = kept and loss < state.best
        state.best = loss if is_best else state.best
        log(event="validation", step=state.step, loss=loss, best=is_best, seconds=throughput.seconds())
        if kept and (is_best or state.step % run.loop.checkpoint_every == 0 or state.step == run.loop.steps):
            save(state, tokenizer_json, throughput.seconds(), is_best)

    def probe() -> None:
        log(event="probe", step=state.step, **measure(state, data, probes))

    def between() -> Iterator[Callable[[], object]]:
        """Yield the work that is due after a step."""
        step, every = state.step, run.loop
        if every.sample_every and step % every.sample_every == 0:
            yield lambda: _sample(state, data, log)
        if probes and step % run.probe.every == 0:
            yield probe
        if step % every.eval_every == 0 or step == every.steps:
            yield check
        elif step % every.checkpoint_every == 0:
            yield lambda: save(state, tokenizer_json, throughput.seconds(), False)

    one_step = first_postponed(stepper(state)) if state.compiled else stepper(state)
    if state.step == 0:
        with throughput.paused():
            check()
            if probes:
                probe()
    for batch in _batches(state, data):
        event = one_step(state, batch)
        if state.step % run.loop.log_every == 0 or state.step == 1:
            state.settle()
            event = {name: float(value) for name, value in event.items()}
            log(event="step", step=state.step, **event, **throughput.read(state.step), seconds=throughput.seconds())
        if due := list(between()):
            state.settle()  # steps that still run on the device count as steps
            with throughput.paused():
                for work in due:
                    work()
        state.writer.check()
        if (number := asked_to_stop()) and state.step < run.loop.steps:
            save(state, tokenizer_json, throughput.seconds(), False)
            state.writer.settle()
            raise Stopped(number)
    state.writer.settle()
    log(event="end", step=state.step, best=state.best, seconds=throughput.seconds())


def _sample(state: TrainState, data: Source, log: Log) -> None:
    from glassformer.training.sample import can_sample, sample_state  # it imports all of `generation`

    if can_sample(state.model):
        log(event="sample", step=state.step, text=sample_state(state, data))


def stepper(state: TrainState) -> Callable[[TrainState, Batch], dict[str, Tensor | float]]:
    """Return `train_step`, or on a GPU the same step as one captured CUDA graph where that is possible."""
    if state.device.type != "cuda":
        return train_step
    from glassformer.training.graph import CapturedStep, can_capture  # it is built on this module

    return CapturedStep(state) if can_capture(state) else train_step


def _batches(state: TrainState, data: Source) -> Iterator[Batch]:
    """Yield the remaining batches of the run. Each is prepared while the device computes the previous step."""
    run, group = state.run, state.group
    order = data.order(run, group.data_rank, group.data_world)
    first_row = group.data_rank * run.loop.batch // group.data_world
    for step in range(state.step, run.loop.steps):
        yield make_batch(run, order.batch(step), step, first_row).to(state.device)


def _precision(state: TrainState) -> str:
    name = str(state.dtype).removeprefix("torch.")
    if state.run.machine.products != "float8":
        return name
    return f"{name}, matmuls of blocks{' and head' if float8_head(state.model) else ''} in float8"


def _facts(state: TrainState, data: Source, baselines: Callable[[], dict[str, float]] | None) -> dict[str, Any]:
    run = state.run
    counted = sizing.flops(run.model, batch=1, context=run.context)
    held = [p.numel() for p in state.model.parameters() if not p.requires_grad]
    square, repeats = 4096 if state.device.type == "cuda" else 512, 25  # the first matmuls of a process are slow
    # the operations of a step are those of all ranks, and so is the peak they are compared with
    (peak,) = state.group.totals(1e9 * measure_matmul(state.device.type, state.dtype, square, repeats))
    return {
        "step": state.step,
        "steps": run.loop.steps,
        "out": run.out,
        "parameters": sizing.count(run.model),
        "trained": sum(p.numel() for p in state.parameters),
        "frozen": sum(held) if run.lora is None else sizing.count(run.model),  # matrices in NF4 are no parameters
        "tokens_per_step": run.loop.batch * run.context,
        "flops_per_step": counted.training * run.loop.batch,
        "peak_flops": peak * state.group.parts,
        "device": str(state.device),
        "precision": _precision(state),
        "implementation": implementation(state.compiled, state.kernels),
        "compiled": state.compiled,
        "kernels": state.kernels,
        "ranks": state.group.world,
        **data.facts(run),
        "baselines": {} if baselines is None else baselines(),
        "uniform": math.log(run.model.vocab_size),
    }
