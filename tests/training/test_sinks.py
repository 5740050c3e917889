"""Loggers: they get what log.jsonl has, and nothing that they do changes a run."""

import json
import socket
import sys
import types
import warnings
from pathlib import Path

import pytest

from glassformer.config import ConfigError
from glassformer.errors import GlassformerError
from glassformer.training import read_run, resume_session, sinks
from glassformer.training.checkpoint import _remove_run
from glassformer.training.loop import train
from glassformer.training.run import run_to_dict
from glassformer.training.sinks import SinkError, check_names, read_id, read_log, replay, scalars, write_id
from tests.training import failing_sinks, tiny

HERE = "tests.training.failing_sinks"


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    failing_sinks.received.clear()
    failing_sinks.released.clear()
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    yield
    failing_sinks.released.set()


def names(*listed: str) -> str:
    return f"loop.sinks={json.dumps(listed)}"


def run(folder: Path, *changes: str) -> list[dict]:
    """Train six steps and return the events; those of the loggers' problems are notes."""
    heard = []
    session = tiny.session(folder, "loop.steps=6", "loop.log_every=1", *changes)
    train(session.run, session.data, heard.append)
    return heard


def weights(folder: Path) -> bytes:
    return (folder / "run" / "last" / "model.safetensors").read_bytes()


def logged(folder: Path) -> list[dict]:
    return list(read_log(folder / "run" / "log.jsonl"))


