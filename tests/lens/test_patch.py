"""Patching: own values change nothing, edits do what they are called, and effects are restored differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glassformer as gf
from glassformer import config as c
from glassformer.lens.patch import (
    from_run,
    mean,
    patch,
    patch_effects,
    path_effect,
    resample,
    value,
    zero,
)
from glassformer.lens.residual import FrozenNorm, attribute_logits, head_outputs
from glassformer.lens.sites import LensError, sites_of
from glassformer.lens.trace import trace
from tests import variants
from tests.sampled import examples
from tests.variants import lively, ragged_mask, tokens


def run(config, rows=2):
    model, _ = lively(config)
    extra = {"target": tokens(rows, 5, seed=3)} if isinstance(config, c.Seq2SeqConfig) else {}
    return model, tokens(rows, 7), extra


@settings(max_examples=examples(40))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs, data=st.data())
def test_patching_with_own_values_changes_nothing_bit_for_bit(config, data):
    model, ids, extra = run(config)
    whole = trace(model, ids, **extra)
    assert torch.equal(patch(model, ids, {site: from_run(whole) for site in whole}, **extra), whole.logits)
    site = data.draw(st.sampled_from(list(sites_of(config))))
    one = trace(model, ids, sites=site, **extra)  # asks for the same scores and patterns as the patch
    assert torch.equal(patch(model, ids, {site: from_run(one)}, **extra), one.logits)
    some = from_run(one, positions=[0, -1], rows=[1])
    assert torch.equal(patch(model, ids, {site: some}, **extra), one.logits)


def test_every_site_is_live_a_foreign_value_changes_the_logits():
    """The control of the test above: at every site another run's value is noticed."""
    for config in (variants.decoder(), variants.decoder(placement="parallel"), variants.seq2seq(placement="post")):
        model, ids, extra = run(config)
        other = trace(model, tokens(2, 7, seed=9), **({"target": tokens(2, 5, seed=8)} if extra else {}))
        for site in sites_of(config):
            same = trace(model, ids, sites=site, **extra).logits
            patched = patch(model, ids, {site: from_run(other)}, **extra)
            assert (patched - same).abs().max() > 1e-6, site


def test_patching_the_stream_of_another_run_gives_that_run():
    model, ids, _ = run(variants.decoder())
    other = trace(model, tokens(2, 7, seed=9), sites="blocks.1.resid_pre")
    assert torch.equal(patch(model, ids, {"blocks.1.resid_pre": from_run(other)}), other.logits)


def test_zeroing_a_head_equals_zeroing_its_slice_of_the_output_matrix():
    model, ids, _ = run(variants.decoder())
    silenced = patch(model, ids, {"blocks.0.attention.heads": zero(heads=[4])})
    assert (silenced - model(ids)).abs().max() > 1e-3
    with torch.no_grad():
        model.blocks[0].attention.o.weight[:, 16:20] = 0
    assert (silenced - model(ids)).abs().max() <= 1e-12


def test_restrictions_touch_only_what_they_name():
    model, ids, _ = run(variants.decoder())
    edit = {"blocks.0.attention.v": value(torch.tensor(3.0), heads=[1], positions=[2, -1], rows=[0])}
    seen, before = (trace(model, ids, sites="blocks.0.attention.v", edits=e) for e in (edit, None))
    after, was = seen["blocks.0.attention.v"], before["blocks.0.attention.v"]
    changed = after != was
    assert set(map(tuple, changed.any(-1).nonzero().tolist())) == {(0, 1, 2), (0, 1, 6)}
    assert (after[0, 1, [2, 6]] == 3).all()


def test_a_pattern_of_sites_is_edited_everywhere_and_a_function_is_an_edit():
    model, ids, _ = run(variants.decoder())
    seen = trace(model, ids, edits={"blocks.*.attention.out": lambda site, x: 0 * x, "blocks.1.*.out": zero()})
    for site in ("blocks.0.attention.out", "blocks.1.attention.out", "blocks.1.feedforward.out"):
        assert not seen[site].any()
    assert seen["blocks.0.feedforward.out"].any()


