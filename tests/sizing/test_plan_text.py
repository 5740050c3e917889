"""Plans as text and as numbers."""

import json
from dataclasses import replace

import pytest

from glassformer.config import presets
from glassformer.sizing.devices import DEVICES, H200
from glassformer.sizing.plan import plan
from glassformer.sizing.plan_text import GPUS, LADDER, plan_ladder, plan_model


def test_the_ladder_reaches_69_billion_parameters_and_1024_devices_and_states_its_assumptions():
    found = plan_ladder({name: presets.get(name) for name in LADDER}, H200)
    assert len(found.rows) == len(LADDER) * len(GPUS)
    text = found.text()
    assert "llama2_70b" in text
    assert "1,024" in text
    assert "matmuls 744 TFLOP/s" in text
    assert "Communication between GPUs was not measured" in text
    assert "links 360 GB/s between the 8" in text
    [row] = [line for line in text.splitlines() if "llama2_70b" in line and " 1 " in line]
    assert "!" in row  # 69 billion parameters on one device


def test_models_that_cannot_run_the_context_are_named():
    models = {"gpt2": presets.gpt2(), "llama2_7b": presets.llama2_7b()}
    assert plan_ladder(models, H200).notes == ()
    [note] = plan_ladder(models, H200, context=2048).notes
    assert note.startswith("gpt2: 2,048 tokens cannot run: the learned position table has only 1,024 positions")
    found = plan_model(models["llama2_7b"], "llama2_7b", 8, H200, context=5000)
    assert len(found.notes) == 1
    assert f"Note: {found.notes[0]}" in found.text().splitlines()
    assert found.to_dict()["notes"] == list(found.notes)


@pytest.mark.parametrize("width", [40, 80])
def test_in_a_narrow_terminal_columns_stand_below_and_nothing_is_lost(width):
    ladder = plan_ladder({name: presets.get(name) for name in LADDER}, H200, context=2048)
    for found in (ladder, plan_model(presets.gpt2(), "gpt2", 8, H200)):
        wide, narrow = found.text(), found.text(width)
        assert max(map(len, narrow.splitlines())) <= width
        assert narrow.split() == wide.split()
        assert found.text(200).splitlines()[:9] == wide.splitlines()[:9]
        table = narrow.split("\n\n")[1].splitlines()
        each, left_over = divmod(len(table), len(found.rows) + 1)
        assert each > 1
        assert left_over == 0
        for line in range(width == 40, each):  # in 40 columns the first line has names only, which end anywhere
            assert len({len(row) for row in table[line::each]}) == 1


def test_rates_that_differ_are_printed_separately():
    text = plan_model(presets.gpt2(), "gpt2", 2, replace(H200, gather=2e9, scatter=1e9)).text()
    assert "links 360 (all-reduce), 2 (all-gather), 1 (reduce-scatter) GB/s between the 8" in text


def test_every_way_is_listed_with_hours_and_cost():
    config = presets.gpt2()
    found = plan_model(config, "gpt2", 8, H200, batch=16, context=1024, tokens=1e9)
    shown = [p.strategy for _, p, _ in found.rows]
    assert shown == ["data", "sharded", "tensor 2", "tensor 4", "context 2"]  # 12 heads; the first context that fits
    lines = 'Run file of the fastest plan that fits (sharded): [loop] batch = 128; [machine] parallel = "fsdp".'
    assert lines in found.text()
    result = json.loads(json.dumps(found.to_dict()))
    one = plan(config, 8, H200, "data", 16, 1024)
    assert result["plans"][0]["step"] == one.step
    assert result["plans"][0]["hours"] == 1e9 / one.tokens_per_second / 3600
    assert result["plans"][0]["cost"] is None
    assert "cost" not in found.text().split("\n\n")[1]
    assert "No cost is printed: give --price in US dollars" in found.text()


def test_a_combination_is_shown_where_it_is_the_fastest_that_fits():
    long = replace(presets.llama2_70b(), max_len=2**20)
    narrow = replace(H200, capacity=32e9)  # neither weights nor activations fit by themselves
    found = plan_model(long, "llama2_70b", 64, narrow, batch=1, context=2**15)
    [combined] = [p for _, p, _ in found.rows if " x " in p.strategy]
    assert combined.fits
    assert f"fits ({combined.strategy}): [loop] batch = {combined.batch}; [machine]" in " ".join(found.text().split())


def test_a_price_gives_a_cost_in_dollars():
    found = plan_model(presets.gpt2(), "gpt2", 8, replace(H200, price=2.5), tokens=1e9)
    result = found.to_dict()
    assert result["plans"][0]["cost"] == result["plans"][0]["hours"] * 8 * 2.5
    assert (result["price"], result["currency"]) == (2.5, "USD")
    assert "cost in USD" in found.text()
    assert "Cost: 2.5 USD per GPU and hour, as given." in found.text()


def test_the_assumptions_of_a_device_that_was_not_measured_are_stated():
    found = plan_model(presets.gpt2(), "gpt2", 8, DEVICES["a100-80gb"])
    assert found.to_dict()["measured"] is False
    text = " ".join(found.text().split())
    assert "Not measured on this device: matmuls at 75% of the peak" in text
    assert plan_model(presets.gpt2(), "gpt2", 8, H200).to_dict()["measured"] is True
