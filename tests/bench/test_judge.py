"""The same model, and the targets: reached, missed, and not judged."""

import pytest

from glassformer.bench import judge
from glassformer.bench.result import Bandwidth, Group, Row, compare_bandwidths
from glassformer.bench.startup import READING
from glassformer.finding import Verdict


def row(name, rate, ours=False, ids=None, precision="float32"):
    """Three quiet rounds at a rate, or rounds as given."""
    return Row(name, precision, ours, rate if isinstance(rate, list) else [rate] * 3, ids=ids or [])


def test_where_ids_part():
    assert judge.first_difference([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6]]) is None
    assert judge.first_difference([[1, 2, 3], [4, 9, 6]], [[1, 2, 0], [4, 5, 6]]) == 1


def test_in_float32_other_ids_are_a_failure_and_elsewhere_a_remark():
    reference = [[1, 2, 3, 4]]
    rows = [row("same", 1.0, ids=[[1, 2, 3, 4]]), row("other", 1.0, ids=[[1, 2, 9, 9]]), row("alien", 1.0, ids=[[7]])]
    findings = judge.compare_ids(Group("float32", "", rows=rows), reference, {"same", "other"})
    assert {f.id: f.verdict for f in findings} == {
        "same-ids:same": Verdict.PASS, "same-ids:other": Verdict.FAIL
    }  # fmt: skip
    assert [r.agrees for r in rows] == ["the same ids", "differs after 2 of 4", "another architecture"]
    rows = [row("other", 1.0, ids=[[1, 2, 9, 9]])]
    assert judge.compare_ids(Group("int8", "", rows=rows), reference, {"other"}) == []
    assert rows[0].agrees == "differs after 2 of 4"


def test_losses_must_equal_ours_and_must_fall():
    def of(ours, theirs, precision="float32"):
        rows = [row("glassformer", 2.0, ours=True, ids=[ours]), row("nanogpt", 1.0, ids=[theirs])]
        return [f.verdict for f in judge.compare_losses(Group(precision, "steps/s", "s", rows=rows))]

    assert of([4.0, 3.5], [4.0, 3.5001]) == [Verdict.PASS, Verdict.PASS]
    assert of([4.0, 3.5], [4.0, 3.6]) == [Verdict.PASS, Verdict.FAIL]
    assert of([4.0, 4.0], [4.0, 4.0]) == [Verdict.FAIL, Verdict.PASS]
    assert of([4.0, 3.5], [4.0, 3.505], "bfloat16") == [Verdict.PASS, Verdict.PASS]


def test_the_last_losses_of_a_model_must_meet_and_all_must_fall():
    def of(ours, theirs, precision="bfloat16"):
        rows = [row("glassformer", 2.0, ours=True, ids=[ours]), row("transformers", 1.0, ids=[theirs])]
        return {f.id: str(f.verdict) for f in judge.compare_last_losses(Group(precision, "tokens/s", rows=rows))}

    fine = {"it-learns:glassformer": "pass", "it-learns:transformers": "pass", "same-loss:transformers": "pass"}
    assert of([9.0, 7.0, 6.2], [9.0, 8.0, 6.25]) == fine  # they may differ on the way
    assert of([9.0, 7.0, 6.2], [9.0, 7.0, 6.35]) == {**fine, "same-loss:transformers": "fail"}
    assert of([9.0, 7.0, 6.2], [9.3, 7.0, 6.2]) == {**fine, "same-loss:transformers": "fail"}  # other weights
    assert of([9.0, 7.0, 6.2], [9.0, 7.0, 6.25], "float32") == {**fine, "same-loss:transformers": "fail"}
    assert of([9.0, 9.0], [9.0, 9.0])["it-learns:transformers"] == "fail"


