"""transformers runs the same model and tells of every token."""

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


def test_its_beam_search_is_ours(subject):
    order = tiny.order(subject, "transformers", "hugging", rows=1)
    found = hugging.Peer(order).generate(order.prompts, order.new, tiny.nothing, beams=3)
    assert found == gf.generate(gf.load(subject.root / "hf"), order.prompts, order.new, beams=3, stop=[]).new
