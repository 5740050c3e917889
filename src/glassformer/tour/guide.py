"""The tour: a Transformer that learns, speaks, is checked and is explained, measured on the spot. Data, no printing.

`walk` goes through the stages of a `Plan`, tells a listener what happens as it happens, and returns a `Tour`: all that
was measured. `tour_text` shows it in a terminal, `report` writes it as a page.
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
from glassformer.generation import Sampling, distribution, generate
from glassformer.model import Model, build
from glassformer.sizing import Sheet, size
from glassformer.tour.theory import Examined, Proof, consult, prove
from glassformer.tour.training import (
    SAMPLERS,
    TRAINED,
    Attention,
    Listen,
    Plan,
    Spoken,
    Text,
    Training,
    beats_bigram,
    initial_loss,
    open_corpus,
    overfit_one_batch,
    read_attention,
    speak_by_every_sampler,
    train_model,
)
from glassformer.training.run import RunConfig

REPORT = "report.html"
BOUND = 1e-10
WHY = "two float64 implementations may differ by the order of their sums, a few 1e-13 at these sizes"


STAGES = (
    "What a model costs",
    "The engine against an oracle written from the formulas",
    "A corpus, and the lines to beat",
    "Training a character model",
    "It speaks: every sampler",
    "The cache changes the time and nothing else",
    "Two things a right implementation does",
    "Theory, proven here and now",
    "A broken model, diagnosed",
    "The report",
)


def small_models() -> dict[str, c.ModelConfig]:
    """One small model per architecture and position scheme."""
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
    """The torch engine and the NumPy oracle on the same weights and tokens, in float64."""
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
class CacheRace:
    """Generation of `length` tokens with and without a cache."""

    length: int
    cached_seconds: float
    recomputed_seconds: float
    same_tokens: bool

    @property
    def speed_up(self) -> float:
        return self.recomputed_seconds / self.cached_seconds


def cache_races(lengths: tuple[int, ...] = (32, 64, 128, 255)) -> Iterator[CacheRace]:
    """The cache must change the time and nothing else; the gain grows with the length."""
    # large enough that a pass over 255 tokens costs more than the Python around it
    model = build(presets.shakespeare(), seed=0)
    generate(model, [[1]], 8, engine="torch")  # warm up; one engine for both, so that only the cache differs
    for length in lengths:
        timed: dict[bool, tuple[float, Any]] = {}
        for cached in (True, False):
            start = time.perf_counter()
            out = generate(model, [[1]], length, sampling=Sampling(), cache=cached, engine="torch")
            timed[cached] = (time.perf_counter() - start, out)
        yield CacheRace(length, timed[True][0], timed[False][0], timed[True][1] == timed[False][1])


def same_tokens(races: list[CacheRace]) -> Finding:
    """The verdict of the races."""
    different = sum(not race.same_tokens for race in races)
    return Finding.judge("cached = recomputed, token for token", different, 0, "a cache stores results, it adds none")


@dataclass(frozen=True)
class SamplerRow:
    """What one sampler makes of the shared logits."""

    name: str
    probabilities: list[float]
    entropy: float
    """In nats."""
    kept: int


def samplers_on_one_distribution(size: int = 8) -> list[SamplerRow]:
    """All samplers on the same eight logits, in falling order; the third token counts as already seen."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = logits.mul(1.5).sort(descending=True).values
    seen = torch.arange(size)[None] == 2
    rows = []
    for name, sampling in SAMPLERS.items():
        p = distribution(logits, sampling, seen)[0]
        entropy = float(torch.special.entr(p).sum())
        rows.append(SamplerRow(name, p.tolist(), entropy, int((p > 0).sum())))
    return rows


def ragged_batch_equals_rows_alone(model: Model | None = None) -> Finding:
    """Prompts of unequal length in one batch, against each alone, sampled with one seed."""
    model = model or build(presets.llama_tiny(), seed=0)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    together = generate(model, prompts, 48, sampling=Sampling(), seed=7)
    alone = [generate(model, [prompt], 48, sampling=Sampling(), seed=7)[0] for prompt in prompts]
    different = sum(a != b for row, other in zip(together, alone, strict=True) for a, b in zip(row, other, strict=True))
    return Finding.judge(
        "a row in a ragged batch = the row alone", different, 0, "padding and neighbours must not change one token"
    )


# --- the walk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tour:
    """All that was measured."""

    sheet: Sheet
    own: Sheet
    """Of the model that was trained."""
    text: Text
    run: RunConfig
    training: Training
    spoken: list[Spoken]
    samplers: list[SamplerRow]
    attention: Attention
    races: list[CacheRace]
    proofs: list[Proof]
    examined: list[Examined]
    findings: list[Finding]
    seconds: float

    @property
    def held(self) -> bool:
        """Whether nothing failed; a skipped finding is no failure."""
        return all(finding.verdict != "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; attention patterns are left to the page."""
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "size": self.sheet.to_dict(),
            "corpus": vars(self.text),
            "training": {**vars(self.training), "model": str(Path(self.run.out) / "best")},
            "samples": [vars(spoken) for spoken in self.spoken],
            "cache": [vars(race) | {"speed_up": race.speed_up} for race in self.races],
            "samplers": [vars(row) for row in self.samplers],
            "claims": [proof.to_dict() for proof in self.proofs],
            "doctor": [{"name": one.name, **one.report.to_dict()} for one in self.examined],
            "seconds": self.seconds,
        }


def make_folder(out: Path, force: bool = False) -> None:
    """Make the folder of a tour before minutes of training; an earlier tour in it is replaced only with `force`."""
    earlier = [name for name in (REPORT, TRAINED) if os.path.lexists(out / name)]
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


def walk(plan: Plan, listen: Listen = lambda event: None) -> Tour:
    """All stages but the last, which is to write the report."""
    began = time.perf_counter()
    make_folder(plan.out, plan.force)
    findings: list[Finding] = []

    def stage(number: int) -> None:
        listen({"event": "stage", "number": number, "title": STAGES[number - 1]})

    def found(finding: Finding) -> None:
        findings.append(finding)
        listen({"event": "finding", "finding": finding})

    def each(name: str, items: Iterable[Any]) -> list[Any]:
        kept = []
        for item in items:
            kept.append(item)
            listen({"event": name, name: item})
        return kept

    stage(1)
    sheet = size(presets.gpt2(), batch=8, context=1024)
    listen({"event": "size", "sheet": sheet})
    stage(2)
    for finding in engine_against_oracle():
        found(finding)
    stage(3)
    session, text = open_corpus(plan)
    listen({"event": "corpus", "text": text})
    stage(4)
    run, model, record = train_model(plan, session, text, listen)
    found(beats_bigram(plan, text, record))
    attention = read_attention(model, session)
    stage(5)
    spoken = each("spoken", speak_by_every_sampler(model, session))
    samplers = samplers_on_one_distribution()
    listen({"event": "samplers", "rows": samplers})
    stage(6)
    races = each("race", cache_races(plan.races))
    found(same_tokens(races))
    found(ragged_batch_equals_rows_alone())
    stage(7)
    found(initial_loss(session, record))
    found(overfit_one_batch(session))
    stage(8)
    proofs = each("proof", prove())
    for finding in (finding for proof in proofs for finding in proof.findings):
        found(finding)
    stage(9)
    examined = each("examined", consult(model))
    for one in examined:
        found(one.finding)
    own = size(run.model, batch=run.loop.batch, context=run.context)
    seconds = time.perf_counter() - began
    return Tour(sheet, own, text, run, record, spoken, samplers, attention, races, proofs, examined, findings, seconds)
