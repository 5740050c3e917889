import os
import signal
import threading

import pytest

from glassformer.config import ConfigError
from glassformer.training import checkpoint, read_run, resume_session, train
from glassformer.training.distributed import group
from glassformer.training.distributed.group import ALONE, check, start
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
    said = capsys.readouterr().err
    assert said.startswith("glass: a sentence" if rank == "0" else "glass: rank 1 on ")  # it has an error of its own
    assert said.endswith("a sentence\n")
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
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_ranks_note_signals_and_ignore_the_second(name):
    number = getattr(signal, name)
    with group.caught_signals(repeated=False) as noted:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert noted == [number, number]


@pytest.mark.parametrize("error", [group.Stopped(15), group.LostRankError("rank 1 ended", True)])
def test_ranks_that_stop_or_are_left_alone_leave_at_once(monkeypatch, capsys, error):
    codes = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(group, "leave", codes.append)
    with group.report_error_once():
        raise error
    assert codes == [143 if isinstance(error, group.Stopped) else 1]
    assert capsys.readouterr().err == ("" if isinstance(error, group.Stopped) else "glass: rank 1 ended\n")


def test_the_command_that_continues_names_as_many_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert group.resume_command("my runs/a") == "glass train --resume 'my runs/a'"
    for name, value in (("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4"), ("GROUP_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    command = "torchrun --nnodes 2 --nproc-per-node 4 -m glassformer train --resume runs/a"
    assert group.resume_command("runs/a") == command
    assert not group.restarted()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert group.restarted()


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


def test_a_process_by_itself_has_no_group(monkeypatch):
    run = read_run("", ("loop.batch=9",))
    assert start(run) is ALONE
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert start(run) is ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"loop.batch=9 is not a multiple of 4 ranks.*Use 8 or 12"):
        start(run)
    with pytest.raises(ConfigError, match=r"machine.replicate=3 does not divide 4 ranks"):
        check(read_run("", ("machine.parallel=fsdp", "machine.replicate=3")))
    with pytest.raises(ConfigError, match=r"4 ranks x loop.accumulate=3: .* Use 12 or 24"):
        check(read_run("", ("loop.batch=9", "loop.accumulate=3")))
