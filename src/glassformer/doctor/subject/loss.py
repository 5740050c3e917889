"""How a model is asked for its loss: by a method `loss`, or with labels given to forward."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.subject import Subject


@dataclass
class LossCall:
    """How to ask for the loss: a method `loss`, or labels given to forward."""

    words: str
    accepted: tuple[int, ...]
    """Shifts that are right here: 1 where the model shifts, 0 where the caller has."""
    method: bool
    labels: str | None
    mask: str | None
    needs_labels: bool = False
    """The method cannot be called without labels."""
    given_shift: int | None = None
    """Shift of labels that are given, where it is another one than without labels; found by trying."""

    @property
    def labels_aligned(self) -> bool:
        """Whether the name says that labels stand where their tokens stand; `targets` may be shifted ones."""
        return self.labels is not None and self.labels.startswith("label")

    def __call__(
        self,
        isolated: Subject,
        tokens: Tensor,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        source: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Loss, and the logits it was made from where they come with it."""
        given: dict[str, Any] = {}
        labels = tokens if labels is None and self.needs_labels else labels
        if labels is not None:
            if self.labels is None:
                raise Unsupported("its loss takes no labels")
            given[self.labels] = labels
        if mask is not None:
            if self.mask is None:
                raise Unsupported("its loss takes no mask")
            given[self.mask] = isolated._mask(mask)
        source = isolated.source(len(tokens)) if source is None else source
        seq2seq = isolated.kind == "seq2seq"
        if self.method:
            positional = [source, tokens] if seq2seq else [tokens]
            output = isolated.model.loss(*positional, **given)
            return _scalar(output), None
        if labels is None and self.labels:
            given[self.labels] = tokens
        first = source if seq2seq else tokens
        output = isolated.model(first, **{**isolated.filled(tokens, source), **isolated.interface.flags, **given})
        return _scalar(output), isolated.logits_in(output, tokens)


def _scalar(output: Any) -> Tensor:
    loss = calls.find_loss(output)
    if loss is None and isinstance(output, tuple | list | Tensor):
        first = output if isinstance(output, Tensor) else output[0]
        loss = first.reshape(()) if isinstance(first, Tensor) and first.numel() == 1 else None
    if loss is None:
        raise Unsupported("its loss is not one number")
    return loss


def loss_call(subject: Subject) -> LossCall | None:
    """The way this subject reports a loss; None when it reports none."""
    method = getattr(subject.model, "loss", None)
    if callable(method) and not isinstance(method, nn.Module):
        try:
            names = list(inspect.signature(method).parameters)
        except (TypeError, ValueError):
            return None
        target_mask = calls.TARGET_MASK if subject.kind == "seq2seq" else calls.MASK
        labels = next((n for n in calls.LABELS if n in names), None)
        mask = next((n for n in target_mask if n in names), None)
        given = labels is not None and inspect.signature(method).parameters[labels].default is inspect.Parameter.empty
        # from tokens alone it must shift by itself; who shifts labels that the caller has to pass is not declared
        right = (0,) if subject.kind == "encoder" else (0, 1) if given else (1,)
        return LossCall("loss()", right, True, labels, mask, given)
    face = subject.interface
    if face.labels is None:
        return None
    if subject.kind == "encoder" or subject.kind == "seq2seq":
        accepted: tuple[int, ...] = (0,)
    else:
        accepted = (1,) if face.shifts_labels else (0, 1)  # elsewhere the caller may shift, and nothing says who does
    return LossCall(f"{face.labels}=", accepted, False, face.labels, face.mask)
