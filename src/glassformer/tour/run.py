"""Run the tour: train a model, sample from it, check it, prove claims, diagnose a bug, adapt a model. No printing.

`run_tour` goes through the stages of a `Plan`, passes each event to a listener, and returns a `Tour` with everything
that was measured. `terminal` prints it, `report` writes it as a page.
"""

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from glassformer import config as c
from glassformer import reference
from glassformer.config import presets
from glassformer.finding import Finding
from glassformer.model import build
from glassformer.sizing import Sheet, size
from glassformer.tour.attention import AttentionMaps, attention_maps
from glassformer.tour.claims import CheckedClaim, check_claims
from glassformer.tour.diagnosis import DiagnosedModel, diagnose_models
from glassformer.tour.generation import (
    CacheTiming,
    Sample,
    SamplerDistribution,
    batched_equals_single,
    cached_equals_recomputed,
    sample_with_every_sampler,
    sampler_distributions,
    time_cache,
)
from glassformer.tour.training import (
    ADAPTED,
    TRAINED,
    Corpus,
    Listener,
    Plan,
    TrainingRecord,
    beats_bigram,
    initial_loss,
    open_corpus,
    overfit_one_batch,
    train_model,
)
from glassformer.tour.tuning import TuningRecord, adapt
from glassformer.training.run import Run

REPORT = "report.html"
BOUND = 1e-10
WHY = "two float64 implementations may differ by the order of their sums, a few 1e-13 at these sizes"
STAGES = (
    "The size of a model",
    "The engine compared with an independent NumPy implementation",
    "The corpus and its n-gram baselines",
    "Training a character model",
    "Samples of every sampler",
    "Generation with and without a KV cache",
    "Two sanity checks of training",
    "Claims of the theory, proven",
    "A bug, diagnosed",
    "Make it yours: adapters of a model",
    "The report",
)


def small_models() -> dict[str, c.ModelConfig]:
    """Return one small model config per architecture and position scheme."""
    nano = presets.nano(n_layers=2)
    heads = {"d_model": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "d_ff": 64}
    return {
        "decoder, learned positions": nano,
        "decoder, rotary, grouped, SwiGLU": presets.llama_tiny(n_layers=2),
        "decoder, mixture of experts": presets.moe_tiny(n_layers=2),
        "decoder, ALiBi": c.replace(nano, position=c.Alibi()),
        "encoder, post-norm (BERT)": presets.bert_base(**heads, max_len=64),
        "encoder-decoder (T5)": presets.t5_small(**heads, n_encoder_layers=2, d_head=8),
    }


def engine_against_oracle(seed: int = 0) -> Iterator[Finding]:
    """Compare the torch engine with the NumPy oracle on the same weights and tokens, in float64."""
    generator = np.random.default_rng(seed)
    for name, config in small_models().items():
        params = reference.random_params(config, seed=seed, std=0.2)
        model = build(config, dtype=torch.float64).eval()
        model.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in params.items()})
        tokens = generator.integers(0, config.vocab_size, (2, 24))
        ids = torch.from_numpy(tokens)
        with torch.no_grad():
            if isinstance(config, c.Seq2SeqConfig):
                engine, oracle = model(ids, ids), reference.forward_seq2seq(config, params, tokens, tokens)
            else:
                engine, oracle = model(ids), reference.forward(config, params, tokens)
        worst = float(np.abs(engine.numpy() - oracle).max())
        yield Finding.judge(f"engine = oracle: {name}", worst, BOUND, WHY)


@dataclass(frozen=True)
class Tour:
    """Everything that a tour measured."""

    sheet: Sheet
    """The size of GPT-2 small."""
    model_sheet: Sheet
    """The size of the model that was trained."""
    corpus: Corpus
    run: Run
    training: TrainingRecord
    samples: list[Sample]
    distributions: list[SamplerDistribution]
    attention: AttentionMaps
    cache: list[CacheTiming]
    claims: list[CheckedClaim]
    diagnosed: list[DiagnosedModel]
    tuning: TuningRecord
    findings: list[Finding]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if no finding failed. A skipped finding is not a failure."""
        return all(finding.verdict != "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the tour as JSON values. Attention patterns are on the page only."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "size": self.sheet.to_dict(),
            "corpus": vars(self.corpus),
            "training": {**vars(self.training), "model": str(Path(self.run.out) / "best")},
            "samples": [vars(sample) for sample in self.samples],
            "cache": [vars(timing) | {"speed_up": timing.speed_up} for timing in self.cache],
            "samplers": [vars(row) for row in self.distributions],
            "claims": [claim.to_dict() for claim in self.claims],
            "doctor": [{"name": one.name, **one.report.to_dict()} for one in self.diagnosed],
            "tuning": self.tuning.to_dict(),
            "seconds": self.seconds,
        }


def make_folder(out: Path, force: bool = False) -> None:
    """Create the folder of a tour before minutes of training. An earlier tour in it is replaced only with `force`."""
    earlier = [name for name in (REPORT, TRAINED, ADAPTED) if os.path.lexists(out / name)]
    if earlier and not force:
        raise ValueError(
            f"{out} already holds an earlier tour ({' and '.join(earlier)}): pass --force to replace it, or give "
            "another --out."
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}): give another folder for the report.") from None


def run_tour(plan: Plan, listen: Listener = lambda event: None) -> Tour:
    """Run all stages except the last one, which writes the report."""
    began = time.perf_counter()
    make_folder(plan.out, plan.force)
    findings: list[Finding] = []

    def stage(number: int) -> None:
        listen({"event": "stage", "number": number, "title": STAGES[number - 1]})

    def add(*found: Finding) -> None:
        for finding in found:
            findings.append(finding)
            listen({"event": "finding", "finding": finding})

    def each(kind: str, results: Iterable[Any]) -> list[Any]:
        """Report each result as soon as it is there, and return all."""
        collected = []
        for result in results:
            collected.append(result)
            listen({"event": kind, "result": result})
        return collected

    stage(1)
    sheet = size(presets.gpt2(), batch=8, context=1024)
    listen({"event": "size", "result": sheet})
    stage(2)
    for finding in engine_against_oracle():
        add(finding)
    stage(3)
    session, corpus = open_corpus(plan)
    listen({"event": "corpus", "result": corpus})
    stage(4)
    run, model, record = train_model(plan, session, corpus, listen)
    add(beats_bigram(plan, corpus, record))
    attention = attention_maps(model, session)
    stage(5)
    samples = each("sample", sample_with_every_sampler(model, session))
    distributions = sampler_distributions()
    listen({"event": "distributions", "result": distributions})
    stage(6)
    timings = each("cache", time_cache(plan.cache_lengths))
    add(cached_equals_recomputed(timings), batched_equals_single())
    stage(7)
    add(initial_loss(session, record))
    add(overfit_one_batch(session))
    stage(8)
    claims = each("claim", check_claims())
    add(*(finding for claim in claims for finding in claim.findings))
    stage(9)
    diagnosed = each("diagnosis", diagnose_models(model))
    add(*(one.finding for one in diagnosed))
    stage(10)
    tuning, checked = adapt(plan, listen)
    add(*checked)
    model_sheet = size(run.model, batch=run.loop.batch, context=run.context)
    seconds = time.perf_counter() - began
    return Tour(
        sheet, model_sheet, corpus, run, record, samples, distributions, attention, timings, claims, diagnosed,
        tuning, findings, seconds,
    )  # fmt: skip
