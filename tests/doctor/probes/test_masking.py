"""Padding is invisible: content, amount, side, cache, precision."""

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import masking
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, bert, buggy, failures, gpt2, names, rotary, t5


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_do_not_see_padding(make):
    subject = make()
    assert failures(masking.padding_is_invisible(subject)) == []
    assert failures(masking.nothing_is_nan(subject)) == []
    assert failures(masking.padding_constant(subject)) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "id",
    ["mask_ignored", "mask_ignored_one_layer", "right_padding_assumed", "queries_masked", "source_mask_ignored",
     "padding_forgotten", "counts_padding", "counts_padding_when_cached", "mask_of_first_row"],
)  # fmt: skip
def test_each_fault_of_padding_has_its_own_name(id):
    assert names(masking.padding_is_invisible(buggy(id))) == {BUGS[id].diagnosis}


@pytest.mark.parametrize(("id", "where"), [("empty_rows", "float32-padded"), ("float32_constant", "bfloat16-padded")])
def test_nan_is_found_where_it_arises(id, where):
    assert f"mask_nan/{where}" in failures(masking.nothing_is_nan(buggy(id)))


def test_a_padding_constant_is_read_from_the_scores():
    assert failures(masking.padding_constant(buggy("mask_minus_1e4"))) == ["mask_value/padding"]


def test_absolute_positions_of_a_library_are_a_note_and_not_a_bug():
    transformers = pytest.importorskip("transformers")
    from glassformer.doctor.probes import subject_of

    config = transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    findings = list(masking.padding_is_invisible(subject_of(transformers.GPT2LMHeadModel(config))))
    assert names(findings) == set()
    note = next(f for f in findings if f.id == "left_pad_position/without-positions")
    assert note.verdict is Verdict.SKIP
    assert note.evidence["explained"]


class Table(nn.Module):
    """A rotary encoder that counts padding, with cosines and sines kept in float32 as a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.qkv, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)
        angles = torch.arange(200.0)[:, None] * 10000 ** (-torch.arange(0, 16, 2) / 16)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))
        with torch.no_grad():
            self.qkv.weight.mul_(12)

    def forward(self, input_ids, attention_mask=None):
        q, k, v = self.qkv(self.table(input_ids)).chunk(3, -1)
        cos, sin = (t[: input_ids.shape[1]].repeat(1, 2) for t in self.turns)
        q, k = (x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin for x in (q, k))
        scores = q @ k.transpose(1, 2)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None] == 0, -1e30)
        return self.head(scores.softmax(-1) @ v)


def test_left_padding_moves_rotary_tables_by_their_rounding_alone():
    subject = subject_of(Table(), kind="encoder")
    with subject.isolated(dtype=torch.float64) as isolated:
        left, right = (masking._amount_of(isolated, [8], side, True, False) for side in ("left", "right"))
    assert left.gap > 1e3 * right.gap  # float64 does not make the table finer
    assert left.ratio < 1
    assert failures(masking.padding_is_invisible(subject)) == []


def test_nan_in_a_padded_batch_is_no_leak():
    found = list(masking.padding_is_invisible(buggy("empty_rows")))
    assert [f.id for f in found if f.verdict is Verdict.FAIL] == ["mask_nan/padded-left"]


class Empty(nn.Module):
    """A causal decoder of torch's own attention, whose padded queries see no key and get NaN."""

    def __init__(self, positions: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind = positions
        self.table, self.places, self.head = nn.Embedding(31, 16), nn.Embedding(200, 16), nn.Linear(16, 31)
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, input_ids, attention_mask=None):
        length = input_ids.shape[1]
        x, at = self.table(input_ids), torch.arange(length)[None]
        if attention_mask is not None and self.kind == "counted":
            at = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = x if self.kind == "none" else x + self.places(at)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = None if attention_mask is None else attention_mask == 0
        if self.kind == "right":
            hidden = None if hidden is None else hidden | hidden.any(1, keepdim=True)
        for layer in self.layers:
            x = x + layer(x, x, x, attn_mask=future, key_padding_mask=hidden, need_weights=False)[0]
        return self.head(x)


@pytest.mark.parametrize("positions", ["none", "counted", "right"])
def test_nan_is_a_bug_where_left_padding_is_meant_or_the_padding_is_right(positions):
    found = list(masking.nothing_is_nan(subject_of(Empty(positions))))
    assert "mask_nan/float32-padded" in failures(found)


def test_nan_with_left_padding_is_a_note_where_positions_count_the_padding():
    subject = subject_of(Empty("absolute"))
    for found in (list(masking.nothing_is_nan(subject)), list(masking.padding_is_invisible(subject))):
        assert failures(found) == []
        assert [f.evidence.get("explained") for f in found if f.why == masking.EMPTY]
