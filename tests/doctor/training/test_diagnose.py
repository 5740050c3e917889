"""Training pipelines: sound ones raise no alarm, planted faults are named first."""

import copy
import functools

import pytest
import torch
from torch import nn

import glassformer as gf
from glassformer.doctor.subject.errors import CannotExamineError
from glassformer.doctor.training.diagnose import EXPLAINS, TITLES
from tests.doctor.training.pipelines import EOS, PAD, Plain, Tiny, V, texts

SOUND = {
    "plain": {},
    "accumulated": {"parts": 2},
    "dropout": {"dropout": 0.1},
    "clipped": {"clip": True},
    "one mean per part of equal size": {"parts": 2, "divide": "each part by itself", "lengths": (9, 6, 9, 6)},
}
FAULTS = {
    "labels not shifted": ({"shift": 0}, "label_shift"),
    "labels shifted twice": ({"shift": 2}, "label_shift"),
    "labels shifted back": ({"shift": -1}, "label_shift"),
    "padding is a target": ({"count_padding": True}, "loss_padding"),
    "padding in the denominator": ({"divide": "all positions"}, "loss_padding"),
    "end masked": ({"mask_end": True}, "end_never_learned"),
    "parts by their own mean": ({"parts": 2, "divide": "each part by itself"}, "accumulation_weights"),
    "parts not divided": ({"parts": 4, "divide": "not by the parts"}, "loss_scale"),
    "scaled and not unscaled": ({"scale": 65536.0}, "loss_scale"),
    "head not in the optimizer": ({"leave_out": True}, "optimizer_coverage"),
    "optimizer of an old head": ({"rebuilt": True}, "optimizer_coverage"),
    "frozen": ({"frozen": True}, "frozen_parameters"),
    "rate of zero": ({"lr": 0.0}, "zero_learning_rate"),
    "no zero_grad": ({"no_zero": True}, "stale_gradients"),
    "no step": ({"no_step": True}, "no_update"),
    "eval mode": ({"dropout": 0.1, "eval": True}, "train_mode"),
    "rate too high": ({"lr": 30.0}, "divergence"),
    "no gradient": ({"detached": True}, "missing_gradient"),
}


def lengths(faults):
    return {k: v for k, v in faults.items() if k != "lengths"}, texts(faults.get("lengths", (12, 9, 7, 5)))


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_pipeline_raises_no_alarm(name):
    faults, batch = lengths(SOUND[name])
    report = gf.diagnose_training(Plain(**faults), batch)
    assert report.healthy, report.text()
    assert report.kind == "training"


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first(name):
    faults, expected = FAULTS[name]
    report = gf.diagnose_training(Plain(**faults), texts())
    assert [d.id for d in report.diagnoses][:1] == [expected], report.text()
    assert report.diagnoses[0].title == TITLES[expected]
    assert report.diagnoses[0].remedy


def test_the_pipeline_is_left_as_it_was():
    pipeline = Plain(dropout=0.1)
    pipeline(texts())
    before = copy.deepcopy((pipeline.model.state_dict(), pipeline.optimizer.state_dict()))
    gradients = [p.grad.clone() for p in pipeline.model.parameters()]
    random = torch.get_rng_state()
    gf.diagnose_training(pipeline, texts())
    for one, two in zip(before, (pipeline.model.state_dict(), pipeline.optimizer.state_dict()), strict=True):
        assert str(one) == str(two)
    assert all(torch.equal(g, p.grad) for g, p in zip(gradients, pipeline.model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state())


def test_a_function_with_a_closure_and_a_partial_are_steps():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch, clip=None):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    for given in (step, functools.partial(step, clip=1.0)):
        report = gf.diagnose_training(given, texts())
        assert report.healthy, report.text()
        assert "label_shift" in report.coverage


def test_an_optimizer_that_runs_every_second_step_is_waited_for():
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = []

    def step(batch):
        (model(**batch).loss / 2).backward()
        done.append(1)
        if len(done) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    report = gf.diagnose_training(step, texts())
    assert report.healthy, report.text()
    assert "the optimizer runs after 2 steps" in report.notes[0]


def test_a_trainer_computes_gradients_and_the_optimizer_follows():
    class Trainer:
        def __init__(self):
            self.model, self.optimizer = Tiny(), None

        def create_optimizer(self):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

        def training_step(self, model, inputs):
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    report = gf.diagnose_training(Trainer(), texts())
    assert report.healthy, report.text()


@pytest.mark.parametrize(("broken", "expected"), [(False, []), (True, ["eval_mode"])])
def test_an_evaluation_runs_in_eval_mode(broken, expected):
    pipeline = Plain(dropout=0.1)

    def evaluate():
        pipeline.model.train(broken)
        with torch.no_grad():
            pipeline.model(texts()["input_ids"])
        pipeline.model.train()

    report = gf.diagnose_training(pipeline, texts(), evaluate=evaluate)
    assert [d.id for d in report.diagnoses] == expected


