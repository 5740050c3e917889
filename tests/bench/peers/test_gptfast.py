"""gpt-fast from a checkout: as many weights in its own architecture, and its own loop. A checkout in miniature."""

import pytest

from glassformer.bench.peers import gptfast
from tests.bench import checkout, tiny

pytestmark = pytest.mark.usefixtures("clean_imports")


def test_it_is_asked_as_its_own_main_asks(subject, tmp_path):
    order = tiny.order(subject, "gpt-fast", "gptfast", "bfloat16", checkout=str(checkout.gpt_fast(tmp_path)))
    peer = gptfast.Peer(order)
    marks = []
    made = peer.generate(order.prompts, order.new, lambda: marks.append(1))
    assert [len(row) for row in made] == [order.new] * 2
    assert len(marks) == order.new - 1  # its callback begins with the second token
    assert str(peer.model.output.weight.dtype) == "torch.bfloat16"


def test_three_gated_matrices_hold_what_two_did(subject, tmp_path):
    order = tiny.order(subject, "gpt-fast", "gptfast", checkout=str(checkout.gpt_fast(tmp_path)))
    args = gptfast.Peer(order).model.args
    assert 3 * args.intermediate_size == pytest.approx(2 * 4 * args.dim, abs=3)
    assert (args.dim, args.n_layer, args.vocab_size) == (64, 2, tiny.VOCAB)


def test_a_prompt_alone_is_its_prefill(subject, tmp_path):
    order = tiny.order(subject, "gpt-fast", "gptfast", checkout=str(checkout.gpt_fast(tmp_path)), task="prefill", new=1)
    peer = gptfast.Peer(order)
    peer.theirs.prefill = lambda model, ids, places, **sampling: ids[:, -1:] + places[-1]
    marks = []
    last = order.prompts[0][-1] + 5  # it gives every row the first prompt
    assert peer.generate(order.prompts, 1, lambda: marks.append(1)) == [[last], [last]]
    assert (len(marks), peer.model.caches) == (1, (2, 7))
