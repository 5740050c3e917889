"""The parts of a pipeline, found in what a step refers to."""

import torch
from torch import nn

from glassformer.doctor.training.listen import listen
from glassformer.doctor.training.pipeline import find_pipeline
from glassformer.training.optimizers import AdamW
from tests.doctor.training.pipelines import Plain, Tiny, texts

model = Tiny()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(batch):
    return model(**batch).loss


def test_global_variables_that_a_function_names_are_found():
    found = find_pipeline(step)
    assert (found.model, found.optimizer) == (model, optimizer) or found.optimizer is None
    assert found.model is model


def test_the_outermost_module_is_the_model():
    inner = Tiny()
    outer = nn.Sequential(inner)

    def step(batch):
        return inner, outer

    assert find_pipeline(step).model is outer


def test_what_is_given_is_taken():
    other = Tiny()
    assert find_pipeline(step, model=other, optimizer=optimizer).model is other
    assert find_pipeline(step, optimizer=optimizer).optimizer is optimizer


def test_optimizers_that_are_not_of_torch_are_found_and_heard():
    tiny = Tiny()
    ours = AdamW([{"params": list(tiny.parameters()), "weight_decay": 0.0}], 0.1, (0.9, 0.95))

    def step(batch):
        tiny(**batch).loss.backward()
        ours.step()

    found = find_pipeline(step, model=tiny)
    assert found.optimizer is ours
    update = listen(found, texts())
    assert update.stepped
    assert update.rates == [0.1]
    assert update.used.keys() == dict(tiny.named_parameters()).keys()
    assert "step" not in vars(ours)


def test_everything_is_restored():
    plain = Plain()
    pipeline = find_pipeline(plain)
    before = plain.model.head.weight.detach().clone()
    with pipeline.restored():
        pipeline.run(texts())
        assert not torch.equal(before, plain.model.head.weight)
        assert plain.optimizer.state
    assert torch.equal(before, plain.model.head.weight)
    assert not plain.optimizer.state
