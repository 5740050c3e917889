import os
import signal
import threading

import pytest

from glassformer.training import checkpoint, resume_session, train
from glassformer.training.interrupt import interrupts
from tests.training import tiny


def test_the_first_is_noted_and_the_second_stops():
    before = signal.getsignal(signal.SIGINT)
    with interrupts() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with interrupts(active=False), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with interrupts() as asked:
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
