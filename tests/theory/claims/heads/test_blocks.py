"""Heads as a sum: the cut of W_o, and engines that pair heads with the wrong rows."""

import torch

from glassformer.model.attention import Attention
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.heads import blocks


def test_cut_takes_consecutive_rows_and_the_control_does_not():
    matrix = torch.arange(6)[:, None]
    assert [b.flatten().tolist() for b in blocks.cut(matrix, 2)] == [[0, 1, 2], [3, 4, 5]]
    assert [b.flatten().tolist() for b in blocks.cut(matrix, 2, interleaved=True)] == [[0, 2, 4], [1, 3, 5]]


def test_storage_of_the_example():
    found = {f.id: f for f in blocks.value_output_merge(Lab())}["storage"]
    assert (found.evidence["merged"], found.evidence["separate"]) == (2_097_152, 524_288)


def test_an_engine_that_mixes_up_its_heads_is_caught(monkeypatch):
    original = Attention.attend

    def heads_in_another_order(self, x, k, v, *rest, **named):
        return original(self, x, k, v.flip(1), *rest, **named)

    monkeypatch.setattr(Attention, "attend", heads_in_another_order)
    found = {f.id: f for f in blocks.value_output_merge(Lab())}
    assert not found["engine against merged form"].passed


def test_an_engine_that_scales_by_the_value_width_is_caught(monkeypatch):
    from glassformer import config as c

    monkeypatch.setattr(c.ModelConfig, "scale", property(lambda config: config.d_value**-0.5))
    found = {f.id: f for f in blocks.value_output_merge(Lab())}
    assert not found["engine against merged form"].passed
