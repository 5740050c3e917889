"""A whole training step as one CUDA graph: forward, backward, clipping and optimizer are replayed by a single launch.

A small model on a fast GPU mostly waits for Python: a thousand kernels of microseconds, each launched by the
interpreter. Captured once, the step is one launch. Values that change from step to step are tensors that are filled in
place: the batch, the learning rates, the offset of the random generator (dropout). A step with a NaN or infinite
gradient is skipped on the device (`found_inf`), and is reported as in `train_step`.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from glassformer.training import accelerate
from glassformer.training.data.batches import IGNORED
from glassformer.training.distributed.group import ALONE
from glassformer.training.health import NonFinite, explain_non_finite
from glassformer.training.loop import TrainState, train_step
from glassformer.training.objective import Batch, has_experts
from glassformer.training.optimizers import factor, gradient_norm, require_gradient

WARM_UP = 3
"""Uncaptured steps before the capture: they compile, allocate and choose kernels. They are real steps of the run."""


def can_capture(state: TrainState) -> bool:
    """Return whether every step launches the same kernels: one CUDA process, no accumulation, no expert by itself."""
    routed = has_experts(state.model) and "grouped experts" not in state.kernels
    return accelerate.is_capturable(state.run, state.device, state.group is ALONE) and not routed


@dataclass
class Reading:
    """The results of a step while they are copied to the host."""

    batch: Batch
    values: Tensor
    """The loss, and the norm of the gradient."""
    done: torch.cuda.Event


class CapturedStep:
    """Called like `train_step`. Loss and norm are tensors on the device; reading them waits for the step."""

    def __init__(self, state: TrainState):
        self.state = state
        self.done = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Batch | None = None
        self.unread: Reading | None = None
        self.results = torch.zeros(2, device=state.device)
        self.failed = torch.zeros((), device=state.device)
        """1 from the first NaN or infinite step on."""
        self.versions: list[int] = []
        """Of the parameters: operations of torch that changed them in place. The captured step does not count."""
        state.settle = self.settle

    def __call__(self, state: TrainState, batch: Batch) -> dict[str, Tensor | float]:
        assert state is self.state
        if self.done < WARM_UP or (self.batch is not None and batch.inputs.shape != self.batch.inputs.shape):
            self.settle()
            self.done += 1
            return train_step(state, batch)
        if self.graph is None:
            self._capture(batch)
        assert self.graph is not None
        assert self.batch is not None
        for held, new in ((self.batch.inputs, batch.inputs), (self.batch.targets, batch.targets)):
            held.copy_(new, non_blocking=True)
        if self.batch.source is not None and batch.source is not None:
            self.batch.source.copy_(batch.source, non_blocking=True)
        scale = factor(state.run.schedule, state.step, state.run.loop.steps)
        state.optimizer.set_rate(scale)
        self._renew_copies()
        self.graph.replay()
        before, self.unread = self.unread, self._read(batch)
        state.step += 1
        if state.average is not None:
            state.average.update(state.model, state.step)
        if before is not None:
            self._judge(before, late=1)
        value, norm = self.results.clone()
        return {"loss": value, "gradient_norm": norm, **state.optimizer.rates(scale)}

    def _renew_copies(self) -> None:
        """Renew the copies of weights that the step reads, if something else than the step changed weights."""
        versions = [parameter._version for parameter in self.state.parameters]
        if versions != self.versions:
            self.versions = versions
            accelerate.renew_copies(self.state.parameters)

    def settle(self) -> None:
        """Wait for the last step; raise if it was skipped."""
        if self.unread is not None:
            self._judge(self.unread, late=0)
        self.unread = None

    def _read(self, batch: Batch) -> Reading:
        values = torch.empty(2, pin_memory=True)
        values.copy_(self.results, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Reading(batch, values, done)

    def _judge(self, reading: Reading, late: int) -> None:
        """Raise if a step was NaN or infinite; `late` steps were launched after it."""
        reading.done.synchronize()
        value, norm = reading.values.tolist()
        if math.isfinite(value) and math.isfinite(norm):
            require_gradient(self.state.step - late, value, norm)
            return
        self.unread = None
        self.state.step -= 1 + late  # they were launched and changed nothing
        self.failed.zero_()
        raise NonFinite(explain_non_finite(self.state, reading.batch, value))

    def _capture(self, batch: Batch) -> None:
        copies = (None if t is None else t.clone() for t in (batch.inputs, batch.targets, batch.source))
        inputs, targets, source = copies
        assert inputs is not None
        assert targets is not None
        self.batch = dataclasses.replace(batch, inputs=inputs, targets=targets, source=source)
        self.state.optimizer.zero_grad()  # gradients must be allocated in the memory pool of the graph
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._body(self.batch)

    def _body(self, batch: Batch) -> None:
        """The operations of a step. Python runs this once, during the capture."""
        state = self.state
        state.optimizer.zero_grad()
        with state.autocast():
            total, plain = state.loss_function(state.model, batch, state.run.loss, True)
        n_targets = (batch.targets != IGNORED).sum().clamp(min=1)  # the number of targets may differ between batches
        (total / n_targets).backward()
        norm = gradient_norm(state.parameters)
        self.results.copy_(torch.stack([plain.detach() / n_targets, norm.detach()]).float())
        limit = state.run.optim.clip
        shrink = None if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)
        self.failed.copy_(torch.maximum(self.failed, (~self.results.isfinite().all()).float()))
        state.optimizer.step_unless(self.failed, shrink)
