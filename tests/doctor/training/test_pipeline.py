"""The parts of a pipeline, found in what a step refers to."""

import torch
from torch import nn

from glassformer.doctor.training.pipeline import find_pipeline
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
