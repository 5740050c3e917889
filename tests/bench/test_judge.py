"""The same model, and the targets: reached, missed, and not judged."""

import pytest

from glassformer.bench import judge
from glassformer.bench.result import Group, Row
from glassformer.bench.startup import READING
from glassformer.finding import Verdict


def row(name, rate, ours=False, ids=None, precision="float32"):
    return Row(name, precision, ours, [rate], ids=ids or [])


def test_where_ids_part():
    assert judge.parting([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) is None
    assert judge.parting([[1, 2, 3], [4, 9, 6]], [[1, 2, 0], [4, 5, 6]]) == 1


def test_in_float32_other_ids_are_a_failure_and_elsewhere_a_remark():
    reference = [[1, 2, 3, 4]]
    rows = [row("same", 1.0, ids=[[1, 2, 3, 4]]), row("other", 1.0, ids=[[1, 2, 9, 9]]), row("alien", 1.0, ids=[[7]])]
    findings = judge.compare_ids(Group("float32", "", rows=rows), reference, {"same", "other"})
    assert {f.id: f.verdict for f in findings} == {
        "same-ids:same": Verdict.PASS, "same-ids:other": Verdict.FAIL
    }  # fmt: skip
    assert [r.agrees for r in rows] == ["the same ids", "parts after 2 of 4", "another architecture"]
    rows = [row("other", 1.0, ids=[[1, 2, 9, 9]])]
    assert judge.compare_ids(Group("int8", "", rows=rows), reference, {"other"}) == []
    assert rows[0].agrees == "parts after 2 of 4"


def test_losses_must_be_ours_and_must_fall():
    def of(ours, theirs, precision="float32"):
        rows = [row("glassformer", 2.0, ours=True, ids=[ours]), row("nanogpt", 1.0, ids=[theirs])]
        return [f.verdict for f in judge.compare_losses(Group(precision, "steps/s", "s", rows=rows))]

    assert of([4.0, 3.5], [4.0, 3.5001]) == [Verdict.PASS, Verdict.PASS]
    assert of([4.0, 3.5], [4.0, 3.6]) == [Verdict.PASS, Verdict.FAIL]
    assert of([4.0, 4.0], [4.0, 4.0]) == [Verdict.FAIL, Verdict.PASS]
    assert of([4.0, 3.5], [4.0, 3.505], "bfloat16") == [Verdict.PASS, Verdict.PASS]


def group(ours, peer, precision="float32", bandwidth=None, touched=1.0):
    rows = [row("glassformer", ours, ours=True), *([] if peer is None else [row("llama.cpp", peer)])]
    read = None if bandwidth is None else row("memory", bandwidth)
    return Group(precision, "tokens/s", rows=rows, bandwidth=read, touched=touched)


PLAN = {"task": "decode", "model": "gpt2", "batch": 1}


@pytest.mark.parametrize(
    ("precision", "ours", "bandwidth", "verdicts"),
    [
        ("float32", 10.0, 12.0, ["pass", "pass"]),
        ("float32", 9.9, 13.0, ["fail", "fail"]),
        ("int8", 10.0, 14.0, ["pass", "pass"]),
        ("int4", 1.0, 99.0, []),
    ],
)
def test_targets_of_decoding(precision, ours, bandwidth, verdicts):
    findings = judge.targets(PLAN, [group(ours, 10.0, precision, bandwidth)], [])
    assert [str(f.verdict) for f in findings] == verdicts
    for finding in findings:
        told = judge.sentence(finding)
        assert ("reached" if finding.passed else "missed by") in told
        assert "\n" not in told


def test_a_batch_has_no_bandwidth_target_and_is_named():
    findings = judge.targets({**PLAN, "batch": 8}, [group(20.0, 10.0, bandwidth=99.0)], [])
    assert [f.id for f in findings] == ["target:decode:float32:batch 8"]


def test_without_a_peer_nothing_is_claimed():
    (finding,) = judge.targets({**PLAN, "task": "prefill"}, [group(5.0, None)], [])
    assert finding.verdict is Verdict.SKIP
    assert "not judged, no peer ran in float32" in judge.sentence(finding)


def test_nothing_is_claimed_when_we_or_the_memory_died():
    made = group(5.0, 4.0, bandwidth=9.0)
    made.bandwidth.died = "killed"
    assert [str(f.verdict) for f in judge.targets(PLAN, [made], [])] == ["pass", "skip"]
    assert [f.id for f in judge.deaths([made])] == ["alive:memory:float32"]
    made.rows[0].died = "killed"
    assert [str(f.verdict) for f in judge.targets(PLAN, [made], [])] == ["skip", "skip"]


def test_training_asks_for_more_than_level():
    for ratio, expected in ((1.14, False), (1.16, True)):
        (finding,) = judge.targets({**PLAN, "task": "train"}, [group(ratio, 1.0)], [])
        assert finding.passed is expected


def test_other_models_have_no_targets():
    assert judge.targets({**PLAN, "model": "gpt2_medium"}, [group(1.0, 9.0)], []) == []


def test_the_target_of_startup_is_torch_and_the_file():
    plain = [row("import torch", 1.0), row(READING, 0.5)]
    for seconds, expected in ((1.7, True), (1.8, False)):
        made = group(seconds, 0.3)
        (finding,) = judge.targets({**PLAN, "task": "startup"}, [made], plain)
        assert finding.passed is expected
    (finding,) = judge.targets({**PLAN, "task": "startup"}, [group(1.0, 0.3)], [])
    assert finding.verdict is Verdict.SKIP


def test_the_dead_are_named():
    made = group(1.0, 2.0)
    made.rows[1].died = "Segmentation fault"
    (finding,) = judge.deaths([made])
    assert (finding.id, finding.why) == ("alive:llama.cpp:float32", "Segmentation fault")
