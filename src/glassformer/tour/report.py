"""The tour as one page: self-contained HTML with inline SVG. No network, no other files, no script."""

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path

from glassformer.files import write_atomically
from glassformer.finding import Finding
from glassformer.pages.style import STYLE
from glassformer.pages.svg import bars, escape, large_map, loss_curves, race_bars, small_map
from glassformer.sizing.text import byte_unit, flop_unit
from glassformer.tour.guide import REPORT, Tour

NAME = REPORT
SECTIONS = {
    "corpus": "The text, and the lines to beat",
    "training": "It learns",
    "attention": "What the heads look at",
    "samples": "It speaks",
    "cache": "The cache changes the time and nothing else",
    "theory": "Theory, proven on the way",
    "doctor": "A broken model, diagnosed",
    "size": "What a model costs",
    "checks": "What was checked",
    "next": "Where to go next",
}
MEANINGS = {
    "greedy": "always the likeliest character; it soon walks in circles",
    "temp 0.5": "logits divided by 0.5: bolder",
    "as it is": "the model's own distribution",
    "temp 2": "logits divided by 2: nearly anything goes",
    "top-k 4": "only the four likeliest",
    "top-p 0.7": "the likeliest that together reach 70 %",
    "min-p 0.2": "those at least a fifth as likely as the likeliest",
    "penalty 2": "characters already used made less likely: for words, not for letters",
    "4 beams": "the likeliest of four whole continuations, kept side by side",
}


