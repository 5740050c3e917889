"""The stream of weights: what blocks find in their stages, multiplied as the kernel does, is the model's products."""

import pytest
import torch

from glassformer import config as c
from glassformer.config import presets
from glassformer.kernels.cuda.decode.pack import stacked_weights
from glassformer.kernels.cuda.decode.stream import AIM, MEMORY, Layout, fill
from tests.variants import decoder, lively

LAYER = 1


def made(feed, clusters, neighbours=2, dtype=torch.float32):
    config = decoder(d_model=40, attention__d_head=16, head=c.Head(tied=False), feedforward=feed, n_layers=3)
    model = lively(config, std=0.4)[0].float()
    layout = Layout(config, dtype, clusters, neighbours, 12)
    held = stacked_weights(model, dtype)
    out = layout.empty(torch.device("cpu"))
    fill(out, layout, held)
    return layout, held, out


def rows_of(layout, stages, width, count, header):
    """(blocks, count, width) from (blocks, stages, bytes), and the numbers before them."""
    m, size = layout.macros, layout.dtype.itemsize
    fit = m["WIDE_ROWS"] if header else m["STAGE"] // (width * size)
    begin = m["HEADER"] if header else 0
    rows = stages[..., begin : begin + fit * width * size].view(layout.dtype).unflatten(-1, (fit, width))
    before = stages[..., : fit * 4].view(torch.float32) if header else rows[..., 0].float()
    return rows.flatten(1, 2)[:, :count].float(), before.flatten(1, 2)[:, :count]


def of_layer(layout, out, name):
    m, at = layout.macros, LAYER * layout.macros["LAYER_STAGES"]
    for other in ("QKV", "OUT", "UP", "DOWN"):
        if other == name:
            return out[:, at : at + m[f"{name}_STAGES"]]
        at += m[f"{other}_STAGES"]
    return None


@pytest.mark.parametrize("clusters", [1, 2, 3, 5])
@pytest.mark.parametrize("feed", [c.Dense(136), c.Gated(48, bias=True)], ids=["dense", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_have_what_their_cluster_multiplies(feed, clusters, dtype):
    layout, held, out = made(feed, clusters, dtype=dtype)
    cfg, m, n = layout.config, layout.macros, layout.neighbours
    x = torch.randn(cfg.d_model, generator=torch.Generator().manual_seed(0))
    weights, shifts = rows_of(layout, of_layer(layout, out, "QKV"), cfg.d_model, m["QKV_ROWS"], header=True)
    found = (weights @ x + shifts).view(clusters, -1)
    wanted = held["w_qkv"][LAYER].float() @ x + held["b_qkv"][LAYER]
    k, u, group = cfg.d_head, cfg.d_value, cfg.n_heads // cfg.n_kv_heads
    q, keys, values = wanted.split([cfg.n_heads * k, cfg.n_kv_heads * k, cfg.n_kv_heads * u])
    for head in range(cfg.n_heads):
        g, first = head // group, head // clusters * (2 * k + u)
        parts = (q[head * k :][:k], keys[g * k :][:k], values[g * u :][:u])
        mine = found[head % clusters, first : first + 2 * k + u]
        assert torch.allclose(mine, torch.cat(parts), atol=1e-5)

    up, shifts = rows_of(layout, of_layer(layout, out, "UP"), cfg.d_model, m["UP_ROWS"], header=True)
    found = (up @ x + shifts).view(layout.blocks * m["HIDDEN_EACH"], -1)[: cfg.d_ff]
    wanted = (held["w_up"][LAYER].float() @ x + held["b_up"][LAYER]).view(-1, cfg.d_ff).T
    assert torch.allclose(found, wanted, atol=1e-5)

    for name, width, vector in (
        ("OUT", m["HEADS_EACH"] * u, torch.randn(cfg.n_heads * u)),
        ("DOWN", m["HIDDEN_EACH"] * n, torch.randn(cfg.d_ff)),
    ):
        weights, _ = rows_of(layout, of_layer(layout, out, name), width, cfg.d_model // n, header=False)
        dealt = torch.zeros(clusters, width)
        if name == "OUT":
            for head in range(cfg.n_heads):
                dealt[head % clusters, head // clusters * u :][:u] = vector[head * u :][:u]
        else:
            dealt.view(-1)[: cfg.d_ff] = vector
        sums = weights.unflatten(0, (clusters, n)) @ dealt[:, None, :, None]
        wanted = held["w_out" if name == "OUT" else "w_down"][LAYER].float() @ vector
        assert torch.allclose(sums.sum(0).flatten(), wanted, atol=1e-4)

    head, shifts = rows_of(layout, out[:, -m["HEAD_STAGES"] :], cfg.d_model, m["HEAD_ROWS"], header=True)
    found = (head @ x + shifts).flatten()[: cfg.vocab_size]
    assert torch.allclose(found, held["head"].float() @ x, atol=1e-5)


@pytest.mark.parametrize(("width", "dtype"), [(40, torch.bfloat16), (768, torch.bfloat16), (2048, torch.float32)])
def test_stages_suit_the_machine(width, dtype):
    """Copies want multiples of 16 bytes, a stage holds at least one row, and the ring what fits beside the rest."""
    config = decoder(d_model=width, attention__d_head=16, feedforward=c.Dense(4 * width))
    layout = Layout(config, dtype, 15, 8, 12)
    m = layout.macros
    assert layout.fits
    assert m["STAGE"] % 128 == 0
    assert m["HEADER"] + m["WIDE_ROWS"] * width * dtype.itemsize <= m["STAGE"] <= 2 * AIM
    assert m["RING"] * m["STAGE"] + layout.declared <= MEMORY
    assert m["HIDDEN_EACH"] * layout.blocks >= 4 * width


def test_what_a_block_cannot_hold_is_known():
    config = decoder(d_model=4096, attention__d_head=128, feedforward=c.Dense(16384))
    assert not Layout(config, torch.bfloat16, 15, 8, 12).fits


def test_gpt2_is_dealt_out_without_a_rest_but_of_its_hidden_layer():
    m = Layout(presets.gpt2(), torch.bfloat16, 15, 8, 12).macros
    assert (m["STAGE"], m["RING"], m["QKV_STAGES"], m["OUT_STAGES"]) == (12416, 16, 3, 1)
