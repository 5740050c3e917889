"""The gradient of a block in every placement, against finite differences of the whole model."""

from typing import Any

import pytest

from glassformer import config as gf

from .test_backward import assert_decoder_gradients, decoder

PLACEMENTS = ("pre", "post", "after", "sandwich", "parallel", "parallel_two")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement(placement: Any) -> None:
    norm = gf.RMSNorm(offset=1.0) if placement in ("sandwich", "after") else gf.LayerNorm(offset=0.5)
    assert_decoder_gradients(decoder(placement=placement, residual_scale=0.6, norm=norm))


def test_layers_with_another_rotation_and_feed_forward() -> None:
    kinds = (
        gf.LayerKind((0,), position=gf.NoPosition()),
        gf.LayerKind((1,), feedforward=gf.Gated(5)),
    )
    attention = gf.Attention(*(6, 2, 4, 3), qk_norm=gf.RMSNorm(), qk_norm_over="all", clip=0.8, softcap=1.5, sinks=True)
    assert_decoder_gradients(decoder(position=gf.Rotary(), layer_kinds=kinds, attention=attention))


@pytest.mark.parametrize("over", ["head", "heads"])
def test_a_norm_after_the_rotation(over: Any) -> None:
    attention = gf.Attention(
        *(6, 2, 4, 3), qk_norm=gf.LayerNorm(bias=False), qk_norm_over=over, qk_norm_after_rotation=True
    )
    assert_decoder_gradients(decoder(position=gf.Rotary(), attention=attention, head=gf.Head(softcap=2.0)))
