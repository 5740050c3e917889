"""Errors that ranks have in common, and signals: what `Replicated` adds to a process alone."""

import socket
import time

import pytest

from tests.cli.asking import settings
from tests.training.distributed.ranks import SHORT, launch, ranks_by_hand, where
from tests.training.tiny import corpus


@pytest.mark.slow
def test_a_batch_that_ranks_cannot_share_is_one_sentence(tmp_path):
    corpus(tmp_path)
    first, second = ranks_by_hand(2, *SHORT, *where(tmp_path, "run"), "loop.batch=9")
    sentence = "loop.batch=9 is not a multiple of 2 ranks: they cannot take equal shares. Use 8 or 10.\n"
    assert first == (2, "", f"glass: {sentence}")
    # torchrun ends the second when the first has left; here it outlives that, and names itself
    assert second == (2, "", f"glass: rank 1 on {socket.gethostname()}: {sentence}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_step_that_is_no_number_stops_all_ranks_with_one_sentence(tmp_path, kind):
    corpus(tmp_path)
    changes = (*SHORT, *where(tmp_path, "run"), f"machine.parallel={kind}", "optim.lr=1e30", "loop.steps=2000")
    began = time.monotonic()
    done = launch(2, "-m", "glassformer", "train", "--no-latest", "--json", *settings(*changes, "schedule.warmup=0"))
    assert time.monotonic() - began < 240
    assert done.returncode != 0
    assert done.stderr.count("Nothing was updated") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_stops_all_ranks_with_one_sentence(tmp_path):
    corpus(tmp_path)
    (tmp_path / "run").write_text("in the way")
    done = launch(2, "-m", "glassformer", "train", "--no-latest", *settings(*SHORT, *where(tmp_path, "run")))
    assert done.returncode != 0
    assert done.stderr.count("cannot be written") == 1
    assert "Error: " not in done.stderr.replace("ChildFailedError: ", "")
