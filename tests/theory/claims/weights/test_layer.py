"""The layer the claims examine is the engine's, with the matrices the claims mean."""

import numpy as np
import torch

from glassformer.theory.claims.weights.layer import identity, layer, normal, random_layer, run, softmax_of


def by_hand(x, q, k, v, o, n_heads):
    """Rows are tokens; every width is a different prime, so no swapped axis survives."""
    out = np.zeros((len(x), o.shape[1]))
    for h, (wq, wk, wv) in enumerate(zip(*(np.split(w, n_heads, axis=1) for w in (q, k, v)), strict=True)):
        scores = (x @ wq) @ (x @ wk).T / np.sqrt(wq.shape[1])
        pattern = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        out += pattern @ x @ wv @ np.split(o, n_heads, axis=0)[h]
    return out


def test_layer_computes_the_formula_of_the_claims():
    generator = torch.Generator().manual_seed(0)
    q, k, v, o = (normal(generator, *size) / 3 for size in ((7, 6), (7, 6), (7, 10), (10, 7)))
    x = normal(generator, 5, 7)
    found = run(layer(q, k, v, o, n_heads=2), x)
    expected = by_hand(*(w.numpy() for w in (x, q, k, v, o)), n_heads=2)
    np.testing.assert_allclose(found["out"], expected, atol=1e-13)
    assert found["pattern"].shape == (2, 5, 5)
    assert found["v"].shape == (2, 5, 5)


def test_causal_and_bias_reach_the_pattern():
    generator = torch.Generator().manual_seed(0)
    attention, x = random_layer(generator, 6, 2, 3, 3), normal(generator, 4, 6)
    assert run(attention, x, causal=True)["pattern"].triu(1).abs().max() == 0
    bias = torch.zeros(2, 4, 4, dtype=torch.float64)
    bias[:, :, 2] = 60
    assert run(attention, x, bias=bias)["pattern"][:, :, 2].min() > 0.999


def test_identity_leaves_one_token_alone_and_mixes_two():
    one = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert torch.equal(run(identity(2, scale=1.0), one)["out"], one)
    assert not torch.allclose(
        run(identity(2, scale=1.0), torch.eye(2, dtype=torch.float64))["out"], torch.eye(2).double()
    )


def test_softmax_of_gives_scores_to_the_engine_unchanged():
    scores = torch.tensor([[0.5, -1.25, 3.0], [1e4, -1e4, 0.0]], dtype=torch.float64)
    for fused in (False, True):
        torch.testing.assert_close(softmax_of(scores, fused=fused), scores.softmax(-1), atol=1e-16, rtol=1e-15)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    assert softmax_of(scores, mask)[0, 1] == 0
