"""Plans: what was measured on one device comes out, and many devices obey the arithmetic of rings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.config import presets
from glassformer.sizing.devices import H200
from glassformer.sizing.parameters import count
from glassformer.sizing.plan import all_gather, all_reduce, best, copies, plan, plans, reduce_scatter, work
from glassformer.sizing.rank_memory import rank_bytes
from glassformer.sizing.strategy import Strategy
from glassformer.training import read_run
from glassformer.training.distributed.group import check

GPT2 = presets.gpt2(vocab_size=50304)


@pytest.mark.parametrize(("batch", "measured"), [(12, 520_733), (32, 580_618), (64, 600_438)])
def test_one_gpu_is_predicted_as_it_was_measured(batch, measured):
    """docs/benchmarks_history.md, GPT-2 124M at 1,024 tokens; only the largest batch was profiled to find the rates."""
    assert plan(GPT2, 1, H200, "data", batch, 1024).tokens_per_second == pytest.approx(measured, rel=0.05)


def test_rings_move_what_rings_move():
    one = replace(H200, latency=0.0)
    assert all_gather(8e9, 8, one) == pytest.approx(7e9 / one.link)
    assert all_reduce(8e9, 8, one) == pytest.approx(14e9 / one.link)
    assert all_gather(8e9, 1, one) == 0
    # 4 machines of 8: inside as before, then each device an eighth with its 3 peers
    assert all_gather(8e9, 32, one) == pytest.approx(7e9 / one.link + 1e9 * 3 / 4 / one.network)


def test_sums_gathers_and_scatters_have_their_own_rates():
    odd = replace(H200, link=1e9, gather=2e9, scatter=4e9, latency=0.0)
    assert [f(8e9, 2, odd) for f in (all_reduce, all_gather, reduce_scatter)] == pytest.approx([8.0, 2.0, 1.0])


def test_every_message_waits_for_its_beginning():
    slow = replace(H200, latency=1.0)
    assert all_gather(0.0, 8, slow, messages=5) == pytest.approx(5 * 3)  # log2(8) hops
    assert all_gather(0.0, 32, slow, messages=5) == pytest.approx(5 * (3 + 2))
    # a sharded step sends a message for each of 12 layers and one for the rest: two gathers and a scatter
    slow = replace(slow, link=1e30, gather=1e30, scatter=1e30, memory=1e30, overlap=0.0)
    assert plan(GPT2, 2, slow, "sharded", 1, 256).exposed == pytest.approx(3 * 13)
    # divided blocks: 4 gathers and 4 scatters in each layer; outside of them 2 gathers and 7 sums, there and back
    assert plan(GPT2, 2, slow, "tensor 2", 1, 256).exposed == pytest.approx(8 * 12 + 2 + 2 * 7)
    # sums go there and back, in buckets of 25 MiB
    assert plan(GPT2, 2, slow, "data", 1, 256).exposed == pytest.approx(2 * -(-4 * count(GPT2) // (25 * 2**20)))


def test_a_sharded_step_over_the_memory_of_its_own_processor_is_the_sum_of_its_parts():
    """Nothing hides: compute, two gathers, a scatter, and the copies in and out of each."""
    own = replace(H200, link=3e9, gather=1e9, scatter=0.5e9, latency=0.0, overlap=0.0, gaps=0.0)
    found, size = plan(GPT2, 2, own, "sharded", 2, 256), 4 * count(GPT2)
    sent = 2 * size / 2 / 1e9 + size / 2 / 0.5e9
    assert found.exposed == pytest.approx(found.communication)
    assert found.exposed == pytest.approx(sent + copies(3 * size, 2, own))
    assert copies(3 * size, 2, own) == pytest.approx(9 * size / own.memory)  # read and written: whole, and half of it
    assert found.compute == pytest.approx(2 * work(GPT2, 256).seconds(own) + 25 * count(GPT2) / own.memory)


def test_what_hides_messages_does_not_hide_copies():
    hidden = replace(H200, overlap=1.0)
    found = plan(GPT2, 8, hidden, "sharded", 64, 1024)
    assert found.exposed == pytest.approx(copies(12 * count(GPT2), 8, hidden))
    assert plan(GPT2, 8, hidden, "sharded", 64, 1024, weight_bytes=2).exposed < found.exposed
    assert plan(GPT2, 1, hidden, "sharded", 64, 1024).exposed == 0


@given(st.sampled_from([2, 8, 64, 1024]), st.integers(1, 16), st.sampled_from([256, 1024]))
def test_more_devices_never_make_a_step_shorter_than_its_compute(gpus, batch, context):
    for found in plans(GPT2, gpus, H200, batch, context):
        assert found.step >= found.compute
        assert found.exposed <= found.communication + 1e-12
        assert 0 < found.utilisation < 1
        assert found.batch == gpus * batch // found.settings.get("context", 1)
        assert found.tokens == found.batch * context


def test_without_links_to_wait_for_all_ways_do_the_same_work():
    links = {"link": 1e30, "gather": 1e30, "scatter": 1e30, "network": 1e30, "latency": 0.0}
    fast = replace(H200, **links, memory=1e30, gaps=0.0, capacity=1e15)
    steps = {p.strategy: p for p in plans(GPT2, 8, fast, 8, 1024)}
    simple = [name for name in steps if " x " not in name]  # 8 does not divide the 12 heads
    assert simple == ["data", "sharded", "tensor 2", "tensor 4", "context 2", "context 4", "context 8"]
    assert {"tensor 2 x context 2", "tensor 2 x context 4", "tensor 4 x context 2"} == steps.keys() - set(simple)
    for name, found in steps.items():
        assert found.exposed < 1e-9, name
        per_sequence = found.compute / found.batch
        assert per_sequence == pytest.approx(steps["sharded"].compute / steps["sharded"].batch), name


def test_copies_of_a_sharded_model_gather_inside_a_machine_and_sum_between():
    one = replace(H200, latency=0.0, overlap=0.0, memory=1e30, gaps=0.0, capacity=1e15)
    found, size = plan(GPT2, 32, one, "replicate 4", 1, 256), 4 * count(GPT2)
    inside = 3 * size * 7 / 8 / one.link
    assert found.exposed == pytest.approx(inside + 2 * size / 8 * 3 / 4 / one.network)
    assert found.exposed < plan(GPT2, 32, one, "sharded", 1, 256).exposed


def test_divided_sequences_exchange_keys_and_values():
    one = replace(H200, latency=0.0, overlap=0.0, memory=1e30, gaps=0.0, capacity=1e15)
    sharded, divided = (plan(presets.llama3_8b(), 8, one, how, 2, 8192) for how in ("sharded", "context 8"))
    keys = 32 * 2 * 2 * 8192 * 8 * 2 * 128  # layers, bytes, sequences, tokens, key heads, keys and values
    assert divided.exposed - sharded.exposed == pytest.approx(2 * keys * 7 / 8 / one.link)
    assert divided.batch == 2


PLANNED = {
    "llama3_8b": presets.llama3_8b(),
    "llama2_70b": presets.llama2_70b(),
    "gpt2": presets.gpt2(),
    "mixtral_8x7b": presets.mixtral_8x7b(),
}


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("gpus", [1, 2, 8, 24, 64])
def test_every_plan_is_a_run_that_training_accepts(name, gpus):
    for found in plans(PLANNED[name], gpus, H200, 4, 1024):
        machine = tuple(f"machine.{field}={value}" for field, value in found.settings.items())
        sizes = (f"model.preset={name}", "loop.context=1024", f"loop.batch={found.batch}")
        run = read_run("", (*sizes, *machine))
        check(run, gpus)
        assert all(getattr(run.machine, field) == value for field, value in found.settings.items())


def test_what_does_not_fit_is_gathered_in_bfloat16_and_then_recomputed():
    config = presets.llama2_7b()
    sizes = {
        (recompute, width): rank_bytes(config, 8, Strategy(), 4, 4096, recompute, width)
        for recompute in (False, True)
        for width in (4, 2)
    }
    assert sorted(sizes, key=sizes.get, reverse=True) == [(False, 4), (False, 2), (True, 4), (True, 2)]
    for (recompute, width), size in sizes.items():
        found = plan(config, 8, replace(H200, capacity=size), "sharded", 4, 4096)
        assert (found.recompute, found.weight_bytes, found.fits) == (recompute, width, True)
        assert ("gather" in found.settings) == (width == 2)
    assert not plan(config, 8, replace(H200, capacity=size - 1), "sharded", 4, 4096).fits


def test_sharding_divides_the_state_and_data_parallelism_does_not():
    wide = replace(H200, capacity=1e15)
    config = presets.llama2_70b()
    data, sharded = (plan(config, 64, wide, how, 1, 512) for how in ("data", "sharded"))
    state = 16 * count(config)
    assert data.memory - sharded.memory == pytest.approx(state * 63 / 64, rel=0.03)
    assert plan(config, 64, H200, "data", 1, 512).fits is False
    assert plan(config, 64, H200, "sharded", 1, 512).fits


def test_what_does_not_fit_is_recomputed_before_it_is_given_up():
    tight = replace(H200, capacity=rank_bytes(GPT2, 1, Strategy(is_sharded=False), 64, 1024, recompute=True))
    found = plan(GPT2, 1, tight, "data", 64, 1024)
    assert found.recompute
    assert found.fits
    roomy = plan(GPT2, 1, H200, "data", 64, 1024)
    assert not roomy.recompute
    assert found.compute > 1.25 * roomy.compute
    assert found.flops == roomy.flops


def test_the_best_fits_where_anything_does():
    assert best(presets.llama2_70b(), 64, H200, 1, 2048).fits
    assert not best(presets.llama2_70b(), 1, H200, 1, 2048).fits


def test_sequences_are_divided_only_where_nothing_else_fits():
    config = replace(presets.llama3_8b(), max_len=2**20)
    assert "context" not in best(config, 64, H200, 1, 2**16).settings
    found = best(config, 64, H200, 1, 2**19)
    assert found.fits
    assert found.settings["context"] > 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gpus": 0}, "gpus=0 must be at least 1"),
        ({"batch": 0}, "batch=0 must be at least 1"),
        ({"strategy": "pipeline"}, "'pipeline' is not known"),
        ({"strategy": "tensor 3"}, "must divide"),
        ({"strategy": "tensor 8"}, "8 does not divide the 12 heads of the model"),
        ({"strategy": "tensor 2", "config": presets.bloom_560m()}, "does not support biases on the scores"),
        ({"strategy": "tensor 16", "gpus": 16}, "at most 8, the devices of one machine"),
        ({"strategy": "context 8", "context": 1000}, "1000 tokens is not a multiple of 2 x 8"),
        ({"strategy": "context 2", "config": presets.bloom_560m(), "context": 256}, "does not support biases"),
        ({"strategy": "context 2 x context 4"}, "is not known"),
        ({"strategy": "replicate 2 x tensor 8", "gpus": 8}, "must divide"),
        ({"config": presets.bert_base()}, "only for decoder-only"),
    ],
)
def test_bad_arguments_are_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(**{"config": GPT2, "gpus": 8, "device": H200, **given})
