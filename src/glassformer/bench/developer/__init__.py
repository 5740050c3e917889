"""Benchmarks for developers that run on a CPU; each is a command, `python -m glassformer.bench.developer.NAME`."""

from typing import Any

from glassformer.bench.commands import in_process


def in_ranks(module: str, ranks: int, *arguments: str) -> list[Any]:
    """Run a module on several ranks of torchrun with one thread each; return what its first rank prints as JSON."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return in_process(module, *arguments, launcher=torchrun)
