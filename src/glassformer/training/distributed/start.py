"""The start of several ranks: they join under torchrun, and stop unless they agree on what they train.

torchrun shares its key-value store with the ranks. After a restart (`--max-restarts`) it still holds the addresses of
the ranks that ended, so each attempt uses keys of its own. On several hosts, attempts may be counted differently: set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun there, which gives each attempt a new store.
"""

import datetime
import hashlib
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from glassformer.config import ConfigError
from glassformer.training.distributed.failure import Watch
from glassformer.training.distributed.group import Group, local_rank
from glassformer.training.run import Run, run_to_dict
from glassformer.training.sinks import flat

PATIENT = datetime.timedelta(minutes=30)
"""How long ranks wait for rank 0 alone: it may be counting n-grams or hashing a large checkpoint meanwhile."""
OWN_PATHS = ("data.cache",)
"""Fields of a run that may differ between hosts."""
SHOWN = 3
"""Differences that the message names."""


@dataclass
class Joined:
    """The connections of this process to the other ranks."""

    watch: Watch
    patient: Any
    """The group of processes for what may take rank 0 a long time, with the time-out PATIENT."""
    timeout: float
    """Seconds that a rank waits for the others in a step: machine.timeout."""


_joined: Joined | None = None


def connect(run: Run) -> Group:
    """Join the processes of torchrun and return their group. It can be called again."""
    global _joined
    from glassformer.training.distributed.replicate import Replicated
    from glassformer.training.distributed.sharding import Sharded

    cuda = run.machine.device != "cpu" and torch.cuda.is_available()
    if cuda:
        local, devices = local_rank(), torch.cuda.device_count()
        if local >= devices:
            raise ConfigError(
                f"this machine has {devices} CUDA devices, which is too few for process {local + 1}: "
                f"use --nproc-per-node {devices}, or machine.device='cpu'."
            )
        torch.cuda.set_device(local)
    if _joined is None:
        _joined = _join(cuda)
    _set_timeout(_joined, run.machine.timeout)
    kind = Sharded if run.machine.parallel == "fsdp" else Replicated
    return kind(torch.device("cuda" if cuda else "cpu"), _joined, run.machine)


def _join(cuda: bool) -> Joined:
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    held = dist.TCPStore(address, port, is_master=rank == 0 and not shared, timeout=PATIENT)
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", held)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENT)
    return Joined(Watch(store, rank, world), dist.new_group(backend="gloo", timeout=PATIENT), PATIENT.total_seconds())


def connect_again(joined: Joined) -> Joined:
    """Return further connections to the same ranks, for a second thread. All ranks must call it."""
    import torch.distributed as dist

    uncounted = cast(Watch, SimpleNamespace(exchanges=0))  # the heartbeats are those of the first connections
    return Joined(uncounted, dist.new_group(backend="gloo", timeout=PATIENT), joined.timeout)


def _set_timeout(joined: Joined, seconds: float) -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(datetime.timedelta(seconds=seconds))
    joined.timeout = seconds


def disconnect() -> None:
    """End the connections of this process."""
    global _joined
    import torch.distributed as dist

    if _joined is not None:
        _joined.watch.stop()
        _joined = None
    dist.destroy_process_group()


def identity(run: Run, data: Any, resumed: dict[str, Any] | None) -> dict[str, Any]:
    """Return everything that the ranks of a run must have in common, by name."""
    import glassformer

    return {
        "host": socket.gethostname(),
        "the version of glassformer": glassformer.__version__,
        "the source code of glassformer": _hash_of_code(),
        "the version of torch": torch.__version__,
        **{name: value for name, value in flat(run_to_dict(run)).items() if name not in OWN_PATHS},
        "tokenizer.json": _sha256(data.tokenizer.to_json().encode()),
        "the token files": _sha256(json.dumps([getattr(data, "digest", None), data.facts(run)], default=str).encode()),
        "the checkpoint": resumed and f"step {resumed['step']}, {_sha256(json.dumps(resumed['sha256']).encode())}",
    }


def difference(facts: list[dict[str, Any]]) -> str | None:
    """Return one sentence about what the facts of the ranks do not have in common; None if there is nothing."""
    found = []
    for name in [n for n in {**facts[0], **facts[-1]} if n != "host"]:
        first = facts[0].get(name)
        other = next((rank for rank, held in enumerate(facts) if held.get(name) != first), None)
        if other is not None:
            value = facts[other].get(name)
            found.append(f"{name} is {first!r} on rank 0 and {value!r} on rank {other} ({facts[other]['host']})")
    if not found:
        return None
    more = f", and {len(found) - SHOWN} more differences" if len(found) > SHOWN else ""
    return (
        f"ranks must train the same run, but {'; '.join(found[:SHOWN])}{more}: give all of them the same run file, "
        "data and version."
    )


def _hash_of_code() -> str:
    """Return a hash of all Python files of this package, in which two checkouts of one version may differ."""
    import glassformer

    root, total = Path(glassformer.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
