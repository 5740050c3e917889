"""The part of the tour that adapts a model: adapters of `bard`, and answers of `bard-chat`, which is bundled too."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassformer import pretrained
from glassformer.chat.render import load_renderer
from glassformer.chat.session import Chat
from glassformer.finding import Finding
from glassformer.generation import Sampling
from glassformer.model import Model
from glassformer.model.adapters import adapters_of
from glassformer.tour.training import ADAPTED, Listener, Plan
from glassformer.training import Session, open_session, read_run, train
from glassformer.weights import load, load_to_compute, load_tokenizer

BASE, BUNDLED = "bard", "bard-chat"
ASKED = 4
"""Questions that the bundled adapter answers in the tour, of those that it was not trained on."""


@dataclass(frozen=True)
class Answered:
    """A question that was no part of the training data, and the answers before and after fine-tuning."""

    question: str
    base: str
    """What the base model writes in place of an answer."""
    answer: str
    expected: str


@dataclass
class TuningRecord:
    """What the tour measured of fine-tuning."""

    parameters: int = 0
    trained: int = 0
    """Parameters of the adapters."""
    steps: int = 0
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Steps and losses of answers to questions that were no part of the training data."""
    seconds: float = 0.0
    answers: list[Answered] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "answers": [vars(one) for one in self.answers]}


def adapt(plan: Plan, listen: Listener) -> tuple[TuningRecord, list[Finding]]:
    """Train adapters of `bard` for a few steps, then let the bundled adapter answer. Return also what was checked."""
    if BUNDLED not in pretrained.FOLDERS:
        why = f"this installation has no bundled model {BUNDLED}"
        return TuningRecord(), [Finding.skip("adapters learn while the base stays as it is", why)]
    began, record = time.perf_counter(), TuningRecord()
    session = _session(plan)

    def report(event: dict[str, Any]) -> None:
        if event["event"] == "validation":
            record.validation.append((event["step"], event["loss"]))
            listen({"event": "tuning", "result": record.validation[-1]})

    model = train(session.run, session.data, report, force=plan.force).model.eval()
    record.parameters = sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)
    record.trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    record.steps = session.run.loop.steps
    findings = [_learned(record), _unchanged(model), _merged(model, Path(session.run.out) / "last")]
    record.answers = ask()
    for one in record.answers:
        listen({"event": "answer", "result": one})
    findings.append(_answered(record.answers))
    record.seconds = time.perf_counter() - began
    return record, findings


def _session(plan: Plan) -> Session:
    """Return the session of the recipe of the bundled adapter, with fewer and smaller steps."""
    folder = pretrained.FOLDERS[BUNDLED]
    changes = {
        "data.corpus": str(folder / "questions.jsonl"),
        "chat.validation": str(folder / "held_out.jsonl"),
        "chat.template": str(folder / "chat_template.jinja"),
        "loop.steps": plan.tuning_steps,
        "loop.eval_every": plan.tuning_steps,
        "loop.checkpoint_every": plan.tuning_steps,
        "schedule.warmup": 2,
        "machine.compile": "no",
        "out": str(plan.out / ADAPTED),
    }
    run = read_run(
        (folder / "run.toml").read_text(encoding="utf-8"),
        tuple(f"{name}={value if isinstance(value, int) else repr(value)}" for name, value in changes.items()),
        source="the tour",
    )
    return open_session(run)


def ask(count: int = ASKED) -> list[Answered]:
    """Return answers of the bundled adapter, and of its base, to questions that were no part of its training data."""
    folder = pretrained.FOLDERS[BUNDLED]
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    renderer, tokenizer = load_renderer(folder), load_tokenizer(folder)
    models = [load_to_compute(BASE), load_to_compute(BUNDLED)]
    found = []
    for row in rows[:: max(1, len(rows) // count)][:count]:
        chats = (Chat(model, tokenizer, renderer, Sampling(0.0), max_new_tokens=120) for model in models)
        base, answer = ("".join(chat.ask(row["prompt"])) for chat in chats)
        found.append(Answered(row["prompt"], base, answer, row["completion"]))
    return found


def _learned(record: TuningRecord) -> Finding:
    (_, before), *_, (_, after) = record.validation
    why = f"nats per character of answers to new questions: {before:.3f} before, {after:.3f} after {record.steps} steps"
    remedy = "train longer: recipes/bard_chat.toml"
    return Finding.judge("adapters lower the loss to 9/10 of that of the base", after / before, 0.9, why, remedy)


def _unchanged(model: Model) -> Finding:
    """Judge whether all weights outside the adapters are still those of the bundled model, bit for bit."""
    original = load(BASE, dtype="float32").state_dict()
    held = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    different = set(original) ^ set(held)
    different |= {name for name in set(original) & set(held) if not torch.equal(original[name], held[name].cpu())}
    why = f"the {len(original)} tensors of {BASE} are frozen; only the adapters are trained"
    return Finding.judge("the base model is unchanged, bit for bit", len(different), 0, why)


@torch.no_grad()
def _merged(model: Model, folder: Path) -> Finding:
    """Compare the logits with separate adapters to those of the merged weights that `load` returns."""
    tokens = torch.arange(model.config.vocab_size)[None]
    merged = load(folder, dtype="float32", device=model.device)
    difference = float((merged(tokens.to(model.device)) - model(tokens.to(model.device))).abs().max())
    n = len(adapters_of(model))
    why = f"W + B A of {n} layers is one matrix each; the largest difference of a logit is rounding"
    return Finding.judge("merged adapters = separate adapters", difference, 1e-3, why)


def _answered(answers: list[Answered]) -> Finding:
    wrong = sum(one.answer != one.expected for one in answers)
    why = f"{BUNDLED} was trained on other wordings of these questions, and must answer letter for letter"
    return Finding.judge(f"{BUNDLED} answers {len(answers)} new questions", wrong, 0, why)
