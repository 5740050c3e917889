"""Speculative decoding: greedy output is the model's own, sampled output has the model's distribution."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.generation import Sampling, distribution, draw, generate, speculate, stream
from glassformer.generation.request import GenerationRequest
from glassformer.generation.speculate import DraftedSequence, DraftModel, Lookup, Proposal, Reader, TorchReader, accept
from glassformer.model import build
from tests import variants
from tests.generation.test_state import Counting
from tests.variants import decoder, lively

RAGGED = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7], [9, 3]]
LIVELY = Sampling(temperature=1.2, top_k=20, top_p=0.95)


def untied(**changes):
    """A tied head with random weights repeats its input; this one wanders."""
    return decoder(head=c.Head(tied=False), max_len=64, **changes)


def near(model, noise):
    """A draft that is often right and often wrong: the model with every weight disturbed."""
    draft = build(model.config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    draft.load_state_dict(
        {
            name: value * (1 + noise * torch.randn(value.shape, generator=generator, dtype=value.dtype))
            for name, value in model.state_dict().items()
        }
    )
    return draft


@settings(max_examples=12)
@given(
    config=variants.decoders,
    k=st.integers(1, 6),
    who=st.sampled_from(["the same", "near", "another", "lookup"]),
    kind=st.sampled_from(["static", "growing", "windowed", False]),
    penalty=st.sampled_from([1.0, 1.3]),
)
def test_greedy_output_is_the_models_own(config, k, who, kind, penalty):
    model, _ = lively(config, std=0.5)
    if kind == "windowed" and config.window(0) is None:
        kind = "growing"
    draft = {"the same": model, "near": near(model, 0.2), "lookup": "lookup"}.get(who) or lively(decoder(n_layers=1))[0]
    sampling = Sampling(0.0, repetition_penalty=penalty)
    plain = generate(model, RAGGED[:2], 15, sampling, cache=kind)
    found = generate(model, RAGGED[:2], 15, sampling, cache=kind, draft=draft, draft_tokens=k)
    assert found == plain
    assert found.finished == plain.finished
    if who == "the same":
        assert all(row.rate == 1 and row.passes == math.ceil(15 / (k + 1)) for row in found.acceptance)


class Half:
    """Knows what will come and lies about it: of its proposals the first 0, 1, 2, 3, 0, ... are right."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def propose(self, row, count, uniform):
        right = self.asked % 4
        self.asked += 1
        coming = self.answer[len(row) : len(row) + count]
        return Proposal([token if i < right else (token + 1) % variants.V for i, token in enumerate(coming)])


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", variants.POSITIONS)
@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_greedy_output_survives_rejections_in_every_kind_of_cache(name, window):
    """Every cache is cut back by every number of tokens, past the window too."""
    model, _ = lively(untied(position=variants.POSITIONS[name], window=window), std=0.5)
    answer = generate(model, [[3, 1, 4]], 24, cache=False)[0]
    for kind in ("growing", "static", None, *(["windowed"] if window else [])):
        request = GenerationRequest([[3, 1, 4]], 24, draft_tokens=3)
        row = DraftedSequence([3, 1, 4], 0, TorchReader(model, 27, kind, 3, None), Half(answer), request)
        while not row.ended:
            row.advance()
        assert row.tokens == answer, kind
        assert (row.accepted, row.passes) == (13, 11)  # 1 + 2 + 3 + 4 tokens, twice; 1 + 2; the last


class Remembering(Reader):
    """A model that is asked about each context once: the rule is tested with many draws, the engine elsewhere."""

    def __init__(self, model):
        super().__init__()
        self.model, self.known = model, {}

    def logits(self, row, wanted):
        return torch.stack([self.after(row[:n]) for n in range(len(row) - wanted + 1, len(row) + 1)])

    def after(self, row):
        if tuple(row) not in self.known:
            with torch.no_grad():
                self.known[tuple(row)] = self.model(torch.tensor([row]))[0, -1]
        return self.known[tuple(row)]


WORDS, LENGTH, STD = 5, 3, 0.6
PROMPTS = {"a poor draft": [1], "lookup": [1, 3, 1]}  # the second has something to copy
SAMPLINGS = {
    "plain": Sampling(),
    "temperature and top-k": Sampling(temperature=1.4, top_k=3),
    "top-p and min-p": Sampling(temperature=0.8, top_p=0.8, min_p=0.1),
    "penalty": Sampling(repetition_penalty=9.0),
}


