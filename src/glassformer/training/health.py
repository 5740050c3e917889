"""Is a training step sound? What is not a number is found where it began; a gradient of nothing is not let through."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.training.objective import Batch

if TYPE_CHECKING:
    from glassformer.training.loop import TrainState


class NonFinite(ArithmeticError):  # noqa: N818  (the name says what happened)
    """Loss or gradient is no number. Nothing was updated; the message says where it began."""


class DeadGradient(ArithmeticError):  # noqa: N818
    """Every gradient is exactly zero although there is something to learn. One sentence."""


def require_gradient(step: int, loss: float, norm: float) -> None:
    """A cross-entropy above zero has a gradient. None at all means that a kernel or a compiler lost it on the way."""
    if norm == 0 and loss > 1e-2:
        raise DeadGradient(
            f"step {step} has a loss of {loss:.4f} and a gradient of exactly zero, so nothing can be learnt: "
            "train with machine.compile='no', and report it with the output of `glass env`."
        )


class FirstNonFinite:
    """A tap that remembers the first site whose values are not all numbers."""

    site: str | None = None

    def __call__(self, site: str, value: Tensor) -> Tensor:
        # masked scores are -inf by design; what matters is what the softmax makes of them
        looked_at = self.site is None and value.is_floating_point() and not site.endswith("scores")
        if looked_at and not bool(torch.isfinite(value).all()):
            self.site = site
        return value

    def wants(self, site: str) -> bool:
        return False


@torch.no_grad()
def explain_non_finite(state: "TrainState", batch: Batch, value: float) -> str:
    """Where it began: the first site of the forward pass, or the first parameter with such a gradient, on any rank."""
    tap, group = FirstNonFinite(), state.group
    with state.autocast():
        inputs = (batch.inputs,) if batch.source is None else (batch.source, batch.inputs)
        group.run(lambda model: model(*inputs, tap=tap), state.model)
    site = next((site for site in group.gather(tap.site) if site), None)
    where = f"first at {site}" if site else "not in the forward pass"
    sick = [
        name
        for name, p in state.model.named_parameters()
        if p.grad is not None and not bool(group.local(p.grad).isfinite().all())
    ]
    last = next((names[-1] for names in group.gather(sick) if names), None)
    if site is None and last:
        where = f"the forward pass is finite, the gradient of {last} is not"
    return (
        f"step {state.step}: the loss is {value} ({where}). Nothing was updated; lower optim.lr, lengthen the warm-up, "
        "or use machine.precision='float32'."
    )
