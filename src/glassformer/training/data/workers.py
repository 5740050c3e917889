"""Processes that do the jobs of a preparation (`parts`)."""

import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from glassformer.training.data import parts
from glassformer.training.data.corpus import DataError
from glassformer.training.data.parts import Job


def do_all(jobs: Sequence[Job], processes: int) -> Iterator[tuple[int, Any]]:
    """Yield the number and the result of each job, as they finish."""
    if processes < 2 or len(jobs) < 2:
        yield from ((number, parts.do(job)) for number, job in enumerate(jobs))
        return
    futures: list[Future[Any]] = []
    workers = [_start() for _ in range(min(processes, len(jobs)))]
    free: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    for worker in workers:
        free.put(worker)

    def ask(job: Job) -> Any:
        worker = free.get()
        try:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except OSError:
            answer = ""
        finally:
            free.put(worker)
        if not answer:
            raise DataError(
                f"a process of the preparation ended with code {worker.wait()}: finished parts are kept, so run it "
                "again, with fewer processes if memory was short."
            )
        return _result(json.loads(answer))

    pool = ThreadPoolExecutor(len(workers))
    try:
        futures += [pool.submit(ask, job) for job in jobs]
        for number, future in enumerate(futures):
            yield number, future.result()
    finally:
        for future in futures:
            future.cancel()
        for worker in workers:
            worker.kill()  # a waiting thread then gets an end of file
        pool.shutdown()
        for worker in workers:
            worker.communicate()


def _start() -> "subprocess.Popen[str]":
    # each process tokenizes in one thread: the processes share the cores
    settings = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, "-m", parts.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | settings | {"PYTHONPATH": path},
    )


def _result(answer: dict[str, Any]) -> Any:
    if "system" in answer:
        raise OSError(*answer["system"])
    if "error" in answer:
        raise DataError(answer["error"])
    return answer["result"]
