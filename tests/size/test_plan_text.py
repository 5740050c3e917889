"""Plans as text and as numbers."""

import json
from dataclasses import replace

from glassformer import presets
from glassformer.size.devices import H200
from glassformer.size.plan import plan
from glassformer.size.plan_text import GPUS, LADDER, plan_ladder, plan_model


def test_the_ladder_reaches_69_billion_parameters_and_1024_devices_and_says_what_it_assumed():
    found = plan_ladder({name: presets.get(name) for name in LADDER}, H200)
    assert len(found.rows) == len(LADDER) * len(GPUS)
    text = found.text()
    assert "llama2_70b" in text
    assert "1,024" in text
    assert "products 694 TFLOP/s" in text
    assert "Only one device was measured" in text
    assert "links 360 GB/s among the 8" in text
    [row] = [line for line in text.splitlines() if "llama2_70b" in line and " 1 " in line]
    assert "!" in row  # 69 billion parameters on one device


def test_rates_that_differ_are_told_apart():
    text = plan_model(presets.gpt2(), "gpt2", 2, replace(H200, gather=2e9, scatter=1e9)).text()
    assert "links 360 (sums), 2 (gathers), 1 (scatters) GB/s among the 8" in text


def test_every_way_is_listed_with_hours_and_cost():
    config = presets.gpt2()
    found = plan_model(config, "gpt2", 8, H200, batch=16, context=1024, tokens=1e9)
    assert [p.strategy for _, p, _ in found.rows] == ["data", "sharded", "tensor 2", "tensor 4", "tensor 8"]
    told = json.loads(json.dumps(found.to_dict()))
    one = plan(config, 8, H200, "data", 16, 1024)
    assert told["plans"][0]["step"] == one.step
    assert told["plans"][0]["hours"] == 1e9 / one.tokens_per_second / 3600
    assert told["plans"][0]["cost"] == told["plans"][0]["hours"] * 8 * H200.price
