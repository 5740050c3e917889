import pytest

from glassformer.training.distributed import ranks


def test_without_torchrun_there_is_one_process_and_errors_pass_through(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (ranks.world_size(), ranks.local_rank(), ranks.is_main()) == (1, 0, True)
    with pytest.raises(ValueError, match="wrong"), ranks.report_error_once():
        raise ValueError("wrong")
    with ranks.report_error_once():
        pass  # and a success just goes on


@pytest.mark.parametrize(("rank", "code"), [("0", 2), ("1", 2)])
def test_under_torchrun_the_first_speaks_and_all_leave(monkeypatch, capsys, rank, code):
    class Left(Exception):  # noqa: N818
        pass

    def leave(given):
        raise Left(given)

    for name, value in (("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks.os, "_exit", leave)
    monkeypatch.setattr(ranks, "PATIENCE", 0.0)
    with pytest.raises(Left, match=str(code)), ranks.report_error_once():
        raise ValueError("a sentence")
    assert ("glass: a sentence" in capsys.readouterr().err) is (rank == "0")
    with pytest.raises(Left, match="0"), ranks.report_error_once():
        pass