def test_ours_in_float8_has_a_target_of_its_own_against_others_in_bfloat16():
    rows = [row("glassformer", 1.4, ours=True, precision="bfloat16"), row("transformers", 1.0, precision="bfloat16")]
    rows.insert(1, row("glassformer float8", 1.6, ours=True, precision="float8"))
    plan = {"task": "train", "model": "llama3_2_1b", "batch": 4, "device": "cuda"}
    found = judge.targets(plan, [Group("bfloat16", "tokens/s", "s", rows=rows)], [])
    assert {f.id: str(f.verdict) for f in found} == {"target:train:bfloat16:s": "pass", "target:train:float8:s": "fail"}


def test_a_gpu_and_the_start_of_training_are_not_judged_by_the_targets_of_a_cpu():
    on_gpu = judge.targets({**PLAN, "device": "cuda"}, [group(20.0, 10.0, bandwidth=99.0)], [])
    assert [f.id for f in on_gpu] == ["target:decode:float32"]
    assert judge.targets({**PLAN, "task": "startup", "training": True}, [group(1.0, None)], []) == []


def group(ours, peer, precision="float32", bandwidth=None, weight_bytes=1.0):
    rows = [row("glassformer", ours, ours=True), *([] if peer is None else [row("llama.cpp", peer)])]
    read = None if bandwidth is None else Bandwidth("memory", precision, False, row("", bandwidth).rounds)
    return Group(precision, "tokens/s", rows=rows, bandwidth=read, weight_bytes=weight_bytes)


PLAN = {"task": "decode", "model": "gpt2", "batch": 1}


@pytest.mark.parametrize(
    ("precision", "ours", "bandwidth", "verdicts"),
    [
        ("float32", 10.0, 12.0, ["pass", "pass"]),
        ("float32", 9.9, 13.0, ["fail", "fail"]),
        ("int8", 10.0, 14.0, ["pass", "pass"]),
        ("int4", 1.0, 99.0, ["fail"]),
    ],
)
def test_targets_of_decoding(precision, ours, bandwidth, verdicts):
    findings = judge.targets(PLAN, [group(ours, 10.0, precision, bandwidth)], [])
    assert [str(f.verdict) for f in findings] == verdicts
    for finding in findings:
        sentence = judge.sentence(finding)
        assert ("reached" if finding.passed else "missed by") in sentence
        assert "\n" not in sentence


def test_a_batch_has_no_bandwidth_target_and_is_named():
    findings = judge.targets({**PLAN, "batch": 8}, [group(20.0, 10.0, bandwidth=99.0)], [])
    assert [f.id for f in findings] == ["target:decode:float32:batch 8"]


def test_without_a_peer_nothing_is_claimed():
    (finding,) = judge.targets({**PLAN, "task": "prefill"}, [group(5.0, None)], [])
    assert finding.verdict is Verdict.SKIP
    assert "not measured: no peer ran in float32" in judge.sentence(finding)


def test_nothing_is_claimed_when_we_or_the_memory_died():
    made = group(5.0, 4.0, bandwidth=9.0)
    made.bandwidth.died = "killed"
    assert [str(f.verdict) for f in judge.targets(PLAN, [made], [])] == ["pass", "skip"]
    assert [f.id for f in judge.failed_contenders([made])] == ["alive:memory:float32"]
    made.rows[0].died = "killed"
    assert [str(f.verdict) for f in judge.targets(PLAN, [made], [])] == ["skip", "skip"]


def test_training_asks_for_more_than_level():
    for ratio, expected in ((1.14, False), (1.16, True)):
        (finding,) = judge.targets({**PLAN, "task": "train"}, [group(ratio, 1.0)], [])
        assert finding.passed is expected


def test_other_models_have_a_ratio_and_no_share_of_the_bandwidth_as_target():
    (finding,) = judge.targets({**PLAN, "model": "gpt2_medium"}, [group(1.0, 9.0, bandwidth=99.0)], [])
    assert finding.id == "target:decode:float32"
    assert judge.targets({**PLAN, "model": "gpt2_medium", "task": "startup"}, [group(1.0, 9.0)], []) == []


