"""Kernels for Hopper GPUs run on Hopper GPUs, where there is a compiler."""

import pytest
import torch

from glassformer.kernels.cuda.training import hopper


@pytest.mark.parametrize(
    ("there", "cuda", "capability", "compiler", "wanted"),
    [
        (True, "13.0", (9, 0), True, True),
        (False, "13.0", (9, 0), True, False),
        (True, None, (9, 0), True, False),  # a GPU of another maker
        (True, "13.0", (8, 0), True, False),
        (True, "13.0", (10, 0), True, False),
        (True, "13.0", (9, 0), False, False),
    ],
)
def test_available(there, cuda, capability, compiler, wanted, monkeypatch):
    hopper._available.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(hopper, "can_compile", lambda: compiler)
    assert hopper.available() is wanted
    hopper._available.cache_clear()
