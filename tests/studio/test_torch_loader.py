import sys

import pytest

from glassformer.studio import torch_loader as module
from glassformer.studio.errors import LoadingError, UnavailableError
from glassformer.studio.torch_loader import TorchLoader
from tests.studio.serving import wait_until


def test_it_is_ready_after_the_background_import():
    torch_loader = TorchLoader(warm=True)
    assert torch_loader.state == "loading"
    torch_loader.start()
    wait_until(torch_loader.done.is_set)
    assert torch_loader.state == "ready"
    torch_loader.require()


def test_until_then_it_refuses(monkeypatch):
    torch_loader = TorchLoader(warm=True)
    monkeypatch.setattr(torch_loader, "start", lambda: None)
    with pytest.raises(LoadingError, match="still being imported"):
        torch_loader.require()


def test_a_failed_import_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(module, "MODULES", ("glassformer.no_such_room",))
    torch_loader = TorchLoader(warm=True)
    torch_loader.start()
    wait_until(torch_loader.done.is_set)
    assert torch_loader.state == "failed"
    with pytest.raises(UnavailableError, match="no_such_room"):
        torch_loader.require()


def test_without_warming_it_takes_what_is_there():
    assert "torch" in sys.modules
    assert TorchLoader(warm=False).state == "ready"


def test_without_torch_and_without_warming_it_never_loads(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    torch_loader = TorchLoader(warm=False)
    torch_loader.start()
    assert torch_loader.state == "loading"
