"""Longer tables, in numbers."""

import torch

import glassformer as gf
from glassformer.config import replace
from glassformer.training.tuning.extend import extend_state


def test_tables_of_tokens_and_positions_grow():
    old = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16, vocab_size=9, max_len=5)
    old = replace(old, head=gf.config.Head(tied=False, bias=True))
    state = gf.build(old, seed=3).state_dict()
    state["head.bias"] = torch.randn(9, generator=torch.Generator().manual_seed(1))
    for name in ("embed.tokens.weight", "head.weight", "head.bias"):
        state[name][7:] = 50.0  # rows of no token have no part in the mean of the others
    new = replace(old, vocab_size=12, max_len=9)
    out = extend_state(state, old, new, known=7, seed=0)
    gf.build(new).load_state_dict(out)
    for name in ("embed.tokens.weight", "head.weight"):
        assert torch.equal(out[name][:7], state[name][:7])
        distance = (out[name][7:] - state[name][:7].mean(0)) / state[name][:7].std(0)
        assert 0.3 < float(distance.std()) < 2
    assert torch.allclose(out["head.bias"][7:], state["head.bias"][:7].mean().expand(5))
    again, other = (extend_state(state, old, new, known=7, seed=seed)["head.weight"] for seed in (0, 1))
    assert torch.equal(again, out["head.weight"])
    assert not torch.equal(other, again)
    positions = out["decoder.position.weight"]
    assert torch.equal(positions[:5], state["decoder.position.weight"])
    assert torch.allclose(positions[8], positions[4])
    assert torch.allclose(positions[6], positions[3])


def test_nothing_grows_without_being_asked():
    config = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16)
    state = gf.build(config).state_dict()
    out = extend_state(state, config, config, config.vocab_size, 0)
    assert all(out[name] is state[name] for name in state)


def test_positions_that_begin_after_rows_of_their_own_are_interpolated_without_those():
    """OPT and BART have two rows before position 0."""
    old = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16, max_len=5)
    old = replace(old, position=gf.config.Learned(offset=2))
    state = gf.build(old, seed=3).state_dict()
    name = "decoder.position.weight"
    state[name][:2] = 50.0
    longer = extend_state(state, old, replace(old, max_len=9), old.vocab_size, 0)[name]
    assert longer.shape[0] == 11
    assert torch.equal(longer[:7], state[name])
    assert torch.allclose(longer[10], state[name][6])  # the last position is the last trained one
    assert torch.allclose(longer[8], state[name][5])  # position 6 of 8 is position 3 of 4
    assert float(longer[7:].abs().max()) < 1
