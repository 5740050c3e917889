import os
import signal
import threading

import pytest

from glassformer.training import checkpoint, resume_session, train
from glassformer.training.distributed import group
from glassformer.training.distributed.group import ALONE
from glassformer.training.distributed.parallel import Replicated
from tests.training import tiny


def test_without_torchrun_there_is_one_process_and_errors_pass_through(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (group.world_size(), group.local_rank(), group.is_main()) == (1, 0, True)
    with pytest.raises(ValueError, match="wrong"), group.report_error_once():
        raise ValueError("wrong")
    with group.report_error_once():
        pass  # and a success just goes on


@pytest.mark.parametrize(("rank", "code"), [("0", 2), ("1", 2)])
def test_under_torchrun_the_first_speaks_and_all_leave(monkeypatch, capsys, rank, code):
    class Left(Exception):  # noqa: N818
        pass

    def leave(given):
        raise Left(given)

    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(group.os, "_exit", leave)
    monkeypatch.setattr(group, "PATIENCE", 0.0)
    with pytest.raises(Left, match=str(code)), group.report_error_once():
        raise ValueError("a sentence")
    assert ("glass: a sentence" in capsys.readouterr().err) is (rank == "0")
    with pytest.raises(Left, match="0"), group.report_error_once():
        pass


def test_the_first_is_noted_and_the_second_stops():
    before = signal.getsignal(signal.SIGINT)
    with ALONE.interrupts() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with Replicated.interrupts(ALONE), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with ALONE.interrupts() as asked:
            seen.append(asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_ctrl_c_saves_and_the_run_goes_on_bit_for_bit(tmp_path):
    whole = tiny.session(tmp_path, name="whole")
    train(whole.run, whole.data)
    parted = tiny.session(tmp_path, "loop.log_every=1", name="parted")

    def press(event):
        if event["event"] == "step" and event["step"] == 13:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(parted.run, parted.data, press)
    assert checkpoint.find(parted.run.out).name == "step-00000013"
    again = resume_session(parted.run.out)
    train(again.run, again.data, resume=again.resume)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "whole" / "last" / name).read_bytes() == (tmp_path / "parted" / "last" / name).read_bytes()
