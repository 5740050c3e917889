"""Plans: what was measured on one device comes out, and many devices obey the arithmetic of rings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.config import presets
from glassformer.model import build
from glassformer.sizing.devices import H200
from glassformer.sizing.parameters import count, parameters
from glassformer.sizing.plan import (
    _held,
    all_gather,
    all_reduce,
    best,
    copies,
    plan,
    reduce_scatter,
    saved_bytes,
    strategies,
    work,
)
from glassformer.training import read_run
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.tensor import Division

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
    for how in strategies(gpus, H200, GPT2):
        found = plan(GPT2, gpus, H200, how, batch, context)
        assert found.step >= found.compute
        assert found.exposed <= found.communication + 1e-12
        assert 0 < found.utilisation < 1
        assert found.batch == gpus * batch
        assert found.tokens == gpus * batch * context


def test_without_links_to_wait_for_all_ways_do_the_same_work():
    links = {"link": 1e30, "gather": 1e30, "scatter": 1e30, "network": 1e30, "latency": 0.0}
    fast = replace(H200, **links, memory=1e30, gaps=0.0, capacity=1e15)
    steps = {how: plan(GPT2, 8, fast, how, 8, 1024) for how in strategies(8, fast, GPT2)}
    assert list(steps) == ["data", "sharded", "tensor 2", "tensor 4"]  # 8 does not divide the 12 heads
    assert all(p.exposed < 1e-9 for p in steps.values())
    for size in (2, 4):
        assert steps[f"tensor {size}"].compute == pytest.approx(steps["sharded"].compute)


@pytest.mark.parametrize("size", [2, 4])
def test_devices_that_divide_layers_hold_what_training_holds(size):
    """The count of one device against the parameters that `Division` leaves it."""
    part = build(GPT2, device="meta")
    Division(Ranks(None, 0, size), GPT2.vocab_size).divide(part)
    held = sum(p.numel() for p in part.parameters())
    assert _held(parameters(GPT2), size) == held
    assert plan(GPT2, 8, H200, f"tensor {size}", 1, 16).memory > 12 * held / (8 // size)


@pytest.mark.parametrize(
    ("strategy", "recompute", "settings"),
    [
        ("data", False, {"parallel": "ddp"}),
        ("sharded", True, {"parallel": "fsdp", "recompute": "full"}),
        ("tensor 4", False, {"parallel": "fsdp", "tensor": 4}),
    ],
)
def test_a_plan_names_settings_that_a_run_file_takes(strategy, recompute, settings):
    found = replace(plan(GPT2, 8, H200, strategy, 1, 256), recompute=recompute)
    assert found.settings == settings
    run = read_run("", tuple(f"machine.{name}={value}" for name, value in found.settings.items()))
    assert all(getattr(run.machine, name) == value for name, value in settings.items())


def test_sharding_divides_the_state_and_data_parallelism_does_not():
    wide = replace(H200, capacity=1e15)
    config = presets.llama2_70b()
    data, sharded = (plan(config, 64, wide, how, 1, 512) for how in ("data", "sharded"))
    state = 16 * count(config)
    assert data.memory - sharded.memory == pytest.approx(state * 63 / 64, rel=0.02)
    assert plan(config, 64, H200, "data", 1, 512).fits is False
    assert plan(config, 64, H200, "sharded", 1, 512).fits


def test_what_does_not_fit_is_recomputed_before_it_is_given_up():
    tight = replace(H200, capacity=saved_bytes(GPT2, 64, 1024, recompute=True) + 18.1 * count(GPT2))
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
        ({"config": presets.bert_base()}, "only for decoder-only"),
    ],
)
def test_bad_arguments_are_one_sentence(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        plan(**{"config": GPT2, "gpus": 8, "device": H200, **given})
