"""`glass size plan` against what two processes on this machine really do.

One process alone gives the rate of a device, a sum over two ranks gives the rate of their link; from these two numbers
the plan predicts a data-parallel and a fully sharded step of two ranks, and torchrun measures them.

    python -m benchmarks.plan --text TEXT
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from glassformer.size.devices import Device
from glassformer.size.flops import flops
from glassformer.size.parameters import count
from glassformer.size.plan import plan

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SHAPE = ("model.preset=shakespeare", "model.n_layers=6", "model.max_len=256", "model.dropout=0.0", "machine.compile=no")
"""The plain engine everywhere: sharded ranks cannot use the compiled kernels."""
EACH = 4
"""Sequences per rank."""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def changes(folder: Path, name: str, text: str, batch: int, steps: int, *more: str) -> list[str]:
    where = (f"data.corpus={text}", f"data.cache={folder / 'tokens'}", f"out={folder / name}")
    loop = (
        f"loop.batch={batch}",
        f"loop.steps={steps}",
        "loop.log_every=1",
        "loop.eval_every=100000",
        "schedule.warmup=1",
    )
    return [*where, *SHAPE, *loop, "machine.device=cpu", "machine.precision=float32", *more]


def seconds(folder: Path) -> tuple[float, float]:
    """Median seconds of a step after the first five, and the spread of the middle half."""
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [1 / e["steps_per_second"] for e in events if e["event"] == "step" and e.get("steps_per_second")][5:]
    low, _, high = statistics.quantiles(steps, n=4)
    return statistics.median(steps), high - low


def alone(folder: Path, text: str, steps: int) -> float:
    """Two processes side by side that know nothing of each other: what a device does while its neighbour works."""
    running = []
    for name in ("one", "two"):
        command = [sys.executable, "-m", "glassformer", "train", "--set", *changes(folder, name, text, EACH, steps)]
        running.append(subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL))
        if name == "one":
            while not (folder / "tokens").exists():  # one prepares the text
                time.sleep(0.2)
            time.sleep(3)
    assert all(process.wait() == 0 for process in running)
    return statistics.mean(seconds(folder / name)[0] for name in ("one", "two"))


def together(folder: Path, text: str, steps: int, kind: str) -> tuple[float, float]:
    given = changes(folder, kind, text, 2 * EACH, steps, f"machine.parallel={kind}")
    command = [*TORCHRUN, "-m", "glassformer", "train", "--set", *given]
    subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return seconds(folder / kind)


def measure_link(elements: int) -> None:
    """Run by each rank: seconds to sum as many floats as the model has parameters."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tensor, times = torch.ones(elements), []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(statistics.median(times)))
    dist.destroy_process_group()


def link_seconds(elements: int) -> float:
    command = [*TORCHRUN, "-m", "benchmarks.plan", "--link", str(elements)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def report(text: str, steps: int) -> dict[str, Any]:
    from glassformer.train import open_session, read_run

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = alone(folder, text, steps)
        config = open_session(read_run("", tuple(changes(folder, "one", text, EACH, steps)))).run.model
        reduce = link_seconds(count(config))
        work = 3 * sum(flops(config, EACH, 256).needed.values())
        rate, link = work / one, 4 * count(config) / reduce  # 2·(n-1)/n of the bytes for n = 2
        device = Device(
            "this machine", rate, rate, 1e30, 1e12, rate, 0.0, link, link, 2, 0.0, 0.0, 0.0, "benchmarks/plan.py"
        )
        rows = {}
        for kind, how in (("ddp", "data"), ("fsdp", "sharded")):
            predicted = plan(config, 2, device, how, EACH, 256, weight_bytes=4)
            measured, spread = together(folder, text, steps, kind)
            rows[kind] = {
                "predicted": predicted.step, "measured": measured, "spread": spread,
                "error": predicted.step / measured - 1,
            }  # fmt: skip
        return {"alone": one, "all_reduce": reduce, "parameters": count(config), "ranks": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--link", type=int, help="run by each rank")
    given = parser.parse_args()
    if given.link:
        return measure_link(given.link)
    found = report(given.text, given.steps)
    print(f"one process, its neighbour busy: {found['alone']:.3f} s a step; sum over two: {found['all_reduce']:.3f} s")
    for kind, row in found["ranks"].items():
        print(f"{kind:5} predicted {row['predicted']:.3f} s, measured {row['measured']:.3f} s: {row['error']:+.1%}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
