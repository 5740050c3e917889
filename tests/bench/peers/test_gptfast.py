"""gpt-fast from a checkout: as many weights in its own architecture, and its own loop. A checkout in miniature."""

import pytest

import glassformer as gf
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
    assert 3 * args.intermediate_size == pytest.approx(2 * 4 * args.dim, abs=3 * gptfast.STEP / 2)
    assert (args.dim, args.n_layer, args.vocab_size) == (64, 2, tiny.VOCAB)


@pytest.mark.parametrize(
    ("name", "heads", "groups", "hidden"),
    [("llama3_2_1b", 32, 8, 8192), ("llama3_8b", 32, 8, 14336), ("gpt2", 12, 12, 2048), ("llama_tiny", 4, 2, 256)],
)
def test_a_llama_has_its_own_shape(name, heads, groups, hidden):
    config = gf.presets.get(name)
    shape = gptfast.shape(config, 640)
    assert (shape["n_head"], shape["n_local_heads"], shape["intermediate_size"]) == (heads, groups, hidden)
    assert (shape["dim"], shape["n_layer"], shape["block_size"]) == (config.d_model, config.n_layers, 1024)
    assert gptfast.shape(config, 5000)["block_size"] == 5064


def test_wide_heads_are_made_up_for_in_the_feed_forward():
    """Qwen3's 16 heads of 128 are twice as wide as its model."""
    config = gf.presets.qwen3_0_6b()
    shape = gptfast.shape(config, 100)
    width = shape["dim"] // shape["n_head"]
    theirs = 2 * shape["dim"] + 2 * shape["n_local_heads"] * width + 3 * shape["intermediate_size"]
    ours = config.d_head * 2 * (config.n_heads + config.n_kv_heads) + 3 * config.d_ff
    assert theirs == pytest.approx(ours, rel=0.01)


def test_a_prompt_alone_is_its_prefill(subject, tmp_path):
    order = tiny.order(subject, "gpt-fast", "gptfast", checkout=str(checkout.gpt_fast(tmp_path)), task="prefill", new=1)
    peer = gptfast.Peer(order)
    peer.theirs.prefill = lambda model, ids, places, **sampling: ids[:, -1:] + places[-1]
    marks = []
    last = order.prompts[0][-1] + 5  # it gives every row the first prompt
    assert peer.generate(order.prompts, 1, lambda: marks.append(1)) == [[last], [last]]
    assert (len(marks), peer.model.caches) == (1, (2, 7))
