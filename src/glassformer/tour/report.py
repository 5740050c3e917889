"""Write the tour as one self-contained HTML page with inline SVG."""

import datetime
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glassformer.files import write_atomically
from glassformer.finding import Finding
from glassformer.pages.page import render
from glassformer.pages.svg import attention_map, loss_curves, probability_bars, timing_bars, visible
from glassformer.sizing import Sheet
from glassformer.sizing.text import byte_unit, flop_unit
from glassformer.tour.attention import AttentionMaps
from glassformer.tour.run import REPORT, Tour

NAME = REPORT
SECTIONS = {
    "corpus": "The corpus and its n-gram baselines",
    "training": "Training",
    "attention": "Attention maps",
    "samples": "Samples",
    "cache": "Generation with and without a KV cache",
    "theory": "Claims of the theory, proven",
    "doctor": "A bug, diagnosed",
    "tuning": "Make it yours: adapters of a model",
    "size": "The size of a model",
    "checks": "All checks",
    "next": "Next steps",
}
BASELINES = {
    "unigram": "the frequency of each character",
    "bigram": "the previous character",
    "5-gram": "the four previous characters, Kneser-Ney smoothed",
}
SAMPLERS = {
    "greedy": "always the most likely character; it soon repeats itself",
    "temp 0.5": "logits divided by 0.5: more probability on the most likely characters",
    "temp 1": "the distribution of the model, unchanged",
    "temp 2": "logits divided by 2: closer to uniform",
    "top-k 4": "only the four most likely characters",
    "top-p 0.7": "the most likely characters that together reach 70 %",
    "min-p 0.2": "characters at least a fifth as likely as the most likely one",
    "penalty 2": "characters already used are less likely: useful for words, not for letters",
    "4 beams": "the most likely of four continuations searched in parallel",
}


def write(tour: Tour, path: Path) -> Path:
    """Write the page to `path`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(tour).encode())
    return path


def page(tour: Tour) -> str:
    """Return the whole page."""
    record = tour.training
    last = record.validation[-1][0]
    return render(
        "tour.html",
        tour=tour,
        sections=SECTIONS,
        date=f"{datetime.date.today():%d %B %Y}",
        train_time=_duration(record.seconds),
        tour_time=_duration(tour.seconds),
        beaten=_enumeration([name for name, loss in tour.corpus.baselines.items() if record.final < loss]),
        n_passed=sum(finding.passed for finding in tour.findings),
        baselines=[(name, loss, _baseline_meaning(name, tour)) for name, loss in tour.corpus.baselines.items()],
        last_step=last,
        steps_per_second=last / record.seconds if record.seconds else 0.0,
        curves=loss_curves(record.train, record.validation, tour.corpus.baselines),
        attention=_attention(tour.attention),
        samples=list(_samples(tour)),
        timing_chart=timing_bars([(f"{t.length} tokens", t.recomputed_seconds, t.cached_seconds) for t in tour.cache]),
        sizes=_sizes(tour.model_sheet, tour.sheet),
        checks=list(_checks(tour.findings)),
        commands=_commands(tour),
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"


def _enumeration(names: list[str]) -> str:
    """Return `a`, or `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _baseline_meaning(name: str, tour: Tour) -> str:
    V = tour.corpus.vocab_size
    return f"nothing: all {V} characters are equally likely, ln {V}" if name == "uniform" else BASELINES.get(name, "")


def _attention(maps: AttentionMaps) -> dict[str, Any]:
    layer, head = maps.sharpest
    pattern, tokens = maps.patterns[layer][head], [visible(token) for token in maps.tokens]
    name = f"layer {layer + 1}, head {head + 1}"
    large = attention_map(
        pattern,
        f"Attention of {name} with tokens",
        "Each row is a query character; darker cells are the earlier characters that it attends to.",
        labels=tokens,
        hover=lambda t, s: f"{tokens[t]} at {t} attends to {tokens[s]} at {s}: {pattern[t][s]:.2f}",
    )
    heads = [
        {
            "name": f"{i + 1}.{j + 1}",
            "map": attention_map(one, f"Attention of layer {i + 1}, head {j + 1}"),
            "previous": maps.previous[i][j],
        }
        for i, patterns in enumerate(maps.patterns)
        for j, one in enumerate(patterns)
    ]
    return {"name": name, "large": large, "previous": maps.previous[layer][head], "heads": heads}


def _samples(tour: Tour) -> Iterator[dict[str, Any]]:
    rows = {row.name: row for row in tour.distributions}
    for sample in tour.samples:
        row = rows.get(sample.sampler)
        yield {
            "sampler": sample.sampler,
            "meaning": SAMPLERS.get(sample.sampler, ""),
            "bars": probability_bars(row.probabilities, sample.sampler) if row else "",
            "prompt": sample.prompt,
            "continuation": sample.text.removeprefix(sample.prompt),
        }


def _sizes(*sheets: Sheet) -> list[list[str]]:
    """Return the rows of the table of sizes: the name of the quantity, then its value for each model."""
    rows = {
        "parameters": [f"{s.parameters:,}" for s in sheets],
        "weights": [byte_unit(s.inference.weights) for s in sheets],
        "batch × context": [f"{s.batch} × {s.context:,}" for s in sheets],
        "FLOPs of a training step": [flop_unit(s.flops.training) for s in sheets],
        "peak memory of training": [byte_unit(s.training.peak) if s.training else "" for s in sheets],
        "FLOPs of one more token": [flop_unit(sum(s.decode.values())) for s in sheets],
        "KV cache per token": [byte_unit(s.inference.cache_per_token) for s in sheets],
    }
    return [[name, *values] for name, values in rows.items()]


def _checks(findings: list[Finding]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table of checks. A reason that equals the one before is left out."""
    before = ""
    for finding in findings:
        why = finding.why + (f" {finding.remedy}" if finding.remedy and finding.verdict == "fail" else "")
        steps = finding.evidence.get("steps")
        why += f" ({steps} steps)" if steps else ""
        yield {
            "name": finding.id,
            "why": why if why != before else "",
            "verdict": str(finding.verdict),
            "measured": "" if finding.measured is None else f"{finding.measured:.3g}",
            "bound": "" if finding.measured is None else f"≤ {finding.bound:.3g}",
        }
        before = why


def _commands(tour: Tour) -> dict[str, str]:
    folder, prompt = shlex.quote(tour.run.out), shlex.quote(tour.samples[0].prompt.strip())
    return {
        "sample from the model": f"glass sample --model {folder}/best {prompt}",
        "train it longer": f"glass train {folder}/run.toml --set loop.steps=5000 --out runs/longer",
        "train on your own text": "glass train PATH/TO/TEXT.txt",
        "talk to the bundled chat model": "glass chat --model bard-chat",
        "fine-tune it on your own text": "glass train PATH/TO/TEXT.txt --from bard --lora 8",
        "compute the size of any model": "glass size llama3_8b --batch 1 --context 8192",
        "sample from a Hugging Face model": "glass sample --model PATH/TO/FOLDER 'Once upon a time'",
    }
