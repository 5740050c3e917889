import asyncio
import json

import pytest
from pydantic import ValidationError

from glassformer.config import ConfigError
from glassformer.studio import schema
from glassformer.studio.api import train as view
from glassformer.studio.errors import StudioError
from glassformer.studio.settings import Limits
from glassformer.studio.training import Run, TrainingRuns
from glassformer.training import read_run
from glassformer.training.run import SECTIONS
from tests.studio.serving import parse_events

SMALL = {"model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16, "model.max_len": 16}


@pytest.fixture
def training_runs(tmp_path, monkeypatch):
    """TrainingRuns that start nothing: what would be started is kept."""
    made = TrainingRuns(tmp_path, Limits())
    monkeypatch.setattr(made, "_spawn", lambda run: None)
    return made


def started(training_runs, **body):
    response = view.start(training_runs, schema.Train(**body))
    return response, read_run((training_runs.run(response["run"]).folder / "spec.toml").read_text())


def test_fields_are_those_of_the_run_with_their_docs():
    fields = view.fields()
    assert fields["optim.lr"].help == "Peak learning rate of AdamW."
    assert fields["optim.kind"].choices == ("adamw", "muon")
    assert fields["optim.clip"].optional
    assert fields["loop.steps"].default == 500
    for name in fields:
        section, _, field = name.rpartition(".")
        assert section in ("model", "") or field in SECTIONS[section].__dataclass_fields__
    assert not {"out", "data.corpus", "data.cache", "machine.device"} & set(fields)  # nothing that is a path


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", list(view.RANGES))
def test_ranges_are_inside_what_the_dataclasses_accept(training_runs, name):
    """Both ends are accepted by the run itself; what lies below is refused here."""
    low, high = view.RANGES[name]
    field = view.fields()[name]
    for value in (low, high):
        if value is None:
            continue
        value = type(field.kinds[0](0))(value)
        section, _, last = name.rpartition(".")
        if section not in ("model", ""):
            SECTIONS[section](
                **{last: view.parse_fields({name: value}, "nano")[name]}
                | ({"accumulate": 1} if section == "loop" and last == "batch" else {})
                | ({"batch": 4096} if last == "accumulate" else {})
            )
    with pytest.raises(ValidationError, match="greater than or equal to"):
        view.parse_fields({name: type(field.kinds[0](0))(low - 1)}, "nano")


def test_a_run_is_what_was_asked_for(training_runs):
    response, run = started(
        training_runs,
        corpus="embedded",
        preset="llama_tiny",
        fields={**SMALL, "model.n_kv_heads": 1, "loop.steps": 7, "optim.lr": 1, "optim.clip": None, "seed": 5},
    )
    assert (run.model.n_layers, run.model.d_model, run.model.n_kv_heads) == (1, 16, 1)
    assert (run.loop.steps, run.optim.lr, run.optim.clip, run.seed) == (7, 1.0, None, 5)
    assert (run.data.corpus, run.out, run.data.cache) == ("embedded", "out", "tokens")
    assert run.loop.log_every == 1
    assert response["steps"] == 7
    assert response["predicted_bytes"] > 4 * response["parameters"]


def test_memory_is_forecast_for_the_optimizer_that_the_run_has(training_runs):
    def predicted(**fields):
        return started(training_runs, corpus="embedded", preset="nano", fields={**SMALL, **fields})[0][
            "predicted_bytes"
        ]

    adamw, muon = predicted(), predicted(**{"optim.kind": "muon"})
    matrices = 4 * (4 + 2) * SMALL["model.d_model"] ** 2 * SMALL["model.n_layers"]
    assert adamw - muon == matrices  # one moment less for q, k, v, o, up and down; d_ff = d_model
    weights = 4 * started(training_runs, corpus="embedded", preset="nano", fields=SMALL)[0]["parameters"]
    assert predicted(**{"optim.ema": 0.99}) - adamw == weights


def test_a_task_and_an_upload_can_be_trained_on(training_runs):
    _, run = started(training_runs, corpus="task:repeat", preset="nano", fields={"model.max_len": 40})
    assert run.task is not None
    kept = training_runs.add_corpus(("ab cd\n" * 300).encode(), "../../my <b>.txt")
    _, run = started(training_runs, corpus=kept["corpus"], preset="nano", fields=SMALL)
    assert run.data.corpus == str((training_runs.folder / "corpora" / f"{kept['corpus']}.txt").resolve())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"corpus": "/etc/passwd"}, "no corpus"),
        ({"corpus": "../../x"}, "no corpus"),
        ({"preset": "nonsense"}, "not a preset"),
        ({"preset": "t5_small"}, "not a decoder"),
        ({"preset": "llama2_7b"}, "too large|exceed"),
        ({"fields": {"out": "/tmp/x"}}, "not a field"),
        ({"fields": {"data.tokenizer": "/etc/passwd"}}, "should be 'char'"),
        ({"fields": {"data.corpus": "/etc/passwd"}}, "not a field"),
        ({"fields": {"machine.device": "cuda"}}, "not a field"),
        ({"fields": {"model.n_heads": 3}}, "not a multiple"),
        ({"fields": {"model.n_layers": "4"}}, "should be a valid integer"),
        ({"fields": {"model.n_layers": 10**18}}, "too large|parameters"),
        ({"fields": {"loop.steps": 10**9}}, "less than or equal to 200000"),
        ({"fields": {"loop.batch": 4096, "model.max_len": 4096, "model.d_model": 512}}, "GB"),
        ({"fields": {"optim.lr": "fast"}}, "should be a valid number"),
        ({"fields": {"optim.lr": None}}, "should be a valid number"),
        ({"fields": {"schedule.warmup": 900}}, "leaves nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_words(training_runs, body, words):
    with pytest.raises((StudioError, ConfigError, ValidationError), match=words):
        view.start(training_runs, schema.Train(**body))
    assert training_runs.runs() == []


def test_the_form_has_everything(client, studio):
    response = client.get("/api/train/presets").json()
    assert {"name", "section", "kind", "default", "doc", "low", "high", "choices", "main"} <= set(response["fields"][0])
    assert response["presets"][0]["name"] == "nano"
    assert response["presets"][0]["values"]["model.n_layers"] == 4
    assert "shakespeare" in [row["name"] for row in response["corpora"]]


def follow(training_runs, run, after=0):
    async def collect():
        return b"".join([part async for part in view.follow(training_runs, run, after)]).decode()

    return asyncio.run(collect())


def test_events_are_followed_from_where_a_client_was(training_runs):
    response, _ = started(training_runs, corpus="embedded", fields=SMALL)
    run = Run(training_runs.folder / "runs" / response["run"])
    lines = [json.dumps({"event": "step", "step": n}) + "\n" for n in range(5)]
    run.events.write_text("".join(lines[:3]) + '{"event": "st\n' + "".join(lines[3:]) + '{"event": "end", "step": 5}\n')
    text = follow(training_runs, run)
    heard = [data["step"] for name, data in parse_events(text) if name == "step"]
    assert heard == [0, 1, 2, 3, 4]
    assert parse_events(text)[-1][0] == "state"
    assert parse_events(text)[-1][1]["state"] == "finished"
    ids = [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]
    again = [data["step"] for name, data in parse_events(follow(training_runs, run, ids[1])) if name == "step"]
    assert again == [2, 3, 4]
    assert [name for name, _ in parse_events(follow(training_runs, run, 10**9))] == ["state"]
