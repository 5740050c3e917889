"""The stages of training against torch's optimizer and the package's schedule."""

import numpy as np
import torch

from glassformer.theory.exercises import training as module

RNG = np.random.default_rng(8)


def test_adamw_is_torchs_over_several_steps():
    w = RNG.normal(size=(3, 4))
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=0.05, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step in range(1, 6):
        g = RNG.normal(size=(3, 4))
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        w, m, v = module.adamw(w, g, m, v, step, 0.05, 0.9, 0.95, 1e-3, 0.1)
        assert np.allclose(w, parameter.detach().numpy(), atol=1e-12)


def test_the_schedule_rises_to_its_peak_and_falls_to_its_floor():
    rates = [module.learning_rate(step, 101, 10, 1.0, 0.1) for step in range(102)]
    assert np.isclose(rates[9], 1.0)
    assert np.isclose(rates[10], 1.0)
    assert np.isclose(rates[101], 0.1)
    assert (np.diff(rates[:10]) > 0).all()
    assert (np.diff(rates[10:]) < 0).all()
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=91, eta_min=0.1)
    for rate in rates[10:60]:
        assert np.isclose(rate, optimizer.param_groups[0]["lr"])
        optimizer.step()
        cosine.step()


def test_each_target_is_the_token_after_its_input():
    text = np.arange(100)
    inputs, targets = module.batch(text, [3, 50, 94], 5)
    assert inputs.tolist()[0] == [3, 4, 5, 6, 7]
    assert (targets == inputs + 1).all()