def write(tour: Tour, path: Path) -> Path:
    """The page at `path`: written beside it and renamed, so that whoever looks finds a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(tour).encode())
    return path


def page(tour: Tour) -> str:
    """The whole page."""
    bodies = {
        "corpus": _corpus(tour),
        "training": _training(tour),
        "attention": _attention(tour),
        "samples": _samples(tour),
        "cache": _cache(tour),
        "theory": _theory(tour),
        "doctor": _doctor(tour),
        "size": _size(tour),
        "checks": _checks(tour.findings),
        "next": _next(tour),
    }
    links = "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title in SECTIONS.items())
    sections = "".join(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>{bodies[key]}</section>\n'
        for key, title in SECTIONS.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>A tour of a Transformer</title>\n<style>{STYLE}</style></head>\n<body>"
        f'<header>{_header(tour)}</header>\n<nav aria-label="Contents"><ol>{links}</ol></nav>\n'
        f"<main>{sections}</main>\n<footer><p>Written by glassformer, {datetime.date.today():%d %B %Y}. "
        "Every number on this page was measured or computed in the run that wrote it.</p></footer></body></html>\n"
    )


def _header(tour: Tour) -> str:
    passed = sum(finding.passed for finding in tour.findings)
    record = tour.training
    beaten = [name for name, value in tour.text.lines.items() if record.final < value]
    kind = "pass" if tour.held else "fail"
    return (
        f"<h1>A Transformer learned to write in {_duration(record.seconds)}</h1>"
        f'<p class="lead">It read {escape(tour.text.name)}, {tour.text.train_tokens:,} characters, and predicts text '
        f"it never saw at <strong>{record.final:.3f}</strong> nats per character: "
        f"{'a better guess than ' + _listed(beaten) if beaten else 'no better than guessing yet'}.</p>"
        f'<p><span class="badge {kind}">{passed} of {len(tour.findings)} findings held</span> '
        f"The whole tour took {_duration(tour.seconds)}.</p>"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], caption: str) -> str:
    """Cells are HTML already; the first of a row is its heading."""
    top = "".join(f'<th scope="col">{name}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>' for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _corpus(tour: Tour) -> str:
    text = tour.text
    meaning = {
        "uniform": f"every one of {text.vocab_size} characters equally likely: ln {text.vocab_size}",
        "unigram": "how often each character occurs",
        "bigram": "the one character before",
        "5-gram": "the four before, Kneser-Ney smoothed",
    }
    rows = [(escape(name), f"{value:.3f}", escape(meaning.get(name, ""))) for name, value in text.lines.items()]
    note = f'<p class="note">{escape(text.note)}</p>' if text.note else ""
    return (
        f"{note}<p>{text.train_tokens:,} characters are trained on; the last {text.validation_tokens:,} are kept "
        f"aside, and only they judge. It begins:</p><pre>{escape(text.excerpt)}</pre>"
        "<p>What counting alone makes of the kept part, in nats per character. A model that is not below the bigram "
        "line has learned nothing that a table of pairs does not know.</p>"
        + _table(("guess by", "nats", "it knows"), rows, "Lines to beat")
    )


def _training(tour: Tour) -> str:
    record, run = tour.training, tour.run
    start = record.start
    last = record.validation[-1][0]
    chart = loss_curves(record.train, record.validation, tour.text.lines)
    rate = last / record.seconds if record.seconds else 0.0
    says = "".join(
        f"<figure><figcaption>after {step:,} steps</figcaption><pre>{escape(text)}</pre></figure>"
        for step, text in record.says
    )
    return (
        f"<p>A decoder of {start['parameters']:,} parameters, {run.model.n_layers} layers of {run.model.n_heads} "
        f"heads, {run.model.d_model} wide, reading {run.context} characters at a time; {last:,} steps of "
        f"{run.loop.batch} windows, {rate:.1f} a second, on {escape(start['device'])} in {escape(start['precision'])}, "
        f"optimiser {escape(run.optim.kind)}.</p>"
        + _figure(chart, "Loss in nats per character: lower is better. Dashed: what counting reaches.")
        + f'<h3>What it said on the way</h3><div class="cards">{says}</div>'
    )


def _attention(tour: Tour) -> str:
    seen = tour.attention
    layer, head = seen.sharpest
    name = f"layer {layer + 1}, head {head + 1}"
    large = large_map(seen.patterns[layer][head], seen.tokens, name)
    maps = "".join(
        f"<figure>{small_map(pattern, f'layer {i + 1}, head {j + 1}')}<figcaption>{i + 1}.{j + 1}"
        f'<span class="soft"> prev {seen.previous[i][j]:.2f}</span></figcaption></figure>'
        for i, heads in enumerate(seen.patterns)
        for j, pattern in enumerate(heads)
    )
    return (
        f"<p>The trained model reads <q>{escape(''.join(seen.tokens))}</q>. Each row of a map is one character; the "
        "dark cells are the earlier characters it takes information from. Above the diagonal there is nothing: no "
        "character can see the future. A dark line just below the diagonal is a head that looks one character back.</p>"
        + _figure(
            large,
            f"The sharpest head, {name}: {seen.previous[layer][head]:.0%} of its weight, on average, lies "
            "on the character before. Point at a cell for its weight.",
        )
        + "<h3>All heads</h3><p>Layer.head, and its mean weight on the character before.</p>"
        + f'<div class="maps">{maps}</div>'
    )


def _samples(tour: Tour) -> str:
    rows = {row.name: row for row in tour.samplers}
    cards = []
    for spoken in tour.spoken:
        row = rows.get(spoken.sampler)
        figure = bars(row.probabilities, spoken.sampler) if row else ""
        said = escape(spoken.text.removeprefix(spoken.prompt))
        cards.append(
            f'<figure><figcaption><strong>{escape(spoken.sampler)}</strong> <span class="soft">'
            f"{escape(MEANINGS.get(spoken.sampler, ''))}</span></figcaption>{figure}"
            f"<pre><b>{escape(spoken.prompt)}</b>{said}</pre></figure>"
        )
    return (
        "<p>A model gives probabilities; a sampler picks. One prompt (bold), one seed: only the sampler differs. The "
        "bars show what each makes of the same eight logits, of which the third counts as already used; a dot is a "
        f'token it would never pick.</p><div class="cards">{"".join(cards)}</div>'
    )


def _cache(tour: Tour) -> str:
    rows = [
        (
            f"{race.length}",
            f"{race.recomputed_seconds:.2f} s",
            f"{race.cached_seconds:.2f} s",
            f"{race.speed_up:.1f} ×",
            _verdict("pass" if race.same_tokens else "fail", "same" if race.same_tokens else "DIFFERENT"),
        )
        for race in tour.races
    ]
    drawn = race_bars([(f"{race.length} tokens", race.recomputed_seconds, race.cached_seconds) for race in tour.races])
    return (
        "<p>Keys and values of earlier tokens do not change, so they need not be computed again: T tokens cost about T "
        "passes of one token instead of T²/2. Measured on a model of 10.7 million parameters.</p>"
        + _figure(drawn, '<span class="key slow"></span> recomputed <span class="key fast"></span> cached')
        + _table(("tokens", "recomputed", "cached", "speed-up", "tokens agree"), rows, "With and without a cache")
    )


def _theory(tour: Tour) -> str:
    cards = []
    for proof in tour.proofs:
        whole, broken = proof.whole, proof.broken
        wrong = ""
        if proof.mistake is not None:
            source, said, fails = map(escape, proof.mistake)
            wrong = f'<p class="note"><strong>{source} has it wrong.</strong> <q>{said}</q> {fails}</p>'
        cards.append(
            f"<h3>{escape(proof.title)}</h3><p>{_verdict(str(whole.finding.verdict), str(whole.badge))}, by "
            f"{len(whole.parts)} pieces of evidence in {whole.seconds:.1f} s. Broken on purpose "
            f"({escape(proof.control.rstrip('.'))}), {proof.turned} of {len(broken.parts)} pieces fail, as they must. "
            f"<code>glass check {escape(proof.id)} --explain</code> shows the derivation.</p>{wrong}"
        )
    return (
        "<p>Statements of textbooks are checks here: each has a derivation, evidence that is computed, and a negative "
        "control. A check that still passes with its hypothesis broken would prove nothing.</p>" + "".join(cards)
    )


def _doctor(tour: Tour) -> str:
    rows = [
        (
            escape(one.name),
            _verdict("fail", "sick") if one.report.diagnoses else _verdict("pass", "healthy"),
            f"{one.report.counts['pass']} passed, {one.report.counts['fail']} failed",
            f"{one.seconds:.1f} s",
        )
        for one in tour.examined
    ]
    told = "".join(
        f'<p class="note"><strong>{escape(first.id)}</strong> ({escape(first.where() or "no place")}): '
        f"{escape(first.remedy)}</p>"
        for one in tour.examined
        for first in one.report.diagnoses[:1]
    )
    return (
        "<p>Without its causal mask a model sees the tokens it is asked to predict: its training loss is splendid and "
        "it has learned nothing. The doctor examines a model from outside, is not told what to look for, and names "
        "the cause.</p>"
        + _table(("model", "verdict", "probes", "time"), rows, "Two examinations")
        + f"{told}<p>Yours: <code>glass doctor file.py:build</code></p>"
    )


def _size(tour: Tour) -> str:
    rows = []
    sheets = (tour.own, tour.sheet)
    for name, show in (
        ("parameters", lambda s: f"{s.parameters:,}"),
        ("weights", lambda s: byte_unit(s.inference.weights)),
        ("batch × context", lambda s: f"{s.batch} × {s.context:,}"),
        ("a training step", lambda s: flop_unit(s.flops.training)),
        ("peak memory, training", lambda s: byte_unit(s.training.peak) if s.training else ""),
        ("one more token", lambda s: flop_unit(sum(s.decode.values()))),
        ("cache per token", lambda s: byte_unit(s.inference.cache_per_token)),
    ):
        rows.append((name, *(escape(show(sheet)) for sheet in sheets)))
    return (
        _table(("", "the model above", "GPT-2 small"), rows, "Two models, computed from their configs alone")
        + "<details><summary>The full sheet of GPT-2 small, each formula with its numbers</summary>"
        f"<pre>{escape(tour.sheet.text())}</pre></details>"
    )


def _verdict(kind: str, word: str = "") -> str:
    sign = {"pass": "✓", "fail": "✗"}.get(kind, "–")
    return f'<span class="verdict {escape(kind)}">{sign} {escape(word or kind)}</span>'


def _checks(findings: list[Finding]) -> str:
    rows, before = [], ""
    for finding in findings:
        numbers = ("", "") if finding.measured is None else (f"{finding.measured:.3g}", f"≤ {finding.bound:.3g}")
        why = finding.why + (f" {finding.remedy}" if finding.remedy and finding.verdict == "fail" else "")
        steps = finding.evidence.get("steps")
        why += f" ({steps} steps)" if steps else ""
        told = f'<span class="why">{escape(why)}</span>' if why != before else ""
        before = why
        rows.append((f"{escape(finding.id)}{told}", _verdict(finding.verdict), *numbers))
    return (
        "<p>The engine is held against an oracle: the same Transformer written a second time, from the formulas, in "
        "plain NumPy and float64. The two share no code. Each check has a bound and a reason for it.</p>"
        + _table(("finding, and why this bound", "verdict", "measured", "bound"), rows, "Findings")
    )


def _next(tour: Tour) -> str:
    folder = shlex.quote(tour.run.out)
    start = shlex.quote(tour.spoken[0].prompt.strip())
    rows = (
        ("let it speak", f"glass sample --model {folder}/best {start}"),
        ("train it longer", f"glass train {folder}/run.toml --set loop.steps=5000 --set out=runs/longer"),
        ("train on your own text", "glass train --set data.corpus=PATH/TO/TEXT.txt"),
        ("size any model before paying for it", "glass size llama3_8b --batch 1 --context 8192"),
        ("bring one from Hugging Face", "glass sample --model PATH/TO/FOLDER 'Once upon a time'"),
    )
    items = "".join(f"<dt>{escape(what)}</dt><dd><code>{escape(how)}</code></dd>" for what, how in rows)
    return (
        f"<dl>{items}</dl><p>To read: <code>src/glassformer/reference/</code>, a whole Transformer in plain NumPy, "
        "forward and backward; <code>src/glassformer/model/</code>, the engine; <code>docs/shapes.md</code>, names "
        "and shapes; <code>docs/architecture.md</code>, which room a line of code lives in.</p>"
    )
