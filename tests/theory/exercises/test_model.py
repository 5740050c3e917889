"""The solutions about models against the engine, torch and its gradients."""

import numpy as np
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer import config as c
from glassformer import sizing
from glassformer.theory.exercises import model as module

RNG = np.random.default_rng(6)


def test_the_gpt_is_torchs():
    for case in module.GPT.cases(RNG):
        tokens, weights, heads = case.arguments.values()

        def tensor(array):
            return torch.from_numpy(array)

        x = tensor(weights["tokens"])[tokens] + tensor(weights["positions"])[: len(tokens)]
        D = (x.shape[1],)
        for block in weights["blocks"]:
            b = {name: tensor(value) for name, value in block.items()}
            y = F.layer_norm(x, D, b["gain_1"], b["bias_1"])
            parts = [F.linear(y, b[n], b[f"{n}_bias"]).unflatten(-1, (heads, -1)) for n in ("query", "key", "value")]
            y = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts), is_causal=True)
            x = x + F.linear(y.transpose(0, 1).flatten(1), b["output"], b["output_bias"])
            y = F.linear(F.layer_norm(x, D, b["gain_2"], b["bias_2"]), b["up"], b["up_bias"])
            x = x + F.linear(F.gelu(y, approximate="tanh"), b["down"], b["down_bias"])
        expected = F.layer_norm(x, D, tensor(weights["gain"]), tensor(weights["bias"])) @ tensor(weights["head"])
        assert np.allclose(module.gpt(tokens, weights, heads), expected.numpy(), atol=1e-10)


def test_the_gradient_of_a_tied_table_is_torchs():
    for case in module.TIED.cases(RNG):
        tokens, hidden, table, d_logits, d_x = case.arguments.values()
        shared = torch.from_numpy(table).requires_grad_()
        logits = torch.from_numpy(hidden) @ shared.T
        (logits * torch.from_numpy(d_logits)).sum().backward()
        (shared[tokens] * torch.from_numpy(d_x)).sum().backward()
        found, d_table, saved = module.tied_head(**case.arguments)
        assert np.allclose(found, logits.detach().numpy(), atol=1e-12)
        assert np.allclose(d_table, shared.grad.numpy(), atol=1e-12)
        assert saved == table.size


def test_tying_saves_what_the_size_sheet_counts():
    sizes = [gf.presets.gpt2(vocab_size=31, d_model=8, n_heads=2, n_layers=1, d_ff=16, max_len=5)]
    sizes.append(c.replace(sizes[0], head=c.Head(tied=False)))
    tied, free = (sizing.count(size) for size in sizes)
    assert free - tied == module.tied_head([0], *(np.zeros(s) for s in ((1, 8), (31, 8), (1, 31), (1, 8))))[2]


def test_masks_are_torchs():
    for case in module.ENCODER.cases(RNG):
        x, w_qkv, real, causal = case.arguments.values()
        weights = module.masked_attention(x, w_qkv, real, causal)
        q, k, v = np.split(x @ w_qkv, 3, axis=-1)
        mask = torch.from_numpy(np.tile(real, (len(x), 1)))
        mask = mask & torch.ones(len(x), len(x)).tril().bool() if causal else mask
        expected = F.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), attn_mask=mask)
        assert np.allclose(weights @ v, expected.numpy(), atol=1e-12)
