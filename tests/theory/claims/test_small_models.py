"""Small engines in which every number matters."""

import torch

from glassformer import config as c
from glassformer.lens import trace
from glassformer.reference import forward, random_params
from glassformer.theory.claims.small_models import (
    SEQUENCE,
    ChangedInputs,
    decoder,
    dependence,
    encoder,
    full_mask,
    random_model,
    seq2seq,
    small_config,
    unmasked,
)

TOKENS = torch.tensor([SEQUENCE])


def test_no_bias_is_zero_and_no_norm_weight_one():
    for parameter in random_model(small_config()).parameters():
        assert ((parameter != 0) & (parameter != 1)).all()


def test_the_engine_has_the_oracles_numbers():
    config = small_config()
    expected = forward(config, random_params(config, 3, 0.5), TOKENS.numpy())
    torch.testing.assert_close(decoder(seed=3)(TOKENS).detach(), torch.from_numpy(expected), atol=1e-12, rtol=0)


def test_a_decoder_without_its_mask_is_the_encoder_with_its_weights():
    model = decoder()
    assert torch.equal(unmasked(model)(TOKENS), model(TOKENS, mask=full_mask(TOKENS)))


def test_unchanged_inputs_give_the_same_logits_and_changed_inputs_others():
    class Blind(ChangedInputs):
        def changed(self, tokens, mask, positions, cache):
            return full_mask(tokens), torch.zeros_like(tokens)

    model = decoder()
    right, other = model(TOKENS), model(TOKENS, mask=full_mask(TOKENS), positions=torch.zeros_like(TOKENS))
    model.__class__ = ChangedInputs
    assert torch.equal(model(TOKENS), right)
    model.__class__ = Blind
    assert torch.equal(model(TOKENS), other)
    assert not torch.equal(other, right)


def test_dependence_is_the_derivative():
    model = decoder(1)
    found = dependence(model, TOKENS)
    step = 1e-6

    def logits(shift):
        def move(site, value):
            return value + shift

        return trace(model, TOKENS, edits={"embed": move}).logits[0]

    shift = torch.zeros(1, 8, 8, dtype=torch.float64)
    shift[0, 2, 5] = step
    slopes = ((logits(shift) - logits(-shift)) / (2 * step)).abs().amax(1)
    assert (slopes <= found[:, 2] + 1e-6).all()
    assert slopes[5] > 0
    assert not slopes[:2].any()


def test_the_three_kinds_are_the_three_kinds():
    assert [type(m.config) for m in (decoder(), encoder(), seq2seq())] == [
        c.DecoderConfig, c.EncoderConfig, c.Seq2SeqConfig,
    ]  # fmt: skip