def test_mean_ablation_uses_this_run_or_a_reference():
    model, ids, _ = run(variants.decoder())
    site, other = "blocks.0.attention.heads", trace(model, tokens(5, 7, seed=4), sites="blocks.0.attention.heads")
    own = trace(model, ids, sites=site)[site]
    both = trace(model, ids, sites=site, edits={site: mean()})[site]
    assert torch.allclose(both, own.mean((0, 2), keepdim=True).expand_as(own), atol=1e-15)
    rows = trace(model, ids, sites=site, edits={site: mean(over=["rows"])})[site]
    assert torch.allclose(rows, own.mean(0, keepdim=True).expand_as(own), atol=1e-15)
    reference = trace(model, ids, sites=site, edits={site: mean(of=other)})[site]
    assert torch.allclose(reference, other[site].mean((0, 2), keepdim=True).expand_as(own), atol=1e-15)


def test_resampling_takes_whole_rows_of_the_other_run_the_same_at_every_site():
    model, ids, _ = run(variants.decoder())
    sites = ["blocks.0.attention.heads", "blocks.0.feedforward.out"]
    other = trace(model, tokens(11, 7, seed=4), sites=sites)

    def chosen(seed):
        """Which rows of the other run each site got."""
        seen = trace(model, ids, sites=sites, edits={site: resample(other, seed=seed) for site in sites})
        return [[(other[s] == row).flatten(1).all(1).nonzero().item() for row in seen[s]] for s in sites]

    draws = [chosen(seed) for seed in range(9)]
    assert all(heads == feedforward for heads, feedforward in draws)
    assert len({tuple(heads) for heads, _ in draws}) > 2


def test_experts_can_be_chosen_by_hand():
    config = variants.decoder(feedforward=c.MoE(n_experts=5, n_active=2, expert=c.Dense(d_ff=variants.F)))
    model, ids, _ = run(config)
    logits = patch(model, ids, {"blocks.0.feedforward.choice": value(torch.tensor([3, 1]))})
    assert (logits - model(ids)).abs().max() > 1e-3
    with pytest.raises(LensError, match="integers"):
        patch(model, ids, {"blocks.0.feedforward.choice": mean()})


def pair():
    clean, corrupt = tokens(2, 7), tokens(2, 7)
    corrupt[:, 3] = (corrupt[:, 3] + 5) % variants.V
    return clean, corrupt


@pytest.mark.parametrize("batch", [1, 5, 64])
def test_effect_maps_equal_patching_one_position_at_a_time(batch):
    model, _ = lively(variants.decoder())
    clean, corrupt = pair()
    found = patch_effects(model, clean, corrupt, 4, torch.tensor([9, 2]), batch=batch, position=5)
    assert found.effects.shape == (2, 6, 7)
    assert found.letters == "L,H,T"
    seen = trace(model, clean)

    def difference(logits):
        return (logits[:, 5, 4] - logits[[0, 1], 5, [9, 2]]).mean().item()

    low, high = difference(model(corrupt)), difference(model(clean))
    assert (found.corrupt, found.clean) == pytest.approx((low, high), abs=1e-12)
    for layer, head, position in [(0, 0, 3), (0, 5, 4), (1, 2, 5), (1, 1, 6), (0, 3, 0)]:
        edit = {f"blocks.{layer}.attention.heads": from_run(seen, heads=[head], positions=[position])}
        expected = (difference(patch(model, corrupt, edit)) - low) / (high - low)
        assert float(found.effects[layer, head, position]) == pytest.approx(expected, abs=1e-9)
    assert found.effects[:, :, 6].abs().max() <= 1e-9  # after the place that is read: nothing can reach it
    assert found.effects[:, :, :3].abs().max() <= 1e-9  # before the texts differ: nothing to restore


def test_restoring_the_position_that_differs_restores_everything():
    model, _ = lively(variants.decoder())
    clean, corrupt = pair()
    stream = patch_effects(model, clean, corrupt, 4, 9, "resid_pre")
    assert stream.letters == "L,T"
    assert stream.effects.shape == (2, 7)
    assert stream.effects[0].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0], abs=1e-9)
    after = patch_effects(model, clean, corrupt, 4, 9, "resid_post", layers=[1])
    assert after.effects[0].tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 1], abs=1e-9)
    assert after.sites == ("blocks.1.resid_post",)


