"""The tour for a terminal: live where there is one, plain lines elsewhere."""

import shlex
import textwrap
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from glassformer.finding import Finding
from glassformer.sizing.text import byte_unit, flop_unit, quantity
from glassformer.tour import guide as tour
from glassformer.tour import report
from glassformer.tour.theory import Examined, Proof
from glassformer.tour.training import Plan, Spoken, Text
from glassformer.training.display import Display


class Guide:
    """Shows each event of the walk as it comes."""

    def __init__(self, console: Console):
        self.console = console
        self.display: Display | None = None

    def say(self, text: str) -> None:
        lines = "\n".join(line.rstrip() for line in text.split("\n"))
        self.console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def tell(self, text: str) -> None:
        """Say sentences: in a terminal they are broken between words, below where each began; elsewhere not at all."""
        self.say(fold(text, self.console.width) if self.console.is_terminal else text)

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "stage":
                self.console.rule(f"{event['number']}  {event['title']}")
            case "size":
                self.say(short_sheet(event["sheet"]))
            case "finding":
                self.finding(event["finding"])
            case "corpus":
                self.tell(corpus_lines(event["text"]))
            case "training":
                self.training(event["of"])
            case "spoken":
                self.say(spoken_lines(event["spoken"]))
            case "samplers":
                self.samplers(event["rows"])
            case "race":
                self.race(event["race"])
            case "proof":
                self.tell(proof_lines(event["proof"]))
            case "examined":
                self.tell(examined_lines(event["examined"]))

    def finding(self, finding: Finding) -> None:
        numbers = "" if finding.measured is None else f"{finding.measured:8.3g}   bound {finding.bound:.3g}"
        self.say(f"{finding.verdict:<4}  {finding.id:<50} {numbers or finding.why}")
        if not finding.passed and finding.measured is not None:
            self.tell(f"      {finding.why}. {finding.remedy}")

    def training(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self.display = Display(self.console)
            self.display.__enter__()
        if self.display is not None:
            self.display(event)
        if event["event"] == "end":
            self.close()

    def close(self) -> None:
        """End the live picture, also when training was interrupted."""
        if self.display is not None:
            self.display.__exit__()
            self.display = None

    def samplers(self, rows: list[tour.SamplerRow]) -> None:
        """What each sampler makes of the same eight logits, in percent."""
        table = Table(Column("sampler", no_wrap=True), *map(str, range(len(rows[0].probabilities))), "kept", "nats")
        for row in rows:
            cells = [f"{100 * p:.0f}" if p else "·" for p in row.probabilities]
            table.add_row(row.name, *cells, str(row.kept), f"{row.entropy:.2f}")
        self.say("\nWhat they do: each on the same eight logits, in percent. Token 2 counts as")
        self.say("seen before; nats measure how undecided a distribution is.")
        self.console.print(table)

    def race(self, race: tour.CacheRace) -> None:
        same = "same tokens" if race.same_tokens else "DIFFERENT tokens"
        times = f"recomputed {race.recomputed_seconds:6.2f} s   cached {race.cached_seconds:6.2f} s"
        self.say(f"{race.length:>4} tokens   {times}   {race.speed_up:4.1f} x   {same}")


def fold(text: str, width: int) -> str:
    """Each line at most so wide, broken between words, its continuation as far to the right as its beginning."""
    lines = []
    for line in text.split("\n"):
        margin = line[: len(line) - len(line.lstrip())]
        fold = textwrap.TextWrapper(
            width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines += fold.wrap(line) or [""]
    return "\n".join(lines)


def short_sheet(sheet: Any) -> str:
    """The sums of a size sheet; `glass size` has every formula."""
    return (
        f"GPT-2 small: {sheet.parameters:,} parameters, {byte_unit(sheet.inference.weights)} of weights.\n"
        f"A training step on {sheet.batch} x {sheet.context:,} tokens: {flop_unit(sheet.flops.training)}, "
        f"{byte_unit(sheet.training.peak)} at the peak.\n"
        f"The next token, with a cache: {flop_unit(sum(sheet.decode.values()))}; "
        f"the cache grows by {byte_unit(sheet.inference.cache_per_token)} a token.\n"
        f"It would be trained best on about {quantity(sheet.chinchilla.allocations[0].tokens)} tokens.\n"
        "Each of these with its formula: glass size gpt2 --batch 8 --context 1024"
    )


def corpus_lines(text: Text) -> str:
    """What there is to learn from, and how far counting gets."""
    lines = "   ".join(f"{name} {value:.3f}" for name, value in text.lines.items())
    note = f"{text.note}\n" if text.note else ""
    return (
        f"{note}{text.name}: {text.train_tokens:,} characters to train on, {text.validation_tokens:,} to be judged by, "
        f"{text.vocab_size} different ones.\nWhat guessing and counting reach (nats per character):\n   {lines}"
    )


def spoken_lines(spoken: Spoken) -> str:
    """The sampler, and what it said."""
    said = spoken.text.strip("\n").replace("\n", "\n            ")
    return f"{spoken.sampler:>10}  {said}"


def proof_lines(proof: Proof) -> str:
    """What was claimed and how it was tried; and who has it wrong."""
    whole, broken = proof.whole, proof.broken
    lines = [
        f"{proof.title}: {whole.badge}, {len(whole.parts)} pieces of evidence in {whole.seconds:.1f} s.",
        f"   Broken on purpose ({proof.control.rstrip('.')}): {proof.turned} of {len(broken.parts)} pieces fail.",
    ]
    if proof.mistake is not None:
        source, said, fails = proof.mistake
        lines.append(f"   {source} has it wrong: “{said}” {fails}")
    return "\n".join(lines)


def examined_lines(examined: Examined) -> str:
    """The doctor's verdict in one sentence, and the first remedy."""
    report = examined.report
    lines = [f"{report.verdict()}  ({examined.seconds:.1f} s)"]
    if report.diagnoses:
        first = report.diagnoses[0]
        lines += [f"   {first.evidence[0].id}: {first.evidence[0].numbers()}", f"   remedy: {first.remedy}"]
    return "\n".join(lines)


def print_tour(plan: Plan) -> int:
    """Walk, show, write the report. Returns 0 when nothing failed, 1 otherwise."""
    console = Console()
    guide = Guide(console)
    try:
        told = tour.walk(plan, guide)
    finally:
        guide.close()
    guide({"event": "stage", "number": len(tour.STAGES), "title": tour.STAGES[-1]})
    path = report.write(told, plan.out / report.NAME)
    passed = sum(finding.passed for finding in told.findings)
    skipped = sum(finding.verdict == "skip" for finding in told.findings)
    others = f", {skipped} could not be made" if skipped else ""
    guide.say(f"{passed} of {len(told.findings)} findings passed{others}, in {told.seconds / 60:.1f} minutes.")
    guide.say(f"Everything is on one page:   {path}")
    prompt = shlex.quote(told.spoken[0].prompt.strip())
    guide.say(f"Let it go on speaking:       glass sample --model {shlex.quote(told.run.out)}/best {prompt}")
    guide.say("Everything held." if told.held else "Something did NOT hold: see above.")
    return 0 if told.held else 1
