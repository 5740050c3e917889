import sys

import pytest

from glassformer.studio import engine as module
from glassformer.studio.engine import Engine
from glassformer.studio.errors import LoadingError, UnavailableError
from tests.studio.serving import wait_until


def test_it_is_ready_after_the_background_import():
    engine = Engine(warm=True)
    assert engine.state == "loading"
    engine.start()
    wait_until(engine.done.is_set)
    assert engine.state == "ready"
    engine.require()


def test_until_then_it_refuses(monkeypatch):
    engine = Engine(warm=True)
    monkeypatch.setattr(engine, "start", lambda: None)
    with pytest.raises(LoadingError, match="still being imported"):
        engine.require()


def test_a_failed_import_is_told_and_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "ROOMS", ("glassformer.no_such_room",))
    engine = Engine(warm=True)
    engine.start()
    wait_until(engine.done.is_set)
    assert engine.state == "failed"
    with pytest.raises(UnavailableError, match="no_such_room"):
        engine.require()


def test_without_warming_it_takes_what_is_there():
    assert "torch" in sys.modules
    assert Engine(warm=False).state == "ready"


def test_without_torch_and_without_warming_it_never_loads(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    engine = Engine(warm=False)
    engine.start()
    assert engine.state == "loading"