def test_effects_of_keys_of_whole_heads_and_of_an_encoder_decoder():
    model, _ = lively(variants.decoder())
    clean, corrupt = pair()
    keys = patch_effects(model, clean, corrupt, 4, 9, "attention.k")
    assert (keys.letters, tuple(keys.effects.shape)) == ("L,G,T", (2, 2, 7))
    heads = patch_effects(model, clean, corrupt, 4, 9, each_position=False)
    assert (heads.letters, tuple(heads.effects.shape)) == ("L,H", (2, 6))
    both, _ = lively(variants.seq2seq())
    found = patch_effects(both, clean, corrupt, 4, 9, "encoder.blocks.*.resid_pre", target=tokens(2, 5).tolist(),
                          source_mask=ragged_mask([7, 6], 7, "right"))  # fmt: skip
    assert found.effects[0].tolist() == pytest.approx([0, 0, 0, 1, 0, 0, 0], abs=1e-9)


@settings(max_examples=examples(20))
@given(placement=st.sampled_from(["pre", "parallel"]), norm=variants.norms, head=variants.heads)
def test_the_direct_path_with_a_frozen_norm_is_direct_logit_attribution(placement, norm, head):
    head = c.Head(tied=head.tied, bias=head.bias, scale=head.scale)
    model, _ = lively(variants.decoder(placement=placement, norm=norm, head=head))
    clean, corrupt = pair()
    site = "blocks.0.attention.heads"
    found = path_effect(model, clean, corrupt, 4, 9, (site, 2), freeze_norm=True)
    good, bad = (trace(model, ids, sites=[site, "blocks.1.resid_post"]) for ids in (clean, corrupt))
    frozen = FrozenNorm.at(model.decoder.norm, good["blocks.1.resid_post"])
    table = model.embed.tokens.weight if model.head.weight is None else model.head.weight
    moved = head_outputs(model.blocks[0].attention, bad[site] - good[site])[2]
    expected = (frozen.linear(moved)[:, -1] @ (table[4] - table[9])) * head.scale
    assert (found.change - expected).abs().max() <= 1e-10
    attributed = attribute_logits(model, clean, 4, 9)["blocks.0.attention.head.2"]
    written = frozen.linear(head_outputs(model.blocks[0].attention, bad[site])[2])[:, -1] @ (table[4] - table[9])
    assert (found.change - (written * head.scale - attributed)).abs().max() <= 1e-10


def test_paths_through_a_later_layer_and_around_it():
    """Attention only, two layers: a head of layer 0 reaches the logits directly and through layer 1."""
    model, _ = lively(variants.decoder(feedforward=c.NoFeedForward()))
    clean, corrupt = pair()
    site, reads = "blocks.0.attention.heads", [f"blocks.1.attention.{x}" for x in "qkv"]
    sent = {site: from_run(trace(model, corrupt, sites=site), heads=[1])}
    arrived = trace(model, clean, sites=reads, edits=sent)

    def change(edits):
        logits, before = patch(model, clean, edits)[:, -1], trace(model, clean, sites=()).logits[:, -1]
        return (logits[:, 4] - logits[:, 9]) - (before[:, 4] - before[:, 9])

    through = path_effect(model, clean, corrupt, 4, 9, (site, 1), dict.fromkeys(reads))
    assert (through.change - change({name: from_run(arrived) for name in reads})).abs().max() <= 1e-12
    direct = path_effect(model, clean, corrupt, 4, 9, (site, 1))
    kept = trace(model, clean, sites="blocks.1.attention.heads")
    assert (direct.change - change({**sent, "blocks.1.attention.heads": from_run(kept)})).abs().max() <= 1e-12
    assert min(direct.change.abs().min(), through.change.abs().min()) > 1e-6


def test_a_path_cannot_lead_backwards():
    model, _ = lively(variants.decoder())
    clean, corrupt = pair()
    nothing = path_effect(model, clean, corrupt, 4, 9, ("blocks.1.attention.heads", 1), {"blocks.0.attention.q": None})
    assert nothing.change.abs().max() <= 1e-12
    assert nothing.share == pytest.approx(0, abs=1e-10)


