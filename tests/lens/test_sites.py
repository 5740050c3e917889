"""Sites: the list is what a run passes, every name starts with a module's name, and a missing site is explained."""

import re

import pytest
from hypothesis import given, settings
from torch import nn

from glassformer import config as c
from glassformer.lens.sites import MissingSite, site_name, sites_of
from glassformer.lens.trace import trace
from glassformer.model.context import Tap
from tests import variants
from tests.sampled import examples
from tests.variants import lively, tokens

DECODER, SEQ2SEQ = variants.decoder(), variants.seq2seq()


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_the_list_of_sites_is_what_a_run_passes(config):
    model, _ = lively(config)
    extra = {"target": tokens(2, 5)} if isinstance(config, c.Seq2SeqConfig) else {}
    met = []

    class Noting:
        def __call__(self, site, value):
            met.append((site, tuple(value.shape)))
            return value

        def wants(self, site):
            return True

    seen = trace(model, tokens(2, 7), **extra)
    model(*([tokens(2, 7), *extra.values()]), tap=Noting())
    assert [name for name, _ in met] == list(sites_of(config)) == list(seen) == list(seen.sites)
    assert [(site.name, site.shape) for site in seen.sites.values()] == met


@settings(max_examples=examples(30))
@given(config=variants.decoders)
def test_shapes_in_letters_are_the_shapes_in_numbers(config):
    model, _ = lively(config)
    sizes = {"B": 2, "T": 7, "S": 7, "D": config.d_model, "H": config.n_heads, "G": config.n_kv_heads}
    sizes |= {"K": config.d_head, "U": config.d_value, "F": variants.F, "V": config.vocab_size}
    for site in trace(model, tokens(2, 7)).sites.values():
        layer = int(site.name.split(".")[1]) if site.name.startswith("blocks.") else 0
        feedforward = config.layer_feedforward(layer)
        sizes |= {"A": getattr(feedforward, "n_active", None), "E": getattr(feedforward, "n_experts", None)}
        assert tuple(sizes[letter] for letter in site.letters.split(",")) == site.shape, site


def test_every_documented_site_is_listed_with_the_documented_shape():
    documented = dict(re.findall(r"^ +(\S+) +\(([A-Z,]+)\)", Tap.__doc__, re.M))
    listed = {}
    for feedforward in (c.Dense(d_ff=5), c.MoE(n_experts=3, n_active=1, expert=c.Dense(d_ff=5))):
        placement = "sandwich" if isinstance(feedforward, c.Dense) else "pre"
        for site in sites_of(variants.decoder(feedforward=feedforward, placement=placement)).values():
            if not site.name.startswith("blocks.1"):
                listed[site.name.replace("blocks.0", "blocks.I")] = site.letters
    assert listed == documented


def test_sites_are_printed_with_their_shapes():
    model, _ = lively(variants.decoder())
    seen = trace(model, tokens(1, 7), sites=["blocks.0.attention.pattern", "embed"])
    assert str(seen.sites) == (
        "embed                       (B,T,D)    (1,7,14)\nblocks.0.attention.pattern  (B,H,T,S)  (1,6,7,7)"
    )
    assert str(sites_of(model)["logits"]) == "logits  (B,T,V)"


@pytest.mark.parametrize(
    ("config", "site", "sentence"),
    [
        (DECODER, "blocks.0.attenton.pattern", "Did you mean blocks.0.attention.pattern"),
        (DECODER, "nonsense", "sites_of(model) lists them all"),
        (DECODER, "blocks.2.attention.q", "layers are 0 to 1"),
        (DECODER, "blocks.0.cross.pattern", "only the decoder of an encoder-decoder has cross-attention"),
        (DECODER, "blocks.*.feedforward.router", "only a mixture of experts has a router"),
        (DECODER, "decoder.blocks.0.attention.q", "write blocks.0.attention.q"),
        (
            variants.decoder(placement="post"),
            "blocks.0.attention.normed",
            "a sublayer reads the residual stream itself",
        ),
        (variants.decoder(placement="parallel"), "blocks.0.feedforward.normed", "see attention.normed"),
        (variants.decoder(placement="parallel"), "blocks.0.resid_mid", "see attention.normed"),
        (variants.decoder(feedforward=c.NoFeedForward()), "blocks.0.feedforward.out", "attention only"),
        (variants.decoder(head=None), "logits", "has no head"),
        (SEQ2SEQ, "blocks.0.attention.q", "write encoder.blocks.0.attention.q or decoder.blocks.0.attention.q"),
        (SEQ2SEQ, "encoder.blocks.0.cross.q", "only the decoder of an encoder-decoder has cross-attention"),
        (SEQ2SEQ, "encoder.blocks.2.resid_pre", "layers are 0 to 1"),
        (
            variants.decoder(feedforward=c.MoE(n_experts=3, n_active=1, expert=c.Dense(d_ff=5))),
            "blocks.0.feedforward.pre",
            "see feedforward.choice",
        ),
    ],
)
def test_a_site_that_is_not_there_is_refused_with_the_reason(config, site, sentence):
    model, _ = lively(config)
    with pytest.raises(MissingSite) as refused:
        trace(model, tokens(1, 3), sites=["*", site])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@settings(max_examples=examples(30))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_every_site_starts_with_the_name_of_its_module(config):
    """blocks.3.attention.pattern belongs to the module blocks.3.attention, blocks.3.resid_pre to blocks.3."""
    model, _ = lively(config)
    for site in sites_of(config):
        owner, _, tensor = site.rpartition(".")
        assert isinstance(model.get_submodule(owner), nn.Module)
        assert ("blocks." in owner) == (tensor not in ("embed", "final", "logits")), site


def test_a_name_means_itself_or_is_refused():
    assert site_name(DECODER, "blocks.1.attention.q") == "blocks.1.attention.q"
    with pytest.raises(MissingSite, match=r"Did you mean blocks\.0\.attention\.q"):
        site_name(DECODER, "block.0.attention.q")
