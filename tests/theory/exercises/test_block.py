"""The solutions about the block against torch."""

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.theory.exercises import block as module

RNG = np.random.default_rng(3)


def test_layer_norm_is_torchs():
    x, gain, bias = RNG.normal(size=(5, 6)), RNG.normal(size=6), RNG.normal(size=6)
    expected = F.layer_norm(*map(torch.from_numpy, (x,)), (6,), torch.from_numpy(gain), torch.from_numpy(bias), 1e-3)
    assert np.allclose(module.layer_norm(x, gain, bias, 1e-3), expected.numpy(), atol=1e-13)


def test_the_block_is_the_formula_in_torch():
    for case in module.PRE_NORM.cases(RNG):
        p = {name: torch.from_numpy(value) for name, value in case.arguments.items()}
        x = p["x"]
        d = (x.shape[-1],)
        q, k, v = (F.layer_norm(x, d, p["gain_1"], None, 1e-5) @ p["w_qkv"]).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True) @ p["w_o"]
        x = x + (F.layer_norm(x, d, p["gain_2"], None, 1e-5) @ p["w_up"]).relu() @ p["w_down"]
        assert np.allclose(module.block(**case.arguments), x.numpy(), atol=1e-12)


def test_the_stub_has_the_helpers_of_the_solution():
    names = {}
    exec(module.PRE_NORM.stub, names)
    a = module.PRE_NORM.cases(RNG)[0].arguments
    assert np.allclose(names["norm"](a["x"], a["gain_1"]), module.norm(a["x"], a["gain_1"]))
    assert np.allclose(names["attend"](a["x"], a["w_qkv"], a["w_o"]), module.attend(a["x"], a["w_qkv"], a["w_o"]))
    assert np.allclose(names["feed"](a["x"], a["w_up"], a["w_down"]), module.feed(a["x"], a["w_up"], a["w_down"]))
