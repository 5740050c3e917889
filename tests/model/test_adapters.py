"""Adapters of linear layers: names, arithmetic, gradients, and that a fresh one changes nothing."""

import pytest
import torch

import glassformer as gf
from glassformer.model.adapters import (
    AdaptedLinear,
    Adapter,
    adaptable,
    adapters_of,
    attach,
    choose_layers,
    fresh_adapters,
    merged_state,
    scale_of,
)

NANO = gf.presets.get("nano", n_layers=2, d_model=16, n_heads=2, d_ff=24, vocab_size=31, max_len=12)
TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def adapted(config=NANO, dora=False, random=True, quantized=False, dropout=0.0, targets="linear", dtype=torch.float32):
    model = gf.build(config, seed=1, dtype=dtype)
    names = choose_layers(adaptable(model), targets)
    made = fresh_adapters(model, names, 3, 6.0, False, dora, seed=2)
    if random:
        generator = torch.Generator().manual_seed(5)
        made = {
            name: Adapter(
                one.A.to(dtype),
                torch.randn(one.B.shape, generator=generator).to(dtype) / 10,
                one.scale,
                None if one.magnitude is None else (one.magnitude * 1.2).to(dtype),
            )
            for name, one in made.items()
        }
    attach(model, made, dropout, quantized)
    return model


