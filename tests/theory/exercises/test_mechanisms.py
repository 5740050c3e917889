"""The solutions about mechanisms against the lens of the package, torch and plain gradient descent."""

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.lens.heads import induction_score
from glassformer.lens.rank import deviation, singular_values
from glassformer.theory.exercises import mechanisms as module

RNG = np.random.default_rng(4)


def test_induction_scores_are_those_of_the_lens():
    case = module.INDUCTION.cases(RNG)[1].arguments
    expected = induction_score(torch.from_numpy(case["patterns"]), torch.tensor(case["tokens"]))
    assert np.allclose(module.induction_scores(**case), expected.numpy(), atol=1e-12)


def test_a_perfect_induction_head_scores_one():
    tokens = [5, 1, 2, 3, 1, 2, 3]
    pattern = np.zeros((1, 7, 7))
    for t, s in ((4, 2), (5, 3), (6, 4)):
        pattern[0, t, s] = 1
    assert module.induction_scores(pattern, tokens) == [1.0]


def test_collapse_measures_what_the_lens_measures():
    for case in module.COLLAPSE.cases(RNG):
        x, w_q, w_k, w_v = (torch.from_numpy(case.arguments[name]) for name in ("x", "w_q", "w_k", "w_v"))
        ratios, deviations = module.collapse(**case.arguments)
        for n in range(len(w_q)):
            mixed = F.scaled_dot_product_attention(x @ w_q[n], x @ w_k[n], x @ w_v[n])
            x = x + mixed if case.arguments["skip"] else mixed
            sigma = singular_values(x)
            assert np.isclose(ratios[n], float(sigma[1] / sigma[0]), atol=1e-9)
            assert np.isclose(deviations[n], float(deviation(x)), atol=1e-9)
    assert deviations[-1] < deviations[0]


def test_rounding_of_the_input_does_not_decide_the_answer():
    """A solution that adds in another order must be accepted: the answers hardly move with the input's last bits."""
    for case in module.COLLAPSE.cases(RNG):
        moved = {**case.arguments, "x": case.arguments["x"] * (1 + 1e-15 * RNG.normal(size=case.arguments["x"].shape))}
        for a, b in zip(module.collapse(**case.arguments), module.collapse(**moved), strict=True):
            assert np.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_contributions_add_up_to_the_logits():
    for case in module.ATTRIBUTION.cases(RNG):
        terms, gain, head, eps = case.arguments.values()
        stream = torch.from_numpy(terms.sum(0))
        logits = F.layer_norm(stream, gain.shape, torch.from_numpy(gain), None, eps).numpy() @ head
        assert np.allclose(module.logit_attribution(**case.arguments).sum(0), logits, atol=1e-12)


def test_attention_is_a_step_of_gradient_descent():
    for case in module.GRADIENT.cases(RNG):
        x, y, w, eta, query = case.arguments.values()
        start = torch.from_numpy(w).requires_grad_()
        (0.5 * (torch.from_numpy(x) @ start - torch.from_numpy(y)).square().sum()).backward()
        expected = query @ (w - eta * start.grad.numpy())
        assert np.allclose(module.gradient_step(**case.arguments)[0], expected, atol=1e-12)