def curves(events: list[dict]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, value in scalars(event).items():
            found.setdefault(name, []).append((event["step"], value))
    return found


def board(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves in a folder of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    held = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    held.Reload()
    return {name: [(s.step, s.value) for s in held.Scalars(name)] for name in held.Tags()["scalars"]}


def near(found: dict, expected: dict) -> None:
    """Equal to float32, in which TensorBoard stores values."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6), name


def test_a_logger_gets_every_line_of_the_log(tmp_path):
    run(tmp_path, names(f"{HERE}:Remembering"), "probe.every=3")
    kinds = [kind for kind, _ in failing_sinks.received]
    assert kinds[:2] == ["folder", "start"]
    assert kinds[-1] == "close"
    assert failing_sinks.received[0][1] == tmp_path / "run"
    settings, step = failing_sinks.received[1][1]
    assert (settings["loop"]["steps"], step) == (6, 0)
    assert [event for kind, event in failing_sinks.received if kind == "log"] == logged(tmp_path)
    assert "probe/accuracy/validation" in curves(logged(tmp_path))


def test_numbers_have_the_name_of_their_event():
    assert scalars({"event": "validation", "step": 5, "loss": 1.5, "best": True, "seconds": 2.0}) == {
        "validation/loss": 1.5,
        "validation/seconds": 2.0,
    }
    assert scalars({"event": "probe", "step": 5, "norms": {"total": 3.0}}) == {"probe/norms/total": 3.0}
    assert scalars({"event": "end", "step": 5, "best": 1.0}) == {}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of the run without loggers."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder)
    return weights(folder)


FAILING = ["RaisingInLog", "RaisingInStart", "Hanging", "HangingAtTheEnd", "Missing", "absent:X"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", FAILING)
def test_a_logger_that_fails_changes_nothing_in_the_run(tmp_path, monkeypatch, plain, kind):
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 1.0)
    name = kind if ":" in kind else f"{HERE}:{kind}"
    events = run(tmp_path, names(name, f"{HERE}:Remembering"))
    assert weights(tmp_path) == plain
    (note,) = [event["text"] for event in events if event["event"] == "note"]
    assert note.startswith(f"the logger {name} is switched off (")
    assert "\n" not in note
    assert f"--replay {tmp_path / 'run'} --log-to {name}" in note
    assert [event for kind, event in failing_sinks.received if kind == "log"][-1]["event"] == "end"
    assert all(event["event"] != "note" for event in logged(tmp_path))


def test_a_logger_that_falls_behind_is_switched_off(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(sinks, "WAITING", 3)
    events = run(tmp_path, names(f"{HERE}:Hanging"))
    (note,) = [event for event in events if event["event"] == "note"]
    assert "it hangs: 3 events wait for it" in note["text"]
    assert events.index(note) < len(events) - 1  # at once, not at the end of the run


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_numbers_of_the_log_and_a_resumed_run_continues_them(tmp_path):
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(tmp_path, names("tensorboard"))
        near(board(tmp_path / "run" / "tensorboard"), curves(logged(tmp_path)))
        again = resume_session(str(tmp_path / "run" / "checkpoints" / "step-00000005"), ("loop.steps=8",))
        train(again.run, again.data, resume=again.resume)
        near(board(tmp_path / "run" / "tensorboard"), curves(logged(tmp_path)))
    assert max(event["step"] for event in logged(tmp_path)) == 8


@pytest.mark.filterwarnings("ignore")
def test_a_replay_equals_the_live_log(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path)
    settings = run_to_dict(read_run((tmp_path / "run" / "run.toml").read_text()))
    for _ in range(2):  # a second replay takes the place of the first
        assert replay(tmp_path / "run", ["tensorboard"], settings) == len(logged(tmp_path))
        near(board(tmp_path / "run" / "tensorboard"), curves(logged(tmp_path)))


class FakeRun:
    id = "abc123"

    def __init__(self, calls: list):
        self.calls = calls
        self.log = lambda values: calls.append(("log", values))
        self.define_metric = lambda *args, **given: calls.append(("define_metric", args, given))
        self.finish = lambda: calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch):
    """A module with the functions of wandb that are used, which remembers their calls."""
    calls: list = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace(name="wandb")
    fake.Settings = lambda **given: given
    fake.init = lambda **given: calls.append(("init", given)) or FakeRun(calls)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_is_offline_and_keeps_its_id(tmp_path, wandb):
    run(tmp_path, names("wandb"))
    given = wandb[0][1]
    assert (given["mode"], given["id"], given["resume"], given["name"]) == ("offline", None, None, "run")
    assert given["dir"] == str(tmp_path / "run")
    assert given["config"]["loop"]["steps"] == 6
    assert ("define_metric", ("*",), {"step_metric": "step"}) in wandb
    points = [call[1] for call in wandb if call[0] == "log"]
    held: dict = {}
    for point in points:
        for name, value in point.items():
            if name != "step":
                held.setdefault(name, []).append((point["step"], value))
    assert held == curves(logged(tmp_path))
    assert wandb[-1] == ("finish",)
    assert read_id(tmp_path / "run", "wandb") == "abc123"
    wandb.clear()
    again = resume_session(str(tmp_path / "run"), ("loop.steps=8",))
    train(again.run, again.data, resume=again.resume)
    assert (wandb[0][1]["id"], wandb[0][1]["resume"]) == ("abc123", "allow")


def test_the_mode_of_wandb_is_that_of_the_environment(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run(tmp_path, names("wandb"))
    assert wandb[0][1]["mode"] == "disabled"


def test_mlflow_writes_to_a_database_in_the_run(tmp_path, monkeypatch):
    calls: list = []

    class Client:
        def __init__(self, tracking_uri):
            calls.append(("store", tracking_uri))

        def get_experiment_by_name(self, name):
            return None

        def create_experiment(self, name):
            return "7"

        def create_run(self, experiment, run_name):
            calls.append(("run", experiment, run_name))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="xyz"))

        def log_param(self, id, name, value):
            calls.append(("param", name, value))

        def log_metric(self, id, name, value, step):
            calls.append(("metric", name, (step, value)))

        def set_terminated(self, id):
            calls.append(("terminated", id))

    fake = types.ModuleType("mlflow")
    fake.__spec__ = types.SimpleNamespace(name="mlflow")
    fake.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    run(tmp_path, names("mlflow"))
    assert calls[0] == ("store", f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}")
    assert ("run", "7", "run") in calls
    assert ("param", "loop.steps", 6) in calls
    held: dict = {}
    for call in calls:
        if call[0] == "metric":
            held.setdefault(call[1], []).append(call[2])
    assert held == curves(logged(tmp_path))
    assert calls[-1] == ("terminated", "xyz")
    calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    again = resume_session(str(tmp_path / "run"), ("loop.steps=8",))
    train(again.run, again.data, resume=again.resume)
    assert calls[0] == ("store", "http://127.0.0.1:5000")
    assert all(call[0] != "run" for call in calls)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_real_wandb_opens_no_socket_but_to_itself(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    connect, hosts = socket.socket.connect, []

    def watched(self, address):
        hosts.append(address)
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    events = run(tmp_path, names("wandb"))
    assert [event for event in events if event["event"] == "note"] == []
    assert all(isinstance(host, str) or host[0] in ("127.0.0.1", "localhost", "::1") for host in hosts)
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    events = run(tmp_path, names("tensorboard", "wandb"))
    notes = [event["text"] for event in events if event["event"] == "note"]
    assert any("tensorboard is not installed: run pip install" in note and "[logs]" in note for note in notes)
    assert any("wandb is not installed: run pip install wandb" in note for note in notes)
    with pytest.raises(SinkError, match=r"the logger wandb failed \(wandb is not installed"):
        replay(tmp_path / "run", ["wandb"], {})


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("tensorbord", "'tensorbord', which is not a logger; .* Did you mean tensorboard"),
        ("a.b:", "not a logger"),
        (":X", "not a logger"),
    ],
)
def test_names_that_no_logger_has_are_refused(listed, words):
    with pytest.raises(GlassformerError, match=words):
        read_run("", (names(listed),))
    with pytest.raises(ConfigError, match="expected a list of texts"):
        read_run("", ("loop.sinks=wandb",))
    with pytest.raises(SinkError, match="twice"):
        check_names(["wandb", "wandb"])


def test_a_run_file_of_an_older_version_still_has_its_logger():
    assert read_run("[loop]\ntensorboard = true\n").loop.sinks == ("tensorboard",)
    assert read_run("[loop]\ntensorboard = false\n").loop.sinks == ()


def test_ids_are_kept_and_removed_with_the_run(tmp_path):
    write_id(tmp_path, "wandb", "a")
    write_id(tmp_path, "mlflow", "b")
    assert (read_id(tmp_path, "wandb"), read_id(tmp_path, "mlflow"), read_id(tmp_path, "x")) == ("a", "b", None)
    _remove_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(SinkError, match="cannot be read: give the folder of a run"):
        list(read_log(tmp_path / "log.jsonl"))
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n{"event": "end"')
    assert list(read_log(tmp_path / "log.jsonl")) == [{"event": "start"}]
    (tmp_path / "log.jsonl").write_text('{"event": "start"}\n[]\n{"event": "end"}\n')
    with pytest.raises(SinkError, match=r"line 2 of .* is not an event"):
        list(read_log(tmp_path / "log.jsonl"))
