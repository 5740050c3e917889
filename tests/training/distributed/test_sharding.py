"""N processes compute what one does."""

import itertools
import json

import pytest

import glassformer as gf
from glassformer.training import resume_session, train
from glassformer.training.distributed.sharding import Sharded
from glassformer.training.run import Machine
from tests.cli.asking import settings
from tests.training.distributed.ranks import (
    KINDS,
    SHORT,
    alone,
    assert_same,
    compare,
    curve,
    job,
    launch,
    muon_in_float32,
    together,
    where,
)
from tests.training.distributed.test_layouts import MODELS
from tests.training.tiny import corpus

OPTIMISERS = {
    "adamw": ("loop.accumulate=2", "loop.eval_batches=100"),  # the last batch of an evaluation is ragged
    "muon": ("optim.kind=muon", "optim.ema=0.9", "optim.clip=0.1"),
}


@pytest.mark.parametrize(
    ("optimisers", "divided"),
    [(("muon",), ("tensor",)), pytest.param(tuple(OPTIMISERS), ("tensor", "context"), marks=pytest.mark.slow)],
)
def test_ranks_give_the_curve_of_one_process_which_resumes_what_they_wrote(tmp_path, optimisers, divided):
    """One launch, which is most of the time, for ddp, fsdp and divided blocks."""
    more = tuple(
        job(tmp_path, name, *MODELS["llama"], "loop.keep=9", "machine.parallel=fsdp", f"machine.{name}=2")
        for name in divided
    )
    expected = compare(tmp_path, 2, {name: OPTIMISERS[name] for name in optimisers}, more)
    whole = alone(tmp_path, "llama", *MODELS["llama"], "loop.keep=9")
    for name in divided:
        assert_same(curve(tmp_path / name), whole)
        first = (tmp_path / run / "checkpoints" / "step-00000000" / "model.safetensors" for run in (name, "llama"))
        assert len({path.read_bytes() for path in first}) == 1
    for name, kind in itertools.product(optimisers, KINDS):
        half = tmp_path / f"{name}-{kind}" / "checkpoints" / "step-00000010"
        session = resume_session(str(half), (f'out="{tmp_path / name / kind}-1"',))
        with muon_in_float32():
            train(session.run, session.data, resume=session.resume)
        assert_same(curve(tmp_path / name / f"{kind}-1"), expected[name], first=11)
        model = gf.load(tmp_path / f"{name}-{kind}" / "last")
        assert sum(p.numel() for p in model.parameters()) == gf.size(model.config).parameters
    counts = [int((tmp_path / f"jobs.orthogonalized-{rank}").read_text()) for rank in range(2)]
    matrices, steps = 2 * 6, 20  # of each of 2 layers: q, k, v, o, up and down
    assert sum(counts) == len(KINDS) * steps * matrices  # each once
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("world", "machine", "forced", "is_wrapped"),
    [
        (1, {}, (), False),
        (1, {}, ("shard",), True),
        (1, {}, ("replicate",), True),
        (2, {}, (), True),
        (2, {"context": 2}, (), True),
        (4, {"tensor": 4}, (), False),
        (4, {"tensor": 4}, ("shard",), True),
        (4, {"tensor": 4, "precision": "bfloat16", "gather": "bfloat16"}, (), True),
        (4, {"tensor": 2}, (), True),
        (4, {"tensor": 2, "replicate": 2}, (), True),
    ],
)
def test_a_model_with_one_shard_is_not_wrapped(world, machine, forced, is_wrapped):
    group = Sharded.__new__(Sharded)
    group.world, group.machine, group.forced = world, Machine(parallel="fsdp", **machine), forced
    assert group.is_wrapped == is_wrapped


@pytest.mark.slow
def test_copies_of_a_sharded_model_give_the_curve_of_one_process(tmp_path):
    corpus(tmp_path)
    copies = ("machine.parallel=fsdp", "machine.replicate=2")
    together(tmp_path, 4, [job(tmp_path, f"{name}-2x2", *changes, *copies) for name, changes in HYBRID.items()])
    for name, changes in HYBRID.items():
        assert_same(curve(tmp_path / f"{name}-2x2"), alone(tmp_path, name, *changes))
        half = tmp_path / f"{name}-2x2" / "checkpoints" / "step-00000010"
        session = resume_session(str(half), (f'out="{tmp_path / name / "1"}"', "machine.replicate=1"))
        with muon_in_float32():
            train(session.run, session.data, resume=session.resume)
        assert_same(curve(tmp_path / name / "1"), curve(tmp_path / name), first=11)


HYBRID = {name: (*changes, "loop.accumulate=1") for name, changes in OPTIMISERS.items()}


@pytest.mark.slow
def test_weights_gathered_in_bfloat16_are_half_the_bytes(tmp_path):
    corpus(tmp_path)
    half = ("machine.parallel=fsdp", "machine.precision=bfloat16", "machine.compile=no")
    jobs = [job(tmp_path, kind, *half, f"machine.gather={kind}") for kind in ("float32", "bfloat16")]
    together(tmp_path, 2, jobs)
    wide, narrow = (curve(tmp_path / kind) for kind in ("float32", "bfloat16"))
    assert abs(wide[1] - narrow[1]) <= 1e-3
    assert abs(wide[20] - narrow[20]) <= 4e-2
    first, both = (int(text) for text in (tmp_path / "jobs.gathered-0").read_text().split())
    assert both - first == pytest.approx(first / 2, rel=0.05)


@pytest.mark.slow
def test_uneven_groups_of_matrices(tmp_path):
    compare(tmp_path, 4, {"muon": (*OPTIMISERS["muon"], "model.n_layers=3", "model.d_model=28", "model.n_heads=2")})


@pytest.mark.slow
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_three_ranks_resume_what_two_wrote(tmp_path, optimiser):
    expected = compare(tmp_path, 2, {"it": OPTIMISERS[optimiser]})["it"]
    halves = {kind: f"it-{kind}/checkpoints/step-00000010" for kind in KINDS}
    together(tmp_path, 3, [job(tmp_path, f"{k}-3", "loop.accumulate=1", resume=half) for k, half in halves.items()])
    for kind in KINDS:
        assert_same(curve(tmp_path / f"{kind}-3"), expected, first=11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("model.preset=bert_base", "model.vocab_size=50", "model.pooler=true", "model.dropout=0.0"),
        ("model.preset=t5_small", "model.n_encoder_layers=2", "model.dropout=0.0"),
        ("model.preset=transformer_base", "model.n_encoder_layers=2", "model.dropout=0.0"),
        ("model.preset=moe_tiny", "model.n_heads=4", "loss.balance=0.0"),
        ("loss.label_smoothing=0.1", "loss.z_loss=1e-3", "data.order=epoch", "optim.clip=none"),
    ],
    ids=["masked", "t5", "seq2seq", "experts", "losses"],
)
def test_every_objective_gives_the_curve_of_one_process(tmp_path, changes):
    compare(tmp_path, 2, {"it": changes})


@pytest.mark.slow
def test_the_command_line_speaks_with_one_voice(tmp_path):
    corpus(tmp_path)
    changes = (*SHORT, *where(tmp_path, "run"), "machine.parallel=fsdp", "loop.sample_every=20", "model.dropout=0.1")
    done = launch(2, "-m", "glassformer", "train", "--no-latest", "--json", *settings(*changes))
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["event"] for e in events].count("start") == 1
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, 21))
    assert events[0]["ranks"] == 2
    assert [e["text"] != "" for e in events if e["event"] == "sample"] == [True]
    assert events[-1]["event"] == "end"