def test_training_after_an_evaluation_is_in_train_mode():
    pipeline = Plain(dropout=0.1)

    def evaluate():
        pipeline.model.eval()
        pipeline.model(texts()["input_ids"])

    report = gf.diagnose_training(pipeline, texts(), evaluate=evaluate)
    assert [d.id for d in report.diagnoses] == ["train_mode"]
    assert report.findings[-1].id == "train_mode/after-evaluation"


@pytest.mark.parametrize(("whole", "expected"), [(True, []), (False, ["resume"])])
def test_a_checkpoint_holds_the_state_of_the_optimizer(whole, expected):
    pipeline = Plain()

    def save():
        return copy.deepcopy((pipeline.model.state_dict(), pipeline.optimizer.state_dict()))

    def load(state):
        pipeline.model.load_state_dict(state[0])
        if whole:
            pipeline.optimizer.load_state_dict(state[1])
        else:
            pipeline.optimizer.state.clear()

    report = gf.diagnose_training(pipeline, texts(), checkpoint=(save, load))
    assert [d.id for d in report.diagnoses] == expected, report.text()


class Words:
    pad_token_id, eos_token_id = PAD, EOS

    def __init__(self, size=V, eos=EOS):
        self.size, self.eos_token_id = size, eos

    def __len__(self):
        return self.size


@pytest.mark.parametrize(("words", "expected"), [(Words(), []), (Words(V + 3), ["tokenizer_mismatch"])])
def test_the_tokenizer_fits_the_model(words, expected):
    report = gf.diagnose_training(Plain(), texts(), tokenizer=words)
    assert [d.id for d in report.diagnoses] == expected
    wrong = gf.diagnose_training(Plain(), texts(), tokenizer=Words(eos=5))
    assert wrong.diagnoses[0].id == "tokenizer_mismatch"


@pytest.mark.parametrize(
    ("names", "expected"), [(("document_ids", "position_ids"), []), (("position_ids",), ["packing_leak"])]
)
def test_packed_documents_do_not_read_one_another(names, expected):
    batch = texts((12, 12, 12, 12))
    first = torch.arange(13) < 6
    extra = {
        "document_ids": (~first).long().expand(4, -1),
        "position_ids": torch.where(first, torch.arange(13), torch.arange(13) - 6).expand(4, -1),
    }
    report = gf.diagnose_training(Plain(), batch | {n: extra[n] for n in names})
    assert [d.id for d in report.diagnoses] == expected, report.text()


def test_padding_on_the_left_needs_a_mask():
    batch = {k: v.flip(1) for k, v in texts().items()}
    assert gf.diagnose_training(Plain(), batch).healthy

    class Unmasked(Plain):
        def loss(self, part, count):
            part.pop("attention_mask")
            return super().loss(part, count)

    assert [d.id for d in gf.diagnose_training(Unmasked(), batch).diagnoses] == ["missing_mask"]


def test_a_nan_is_named_and_explains_what_follows():
    pipeline = Plain()
    with torch.no_grad():
        pipeline.model.out.bias.fill_(torch.nan)
    report = gf.diagnose_training(pipeline, texts())
    assert report.diagnoses[0].id == "non_finite"
    assert not {d.id for d in report.diagnoses} & set(EXPLAINS["non_finite"])


def test_our_own_training_step_is_sound():
    from glassformer.training.loop import prepare_state, train_step
    from glassformer.training.objective import Batch

    sizes = {"n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": V, "max_len": 16}
    run = gf.Run(model=gf.presets.nano(**sizes))
    state = prepare_state(run)
    ids = torch.randint(0, V, (run.loop.batch, 13), generator=torch.Generator().manual_seed(0))
    members = state.optimizer.members
    step = functools.partial(train_step, state)
    report = gf.diagnose_training(step, Batch(ids[:, :-1], ids[:, 1:]), model=state.model, optimizer=members[0][0])
    assert report.healthy, report.text()
    assert {"label_shift", "loss_scale"} <= set(report.coverage)


@pytest.mark.parametrize(
    ("step", "batch", "sentence"),
    [
        (nn.Linear(2, 2), {}, "Linear does no training step"),
        (3, {}, "int does no training step"),
        (lambda batch: None, {}, "the step refers to no model"),
        (Plain(), {"input_ids": torch.zeros(2, 3)}, "the step failed with KeyError: 'labels'"),
    ],
)
def test_what_cannot_be_examined_is_refused_in_one_sentence(step, batch, sentence):
    with pytest.raises(CannotExamineError, match=sentence):
        gf.diagnose_training(step, batch)
