"""Findings about the optimizer that a report does not list by themselves."""

from glassformer.doctor.training.listen import listen
from glassformer.doctor.training.pipeline import find_pipeline
from glassformer.doctor.training.updates import coverage, learns, modes, moves
from glassformer.finding import Verdict
from tests.doctor.training.pipelines import Plain, Tiny, texts


def test_names_of_what_the_optimizer_misses():
    missing = next(coverage(find_pipeline(Plain(leave_out=True))))
    assert missing.evidence["names"] == ["head.weight", "head.bias"]


def test_a_warm_up_that_begins_at_zero_is_sound():
    plain = Plain()
    steps = []

    def step(batch):
        plain.optimizer.param_groups[0]["lr"] = 1e-3 * len(steps)
        steps.append(1)
        plain(batch)

    found = {f.id: f.verdict for f in moves(find_pipeline(step, optimizer=plain.optimizer), texts())}
    assert found["zero_learning_rate/rate"] is Verdict.PASS
    assert found["no_update/weights"] is Verdict.PASS


def test_without_an_optimizer_nothing_is_reported_about_it():
    def step(batch, model=Tiny()):
        loss = model(**batch).loss
        loss.backward()

    pipeline = find_pipeline(step)
    assert pipeline.optimizer is None
    assert next(coverage(pipeline)).verdict is Verdict.SKIP
    assert list(moves(pipeline, texts())) == []


def test_the_loss_of_one_batch_falls():
    pipeline = find_pipeline(Plain())
    found = learns(pipeline, texts(), steps=5)
    assert found.passed
    assert found.evidence["last"] < found.evidence["first"]
    with pipeline.restored():
        assert modes(listen(pipeline, texts()), pipeline.model).verdict is Verdict.SKIP
