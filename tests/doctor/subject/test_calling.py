"""Models that want more than tokens, or want them otherwise, are called as they want."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import glassformer as gf
from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.caching import cache_equals_recomputation
from glassformer.doctor.subject.arguments import InternalCache
from glassformer.finding import Verdict

V, D, H = 31, 16, 2


class Attention(nn.Module):
    """One block with learned positions; subclasses say how they are called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.positions = nn.Embedding(V, D), nn.Embedding(64, D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.head = nn.Linear(D, V)

    def split(self, x):
        return [t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def attend(self, x, mask):
        q, k, v = self.split(x)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))

    def embedded(self, idx, start=0):
        return self.embed(idx) + self.positions(torch.arange(start, start + idx.shape[1]))


def causal(idx):
    return torch.ones(idx.shape[1], idx.shape[1], dtype=torch.bool).tril()


class NeedsMask(Attention):
    def forward(self, idx, mask):
        return self.attend(self.embedded(idx), mask)


class NeedsAdditiveMask(Attention):
    def forward(self, idx, mask):
        assert mask.is_floating_point()
        return self.attend(self.embedded(idx), mask)


class KeepsItsCache(Attention):
    """As the reference code of LLaMA: `start_pos` says where the tokens stand, keys and values stay in the model."""

    wrong = 0

    def __init__(self):
        super().__init__()
        self.cache_k = torch.zeros(8, 64, H, D // H)
        self.cache_v = torch.zeros(8, 64, H, D // H)

    def forward(self, tokens, start_pos):
        x = self.embedded(tokens, start_pos * (1 - self.wrong))
        q, k, v = self.split(x)
        rows, end = len(tokens), start_pos + tokens.shape[1]
        self.cache_k[:rows, start_pos:end] = k.transpose(1, 2).detach()
        self.cache_v[:rows, start_pos:end] = v.transpose(1, 2).detach()
        keys, values = (c[:rows, :end].transpose(1, 2) for c in (self.cache_k, self.cache_v))
        if start_pos == 0:  # so that training works, too
            keys, values = k, v
        mask = torch.ones(tokens.shape[1], end, dtype=torch.bool).tril(start_pos)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class SetsUpCaches(Attention):
    """Does not run before `setup_caches`, whose batch size must be that of the tokens."""

    max_batch_size = -1

    def setup_caches(self, max_batch_size, max_seq_length):
        if self.max_batch_size >= max_batch_size:
            return
        self.max_batch_size = max_batch_size
        self.kv_cache = torch.zeros(2, max_batch_size, H, max_seq_length, D // H)

    def forward(self, idx, input_pos=None):
        assert hasattr(self, "kv_cache"), "caches must be set up first"
        assert input_pos is not None
        x = self.embed(idx) + self.positions(input_pos)
        q, k, v = self.split(x)
        cache = self.kv_cache.clone()
        cache[:, :, :, input_pos] = torch.stack([k, v])
        self.kv_cache = cache.detach()
        visible = torch.arange(cache.shape[3])[None] <= input_pos[:, None]
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=visible)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class SetsUpAndNeedsPositions(SetsUpCaches):
    def forward(self, idx, input_pos):
        return super().forward(idx, input_pos)


class TimeFirst(Attention):
    def forward(self, idx):
        idx = idx.t()
        return self.attend(self.embedded(idx), causal(idx)).transpose(0, 1)


class LogitsTimeFirst(Attention):
    def forward(self, idx):
        return {"out": {"hidden": None, "scores": self.attend(self.embedded(idx), causal(idx)).transpose(0, 1)}}


class Blocks(Attention):
    size, only = 8, False

    def forward(self, idx):
        assert idx.shape[1] % self.size == 0, "whole blocks"
        assert not self.only or idx.shape[1] == self.size, "one block"
        return self.attend(self.embedded(idx), causal(idx))


class OneBlock(Blocks):
    size, only = 32, True


@pytest.mark.parametrize("make", [NeedsMask, NeedsAdditiveMask])
def test_a_required_mask_is_the_one_that_hides_the_future(make):
    subject = subject_of(make(), vocab_size=V)
    assert set(subject.interface.fill) == {"mask"}
    report = gf.diagnose(make(), kind="decoder", vocab_size=V)
    assert not any(d.id == "causal_leak" for d in report.diagnoses), report.text()
    assert report.examined


def test_a_required_mask_that_is_never_applied_is_still_a_leak():
    class Ignores(Attention):
        def forward(self, idx, mask):
            return self.attend(self.embedded(idx), None)

    assert gf.diagnose(Ignores(), kind="decoder", vocab_size=V).diagnoses[0].id == "causal_leak"


def test_a_cache_inside_the_model_is_examined_through_start_pos():
    subject = subject_of(KeepsItsCache(), kind="decoder", vocab_size=V)
    assert subject.interface.internal
    assert subject.new_cache() == InternalCache(0)
    found = list(cache_equals_recomputation(subject))
    assert [f.verdict for f in found] == [Verdict.PASS] * 3
    broken = KeepsItsCache()
    broken.wrong = 1
    names = {
        f.id.split("/")[0]
        for f in cache_equals_recomputation(subject_of(broken, kind="decoder", vocab_size=V))
        if not f.passed
    }
    assert names == {"decode_position"}


@pytest.mark.parametrize("make", [SetsUpCaches, SetsUpAndNeedsPositions])
def test_caches_are_set_up_for_every_batch_size(make):
    subject = subject_of(make(), kind="decoder", vocab_size=V)
    assert subject.interface.setup is not None
    assert subject.interface.internal
    found = list(cache_equals_recomputation(subject))
    assert [f.verdict for f in found] == [Verdict.PASS] * 3


@pytest.mark.parametrize("make", [TimeFirst, LogitsTimeFirst])
def test_time_may_come_first(make):
    report = gf.diagnose(make(), kind="decoder", vocab_size=V)
    assert {d.id for d in report.diagnoses} <= {"norm_placement", "init_loss"}, report.text()
    assert subject_of(make(), kind="decoder", vocab_size=V).interface.time_first is (make is TimeFirst)


def test_whole_blocks_and_one_length_only():
    blocks = subject_of(Blocks(), kind="decoder", vocab_size=V)
    assert (blocks.multiple, blocks.length(13), blocks.lengths()) == (8, 16, [8, 24, 64])
    one = subject_of(OneBlock(), kind="decoder", vocab_size=V)
    assert (one.multiple, one.limit, one.lengths()) == (32, 32, [32])
    for make in (Blocks, OneBlock):
        report = gf.diagnose(make(), kind="decoder", vocab_size=V)
        assert report.healthy, report.text()


class Recurrent(nn.Module):
    """A linear recurrence with a state that is given and returned."""

    forgets = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)

    def forward(self, idx, state=None):
        h = torch.zeros(len(idx), D) if state is None or self.forgets else state
        out = []
        for x in self.embed(idx).unbind(1):
            h = 0.9 * h + torch.tanh(x + 0.1 * h)
            out.append(h)
        return self.head(torch.stack(out, 1)), h


def test_a_recurrent_state_is_a_cache():
    sound, broken = Recurrent(), Recurrent()
    broken.forgets = True
    report = gf.diagnose(sound, kind="decoder", vocab_size=V)
    assert report.healthy, report.text()
    assert "cache_mismatch" in report.coverage
    assert gf.diagnose(broken, kind="decoder", vocab_size=V).diagnoses[0].id == "cache_mismatch"


class NeedsHidden(Attention):
    """`mask` is True where a key is hidden: the wrong way round, the last query gets NaN, and then all of them."""

    def forward(self, idx, mask):
        x = self.embedded(idx)
        for _ in range(2):
            q, k, v = self.split(x)
            weights = (q @ k.transpose(-1, -2) * (D // H) ** -0.5).masked_fill(mask, -torch.inf).softmax(-1)
            x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(x)


def test_a_mask_the_wrong_way_round_is_not_taken_for_a_causal_one():
    subject = subject_of(NeedsHidden())
    tokens = subject.tokens(2, 5)
    assert torch.isfinite(subject.logits(tokens)).all()
    hidden = subject.filled(tokens)["mask"]
    assert torch.equal(hidden.reshape(5, 5), ~causal(tokens))