@pytest.fixture(scope="module")
def readers():
    """A target and a draft that knows nothing of it, over five words."""
    return [Remembering(lively(decoder(vocab_size=WORDS, head=c.Head(tied=False)), s, STD)[0]) for s in (1, 2)]


def exact_joint(target, prompt, sampling):
    """(V, V, V): the probability of each continuation, by the chain rule."""
    joint = torch.zeros(WORDS, WORDS, WORDS, dtype=torch.float64)
    for tokens in itertools.product(range(WORDS), repeat=LENGTH):
        joint[tokens] = 1.0
        for n, token in enumerate(tokens):
            row = [*prompt, *tokens[:n]]
            seen = torch.zeros(1, WORDS, dtype=torch.bool)
            seen[0, row] = True
            joint[tokens] *= distribution(target.after(row)[None], sampling, seen)[0, token]
    return joint


def p_value(counts, joint):
    """Pearson's chi-square; cells of which fewer than 5 are expected are put together."""
    expected = joint.flatten() * counts.sum()
    observed = counts.flatten()
    assert not observed[expected == 0].any(), "an impossible continuation was drawn"
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor(float(kept.sum()) - 1, dtype=torch.float64)
    return 1 - float(torch.special.gammainc(freedom / 2, statistic / 2))


def drawn(readers, who, sampling, draws=900):
    """How often each continuation came, and how many of the proposals were accepted."""
    target, draft = readers
    counts = torch.zeros(WORDS, WORDS, WORDS, dtype=torch.float64)
    accepted = proposed = 0
    for seed in range(draws):
        proposer = Lookup() if who == "lookup" else DraftModel(draft, sampling)
        request = GenerationRequest([PROMPTS[who]], LENGTH, sampling, draft_tokens=2)
        row = DraftedSequence(PROMPTS[who], seed, target, proposer, request)
        while not row.ended:
            row.advance()
        counts[tuple(row.new)] += 1
        accepted, proposed = accepted + row.accepted, proposed + row.proposed
    return counts, accepted / proposed


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "who"), [*((name, "a poor draft") for name in SAMPLINGS), ("plain", "lookup")])
def test_sampled_output_has_the_models_distribution(readers, name, who):
    joint = exact_joint(readers[0], PROMPTS[who], SAMPLINGS[name])
    assert abs(joint.sum() - 1) < 1e-12
    counts, accepted = drawn(readers, who, SAMPLINGS[name])
    assert 0.1 < accepted < 0.9  # a draft that is always or never right would test half of the rule
    assert p_value(counts, joint) > 0.01


def accept_always(p, proposal, uniform):
    return [*proposal.tokens, int(draw(list(p)[-1], torch.tensor(uniform[-1:])))]


def draw_the_rest_from_p(p, proposal, uniform):
    each = list(p)
    gained = accept(iter(each), proposal, uniform)
    return [*gained[:-1], int(draw(each[len(gained) - 1], torch.tensor(uniform[-1:])))]


