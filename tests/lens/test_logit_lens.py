"""The lens reads the last depth as the model does, earlier ones by the model's own norm and head; tuning helps."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import glassformer as gf
from glassformer import config as c
from glassformer import pretrained
from glassformer.lens.logit_lens import TunedLens, logit_lens, read_out, train_tuned_lens
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from glassformer.training.data import tokenizer
from tests import variants
from tests.sampled import examples
from tests.variants import lively, tokens

TEXT = Path(os.environ.get("GLASSFORMER_DATA") or "nowhere") / "tinyshakespeare.txt"


@settings(max_examples=examples(30))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_the_last_depth_is_the_models_own_output(config):
    model, _ = lively(config)
    extra = {"target": tokens(2, 5)} if isinstance(config, c.Seq2SeqConfig) else {}
    read = logit_lens(model, tokens(2, 7), top=3, logits=True, **extra)
    logits = trace(model, tokens(2, 7), sites=(), **extra).logits
    assert read.logits.shape == (3, *logits.shape)
    assert (read.logits[-1] - logits).abs().max() <= 1e-12
    assert read.divergence[-1].abs().max() <= 1e-12
    assert read.agreement[-1] == 1
    assert read.divergence.min() >= -1e-12


def test_every_depth_is_the_head_of_the_normed_stream():
    model, _ = lively(variants.decoder(norm=c.RMSNorm(), head=c.Head(tied=False, bias=True)))
    ids = tokens(2, 7)
    read, seen = logit_lens(model, ids, logits=True), trace(model, ids, sites=["blocks.*.resid_pre", "*.resid_post"])
    assert read.depths == ("blocks.0.resid_pre", "blocks.0.resid_post", "blocks.1.resid_post")
    for depth, site in enumerate(read.depths):
        x = seen[site]
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.decoder.norm.weight
        assert (read.logits[depth] - normed @ model.head.weight.T - model.head.bias).abs().max() <= 1e-12


def test_top_tokens_entropy_and_divergence_follow_from_the_logits():
    model, _ = lively(variants.decoder())
    read = logit_lens(model, tokens(2, 7), top=4, logits=True)
    p = read.logits.softmax(-1)
    assert torch.equal(read.top, p.topk(4).indices)
    assert torch.allclose(read.probabilities, p.topk(4).values, atol=1e-15)
    assert torch.allclose(read.entropy, torch.distributions.Categorical(probs=p).entropy(), atol=1e-12)
    by_hand = (p[-1] * (p[-1] / p).log()).sum(-1)
    assert torch.allclose(read.divergence, by_hand, atol=1e-12)
    assert read.agreement.tolist() == (read.top[..., 0] == read.top[-1, ..., 0]).double().mean((1, 2)).tolist()
    assert logit_lens(model, tokens(2, 7)).logits is None


def test_an_untrained_tuned_lens_is_the_plain_lens():
    model, _ = lively(variants.decoder())
    plain, tuned = (logit_lens(model, tokens(2, 7), tuned=t) for t in (None, TunedLens.plain(model)))
    assert torch.equal(plain.divergence, tuned.divergence)


def test_a_tuned_lens_learns_what_a_constant_last_block_adds():
    """With a last block that adds only its bias, a constant vector, the tuned lens must learn exactly that vector."""
    model, _ = lively(variants.decoder(n_layers=2, feedforward=c.NoFeedForward()), std=0.5)
    with torch.no_grad():
        model.blocks[1].attention.o.weight.zero_()
        model.blocks[1].attention.o.bias.normal_(std=4.0, generator=torch.Generator().manual_seed(1))
    lens = train_tuned_lens(model, [tokens(8, 13, seed=n) for n in range(8)], steps=200, learning_rate=0.02)
    held_out = tokens(8, 13, seed=99)
    plain, tuned = (logit_lens(model, held_out, tuned=t).divergence[1].mean().item() for t in (None, lens))
    assert plain > 0.2
    assert tuned < 0.15 * plain  # 0.279 and 0.019 measured


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.exists(), reason="the Shakespeare corpus is not here: set GLASSFORMER_DATA")
def test_tuning_lowers_the_divergence_of_bard_on_held_out_text_at_every_layer():
    model = gf.load("bard", dtype="float32")
    words = tokenizer.load(pretrained.FOLDERS["bard"])
    ids = torch.as_tensor(words.encode(TEXT.read_text(encoding="utf-8")[-111_000:]), dtype=torch.long)
    train, held_out = ids[: 12 * 4 * 96].view(12, 4, 96), ids[90_000 : 90_000 + 8 * 96].view(8, 96)
    lens = train_tuned_lens(model, list(train), steps=24, seed=1)
    plain, tuned = (logit_lens(model, held_out, tuned=t) for t in (None, lens))
    before, after = plain.divergence.mean((1, 2)), tuned.divergence.mean((1, 2))
    # measured in nats: 15.0, 1.95, 1.29, 1.01, 0.73, 0.39 before; 4.79, 1.17, 0.95, 0.78, 0.59, 0.31 after 24 steps
    assert (after[:-1] < 0.9 * before[:-1]).all(), (before, after)
    assert after[-1] == before[-1]
    assert lens.losses[-1] < lens.losses[0]


def test_training_a_lens_repeats_itself_and_leaves_the_model_alone():
    model, _ = lively(variants.decoder())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [tokens(2, 7, seed=n) for n in range(3)]
    first, again, other = (train_tuned_lens(model, batches, 5, seed=s) for s in (0, 0, 1))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not first.weight.requires_grad
    assert read_out(model, trace(model, tokens(2, 7))["blocks.1.resid_post"]).shape == (2, 7, variants.V)


def test_errors_name_the_remedy():
    model, _ = lively(variants.decoder())
    headless, _ = lively(variants.decoder(head=None))
    both, _ = lively(variants.seq2seq())
    wide, _ = lively(variants.decoder(n_layers=3))
    ids = tokens(2, 7)
    cases = [
        (lambda: logit_lens(headless, ids), "no layer can be read as tokens"),
        (lambda: logit_lens(model, ids, top=32), "top=32 is outside the vocabulary of 31 tokens: use 1 to 31"),
        (lambda: logit_lens(model, ids, tuned=TunedLens.plain(wide)), "for another model"),
        (lambda: train_tuned_lens(both, [ids]), "use the logit lens"),
        (lambda: train_tuned_lens(model, []), "0 batches"),
        (lambda: train_tuned_lens(model, [ids], steps=0), "steps=0"),
    ]
    for attempt, sentence in cases:
        with pytest.raises(LensError) as refused:
            attempt()
        assert sentence in str(refused.value)
