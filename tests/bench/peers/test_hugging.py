"""transformers runs the same model and tells of every token."""

import json

import pytest

pytest.importorskip("transformers")

import glassformer as gf
from glassformer.bench.peers import hugging
from tests.bench import tiny


def test_its_tokens_are_those_of_the_engine(subject):
    order = tiny.order(subject, "transformers", "hugging")
    marks = []
    made = hugging.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1))
    assert made == tiny.engine_ids(subject, order)
    assert len(marks) == order.new


def test_the_compiled_one_has_a_static_cache(subject):
    peer = hugging.Peer(tiny.order(subject, "transformers-compiled", "hugging", "bfloat16"))
    assert peer.settings.cache_implementation == "static"
    assert peer.settings.compile_config._compile_all_devices
    assert str(peer.model.dtype) == "torch.bfloat16"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_the_compiled_model_has_the_tokens_of_the_engine(subject):
    order = tiny.order(subject, "transformers-compiled", "hugging")
    assert hugging.Peer(order).generate(order.prompts, order.new, tiny.nothing) == tiny.engine_ids(subject, order)


def test_it_draws_as_glass_sample_does(subject):
    order = tiny.order(subject, "transformers", "hugging", new=40)
    peer = hugging.Peer(order)
    tiny.check_draws(subject, order, peer.generate(order.prompts, order.new, tiny.nothing, sampled=True))
    assert peer.generate(order.prompts, order.new, tiny.nothing) == tiny.engine_ids(subject, order)


@pytest.mark.parametrize(
    ("write", "says_so"),
    [(tiny.write, True), (tiny.write_seq2seq, True), (tiny.write_bart, True), (tiny.write_bart, False)],
)
def test_its_beam_search_is_ours(tmp_path, write, says_so):
    """Also of an encoder-decoder whose config.json does not say so, and after the token that ends a text."""
    made = write(tmp_path)
    file = made.root / "hf" / "config.json"
    keys = json.loads(file.read_text())
    ends = engine_tokens(made, 1)[0][1]
    if not says_so:
        del keys["is_encoder_decoder"]
    file.write_text(json.dumps(keys | {"eos_token_id": ends}))
    generation = made.root / "hf" / "generation_config.json"
    if generation.exists():
        generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": ends}))
    order = tiny.order(made, "transformers", "hugging", rows=1)
    for beams in (1, 3):
        found = hugging.Peer(order).generate(order.prompts, order.new, tiny.nothing, beams=beams)
        assert found == engine_tokens(made, beams)
    assert len(found[0]) == order.new


def engine_tokens(made, beams):
    order = tiny.order(made, "transformers", "hugging", rows=1)
    return gf.generate(gf.load(made.root / "hf"), order.prompts, order.new, beams=beams, stop=[]).new