def forget_proposals(logits, sampling, row, proposed, honest=speculate.probabilities):
    return (next(honest(logits[i:], sampling, row, [])) for i in range(len(logits)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("broken", "by", "name", "who"),
    [
        ("accept", accept_always, "plain", "a poor draft"),
        pytest.param("accept", accept_always, "plain", "lookup", marks=pytest.mark.slow),
        pytest.param("accept", draw_the_rest_from_p, "plain", "a poor draft", marks=pytest.mark.slow),
        ("accept", draw_the_rest_from_p, "plain", "lookup"),
        ("probabilities", forget_proposals, "penalty", "a poor draft"),
    ],
)
def test_the_same_test_rejects_a_wrong_rule(readers, monkeypatch, broken, by, name, who):
    monkeypatch.setattr(speculate, broken, by)
    counts, _ = drawn(readers, who, SAMPLINGS[name])
    assert p_value(counts, exact_joint(readers[0], PROMPTS[who], SAMPLINGS[name])) < 1e-6


def test_the_distribution_holds_through_the_engine():
    """As above with nothing remembered: real caches, many rows, one seed each."""
    target, draft = (lively(decoder(vocab_size=WORDS, head=c.Head(tied=False)), s, STD)[0] for s in (1, 2))
    out = generate(target, [[1]] * 200, 2, Sampling(), seed=list(range(200)), draft=draft, draft_tokens=2)
    counts = torch.zeros(WORDS, WORDS, dtype=torch.float64)
    for row in out.new:
        counts[tuple(row)] += 1
    assert p_value(counts, exact_joint(Remembering(target), [1], Sampling()).sum(2)) > 0.01


@pytest.mark.parametrize("sampling", [None, LIVELY, Sampling(repetition_penalty=1.3)])
def test_a_model_accepts_all_that_it_proposes_to_itself(sampling):
    model, _ = lively(untied(), std=0.5)
    out = generate(model, RAGGED, 20, sampling, draft=model, draft_tokens=4)
    assert all(counts.rate == 1 and counts.passes == 4 for counts in out.acceptance)


@pytest.mark.parametrize("n", [1, 2, 5, 21])
@pytest.mark.parametrize("k", [1, 4, 30])
def test_no_token_too_many_and_none_beyond_the_context(n, k):
    """21 new tokens after 8 fill the learned positions to the last; accepting everything goes over any edge."""
    model, _ = lively(decoder(position=c.Learned()))
    for sampling in (None, LIVELY):
        out = generate(model, [RAGGED[2]], n, sampling, draft=model, draft_tokens=k, stop=[])
        assert [len(row) for row in out.new] == [n]
        assert out.finished == ["length"]


@pytest.mark.sample(7)
@pytest.mark.parametrize("who", ["the same", pytest.param("near", marks=pytest.mark.slow), "lookup"])
@pytest.mark.parametrize("place", range(2, 9))
def test_a_stop_inside_an_accepted_block_ends_there(place, who):
    model, _ = lively(untied(), std=0.5)
    draft = {"the same": model, "near": near(model, 0.2), "lookup": "lookup"}[who]
    free = generate(model, [[3, 1, 4]], 12).new[0]
    stop = [free[place - 1 : place + 1]]
    wanted = generate(model, [[3, 1, 4]], 12, stop=stop)
    found = generate(model, [[3, 1, 4]], 12, stop=stop, draft=draft, draft_tokens=5)
    assert found == wanted
    assert len(found.new[0]) <= place + 1
    assert found.finished == ["stop"]
    (counts,) = found.acceptance
    assert counts.accepted <= len(found.new[0]) <= counts.accepted + counts.passes


def test_rows_get_what_they_get_alone():
    model, _ = lively(untied(), std=0.5)
    draft = near(model, 0.3)
    seeds = [5, 6, 7, 8]
    together = generate(model, RAGGED, 15, LIVELY, seed=seeds, draft=draft, stop=[4])
    for i, row in enumerate(RAGGED):
        alone = generate(model, [row], 15, LIVELY, seed=seeds[i], draft=draft, stop=[4])
        assert alone[0] == together[i]
        assert alone.acceptance[0] == together.acceptance[i]
    assert len({len(row) for row in together.new}) > 1  # they ended at different times


def test_a_seed_repeats_itself_and_another_does_not():
    model, _ = lively(untied(), std=0.5)
    one, again, other = (generate(model, [[1]], 15, LIVELY, seed=s, draft=near(model, 0.3)) for s in (3, 3, 4))
    assert one == again
    assert one != other


def test_stream_yields_what_generate_collects_and_can_be_closed():
    model, _ = lively(untied(), std=0.5)
    given = {"sampling": LIVELY, "stop": [4], "draft": near(model, 0.3), "draft_tokens": 3}
    out = generate(model, RAGGED, 12, **given)
    steps = list(stream(model, RAGGED, 12, **given))
    assert [[s[i] for s in steps if s[i] is not None] for i in range(4)] == out.new
    assert not any(all(token is None for token in step) for step in steps)
    begun = stream(model, RAGGED, 12, **given)
    next(begun)
    assert all(counts.passes == 1 for counts in begun.acceptance)
    begun.close()
    assert list(begun) == []


def test_every_pass_is_one_forward_over_the_block():
    model, _ = lively(untied(), std=0.5)
    plain = generate(model, [RAGGED[2]], 20)
    draft = near(model, 0.3)
    for chunk in (None, 2, 5):
        model.decoder.blocks[0] = counter = Counting(model.decoder.blocks[0])
        out = generate(model, [RAGGED[2]], 20, draft=draft, draft_tokens=4, prefill_chunk=chunk)
        model.decoder.blocks[0] = counter.inner
        assert out == plain
        counts, first = out.acceptance[0], 8 + 4
        assert counter.columns[: -counts.passes + 1] == {None: [12], 2: [5, 5, 2], 5: [5, 5, 2]}[chunk]
        assert all(1 <= width <= 5 for width in counter.columns[-counts.passes + 1 :])
        assert sum(counter.columns) == first + counts.proposed - 4 + counts.passes - 1


def test_models_are_left_as_they_were():
    model, _ = lively(untied(dropout=0.5), std=0.5)
    draft = near(model, 0.2)
    quiet = generate(model, [[1, 2]], 10, draft=draft)
    model.train()
    draft.train()
    loud = generate(model, [[1, 2]], 10, draft=draft)
    assert (loud, loud.acceptance) == (quiet, quiet.acceptance)
    assert model.training
    assert draft.training


def test_lookup_by_hand():
    def proposed(row, count=4):
        return Lookup().propose(row, count, [0.0] * count).tokens

    assert proposed([1, 2, 3, 9, 8, 1, 2, 3]) == [9, 8, 1, 2]
    assert proposed([1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3], 2) == [9, 5]  # three that agree before two that are nearer
    assert proposed([4, 6, 4, 7, 4], 1) == [7]  # the latest of two
    assert proposed([7, 7]) == [7, 7, 7, 7]  # its own proposals go on
    assert proposed([5, 1, 2, 1, 2]) == [1, 2, 1, 2]
    assert proposed([1, 2, 3]) == []
    assert proposed([1]) == []
    assert proposed([1, 1], 0) == []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=25), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_lookup_remembers_what_a_search_finds(row, strides):
    """Asked as the row grows, it says what searching the whole row from the back says."""
    asked, length = Lookup(), 0
    for stride in strides:
        length = min(length + stride, len(row))
        held = row[:length]
        wanted = []
        for n in (3, 2, 1):
            ends = [end for end in range(n, length) if held[end - n : end] == held[-n:]] if n <= length else []
            if ends:
                wanted = (held[ends[-1] :] * 9)[:5]
                break
        assert asked.propose(held, 5, [0.0] * 5).tokens == wanted


