"""Caches that a model fills in place or keeps itself are found by trying, and then examined."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from glassformer.doctor.diagnose import diagnose
from glassformer.doctor.probes import modes
from glassformer.doctor.probes.caching import run_chunks
from glassformer.doctor.subject import caches
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.arguments import Setup
from glassformer.doctor.subject.interface import find_cache
from glassformer.finding import Verdict
from tests.bugs.idioms import kept_caches


class Reader(nn.Module):
    """One attention layer over learned positions; `kept` is (k, v) of earlier tokens or None."""

    def __init__(self, bug=None):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=31, n_layer=1, n_head=2, n_embd=16, block_size=64)
        self.table, self.places = nn.Embedding(31, 16), nn.Embedding(64, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 31)
        self.bug = bug

    def read(self, tokens: Tensor, kept, start: int):
        length = tokens.shape[1]
        first = start - (self.bug == "position" and start > 0)
        x = self.table(tokens) + self.places(torch.arange(first, first + length))
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        if kept is not None:
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        hidden = torch.ones(length, start + length, dtype=torch.bool).triu(start + 1)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(hidden, float("-inf")).softmax(-1)
        return self.head(x + self.out((weights @ v).transpose(1, 2).flatten(2))), (k, v)


class FillsDict(Reader):
    def forward(self, tokens, kv_cache=None):
        kept = (kv_cache or {}).get("layer")
        logits, new = self.read(tokens, kept, 0 if kept is None else kept[0].shape[2])
        if kv_cache is not None:
            kv_cache["layer"] = new
        return logits


class FillsList(Reader):
    """Takes a list with one place for each layer."""

    def forward(self, tokens, past=None):
        kept = None if past is None else past[0]
        logits, new = self.read(tokens, kept, 0 if kept is None else kept[0].shape[2])
        if past is not None:
            past[0] = new
        return logits


class Appends(Reader):
    """Takes an empty list."""

    def forward(self, tokens, cache=None):
        kept = (torch.cat([k for k, _ in cache], 2), torch.cat([v for _, v in cache], 2)) if cache else None
        start = 0 if kept is None else kept[0].shape[2]
        logits, (k, v) = self.read(tokens, kept, start)
        if cache is not None:
            cache.append((k[:, :, start:], v[:, :, start:]))
        return logits


class Keeps(Reader):
    """Keeps keys and values itself, from the place that the caller names."""

    def __init__(self, bug=None):
        super().__init__(bug)
        self.k_cache, self.v_cache = torch.zeros(4, 2, 64, 8), torch.zeros(4, 2, 64, 8)

    def forward(self, tokens, start_pos: int = 0):
        rows = len(tokens)
        kept = tuple(c[:rows, :, :start_pos].to(self.head.weight) for c in (self.k_cache, self.v_cache))
        logits, (k, v) = self.read(tokens, kept if start_pos else None, start_pos)
        with torch.no_grad():
            self.k_cache[:rows, :, : k.shape[2]], self.v_cache[:rows, :, : k.shape[2]] = k.float(), v.float()
        return logits


class Returns(Reader):
    def forward(self, tokens, past_key_values=None):
        kept = past_key_values
        logits, new = self.read(tokens, kept, 0 if kept is None else kept[0].shape[2])
        return SimpleNamespace(logits=logits, past=new)


class Makes(Reader):
    """Makes a cache for a batch size that it must be given."""

    def make_cache(self, batch_size):
        return [torch.zeros(batch_size, 2, 0, 8), torch.zeros(batch_size, 2, 0, 8)]

    def forward(self, tokens, cache=None):
        kept = None if cache is None else tuple(part.to(self.head.weight) for part in cache)
        logits, new = self.read(tokens, kept, 0 if kept is None else kept[0].shape[2])
        return logits if cache is None else (logits, list(new))


class Asked(Reader):
    """Returns a cache if it is asked for one by another name than `use_cache`."""

    def forward(self, tokens, cache=None, return_cache=False):
        logits, new = self.read(tokens, cache, 0 if cache is None else cache[0].shape[2])
        return (logits, new) if return_cache else logits


class Offset(Reader):
    """No cache: `offset` shifts positions, and a table happens to be called cached."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos_cached", torch.ones(64, 8))

    def forward(self, tokens, offset: int = 0):
        return self.read(tokens, None, 0)[0] * self.cos_cached[0, 0]


@pytest.mark.parametrize("model", [FillsDict, FillsList, Appends, Keeps, Returns, Makes, Asked])
def test_each_way_to_keep_a_cache_is_found(model):
    subject = subject_of(model())
    assert subject.has_cache
    with subject.isolated() as isolated:
        tokens = isolated.tokens(2, 9)
        stepped, _ = run_chunks(isolated, tokens, [4, 1, 1, 3])
        torch.testing.assert_close(stepped, isolated.logits(tokens))


