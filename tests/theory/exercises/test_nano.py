"""The training as a whole: gradients against torch, and what the judge concludes from a loss."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glassformer.theory.exercises import nano as module
from glassformer.theory.exercises.judge import diagnose

RNG = np.random.default_rng(1)


def test_gradients_are_torchs():
    T, D, V = 5, 4, 6
    sizes = {"embed": (V, D), "position": (T, D), "head": (D, V), "query": (D, D), "key": (D, D), "value": (D, D)}
    w = {name: RNG.normal(size=size) for name, size in sizes.items()}
    inputs, targets = RNG.integers(0, V, (3, T)), RNG.integers(0, V, (3, T))
    t = {name: torch.from_numpy(value).requires_grad_() for name, value in w.items()}
    x = t["embed"][torch.from_numpy(inputs)] + t["position"]
    y = x + F.scaled_dot_product_attention(x @ t["query"], x @ t["key"], x @ t["value"], is_causal=True)
    F.cross_entropy((y @ t["head"]).flatten(0, 1), torch.from_numpy(targets).flatten()).backward()
    for name, found in module.gradients(inputs, targets, w).items():
        assert np.allclose(found, t[name].grad.numpy(), atol=1e-12), name


@pytest.fixture(scope="module")
def case():
    return module.TRAIN.cases(np.random.default_rng(0))[0]


def test_the_true_distribution_is_accepted_and_the_tables_are_not(case):
    source = case.hidden
    assert source.entropy < source.pairs < source.single < np.log(7)

    def verdict(p):
        return diagnose(module.TRAIN, [case], [(np.log(p),)])

    assert verdict(source.after) == []
    text, prompts = case.arguments["text"], case.arguments["prompts"]
    counts = np.full((7, 7), 0.1)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    assert verdict((counts / counts.sum(1, keepdims=True))[prompts[:, -1]]) == [module.PAIRS]
    assert verdict(np.tile(counts.sum(0) / counts.sum(), (len(prompts), 1))) == [module.SINGLE]
    assert verdict(np.full((len(prompts), 7), 1 / 7)) == [module.UNTRAINED]
    pairs = (counts / counts.sum(1, keepdims=True))[prompts[:, -1]]
    mixed = [verdict(a * source.after + (1 - a) * pairs) for a in np.linspace(0, 1, 41)]
    assert mixed[0] == [module.PAIRS]
    assert any("train longer" in "".join(found) for found in mixed)
    assert mixed[-1] == []


def test_what_accepts_needs_is_not_passed_to_the_student(case):
    assert set(case.arguments) == {"text", "vocab", "prompts"}