@pytest.mark.parametrize(("apart", "verdict"), [(1e-5, "pass"), (0.1, "fail")])
def test_hidden_states_are_compared_within_a_bound(apart, verdict):
    made = group(2.0, 1.0)
    made.rows[0].ids, made.rows[1].ids = [[1.0, -2.0]], [[1.0, -2.0 + apart]]
    ours, peer = judge.compare_states(made, [[1.0, -2.0]], set())
    assert str(ours.verdict) == "pass"
    assert str(peer.verdict) == verdict
    assert "apart" in made.rows[1].agrees


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
    (finding,) = judge.failed_contenders([made])
    assert (finding.id, finding.why) == ("alive:llama.cpp:float32", "Segmentation fault")


def sentences(groups, **plan):
    return [judge.sentence(finding) for finding in judge.targets({**PLAN, **plan}, groups, [])]


def test_a_disturbed_contender_is_neither_reached_nor_missed():
    """A spread of 195 %, whoever has it, makes a ratio meaningless."""
    wild = [1.0, 10.0, 20.5]
    for made in (group(wild, 10.0), group(10.0, wild)):
        (sentence,) = sentences([made], task="prefill")
        assert "not measured:" in sentence
        assert "was disturbed: its rounds spread by 195%, more than 50%" in sentence
        assert "reached" not in sentence
        assert "missed" not in sentence


def test_a_disturbed_peer_matters_only_where_it_may_be_the_best():
    made = group(10.0, 8.0)
    made.rows.append(row("slow", [0.5, 1.0, 3.0]))
    (sentence,) = sentences([made], task="prefill")
    assert "reached" in sentence
    made.rows.append(row("may be fast", [0.5, 1.0, 12.0]))
    (sentence,) = sentences([made], task="prefill")
    assert "not measured: may be fast was disturbed" in sentence


@pytest.mark.parametrize(
    ("bandwidth", "words"),
    [
        ([3.0, 12.0, 4.0], "the fastest rounds of reading memory differ"),
        ([12.0, 12.0], "2 rounds cannot show whether they were disturbed"),
        ([3.0, 3.0, 3.0], "333% of the bandwidth: reading memory was disturbed"),
    ],
)
def test_a_disturbed_bandwidth_cannot_be_reached(bandwidth, words):
    """Memory that is read slowly by accident makes every contender look near the limit."""
    sentence = sentences([group(10.0, 10.0, bandwidth=bandwidth)])[1]
    assert sentence.startswith("bandwidth, float32: not measured: ")
    assert words in sentence


def test_rounds_that_were_disturbed_now_and_then_do_no_harm():
    sentence = sentences([group(10.0, 10.0, bandwidth=[2.0, 12.0, 11.9, 5.0, 12.1])])[1]
    assert "reached" in sentence


def test_two_bandwidths_in_one_run_must_agree():
    """9.8 and 53.4 GB/s in the same run: the first was disturbed throughout."""
    groups = [
        group(20.0, 20.0, bandwidth=9.8e9, weight_bytes=4.9e8),
        group(87.0, 80.0, "bfloat16", bandwidth=53.4e9, weight_bytes=4.9e8),
    ]
    compare_bandwidths(groups)
    sentence = sentences(groups)
    assert "memory was read at 9.8 GB/s, and at 53.4 GB/s in another part of the same run" in sentence[1]
    assert sentence[1].startswith("bandwidth, float32: not measured: disturbed")
    assert "bandwidth, bfloat16: missed" in sentence[3] or "bandwidth, bfloat16: reached" in sentence[3]


def test_too_few_rounds_judge_nothing():
    (sentence,) = sentences([group([10.0], [5.0])], task="prefill")
    assert "not measured: 1 round cannot show" in sentence


def test_a_disturbed_start_is_not_judged():
    plain = [row("import torch", [1.0, 1.0, 5.0]), row(READING, 0.5)]
    (finding,) = judge.targets({**PLAN, "task": "startup"}, [group(1.0, 0.3)], plain)
    assert finding.verdict is Verdict.SKIP
    assert "import torch was disturbed" in finding.why
