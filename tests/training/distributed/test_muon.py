"""Who owns which matrix, and what travels; tests/training/distributed/test_sharding.py trains with it."""

import itertools
import threading

import pytest
import torch

from glassformer.training.distributed.muon import Owners
from glassformer.training.muon import Muon, orthogonalize_all


class Meeting:
    """Collectives among threads: each rank puts what it sends and waits for the others."""

    def __init__(self, world: int):
        self.world, self.barrier, self.sent = world, threading.Barrier(world), {}

    def swap(self, rank: int, value):
        self.barrier.wait()
        self.sent[rank] = value
        self.barrier.wait()
        return [self.sent[other] for other in range(self.world)]


class Rank:
    """A group of threads."""

    def __init__(self, meeting: Meeting, rank: int, sharded: bool):
        self.meeting, self.rank, self.world, self.sharded, self.dist = meeting, rank, meeting.world, sharded, self
        self.owners = None

    def get_rank(self, group):
        return self.rank

    def get_world_size(self, group):
        return self.world

    def local(self, tensor):
        return tensor

    def all_gather_into_tensor(self, out, given, group):
        out.copy_(torch.cat(self.meeting.swap(self.rank, given)))

    def all_to_all_single(self, out, given, got_sizes, sent_sizes, group):
        everything = self.meeting.swap(self.rank, given.split(sent_sizes))
        out.copy_(torch.cat([parts[self.rank] for parts in everything]))


@pytest.mark.parametrize(("world", "sharded"), [*itertools.product((2, 3), (True, False))])
def test_each_matrix_is_orthogonalized_once_as_in_one_process(monkeypatch, world, sharded):
    torch.manual_seed(0)
    shapes = {torch.Size((6, 4)): 5, torch.Size((4, 6)): 1, torch.Size((7, 7)): 3}
    stacks = {shape: torch.randn(n, *shape).bfloat16() for shape, n in shapes.items()}
    expected = orthogonalize_all(stacks)
    counted = []
    monkeypatch.setattr(
        "glassformer.training.distributed.muon.orthogonalize_all",
        lambda given: counted.append(sum(map(len, given.values()))) or orthogonalize_all(given),
    )
    meeting, found = Meeting(world), {}

    def work(rank: int) -> None:
        optimizer = Muon([torch.nn.Parameter(torch.zeros(2, 2))], 0.1, 0.9, 0.0)
        owners = Owners(optimizer, Rank(meeting, rank, sharded))
        given = stacks
        if sharded:
            starts = {shape: sum(owners.rows(shape)[:rank]) for shape in shapes}
            given = {s: t[:, starts[s] : starts[s] + owners.rows(s)[rank]] for s, t in stacks.items()}
        found[rank] = optimizer.orthogonalize(given)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert sum(counted) == sum(shapes.values())
    for shape in shapes:
        parts = [found[rank][shape] for rank in range(world)]
        for whole in [torch.cat(parts, dim=1)] if sharded else parts:
            assert torch.allclose(whole.float(), expected[shape].float(), atol=1e-2)  # bfloat16 in other batches
