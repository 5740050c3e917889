"""Windows by layer: kept by the layers' own modules, or alternating with full attention."""

import pytest
import torch

from glassformer.doctor.probes import attention, reach, subject_of
from glassformer.doctor.subject.windows import alternate, own_windows
from glassformer.finding import Verdict
from tests.bugs.styles import inline


class Windowed(inline.Model):
    """Each layer has a window of its own, None for full attention."""

    def forward(self, ids):
        t = torch.arange(ids.shape[1])
        x, far = self.emb(ids), t[:, None] - t
        for block, window in zip(self.blocks, self.layer_windows(), strict=True):
            mask = (far >= 0) & (far < (window or len(t)))
            x = block(x, t.expand_as(ids), mask[None, None])
        return self.unembed(self.out_norm(x))

    def layer_windows(self):
        return self.by_turns if hasattr(self, "by_turns") else [block.window for block in self.blocks]


def windowed(windows, kept: bool, **declared):
    torch.manual_seed(0)
    model = Windowed(type("Settings", (inline.Settings,), declared)).eval()
    if kept:
        for block, window in zip(model.blocks, windows, strict=True):
            block.window = window
    else:
        model.by_turns = windows
    return subject_of(model, kind="decoder")


def judged(subject):
    seen = attention.traced(subject)
    return [f.id for f in attention.masks(subject, seen) if f.verdict is Verdict.FAIL]


def test_windows_that_layers_keep_are_declared():
    subject = windowed([6, None, 6, None], kept=True)
    assert own_windows(subject) == {("blocks", 0): 6, ("blocks", 1): None, ("blocks", 2): 6, ("blocks", 3): None}
    assert judged(subject) == []
    subject = windowed([6, 6, 6, 6], kept=True)
    assert judged(subject) == []
    assert [f.verdict for f in reach.past_by_gradient(subject)] == [Verdict.PASS]


def test_a_flag_of_a_layer_counts_more_than_the_number_that_all_layers_keep():
    subject = windowed([6, None, 6, None], kept=True, window=6)
    for i, block in enumerate(subject.model.blocks):
        block.sliding_window, block.is_sliding, block.window = 6, i % 2 == 0, None if i % 2 else 6
    assert own_windows(subject) == {("blocks", 0): 6, ("blocks", 1): None, ("blocks", 2): 6, ("blocks", 3): None}
    assert judged(subject) == []


def test_a_number_of_kept_keys_is_no_window():
    subject = windowed([None] * 4, kept=True)
    for block in subject.model.blocks:
        block.keep_window_size, block.sliding_window_pattern = 6, 4
    assert own_windows(subject) == {}


def test_the_config_says_it_for_each_layer():
    kinds = ["sliding_attention", "full_attention"] * 2
    subject = windowed([6, None, 6, None], kept=False, window=6, layer_types=kinds)
    for block in subject.model.blocks:
        block.sliding_window = 6
    assert judged(subject) == []


def test_another_window_than_the_one_declared_is_found():
    assert own_windows(windowed([7, 7, 7, 7], kept=True, window=6)) == {}
    assert judged(windowed([7, 7, 7, 7], kept=True, window=6)) == ["window/count"]
    assert judged(windowed([None] * 4, kept=True, window=6)) == ["window/count"]
    assert judged(windowed([6] * 4, kept=False)) == ["over_mask/pattern"]


def test_layers_with_and_without_a_window_may_alternate():
    assert judged(windowed([6, None, 6, None], kept=False, window=6)) == []
    assert judged(windowed([6, 6, None, 6], kept=False, window=6)) == ["window/count"]
    assert judged(windowed([6, None, 7, None], kept=False, window=6)) == ["window/count"]


@pytest.mark.parametrize(
    ("windowed", "regular"),
    [
        ([True, False, True], True),
        ([False, True, False, True], True),
        ([True, True, False, True, True, False], True),
        ([True, False], False),
        ([True, True, True], False),
        ([True, False, False], False),
        ([True, True, False, True], False),
    ],
)
def test_a_regular_order_is_recognised(windowed, regular):
    assert alternate(windowed) is regular