def test_one_receiving_head_is_part_of_the_whole_site():
    model, _ = lively(variants.decoder())
    clean, corrupt = pair()
    sender = ("blocks.0.feedforward.out", None)
    one = path_effect(model, clean, corrupt, 4, 9, sender, {"blocks.1.attention.v": [1]})
    whole = path_effect(model, clean, corrupt, 4, 9, sender, {"blocks.1.attention.v": [0, 1]})
    unrestricted = path_effect(model, clean, corrupt, 4, 9, sender, {"blocks.1.attention.v": None})
    assert torch.equal(whole.change, unrestricted.change)
    assert (one.change - whole.change).abs().min() > 1e-9


def test_training_mode_and_gradients():
    config = c.replace(variants.decoder(), dropout=0.5)
    model, ids, _ = run(config)
    still = model(ids)
    model.train()
    assert torch.equal(patch(model, ids, {}), still)
    assert model.training
    assert patch(model, ids, {"embed": value(torch.zeros(()))}, grad=True).requires_grad
    assert not patch(model, ids, {}).requires_grad


def test_patch_is_a_public_name():
    import glassformer.lens.patch  # noqa: F401

    model, ids, _ = run(variants.decoder())
    assert torch.equal(gf.patch(model, ids, {}), model(ids))


def test_errors_name_the_remedy():
    model, ids, _ = run(variants.decoder())
    longer = trace(model, tokens(2, 9))
    clean, corrupt = pair()
    cases = [
        (lambda: patch(model, ids, {"blocks.0.attention.head": zero()}), "Did you mean blocks.0.attention.heads"),
        (lambda: patch(model, ids, {"embed": from_run(longer)}), "texts of the same length"),
        (lambda: patch(model, ids, {"embed": zero(heads=[0])}), "embed has no heads"),
        (lambda: patch(model, ids, {"blocks.0.attention.k": zero(heads=[2])}), "head 2 does not exist at blocks.0"),
        (lambda: patch(model, ids, {"embed": zero(positions=[7])}), "position 7 does not exist at embed"),
        (lambda: patch(model, ids, {"embed": lambda s, x: x[:1]}), "it must keep the shape"),
        (lambda: mean(over=["heads"]), "average over 'rows', 'positions' or both"),
        (lambda: patch_effects(model, clean, clean, 4, 9), "there is nothing to restore"),
        (lambda: patch_effects(model, clean, corrupt[:, :5], 4, 9), "and the corrupt text has 5 tokens: patching"),
        (lambda: patch_effects(model, clean, corrupt[:1], 4, 9), "2 clean and 1 corrupt texts"),
        (lambda: patch_effects(model, clean, corrupt, 4, 31), "token id 31 is outside the vocabulary of 31"),
        (lambda: patch_effects(model, clean, corrupt, 4, torch.tensor([1, 2, 3])), "3 answers were given for 2 rows"),
        (lambda: patch_effects(model, clean, corrupt, 4, 9, layers=[2]), "give one or more of 0 to 1"),
        (lambda: patch_effects(model, clean, corrupt, 4, 9, position=7), "position 7 is outside a text of 7"),
        (lambda: patch_effects(model, clean, corrupt, 4, 9, cache=model.new_cache()), "leave it out"),
        (lambda: path_effect(model, clean, corrupt, 4, 9, ("embed", None)), "does not write to the residual stream"),
        (
            lambda: path_effect(model, clean, corrupt, 4, 9, ("blocks.0.attention.heads", 0), {"logits": None},
                                freeze_norm=True),
            "leave one of them out",
        ),
    ]  # fmt: skip
    for attempt, sentence in cases:
        with pytest.raises(LensError) as refused:
            attempt()
        assert sentence in str(refused.value)
    post, _ = lively(variants.decoder(placement="post"))
    with pytest.raises(LensError, match="no final norm to freeze"):
        path_effect(post, clean, corrupt, 4, 9, ("blocks.0.attention.heads", 0), freeze_norm=True)
