"""Direct preference optimization: the formula, the first loss, and TRL's loss and gradient on the same batch."""

import json
import math

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training import open_session, read_run, resume_session
from glassformer.training.data.batches import IGNORED
from glassformer.training.loop import train
from glassformer.training.objective import Batch, preference_loss, sequence_logprobs, summed_loss
from glassformer.training.run import Loss
from tests.chat import models

PAIRS = [
    {"prompt": f"what is {i}?", "chosen": f"it is {i}", "rejected": f"who wants to know about {i}?"} for i in range(10)
]


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)))
    start = models.write(tmp_path / "start")

    def made(*changes, out="run"):
        base = (f"start.model='{start}'", f"data.corpus='{path}'", "chat.loss='dpo'", f"out='{tmp_path / out}'")
        small = ("loop.steps=4", "loop.batch=4", "loop.log_every=1", "loop.eval_every=2", "loop.checkpoint_every=2")
        # without the compiled kernels: a resumed run must give the same bytes
        return read_run("", (*base, *small, "optim.lr=1e-3", "machine.compile='no'", *changes))

    return made


def losses(run, resume=None):
    events = []
    session = open_session(run) if resume is None else resume_session(resume)
    state = train(session.run, session.data, events.append, session.resume)
    return state, [e for e in events if e["event"] in ("step", "validation")]


def test_the_loss_is_the_published_formula():
    logprobs, reference = torch.tensor([-3.0, -7.0, -2.0, -1.0]), torch.tensor([-4.0, -6.0, -2.0, -3.0])
    margins = [(-3 + 4) - (-7 + 6), (-2 + 2) - (-1 + 3)]
    wanted = [-math.log(1 / (1 + math.exp(-0.5 * m))) for m in margins]
    assert preference_loss(logprobs, reference, 0.5).tolist() == pytest.approx(wanted)


@torch.no_grad()
def test_the_log_probability_of_a_sequence_is_the_sum_over_its_targets(tmp_path):
    model = gf.load(models.write(tmp_path / "start"))
    inputs = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    targets = torch.tensor([[IGNORED, 7, 8, 9], [IGNORED, IGNORED, 12, IGNORED]])
    found = sequence_logprobs(model, Batch(inputs, targets))
    logprobs = model(inputs).log_softmax(-1)
    wanted = [sum(logprobs[0, i, t] for i, t in ((1, 7), (2, 8), (3, 9))), logprobs[1, 2, 12]]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_the_first_loss_is_ln_2_and_training_lowers_it(run):
    state, events = losses(run("loop.steps=12", "schedule.warmup=0"))
    assert events[0]["event"] == "validation"
    assert events[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert events[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert events[-1]["loss"] < events[0]["loss"] - 0.05
    assert state.run.optim.lr == 1e-3


def test_the_default_learning_rate_is_small(run, tmp_path):
    assert run().optim.lr == 1e-3
    plain = read_run("", (f"start.model='{tmp_path / 'start'}'", "data.corpus='x'", "chat.loss='dpo'"))
    assert plain.optim.lr == 1e-6


def test_dropout_is_off_unless_it_is_set(tmp_path):
    """The reference has none, so with the dropout of the model the first loss would not be ln 2."""
    start = models.write(tmp_path / "start", dropout=0.3)
    words = (f"start.model='{start}'", "data.corpus='x'")
    assert read_run("", (*words, "chat.loss='dpo'")).model.dropout == 0.0
    assert read_run("", (*words, "chat.loss='dpo'", "model.dropout=0.1")).model.dropout == 0.1
    assert read_run("", (*words, "chat.loss='assistant'")).model.dropout == 0.3


def test_parts_of_a_batch_add_up(run):
    _, whole = losses(run(out="whole"))
    _, parts = losses(run("loop.accumulate=2", out="parts"))
    assert [e["loss"] for e in parts] == pytest.approx([e["loss"] for e in whole], abs=1e-6)


def test_a_resumed_run_gives_the_same_bytes(run, tmp_path):
    whole, _ = losses(run("schedule.warmup=1", "loop.keep=9", out="whole"))
    resumed, _ = losses(None, resume=str(tmp_path / "whole" / "checkpoints" / "step-00000002"))
    for ours, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    (tmp_path / "whole" / "reference.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"reference.safetensors cannot be read"):
        losses(None, resume=str(tmp_path / "whole" / "checkpoints" / "step-00000002"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("loop.batch=3", "must be even"),
        ("loss.label_smoothing=0.1", "has no use for loss.label_smoothing"),
        ("loss.beta=0", "loss.beta=0.0 must be positive"),
    ],
)
def test_wrong_settings_are_refused(run, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(change)


@pytest.mark.slow
def test_loss_and_gradient_equal_those_of_trl(tmp_path):
    """TRL's own collator makes the batch; the reference is another model than the trained one."""
    pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import DPOConfig, DPOTrainer

        folders = []
        for seed in range(2):
            config = gf.presets.llama_tiny(vocab_size=320, n_layers=2, max_len=96)
            model = gf.build(gf.config.replace(config, init_std=0.2), seed=seed)
            gf.save(model, tmp_path / f"model{seed}", format="hf")
            folders.append(tmp_path / f"model{seed}")
        from tests.chat.styles import STYLES, peer

        tokenizer = peer(STYLES["generation"])
        tokenizer.pad_token = "</s>"
        trained, frozen = (transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
        conversational = [
            {
                "prompt": [{"role": "user", "content": pair["prompt"]}],
                "chosen": [{"role": "assistant", "content": pair["chosen"]}],
                "rejected": [{"role": "assistant", "content": pair["rejected"]}],
            }
            for pair in PAIRS[:4]
        ]
        arguments = DPOConfig(
            output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to=[], beta=0.2, disable_dropout=True,
            per_device_train_batch_size=4, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = DPOTrainer(
            trained, frozen, arguments, train_dataset=datasets.Dataset.from_list(conversational),
            processing_class=tokenizer,
        )  # fmt: skip
        batch = next(iter(trainer.get_train_dataloader()))
        theirs = trainer.compute_loss(trainer.model, batch)
        theirs.backward()
    ids, learned = batch["input_ids"], batch["completion_mask"].bool()
    order = [i + offset for i in range(4) for offset in (0, 4)]  # TRL: all chosen, then all rejected
    targets = ids.masked_fill(~learned, IGNORED)[order]
    ours, reference = (gf.load(folder) for folder in folders)
    made = Batch(ids[order, :-1], targets[:, 1:])
    with torch.no_grad():
        held = sequence_logprobs(reference, made)
    total, _ = summed_loss(ours, Batch(made.inputs, made.targets, reference=held), Loss(beta=0.2), True)
    loss = total / 4
    assert loss.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert abs(loss.item() - math.log(2)) > 0.01
    loss.backward()
    gradient = dict(trained.named_parameters())["model.embed_tokens.weight"].grad
    scale = gradient.abs().max().item()
    assert scale > 1e-3
    torch.testing.assert_close(ours.embed.tokens.weight.grad, gradient, atol=2e-5 * scale, rtol=0)