def test_distributions_apart_by_rounding_alone_leave_a_token_to_draw():
    """p below q by one rounding at the proposal and equal elsewhere: a rejection finds no mass above q."""
    q = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    p = q.clone()
    p[0, 0] = math.nextafter(0.25, 0)
    assert accept(iter([p, p]), Proposal([0], [q]), [1 - 2**-53, 0.5]) == [1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"draft": "looking"}, "draft is 'looking': give a decoder-only model, or 'lookup'"),
        ({"draft": build(variants.seq2seq())}, "draft is a Seq2Seq"),
        ({"draft": build(decoder(vocab_size=30))}, "the draft knows 30 tokens and the model 31"),
        ({"draft": build(decoder(max_len=10))}, "exceed the draft's context of 10"),
        ({"draft": "lookup", "draft_tokens": 0}, "draft_tokens=0 must be a whole number"),
        ({"draft": "lookup", "draft_tokens": True}, "draft_tokens=True must be a whole number"),
        ({"draft": "lookup", "beams": 2}, "cannot use a draft"),
        ({"draft": "lookup", "seed": [1, 2]}, "2 seeds for 1 prompt: give one number"),
        ({"draft": "lookup", "prefill_chunk": 0}, "prefill_chunk=0"),
        ({"draft": "lookup", "model": build(variants.seq2seq())}, "only a decoder-only model"),
        ({"draft": "lookup", "cache": "windowed"}, "no layer of this model has one"),
    ],
)
def test_bad_input_is_refused_in_words(arguments, words):
    with pytest.raises(ValueError, match=words):
        generate(**{"model": build(decoder()), "prompts": [[1]], "max_new_tokens": 10, **arguments})
