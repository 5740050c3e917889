"""From a plan to a result: with real processes on a tiny model, and with fake ones for what goes wrong."""

import json

import pytest
import torch

from glassformer.bench import judge, processes, race, training
from glassformer.bench import run as running
from glassformer.bench.plan import BenchError, Plan
from tests.bench import checkout, tiny
from tests.cli.asking import has_compiler


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
@pytest.mark.slow
def test_a_tiny_model_end_to_end(subject, tmp_path):
    pytest.importorskip("transformers")
    plan = Plan(
        "decode", against=("transformers", "llama.cpp"), precisions=("float32",), batch=2, prompt=5, new=6, rounds=2,
        threads=1, model=str(subject.root / "hf"), keep=tmp_path,
    )  # fmt: skip
    result = running.run(plan)
    facts = json.loads(json.dumps(result.to_dict()))
    (group,) = facts["groups"]
    assert {row["name"] for row in group["rows"]} >= {"glassformer", "glassformer-torch", "transformers"}
    for row in group["rows"]:
        assert row["agrees"] == "the same ids"
        assert len(row["rounds"]) == 2
        assert 0 < row["low"] <= row["high"]
        assert row["disturbed"] or row["low"] <= row["median"] <= row["high"]
        assert row["first_token_seconds"] > 0
    assert min(group["bandwidth_rounds"]) > 1e7
    assert result.sound
    assert not any(finding["id"].startswith("target") for finding in facts["findings"])  # another model than GPT-2


real = judge.targets


@pytest.fixture
def fakes(monkeypatch, fake_processes):
    """Fake processes; `orders[name]` is what that contender shall do, or a function of its order."""
    orders = {}
    real = processes.Worker.load

    def load(self):
        import dataclasses

        setting = orders.get(self.order.name, {"ids": [[1, 2, 3]]})
        self.order = dataclasses.replace(self.order, setting=setting(self.order) if callable(setting) else setting)
        return real(self)

    monkeypatch.setattr(processes.Worker, "load", load)
    return orders


def plan(subject, tmp_path, **changes):
    base = {"task": "decode", "against": ("transformers",), "precisions": ("float32",), "prompt": 4, "new": 3}
    return Plan(**{**base, "rounds": 2, "model": str(subject.root / "hf"), "keep": tmp_path, **changes})


def test_other_ids_in_float32_make_the_run_unsound(subject, tmp_path, fakes):
    pytest.importorskip("transformers")
    fakes["transformers"] = {"ids": [[1, 2, 9]]}
    result = running.run(plan(subject, tmp_path))
    assert not result.sound
    failed = [f.id for f in result.findings if not f.passed and not f.id.startswith("target")]
    assert failed == ["same-ids:transformers"]
    fakes["transformers"] = {"ids": [[1, 2, 9]]}
    assert running.run(plan(subject, tmp_path, precisions=("bfloat16",))).sound


def test_one_that_dies_is_named_and_the_others_are_measured(subject, tmp_path, fakes):
    pytest.importorskip("transformers")
    fakes["transformers"] = {"die_at": 1}
    messages = []
    result = running.run(plan(subject, tmp_path), messages.append)
    assert "transformers died: MemoryError: all of it is gone" in messages
    assert not result.sound
    rows = {row.name: row for row in result.groups[0].rows}
    assert rows["glassformer"].measured
    assert not rows["transformers"].measured


