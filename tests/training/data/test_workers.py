"""Processes that do jobs: results in order, one error, and no process that is left."""

import os

import pytest

from glassformer.training.data import workers
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.parts import divide
from glassformer.training.data.workers import do_all


def hashing(folder, count):
    jobs = []
    for number in range(count):
        (folder / f"{number}.txt").write_text("x" * (number + 1))
        ((span,),) = divide([Document(str(number), folder / f"{number}.txt")], 1 << 20)
        jobs.append({"kind": "hash", "span": span})
    return jobs


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    found, real = [], workers._start
    monkeypatch.setattr(workers, "_start", lambda: found.append(real()) or found[-1])
    return found


def test_results_come_in_the_order_of_the_jobs_from_no_more_processes_than_jobs(tmp_path, started):
    jobs = hashing(tmp_path, 5)
    alone = list(do_all(jobs, 1))
    assert not started
    assert list(do_all(jobs, 2)) == alone
    assert len(started) == 2
    assert list(do_all(jobs[:2], 9)) == alone[:2]
    assert len(started) == 4
    assert all(worker.poll() is not None for worker in started)


def test_an_error_of_a_job_is_raised_and_ends_the_processes(tmp_path, started):
    jobs = hashing(tmp_path, 4)
    jobs[1]["span"]["path"] = str(tmp_path / "none")
    with pytest.raises(DataError, match="none cannot be read"):
        list(do_all(jobs, 2))
    assert all(worker.poll() is not None for worker in started)


def test_a_process_that_is_killed_is_reported_with_what_to_do(tmp_path, started):
    jobs = hashing(tmp_path, 3)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    jobs[2]["span"]["path"] = str(fifo)  # a job that does not end
    found = do_all(jobs, 2)
    next(found), next(found)
    for worker in started:
        worker.kill()
    with pytest.raises(DataError, match="ended with code -9: finished parts are kept, so run it again"):
        next(found)