def test_a_shift_of_positions_is_no_cache():
    assert not subject_of(Offset()).has_cache


def test_a_model_that_keeps_its_cache_holds_one_sequence_by_design():
    assert not [f for f in modes.nothing_is_remembered(subject_of(Keeps())) if f.verdict is Verdict.FAIL]


@pytest.mark.parametrize("model", [FillsDict, Keeps])
def test_a_wrong_position_with_such_a_cache_is_named(model):
    assert diagnose(model(), quick=True).healthy
    assert diagnose(model("position"), quick=True).diagnoses[0].id == "decode_position"


def test_a_container_that_is_never_read_is_none():
    class Forgets(FillsDict):
        def forward(self, tokens, kv_cache=None):
            if kv_cache is not None:
                kv_cache["seen"] = tokens
            return self.read(tokens, None, 0)[0]

    subject = subject_of(Forgets())
    assert subject.interface.empty is None
    assert not caches._fills(subject, dict)


def test_a_field_named_like_a_cache_is_one_and_hidden_states_are_not():
    kept = [torch.zeros(1)]
    assert find_cache(SimpleNamespace(logits=torch.zeros(2), past=kept)) is kept
    assert find_cache({"logits": torch.zeros(2), "new_cache": kept}) is kept
    assert find_cache(SimpleNamespace(logits=torch.zeros(2), hidden_states=kept)) is None


@pytest.mark.parametrize("cls", kept_caches.MODELS)
def test_a_cache_inside_the_model_is_continued_and_a_plain_call_goes_without(cls):
    subject = subject_of(kept_caches.build(cls))
    assert subject.interface.internal
    assert subject.interface.positions is None
    with subject.isolated() as isolated:
        tokens = isolated.tokens(2, 9)
        plain = isolated.logits(tokens)
        for _ in range(2):
            stepped, _ = run_chunks(isolated, tokens, [4, 1, 1, 3])
            torch.testing.assert_close(stepped, plain)
            torch.testing.assert_close(isolated.logits(tokens), plain)


def test_a_method_that_makes_caches_is_undone():
    model = kept_caches.build(kept_caches.SetUp)
    make = Setup("setup_caches", 16)
    before = {name: id(value) for name, value in vars(model.layers[0].mixer).items()}
    make(model, 3)
    assert model.layers[0].mixer.slots.k.shape[:3] == (3, kept_caches.HEADS, 16)
    make.undo(model)
    assert {name: id(value) for name, value in vars(model.layers[0].mixer).items()} == before
    assert model.layers[0].mixer.slots is None


def test_a_flag_named_like_a_cache_is_a_flag():
    class Flag(Returns):
        def forward(self, tokens, kv_cache: bool = False):
            return self.read(tokens, None, 0)[0]

    face = subject_of(Flag()).interface
    assert face.cache is None
    assert face.use_cache == "kv_cache"


class Counted(nn.Module):
    """A recurrence in the way of `mamba_ssm`: it fills a dictionary, the caller counts, and steps take one token."""

    def __init__(self, bug=""):
        super().__init__()
        torch.manual_seed(4)
        self.bug, self.table, self.head = bug, nn.Embedding(31, 16), nn.Linear(16, 31)
        self.maps = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids, position_ids=None, inference_params=None):
        x, given = self.table(input_ids), inference_params
        if given is not None and given.seqlen_offset > 0:
            assert input_ids.shape[1] == 1, "one token at a time"
        for i, read in enumerate(self.maps):
            state, states = torch.zeros_like(x[:, 0]), []
            if given is not None and given.seqlen_offset > 0 and not (i and self.bug):
                state = given.key_value_memory_dict[i]
            for t in range(x.shape[1]):
                state = torch.tanh(0.7 * state + read(x[:, t]))
                states.append(state)
            if given is not None:
                given.key_value_memory_dict[i] = state
            x = x + torch.stack(states, 1)
        return SimpleNamespace(logits=self.head(x))


def test_a_cache_of_which_the_caller_counts_the_tokens():
    subject = subject_of(Counted())
    with subject.isolated() as isolated:
        tokens = isolated.tokens(2, 7)
        stepped, _ = run_chunks(isolated, tokens, [4, 1, 1, 1])
        torch.testing.assert_close(stepped, isolated.logits(tokens))
    assert diagnose(Counted(), quick=True).healthy
    assert diagnose(Counted("lost"), quick=True).diagnoses[0].id == "cache_mismatch"
