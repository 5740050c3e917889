import contextlib
import json

from glassformer.training.log import Log


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_log_drops_what_will_be_done_again_and_torn_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    with contextlib.closing(Log(path, None, 0)) as log:
        for step in (1, 5, 9):
            log(event="step", step=step)
    path.write_text(path.read_text() + '{"event": "st')  # a crash in the middle of a line
    heard = []
    with contextlib.closing(Log(path, heard.append, 5)) as log:
        log(event="step", step=6)
    assert [e["step"] for e in lines(path)] == [1, 5, 6]
    assert heard == [{"event": "step", "step": 6}]


def test_only_one_rank_writes(tmp_path):
    with contextlib.closing(Log(tmp_path / "log.jsonl", None, 0, is_main=False)) as log:
        log(event="step", step=1)
    assert not (tmp_path / "log.jsonl").exists()
