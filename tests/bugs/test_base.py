"""The base models are right: they are the healthy subjects, and every bug of the zoo is measured against them."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.bugs import probes
from tests.bugs.base import Config, make

# float64 everywhere: 1e-10 is far above its rounding and far below any of the zoo's bugs.
BOUND = 1e-10
DESIGNS = {
    "learned": Config(),
    "rotary-halves": Config(position="rotary", norm="rmsnorm", activation="swiglu", n_kv_heads=2),
    "rotary-interleaved": Config(position="rotary", rope_pairing="interleaved", norm="rmsnorm"),
    "alibi": Config(position="alibi", activation="gelu_tanh"),
    "sinusoidal": Config(position="sinusoidal", norm_placement="post"),
    "none": Config(position="none"),
    "window": Config(position="rotary", window=6),
    "parallel": Config(position="rotary", norm_placement="parallel", n_kv_heads=1),
    "fused": Config(position="rotary", fused=True, n_kv_heads=2),
    "fused-alibi": Config(position="alibi", fused=True),
    "untied": Config(tie_weights=False, dropout=0.2),
    "finite-mask": Config(mask_fill="min", see_self=False),
}
each_design = pytest.mark.parametrize("name", DESIGNS)


def decoder(name, warm=6.0):
    return make(DESIGNS[name], warm=warm).double()


@each_design
def test_future_tokens_do_not_change_past_logits(name):
    assert probes.future(decoder(name)) == 0
    assert probes.future(decoder(name), length=65, attention_mask=torch.ones(2, 65)) == 0


@pytest.mark.sample(12)
@each_design
@pytest.mark.parametrize("sizes", [(1,), (5, 1), (7, 2), (24,)])
def test_any_chunking_through_the_cache_equals_one_pass(name, sizes):
    assert probes.cached(decoder(name), batch=3, sizes=sizes) < BOUND


@each_design
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(name, side):
    assert probes.padded(decoder(name), side) < BOUND
    assert probes.pad_content(decoder(name), side) < BOUND


@each_design
def test_cached_steps_after_a_padded_prompt_equal_the_row_alone(name):
    model, idx, mask = decoder(name), probes.rows(3, 16), probes.pads(11, [0, 3, 6], "left")
    with torch.no_grad():
        together = probes.steps(model, idx, [11, 1], attention_mask=mask)
        for row, n in enumerate([0, 3, 6]):
            assert probes.gap(together[row, n:], model(idx[row : row + 1, n:])[0]) < BOUND


@each_design
def test_only_relative_schemes_forget_a_common_shift(name):
    if DESIGNS[name].position in ("learned", "sinusoidal"):
        assert probes.shifted(decoder(name)) > 1e-3
    else:
        # angles are float32 whatever the model's dtype: 1e-6 of a turn, times the sharpness of warm attention
        assert probes.shifted(decoder(name)) < 1e-4


@each_design
def test_rows_are_independent_and_calls_repeatable(name):
    assert probes.neighbours(decoder(name)) == 0
    assert probes.repeated(decoder(name)) == 0


@each_design
def test_crop_and_reorder_restore_the_state(name):
    model, idx = decoder(name), probes.rows(3, 20)
    padding = torch.cat([probes.pads(9, [0, 2, 4], "left"), torch.ones(3, 11)], 1)
    with torch.no_grad():
        full, order = model(idx, attention_mask=padding), torch.tensor([2, 0, 1])
        _, cache = model(idx[:, :9], attention_mask=padding[:, :9], cache=model.new_cache())
        model(probes.rows(3, 4, seed=5), cache=cache)
        cache.crop(9)
        assert len(cache) == 9
        cache.reorder(order)
        rest, _ = model(idx[order, 9:], cache=cache)
    assert probes.gap(rest, full[order, 9:]) < BOUND


@pytest.mark.sample(4)
@each_design
def test_every_way_of_generating_gives_the_same_tokens(name):
    model, other = decoder(name), make(DESIGNS[name], seed=3, warm=6.0).double()
    idx, mask = probes.rows(2, 9), probes.pads(9, [0, 3], "left")
    plain = model.generate(idx, 8, mask, use_cache=False)
    for draft in (None, model, other):
        assert torch.equal(model.generate(idx, 8, mask, draft=draft), plain)
    alone = model.generate(idx[1:, 3:], 8)
    assert torch.equal(alone[0], plain[1, 3:])
    if DESIGNS[name].window is not None:
        return  # a window counts places: padding between prompt and answer takes some of them
    right = torch.cat([idx[1:, 3:], idx[1:, :3]], 1)
    assert torch.equal(model.generate(right, 8, probes.pads(9, [3], "right"))[0, 9:], alone[0, 6:])


@each_design
def test_loss_is_the_next_token_cross_entropy_of_counted_tokens(name):
    model, idx, mask = decoder(name), probes.rows(3, 12), probes.pads(12, [0, 3, 6], "left")
    total, count = 0.0, 0
    with torch.no_grad():
        for row, real in zip(idx, mask.bool(), strict=True):
            logits = model(row[real][None])[0]
            total += float(F.cross_entropy(logits[:-1], row[real][1:], reduction="sum"))
            count += int(real.sum()) - 1
        assert float(model.loss(idx, attention_mask=mask)) == pytest.approx(total / count, rel=1e-10)


@each_design
def test_a_fresh_model_starts_at_ln_v_and_every_parameter_learns(name):
    model = make(DESIGNS[name])
    idx = probes.rows(4, 128)
    assert abs(float(model.loss(idx).detach()) - math.log(97)) < 0.3
    logits = model(torch.arange(128)[None] % 97)
    (logits * torch.randn(logits.shape)).sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or float(p.grad.abs().max()) < 1e-9]
    relative = DESIGNS[name].position == "rotary"
    assert all(n.endswith("k_proj.bias") for n in dead)  # a bias on keys cancels in the softmax, unless it is rotated
    assert not (relative and dead)


def test_tying_survives_copying_and_loading_and_an_untied_head_is_its_own():
    model = copy.deepcopy(make(Config()))
    model.load_state_dict(make(Config(), seed=2).state_dict())
    assert model.head.weight is model.tokens.weight
    untied = make(Config(tie_weights=False))
    assert untied.head.weight is not untied.tokens.weight


def test_dropout_acts_in_training_only():
    model, idx = make(Config(dropout=0.2)), probes.rows(2, 20)
    with torch.no_grad():
        assert probes.gap(model.train()(idx), model(idx)) > 1e-3
    assert probes.repeated(model.eval()) == 0


def test_the_explicit_and_the_fused_attention_agree():
    for position, kv in itertools.product(["rotary", "alibi", "learned"], [1, 2, 4]):
        cfg = Config(position=position, n_kv_heads=kv)
        explicit, fused = make(cfg, warm=6.0).double(), make(Config(**{**vars(cfg), "fused": True}), warm=6.0).double()
        idx, mask = probes.rows(2, 15), probes.pads(15, [0, 5], "left")
        with torch.no_grad():
            assert probes.gap(explicit(idx, mask)[mask.bool()], fused(idx, mask)[mask.bool()]) < BOUND


def test_an_encoder_sees_both_sides_and_no_padding():
    for placement in ("pre", "post"):
        model = make(Config(kind="encoder", norm_placement=placement), warm=6.0).double()
        assert probes.future(model) > 1e-3
        assert probes.padded(model, "right") < BOUND
        assert probes.padded(model, "left") < BOUND
        assert probes.neighbours(model) == 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal", "alibi"])
def test_an_encoder_decoder_is_causal_cached_and_blind_to_source_padding(position, placement):
    model = make(Config(kind="seq2seq", position=position, norm_placement=placement), warm=6.0).double()
    src, tgt, mask = probes.rows(3, 11), probes.rows(3, 13, seed=2), probes.pads(11, [0, 3, 5], "right")
    with torch.no_grad():
        full = model(src, tgt, mask)
        changed = tgt.clone()
        changed[:, 7:] = 4
        assert probes.gap(model(src, changed, mask)[:, :7], full[:, :7]) == 0
        cache, parts = model.new_cache(), []
        for at, size in ((0, 4), (4, 1), (5, 3), (8, 5)):
            logits, cache = model(src, tgt[:, at : at + size], mask, cache=cache)
            parts.append(logits)
        assert probes.gap(torch.cat(parts, 1), full) < BOUND
        for row, n in enumerate([0, 3, 5]):
            alone = model(src[row : row + 1, : 11 - n], tgt[row : row + 1])
            assert probes.gap(alone[0], full[row]) < BOUND
        assert probes.gap(model(src[:, torch.randperm(11)], tgt), model(src, tgt)) > 1e-4
    assert torch.equal(model.generate(src, 8, mask), model.generate(src, 8, mask, use_cache=False))