def test_a_fresh_adapter_changes_nothing_and_keeps_the_names():
    plain = gf.build(NANO, seed=1)
    for dora in (False, True):
        model = adapted(dora=dora, random=False)
        assert torch.allclose(model(TOKENS), plain(TOKENS), atol=1e-6)
        state = model.state_dict()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor)
        added = {name.rpartition(".")[2] for name in set(state) - set(plain.state_dict())}
        assert added == {"lora_A", "lora_B"} | ({"lora_magnitude"} if dora else set())
        assert all((".lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    bound = 16**-0.5
    first = adapters_of(model)["decoder.blocks.0.attention.q"].A
    assert 0.8 * bound < float(first.abs().max()) <= bound


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@torch.no_grad()
def test_merged_equals_unmerged(dora, quantized):
    model, plain = adapted(dora=dora, quantized=quantized), gf.build(NANO, seed=1)
    merged = gf.build(NANO)
    merged.load_state_dict(merged_state(model))
    assert float((merged(TOKENS) - model(TOKENS)).abs().max()) < 1e-6
    assert float((plain(TOKENS) - model(TOKENS)).abs().max()) > 1e-2
    layer = model.decoder.blocks[0].attention.q
    assert isinstance(layer, AdaptedLinear)
    assert torch.equal(layer.weight, merged.decoder.blocks[0].attention.q.weight)


@torch.no_grad()
def test_latent_attention_decodes_with_its_adapters():
    """A single cached token is computed from the matrices themselves, in the absorbed form."""
    latent = gf.config.Latent(kv_rank=8, d_shared=4)
    attention = gf.config.Attention(n_heads=2, d_head=12, d_value=8, latent=latent)
    model = adapted(gf.config.replace(NANO, attention=attention, position=gf.config.Rotary(fraction=4 / 12)))
    cache = model.new_cache()
    parts = [model(TOKENS[:, :4], cache=cache), model(TOKENS[:, 4:], cache=cache)]
    assert torch.allclose(torch.cat(parts, 1), model(TOKENS), atol=1e-5)


def test_the_gradient_of_dora_takes_the_norm_as_a_constant():
    model = adapted(dora=True, dtype=torch.float64, targets=("q",))
    layer = model.decoder.blocks[0].attention.q
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    layer(x).sum().backward()
    one = layer.adapter()
    norm = (layer.base() + one.scale * one.B @ one.A).norm(dim=1)
    B = one.B.clone().requires_grad_()
    out = (one.magnitude / norm) * (x @ layer.base().T + one.scale * x @ one.A.T @ B.T)
    out.sum().backward()
    assert torch.allclose(layer.lora_B.grad, B.grad)


def test_dropout_is_off_in_evaluation():
    model = adapted(dropout=0.5)
    model.eval()
    assert torch.equal(model(TOKENS), adapted()(TOKENS))
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(TOKENS), model(TOKENS))


def test_adapters_that_share_a_matrix_share_its_parameter():
    model = gf.build(NANO, seed=1)
    A = torch.randn(3, 16)
    names = [f"decoder.blocks.0.attention.{x}" for x in "qkv"]
    attach(model, {name: Adapter(A, torch.ones(16, 3), 1.0) for name in names})
    attention = model.decoder.blocks[0].attention
    assert attention.q.lora_A is attention.k.lora_A is attention.v.lora_A
    model(TOKENS).sum().backward()
    assert sum(p.requires_grad for p in model.parameters()) == 4


def test_targets_are_ends_of_names():
    names = [
        "decoder.blocks.0.attention.o",
        "decoder.blocks.0.cross.o",
        "decoder.blocks.0.feedforward.up",
        "head.transform",
    ]
    assert choose_layers(names, "linear") == names[:3]
    assert choose_layers(names, ("o",)) == names[:2]
    assert choose_layers(names, ("attention.o", "up")) == [names[0], names[2]]
    assert not any(name.endswith(".router") for name in adaptable(gf.build("moe_tiny")))


def test_the_scale():
    assert scale_of(16, 32.0, False) == 2
    assert scale_of(16, 32.0, True) == 8


def test_quantized_matrices_are_not_kept_twice():
    model = adapted(quantized=True)
    assert not any(name.endswith("attention.q.weight") for name in model.state_dict())
    assert model.decoder.blocks[0].attention.q.quantized.codes.numel() == 128


@pytest.mark.parametrize("bias", [False, True])
def test_one_function_computes_what_its_parts_compute(bias, monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.Linear(7, 5, bias=bias, dtype=torch.float64)
    adapter = Adapter(torch.randn(3, 7, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), 0.7)
    x = torch.randn(2, 4, 7, dtype=torch.float64, requires_grad=True)
    adapted = AdaptedLinear(layer, adapter, torch.nn.Parameter(adapter.A), 0.0, quantized=False)
    weight = torch.randn(2, 4, 5, dtype=torch.float64)

    def run():
        out = adapted(x)
        return out, *torch.autograd.grad((out * weight).sum(), (x, adapted.lora_A, adapted.lora_B))

    assert adapted._is_one_function(x)
    found = run()
    with torch.no_grad():  # an input without a gradient, and a single vector
        torch.testing.assert_close(adapted(x[0, 0]), found[0][0, 0])
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        torch.testing.assert_close(adapted(x), found[0], rtol=0, atol=0)
    monkeypatch.setattr(AdaptedLinear, "_is_one_function", lambda self, x: False)
    for ours, parts in zip(found, run(), strict=True):
        torch.testing.assert_close(ours, parts, rtol=1e-12, atol=1e-12)


def test_one_function_under_autocast_rounds_no_more_than_its_parts(monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48)
    adapter = Adapter(torch.randn(3, 64), torch.randn(48, 3), 0.7)
    x = torch.randn(2, 40, 64, requires_grad=True)
    adapted = AdaptedLinear(layer, adapter, torch.nn.Parameter(adapter.A), 0.0, quantized=False)
    weight = torch.randn(2, 40, 48)

    def run(autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = adapted(x)
        return out, *torch.autograd.grad((out.float() * weight).sum(), (x, adapted.lora_A, adapted.lora_B))

    exact, found = run(False), run(True)
    monkeypatch.setattr(AdaptedLinear, "_is_one_function", lambda self, x: False)
    for truth, ours, parts in zip(exact, found, run(True), strict=True):
        assert ours.dtype is parts.dtype
        error, usual = (float((tensor - truth).detach().norm()) for tensor in (ours, parts))
        assert 0 < error < 1.1 * usual


def test_a_row_of_zeros_stays_zero_with_dora():
    layer = torch.nn.Linear(7, 5, bias=False)
    with torch.no_grad():
        layer.weight[2] = 0
    adapter = Adapter(torch.randn(3, 7), torch.zeros(5, 3), 0.7, layer.weight.detach().norm(dim=1))
    adapted = AdaptedLinear(layer, adapter, torch.nn.Parameter(adapter.A), 0.0, quantized=False)
    x = torch.randn(4, 7)
    torch.testing.assert_close(adapted(x), layer(x))
    adapted(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in adapted.parameters() if p.requires_grad)
    torch.testing.assert_close(adapted.weight, layer.weight.detach())
