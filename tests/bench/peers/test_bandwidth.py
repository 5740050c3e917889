"""The memory is really read."""

import pytest

from glassformer.bench.peers.bandwidth import Peer
from glassformer.bench.peers.base import Order


def test_it_reads_as_many_bytes_as_it_reports():
    peer = Peer(Order("memory", "bandwidth", "bandwidth", "float32", ""), size=1 << 20)
    assert peer.read() == 1 << 20
    assert float(peer.numbers.sum()) == (1 << 20) / 4


def test_memory_that_is_not_there_is_noticed():
    peer = Peer(Order("memory", "bandwidth", "bandwidth", "float32", ""), size=1 << 16)
    peer.numbers.zero_()
    with pytest.raises(AssertionError, match="not read"):
        peer.read()
