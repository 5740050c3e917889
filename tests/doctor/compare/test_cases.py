"""Both are asked everything both can answer, and each answer is the model's own."""

import torch

from glassformer.doctor.compare.cases import answers, cases_for, draw, is_compiled
from glassformer.doctor.subject.adapt import subject_of
from tests.doctor.compare.pairs import Nano, ours, theirs


def test_lengths_padding_and_cache_where_both_have_them():
    a, b = subject_of(theirs("gpt2")), subject_of(ours("gpt2"))
    names = [case.name for case in cases_for(a, b, None, 97)]
    assert names[:3] == ["5 tokens", "13 tokens", "37 tokens"]  # 131 is more than the context
    assert {"padded on the right", "padded on the left", "through a cache, token by token"} <= set(names)
    plain = [case.name for case in cases_for(a, subject_of(Nano(ours("gpt2"))), None, 97)]
    assert plain == names[:2]  # it declares no context, so only lengths that were tried; no mask, no cache
    source = [case.name for case in cases_for(*(subject_of(m("t5")) for m in (theirs, ours)), None, 97)]
    assert "source padded" in source


def test_padding_and_cache_change_nothing_at_real_places():
    subject = subject_of(ours("llama"))
    cases = {case.name: case for case in cases_for(subject, subject, None, 97)}
    found = answers(subject, list(cases.values()), torch.float32, exact=True)
    left, cached = cases["padded on the left"], cases["through a cache, token by token"]
    assert torch.equal(left.tokens, cached.tokens)
    torch.testing.assert_close(found[left.name][0], found[cached.name][0], rtol=0, atol=1e-10)
    with torch.no_grad():
        alone = subject.model.double()(left.tokens[1:, 4:])
    torch.testing.assert_close(found[left.name][1:, 4:], alone, rtol=0, atol=1e-10)


def test_an_answer_that_fails_is_a_reason():
    model = ours("gpt2")
    subject = subject_of(model)
    case = cases_for(subject, subject, None, 97)[0]
    model.decoder.blocks[0].attention.o = None
    assert "NoneType" in answers(subject, [case], torch.float32, exact=False)[case.name]


def test_tokens_are_drawn_alike_and_special_ids_left_out():
    a, b = subject_of(theirs("gpt2")), subject_of(ours("gpt2"))
    tokens = draw(a, b, 400, 97, seed=3)
    assert torch.equal(tokens, draw(b, a, 400, 97, seed=3))
    assert 1 not in tokens  # eos
    assert not is_compiled(a.model)
