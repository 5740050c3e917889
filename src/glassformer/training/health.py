"""Find where NaN or infinity first appears in a training step that failed."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glassformer.training.objective import Batch, hidden_states

if TYPE_CHECKING:
    from glassformer.training.loop import TrainState


class NonFinite(ArithmeticError):  # noqa: N818  (the name says what happened)
    """The loss or gradient is NaN or infinite. Nothing was updated; the message names the first site."""


class FirstNonFinite:
    """A tap that stores the first site with a NaN or infinite value."""

    site: str | None = None

    def __call__(self, site: str, value: Tensor) -> Tensor:
        # masked scores are -inf by design; the softmax that follows must be finite
        checked = self.site is None and value.is_floating_point() and not site.endswith("scores")
        if checked and not bool(torch.isfinite(value).all()):
            self.site = site
        return value

    def wants(self, site: str) -> bool:
        return False


@torch.no_grad()
def explain_non_finite(state: "TrainState", batch: Batch, value: float) -> str:
    """Return where NaN or infinity first appears on any rank: a site of the forward pass, or a gradient."""
    tap, group = FirstNonFinite(), state.group
    with state.autocast():
        group.run(lambda model: model.logits(hidden_states(model, batch, tap), tap), state.model)
    site = next((site for site in group.gather(tap.site) if site), None)
    where = f"first at {site}" if site else "not in the forward pass"
    affected = [
        name
        for name, p in state.model.named_parameters()
        if p.grad is not None and not bool(group.local(p.grad).isfinite().all())
    ]
    last = next((names[-1] for names in group.gather(affected) if names), None)
    if site is None and last:
        where = f"the forward pass is finite, the gradient of {last} is not"
    return (
        f"step {state.step}: the loss is {value} ({where}). Nothing was updated; lower optim.lr, lengthen the warm-up, "
        "or use machine.precision='float32'."
    )
