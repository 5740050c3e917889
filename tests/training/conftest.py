"""What tests of several kernels share."""

import pytest

from glassformer.kernels.cuda.training import tiles


@pytest.fixture
def small(monkeypatch):
    """Products in tiles with another ring, cluster and panel: an emulated GPU has less patience."""

    def choose(stages, cluster, panel):
        for name, value in (("STAGES", stages), ("CLUSTER", cluster), ("PANEL", panel)):
            monkeypatch.setattr(tiles, name, value)
        tiles.source.cache_clear()

    yield choose
    tiles.source.cache_clear()
