"""Sites: documented names, documented shapes, and values that can be replaced."""

import re

import torch

from glassformer import config as c
from glassformer.model import tap as tap_module
from glassformer.model.tap import NO_TAP, scoped
from tests import variants
from tests.model.test_attention import Wanting
from tests.variants import lively, tokens

SIZES = {"B": 2, "T": 7, "S": 7, "D": variants.D, "H": 6, "G": 2, "K": variants.K, "U": variants.U, "F": variants.F}
SIZES |= {"V": variants.V, "E": 5, "A": 3}


def documented() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^    (\S+) +\(([A-Z,]+)\)", tap_module.__doc__, re.M)
    return {name.replace("I", "0"): tuple(SIZES[d] for d in dims.split(",")) for name, dims in rows}


def test_every_documented_site_exists_with_its_shape():
    attention = c.Attention(n_heads=6, n_kv_heads=2, d_head=variants.K, d_value=variants.U)
    expected = documented()
    assert len(expected) > 18
    found = {}
    for feedforward in (c.Dense(d_ff=variants.F), c.MoE(n_experts=5, n_active=3, expert=c.Dense(d_ff=variants.F))):
        placement = "sandwich" if isinstance(feedforward, c.Dense) else "pre"
        model, _ = lively(variants.decoder(attention=attention, feedforward=feedforward, placement=placement))
        tap = Wanting("pattern")
        model(tokens(2, 7), tap=tap)
        found |= {site: tuple(value.shape) for site, value in tap.seen.items() if not site.startswith("blocks.1")}
    assert found == expected


def test_a_tap_can_replace_what_it_sees():
    model, _ = lively(variants.decoder())

    class Silence(Wanting):
        def __call__(self, site, value):
            return torch.zeros_like(value) if site.endswith(("attention.out", "feedforward.out")) else value

    ids = tokens(2, 7)
    tap = Wanting()
    model(ids, tap=tap)
    silenced = model(ids, tap=Silence())
    assert torch.allclose(silenced, model.logits(model.decoder.norm(tap.seen["embed"])), atol=1e-13)


def test_encoder_decoder_sites_carry_their_stack():
    model, _ = lively(variants.seq2seq())
    tap = Wanting("pattern")
    model(tokens(2, 5), tokens(2, 3), tap=tap)
    for site in ("encoder.embed", "encoder.blocks.1.attention.pattern", "decoder.blocks.0.cross.pattern", "logits"):
        assert site in tap.seen
    assert tap.seen["decoder.blocks.0.cross.pattern"].shape == (2, 6, 3, 5)


def test_the_silent_tap_builds_no_strings():
    assert scoped(NO_TAP, "blocks.0.") is NO_TAP
