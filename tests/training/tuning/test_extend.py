"""Longer tables, in numbers."""

import torch

import glassformer as gf
from glassformer.config import replace
from glassformer.training.tuning.extend import extend_state


def test_tables_of_tokens_and_positions_grow():
    old = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16, vocab_size=9, max_len=5)
    old = replace(old, head=gf.config.Head(tied=False, bias=True))
    state = gf.build(old, seed=3).state_dict()
    new = replace(old, vocab_size=12, max_len=9)
    out = extend_state(state, old, new, known=7, seed=0)
    gf.build(new).load_state_dict(out)
    for name in ("embed.tokens.weight", "head.weight"):
        assert torch.equal(out[name][:7], state[name][:7])
        distance = (out[name][7:] - state[name][:7].mean(0)) / state[name][:7].std(0)
        assert 0.3 < float(distance.std()) < 2
    assert torch.equal(out["head.bias"][7:], state["head.bias"][:7].mean().expand(5))
    positions = out["decoder.position.weight"]
    assert torch.equal(positions[:5], state["decoder.position.weight"])
    assert torch.allclose(positions[8], positions[4])
    assert torch.allclose(positions[6], positions[3])


def test_nothing_grows_without_being_asked():
    config = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16)
    state = gf.build(config).state_dict()
    out = extend_state(state, config, config, config.vocab_size, 0)
    assert all(out[name] is state[name] for name in state)