def test_a_disturbed_run_judges_no_target(subject, tmp_path, fakes, monkeypatch):
    """Fake contenders whose rounds differ: the whole way from the turns to the sentences."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(judge, "targets", lambda plan, *rest: real({**plan, "model": "gpt2"}, *rest))
    quiet = {"ids": [[1, 2, 3]], "rate": 100.0}
    for wild in ("transformers", "glassformer", "memory"):
        fakes.update(dict.fromkeys(("transformers", "glassformer", "glassformer-torch", "memory"), quiet))
        fakes["memory"] = {"rate": 1e12}
        scale = 1e10 if wild == "memory" else 1.0
        fakes[wild] = {"ids": [[1, 2, 3]], "rates": [5.0 * scale, 100.0 * scale, 300.0 * scale]}
        result = running.run(plan(subject, tmp_path, rounds=3))
        found = {f.id: f for f in result.findings if f.id.startswith("target")}
        bandwidth, ratio = found["target:bandwidth:float32"], found["target:decode:float32"]
        assert (bandwidth.verdict == "skip") == (wild != "transformers")
        assert (ratio.verdict == "skip") == (wild != "memory")
        assert result.sound


def test_two_precisions_of_one_run_must_agree_on_the_bandwidth(subject, tmp_path, fakes):
    """Memory was read at 9.8 and at 53.4 GB/s in one run, and the target of the slower part was "reached"."""
    pytest.importorskip("transformers")

    def slow_in_float32(order):
        return {"rate": 9.8e9 if order.precision == "float32" else 53.4e9}

    fakes["memory"] = slow_in_float32
    result = running.run(plan(subject, tmp_path, rounds=3, precisions=("float32", "bfloat16")))
    slow, fast = (group.bandwidth.disturbed for group in result.groups)
    assert "memory was read at 9.8 GB/s, and at 53.4 GB/s in another part of the same run" in slow
    assert fast == ""


def test_without_the_engine_there_is_nothing_to_compare_with(subject, tmp_path, fakes):
    fakes["glassformer-torch"] = {"die_at": "load"}
    with pytest.raises(BenchError, match="the torch engine, which the others are compared with, failed: RuntimeError"):
        running.run(plan(subject, tmp_path))


def test_converters_that_write_gpt2_only_are_left_out_of_others(tmp_path, fakes, monkeypatch):
    made = tiny.write(tmp_path, attention__bias=True, activation="relu")
    given = plan(made, tmp_path, against=("all",), checkouts={"nanogpt": checkout.nanogpt(tmp_path)})
    result = running.run(given)
    assert result.missing["nanogpt"] == "it is measured here with models of kind gpt2"


def test_training_of_fakes_compares_losses(tmp_path, fakes, monkeypatch):
    small = training.Setting("tiny", training.settings()[0].config, 2)
    monkeypatch.setattr(training, "settings", lambda: (small,))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    fakes["glassformer"] = {"ids": [[4.0, 3.0]], "rate": 3.0}
    fakes["nanogpt"] = {"ids": [[4.0, 3.0]], "rate": 2.0}
    given = Plan("train", rounds=3, keep=tmp_path, checkouts={"nanogpt": checkout.nanogpt(theirs)})
    result = running.run(given)
    assert [group.precision for group in result.groups] == ["float32", "bfloat16"]
    assert result.sound
    assert {f.id: str(f.verdict) for f in result.findings if f.id.startswith("target")} == {
        "target:train:float32:tiny": "pass", "target:train:bfloat16:tiny": "pass"
    }  # fmt: skip
    fakes["nanogpt"] = {"ids": [[4.0, 2.0]]}
    assert not running.run(given).sound
    with pytest.raises(BenchError, match="float32 and bfloat16"):
        running.run(Plan("train", precisions=("int8",), keep=tmp_path))


def model_plan(tmp_path, **changes):
    base = {"task": "train", "model": "nano", "layers": 1, "batch": 2, "prompt": 8, "rounds": 3, "new": 2}
    return Plan(**{**base, "against": ("transformers",), "keep": tmp_path, **changes})


def test_training_of_a_model_compares_the_last_losses(tmp_path, fakes):
    pytest.importorskip("transformers")
    fakes["glassformer"] = {"ids": [[4.0, 3.0]], "rate": 3.0}
    fakes["transformers"] = {"ids": [[4.0, 3.05]], "rate": 2.0}
    result = running.run(model_plan(tmp_path, precisions=("bfloat16",)))
    (group,) = result.groups
    assert (group.unit, group.setting) == ("tokens/s", "nano, 1 layer, 128 wide, context 8, batch 2")
    assert {row.name: row.agrees for row in group.rows} == {
        "glassformer": "loss 4.000 to 3.000",
        "transformers": "loss 4.000 to 3.050, 0.0e+00 and 5.0e-02 from glassformer",
    }
    assert result.sound
    fakes["transformers"] = {"ids": [[4.0, 3.2]]}
    assert not running.run(model_plan(tmp_path, precisions=("bfloat16",))).sound


def test_eight_bits_race_against_sixteen_of_the_others(tmp_path):
    pytest.importorskip("transformers")
    given = model_plan(tmp_path, device="cuda", precisions=("bfloat16", "float8", "float32"))
    chosen, _ = running.choose(given)
    rows = running._trained_rows(given, chosen)
    assert {name: [(row.name, row.precision) for _, row in group] for name, group in rows.items()} == {
        "bfloat16": [
            ("glassformer", "bfloat16"), ("glassformer float8", "float8"), ("transformers", "bfloat16")
        ],
        "float32": [("glassformer", "float32"), ("transformers", "float32")],
    }  # fmt: skip


def test_the_start_of_training_is_measured_cold_and_warm(tmp_path, fakes, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("glassformer.bench.startup.OF_TRAINING", {"import torch": ["-S", "-c", "pass"]})
    given = model_plan(tmp_path, task="startup", new=0, training=True, rounds=1, precisions=("float32",))
    result = running.run(given)
    names = [group.setting.rpartition(", ")[2] for group in result.groups]
    assert names == ["cold", "warm", "without a model"]
    for group in result.groups[:2]:
        assert {row.name for row in group.rows if row.measured} == {"glassformer", "transformers"}
        assert group.unit == "seconds to training step 10"
    (text,) = tmp_path.glob("nano-*/words.txt")
    assert set(text.read_text().split()) == {f"t{i}" for i in range(65)}


def test_only_a_decoder_is_trained(tmp_path):
    with pytest.raises(BenchError, match="--model t5_small cannot be trained here: give a decoder"):
        running.run(model_plan(tmp_path, model="t5_small"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("task", ["decode", "train", "startup"])
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path, task):
    with pytest.raises(BenchError, match=r"^--device cuda: torch finds no CUDA device: [^.]*\.$"):
        running.run(Plan(task, model="nano", device="cuda", keep=tmp_path))
    assert not list(tmp_path.iterdir())


def test_startup_also_measures_the_unavoidable(subject, tmp_path, fakes, monkeypatch):
    monkeypatch.setattr("glassformer.bench.startup.PLAIN", {"import torch": ["-S", "-c", "pass"]})
    result = running.run(plan(subject, tmp_path, task="startup", new=0, against=("nanogpt",), rounds=1))
    assert [group.setting for group in result.groups] == ["", "without a model"]
    assert [row.name for row in result.groups[1].rows] == ["import torch", "reading the file"]


def test_an_interrupt_passes_through(subject, tmp_path, fakes, monkeypatch):
    monkeypatch.setattr(race, "rotated", lambda rows, turn: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        running.run(plan(subject, tmp_path))
