"""What the gradient of the logits says about targets and their weights."""

import pytest
import torch
import torch.nn.functional as F

from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.training.listen import Forward, Update, listen
from glassformer.doctor.training.pipeline import find_pipeline
from tests.doctor.training.pipelines import Plain, V, texts


def test_targets_and_weights_are_read_from_the_gradient_of_the_logits():
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=draw, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 7, (2, 5), generator=draw)
    targets[1, 3:] = -100
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 8
    (gradient,) = torch.autograd.grad(loss, logits)
    forward = Forward(targets.clamp(min=0), True, logits=logits.detach(), gradient=gradient)
    counted = targets != -100
    assert torch.equal(forward.trained, counted)
    assert torch.equal(forward.targets[counted], targets[counted])
    assert torch.allclose(forward.weights[counted], torch.tensor(1 / 8, dtype=torch.float64))
    assert forward.loss() == pytest.approx(loss.item())


def test_an_update_hears_parts_gradients_and_rates():
    pipeline = find_pipeline(Plain(parts=2, clip=True, lr=0.5))
    with pipeline.restored():
        update = listen(pipeline, texts())
    assert (len(update.forwards), update.calls, update.stepped, update.rates) == (2, 1, True, [0.5])
    assert set(update.used) == {n for n, _ in pipeline.model.named_parameters()}
    assert 0 < update.factor < 0.1  # clipped
    assert update.forwards[0].logits.shape[-1] == V


def test_without_a_gradient_nothing_is_reported():
    with pytest.raises(Unsupported, match="the model was not called"):
        Update().examined()
    with pytest.raises(Unsupported, match="no gradient of logits"):
        _ = Forward(torch.zeros(1, 2, dtype=torch.long), True).trained
