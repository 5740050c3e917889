"""MLPs: a block that sees itself alone is one."""

import numpy as np
import pytest
import torch

from glassformer.reference import random_params
from glassformer.theory.claims.architecture import mlp
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.small_models import model_with


def test_one_token_alone_is_the_mlp():
    config = mlp._config()
    params = random_params(config, 2, 0.5)
    logits = model_with(config, params)(torch.tensor([[3]]))[0, 0].detach().numpy()
    assert np.abs(logits - mlp.token_by_token(params, 3)).max() < 1e-12


def test_seeing_a_neighbour_makes_the_first_parts_fail():
    found = {f.id: f for f in mlp.mlp_vs_transformer(Lab(broken=True))}
    failing = [id for id, finding in found.items() if not finding.passed]
    assert failing == ["A = I", "derivatives", "an MLP, token by token"]


def test_a_flattened_mlp_follows_one_order_of_120():
    found = {f.id: f for f in mlp._order(Lab(seed=3))}
    assert found["MLP and order"].evidence["passing"] == 1
    assert found["Transformer and order"].evidence["cases"] == 120


def test_a_flattened_mlp_of_equal_weights_would_follow_all():
    flat = mlp.Flattened(3, 1, 4, np.random.default_rng(0))
    flat.first[:], flat.second[:] = 1.0, 1.0
    x = np.array([[1.0], [2.0], [3.0]])
    assert flat(x[[2, 0, 1]]) == pytest.approx(flat(x)[[2, 0, 1]])


def test_parameters_by_length():
    found = {f.id: f for f in mlp._sizes(Lab())}["parameters by length"]
    assert set(found.evidence["transformer"].values()) == {1272}
    assert found.evidence["dense"] == {4: 1056, 8: 4160, 16: 16_512}
