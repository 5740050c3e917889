"""What an output reads, by gradient: it agrees with perturbation about the future, and sees what is hidden."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from glassformer.doctor.probes import causality, reach
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.errors import Unsupported
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import Copycat, bert, buggy, failures, gpt2, listed, rotary, t5


@pytest.mark.parametrize("make", [gpt2, rotary, t5])
def test_nothing_of_the_future_and_all_of_the_past_is_read(make):
    finding = reach.future_by_gradient(make())
    assert finding.verdict is Verdict.PASS
    assert finding.measured == 0
    assert {f.verdict for f in reach.past_by_gradient(make())} == {Verdict.PASS}


@pytest.mark.sample(3)
@pytest.mark.parametrize("id", ["no_causal_mask", "leak_one_head", "leak_beyond_64", "leak_block_means", "leak_target"])
def test_what_perturbation_sees_the_gradient_sees(id):
    assert failures([reach.future_by_gradient(buggy(id))]) == ["causal_leak/gradient"]


def test_the_token_that_is_read_is_named():
    evidence = reach.future_by_gradient(buggy("leak_next_token")).evidence
    assert evidence["reads"] == evidence["cut"] + 1


@pytest.mark.parametrize("id", ["over_mask_far_keys", "over_mask_causal_encoder"])
def test_a_token_that_cannot_be_read_is_found(id):
    (failed,) = [f for f in reach.past_by_gradient(buggy(id)) if f.verdict is Verdict.FAIL]
    assert failed.id == "over_mask/gradient"
    assert "does not read token" in failed.evidence["cause"]


def test_an_encoder_reads_both_ways():
    assert failures(reach.past_by_gradient(bert())) == []


@pytest.mark.parametrize("how", ["module", "function", "index", "select"])
def test_the_rows_of_the_tokens_are_found_however_they_are_looked_up(how):
    class Net(Copycat):
        def forward(self, idx):
            table = self.table.weight
            rows = {
                "module": lambda: self.table(idx),
                "function": lambda: F.embedding(idx, table),
                "index": lambda: table[idx],
                "select": lambda: torch.index_select(table, 0, idx.reshape(-1)).view(*idx.shape, -1),
            }[how]()
            rows += 1.0  # in place, as positions are often added
            return self.head(rows)

    with subject_of(Net()).isolated() as isolated:
        sizes = reach.read(isolated, isolated.tokens(2, 6)).sizes(3)
    assert torch.equal(sizes > 0, torch.arange(6).expand(2, 6) == 3)


def test_what_cannot_be_differentiated_is_not_examined():
    class Counts(nn.Module):
        def forward(self, idx):
            return F.one_hot(idx, 7).float()

    class Cut(Copycat):
        def forward(self, idx):
            return super().forward(idx).detach()

    for model, words in ((Counts(), "no table was looked up"), (Cut(7), "carry no gradient")):
        with subject_of(model, vocab_size=7).isolated() as isolated, pytest.raises(Unsupported, match=words):
            reach.read(isolated, isolated.tokens(1, 4))


def test_underflow_is_not_a_mask():
    class Steep(Copycat):
        """Averages over the past with weights that fall by e^-30 per position: 0 in float32 after four only."""

        def forward(self, idx):
            x, t = self.table(idx), torch.arange(idx.shape[1], dtype=self.table.weight.dtype)
            scores = (30 * (t[None] - t[:, None])).masked_fill(t[None] > t[:, None], -torch.inf)
            return self.head(torch.softmax(scores, -1) @ x)

    subject = subject_of(Steep())
    subject.limit = 17
    (finding,) = listed(reach.past_by_gradient(subject))
    assert finding.verdict is Verdict.PASS
    assert finding.evidence["rounding"] > 0


def test_a_model_that_mixes_no_places_masks_none():
    with pytest.raises(Unsupported, match="no position reads another"):
        listed(reach.past_by_gradient(subject_of(Copycat())))


def test_a_declared_sparse_pattern_is_not_judged():
    subject = subject_of(Copycat(), expect={"block_sparse": 4})
    (finding,) = listed(reach.past_by_gradient(subject))
    assert finding.verdict is Verdict.SKIP
    assert "block_sparse" in finding.why


def test_a_declared_prefix_may_be_read():
    from tests.bugs.healthy import WARD

    healthy = next(h for h in WARD if h.id.endswith("prefix-lm"))
    assert reach.future_by_gradient(subject_of(healthy.build(), kind="decoder", expect=dict(healthy.expect))).passed
    assert not reach.future_by_gradient(subject_of(healthy.build(), kind="decoder")).passed
    assert causality.declared_prefix(subject_of(healthy.build(), kind="decoder")) == 0
