import json
import os
import signal
import urllib.request

import pytest

from glassformer.studio import training as module
from glassformer.studio.api import train as train_view
from glassformer.studio.errors import BusyError, ConflictError, NotFoundError, StudioError
from glassformer.studio.settings import Limits
from glassformer.studio.training import TrainingRuns
from tests.studio.serving import Server, parse_events, serving, wait_until

FIELDS = {
    "model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16, "model.max_len": 16,
    "loop.batch": 4, "loop.eval_batches": 1, "loop.eval_every": 100, "loop.checkpoint_every": 20,
    "loop.sample_every": 0, "probe.every": 0,
}  # fmt: skip
TEXT = ("the cat sat on a mat and saw that dog ate hat of man red van " * 200).encode()


@pytest.fixture
def training_runs(tmp_path):
    return TrainingRuns(tmp_path, Limits(corpora=2))


@pytest.mark.parametrize("id", ["..", "../x", "/etc", "a/b", "", "RUN", "run\n", "run-" + "x" * 100, "\0"])
def test_only_names_of_runs_are_known(training_runs, id):
    (training_runs.folder / "runs").mkdir()
    (training_runs.folder / "studio.json").write_text("{}")
    with pytest.raises(NotFoundError):
        training_runs.run(id)
    assert training_runs.corpus(id) is None


def test_uploads_are_texts_of_some_length_and_number(training_runs):
    for data, words in ((b"\xff\xfe" * 1000, "UTF-8"), (b"a\0" * 1000, "NUL"), (b"short", "too short")):
        with pytest.raises(StudioError, match=words):
            training_runs.add_corpus(data)
    kept = training_runs.add_corpus("é".encode() * 1000, "a\nb\x07.txt")
    assert (kept["characters"], kept["bytes"], kept["title"]) == (1000, 2000, "ab.txt")
    training_runs.add_corpus(b"b" * 1000)
    assert [row["name"] for row in training_runs.corpora()] == sorted(row["name"] for row in training_runs.corpora())
    with pytest.raises(StudioError, match="2 texts are stored"):
        training_runs.add_corpus(b"c" * 1000)


def fake(training_runs, monkeypatch):
    """A run whose process is only claimed to be there: a lock that we hold."""
    monkeypatch.setattr(training_runs, "_spawn", lambda run: None)
    run = training_runs.start("", {"steps": 5})
    return run


def hold(run):
    import fcntl

    handle = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def test_states_follow_from_lock_wish_and_events(training_runs, monkeypatch):
    run = fake(training_runs, monkeypatch)
    assert training_runs.state(run) == "failed"  # wanted, but no process is there
    handle = hold(run)
    states = []
    for wanted in ("running", "paused", "stopped"):
        run.update(wanted=wanted)
        states.append(training_runs.state(run))
    assert states == ["running", "pausing", "stopping"]
    with pytest.raises(BusyError):
        training_runs.start("", {})
    with pytest.raises(ConflictError, match="only a paused"):
        training_runs.resume(run)
    os.close(handle)
    assert training_runs.state(run) == "stopped"
    run.events.write_text(json.dumps({"event": "end", "step": 5}) + "\n")
    assert training_runs.state(run) == "finished"
    with pytest.raises(ConflictError):
        training_runs.end(run, "paused")
    with pytest.raises(ConflictError):
        training_runs.resume(run)


def test_the_most_memory_a_run_held_is_kept_and_survives_a_restart(training_runs, monkeypatch):
    """A run that outlived its server: this process plays it, and holds its lock."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)
    run = fake(training_runs, monkeypatch)
    run.update(pid=os.getpid(), peak_bytes=1)
    handle = hold(run)
    assert training_runs.recover() == []  # nothing to begin anew, but it is watched
    peak = wait_until(lambda: held if (held := run.meta().get("peak_bytes", 0)) > 1 else 0)
    os.close(handle)
    assert peak <= run.memory()["peak"]
    assert peak > 1e7
    assert TrainingRuns(training_runs.folder, Limits()).describe(run)["peak"] >= peak
    run.update(peak_bytes=10**15)  # a former process held more
    assert train_view._memory(run)["peak"] == 10**15


def test_only_what_is_wanted_dead_and_blameless_is_recovered(training_runs, monkeypatch):
    spawned = []
    monkeypatch.setattr(training_runs, "_spawn", lambda run: spawned.append(run.id))
    run = training_runs.start("", {})
    spawned.clear()
    assert training_runs.recover() == [run.id] == spawned
    (run.folder / "errors.txt").write_text("glass: the loss is nan.\n")
    assert training_runs.recover() == []
    assert training_runs.describe(run)["error"] == "the loss is nan."
    (run.folder / "errors.txt").unlink()
    run.update(restarts=module.MAX_RESTARTS)
    assert training_runs.recover() == []
    run.update(restarts=0, wanted="paused")
    assert training_runs.recover() == []


def test_a_torn_or_foreign_studio_json_is_no_crash(training_runs, monkeypatch):
    run = fake(training_runs, monkeypatch)
    for text in ("", "{", "[1]", "null"):
        (run.folder / "studio.json").write_text(text)
        assert training_runs.describe(run)["run"] == run.id


def events_of(server, run, last="0", until=lambda name, data: False):
    """Events until one says stop; then the connection is closed."""
    request = urllib.request.Request(f"{server.address}/api/train/{run}/events", headers={"Last-Event-ID": last})
    heard, block = [], b""
    with urllib.request.urlopen(request, timeout=60) as reply:
        for line in reply:
            block += line
            if line == b"\n":
                for name, data in parse_events(block.decode()):
                    heard.append((name, data))
                    if until(name, data):
                        return heard
                block = b""
    return heard


def start(server, steps):
    server.wait_for_torch()
    request = urllib.request.Request(server.address + "/api/train/upload?name=x", TEXT, {"content-type": "text/plain"})
    with urllib.request.urlopen(request) as reply:
        corpus = json.loads(reply.read())["corpus"]
    status, response = server.post(
        "/api/train", {"corpus": corpus, "preset": "nano", "fields": {**FIELDS, "loop.steps": steps}}
    )
    assert status == 200, response
    return response["run"]


@pytest.mark.slow
def test_a_run_goes_on_after_server_and_training_were_killed(tmp_path):
    """kill -9 of both in mid-training: the next server goes on from the checkpoint and the run ends."""
    server = Server(tmp_path)
    run = start(server, 400)
    events_of(server, run, until=lambda name, data: name == "step" and data["step"] >= 60)
    status, response = server.post("/api/train", {"corpus": "embedded", "preset": "nano", "fields": FIELDS})
    assert status == 429
    assert "pause or stop it first" in response["error"]
    pid = json.loads((tmp_path / "runs" / run / "studio.json").read_text())["pid"]
    server.kill()
    os.kill(pid, signal.SIGKILL)
    with serving(tmp_path) as again:
        heard = events_of(again, run)
        starts = [data["step"] for name, data in heard if name == "start"]
        assert len(starts) == 2
        assert starts[1] >= 20
        assert heard[-1][0] == "state"
        assert heard[-1][1]["state"] == "finished"
        steps = [data["step"] for name, data in heard if name == "step"]
        assert set(steps) >= set(range(1, 401))  # every step was reported, some twice
        assert run in [row["name"] for row in again.get("/api/state")["models"]]


@pytest.mark.slow
def test_a_run_survives_its_server_and_can_be_paused_resumed_and_stopped(tmp_path):
    server = Server(tmp_path)
    run = start(server, 20_000)
    events_of(server, run, until=lambda name, data: name == "step" and data["step"] >= 20)
    server.kill()
    with serving(tmp_path) as again:
        assert again.get("/api/train")["runs"][0]["state"] == "running"  # the same process, found by its lock
        heard = events_of(again, run, until=lambda name, data: name == "memory")
        heard += events_of(again, run, until=lambda name, data: name == "step" and data["step"] >= 40)
        assert [data["step"] for name, data in heard if name == "start"] in ([0], [0, 0])  # it was never begun anew
        assert any(name == "memory" and data["bytes"] > 1e7 for name, data in heard)
        assert again.post(f"/api/train/{run}/pause", {})[0] == 200
        wait_until(lambda: again.get("/api/train")["runs"][0]["state"] == "paused", 60)
        again.wait_for_torch()
        assert again.post(f"/api/train/{run}/resume", {})[0] == 200
        begun = events_of(again, run, until=lambda name, data: name == "start" and data["step"] > 0)
        assert begun[-1][1]["step"] >= 40
        assert again.post(f"/api/train/{run}/stop", {})[0] == 200
        wait_until(lambda: again.get("/api/train")["runs"][0]["state"] == "stopped", 60)
        assert again.post(f"/api/train/{run}/dance", {})[0] == 400
