"""Print the tour: with a live display in a terminal, as plain lines elsewhere."""

import shlex
import textwrap
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from glassformer.finding import Finding
from glassformer.sizing import Sheet
from glassformer.sizing.text import byte_unit, flop_unit, quantity
from glassformer.tour import report
from glassformer.tour.claims import CheckedClaim
from glassformer.tour.diagnosis import DiagnosedModel
from glassformer.tour.generation import CacheTiming, Sample, SamplerDistribution
from glassformer.tour.run import STAGES, run_tour
from glassformer.tour.training import Corpus, Plan
from glassformer.tour.tuning import Answered
from glassformer.training.events import Display


class Printer:
    """Prints each event of the tour as it happens."""

    def __init__(self, console: Console):
        self.console = console
        self.display: Display | None = None

    def print(self, text: str) -> None:
        """Print lines as they are."""
        lines = "\n".join(line.rstrip() for line in text.split("\n"))
        self.console.print(lines, highlight=False, markup=False, soft_wrap=True)

    def print_wrapped(self, text: str) -> None:
        """Print sentences. In a terminal they are wrapped between words and keep their indentation."""
        self.print(wrap(text, self.console.width) if self.console.is_terminal else text)

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "stage":
                self.console.rule(f"{event['number']}  {event['title']}")
            case "size":
                self.print(size_text(event["result"]))
            case "finding":
                self.print_finding(event["finding"])
            case "corpus":
                self.print_wrapped(corpus_text(event["result"]))
            case "training":
                self.show_training(event["training_event"])
            case "sample":
                self.print(sample_text(event["result"]))
            case "distributions":
                self.print_distributions(event["result"])
            case "cache":
                self.print(timing_text(event["result"]))
            case "claim":
                self.print_wrapped(claim_text(event["result"]))
            case "diagnosis":
                self.print_wrapped(diagnosis_text(event["result"]))
            case "tuning":
                step, loss = event["result"]
                self.print(f"adapters of bard, after {step:>3} steps: loss of answers to new questions {loss:.3f}")
            case "answer":
                self.print_wrapped(answer_text(event["result"]))

    def print_finding(self, finding: Finding) -> None:
        numbers = "" if finding.measured is None else f"{finding.measured:8.3g}   bound {finding.bound:.3g}"
        self.print(f"{finding.verdict:<4}  {finding.id:<50} {numbers or finding.why}")
        if not finding.passed and finding.measured is not None:
            self.print_wrapped(f"      {finding.why}. {finding.remedy}")

    def show_training(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self.display = Display(self.console)
            self.display.__enter__()
        if self.display is not None:
            self.display(event)
        if event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Stop the live display, also when training was interrupted."""
        if self.display is not None:
            self.display.__exit__()
            self.display = None

    def print_distributions(self, rows: list[SamplerDistribution]) -> None:
        """Print the distribution of each sampler for the same eight logits, in percent."""
        table = Table(Column("sampler", no_wrap=True), *map(str, range(len(rows[0].probabilities))), "kept", "nats")
        for row in rows:
            cells = [f"{100 * p:.0f}" if p else "·" for p in row.probabilities]
            table.add_row(row.name, *cells, str(row.kept), f"{row.entropy:.2f}")
        self.print("\nThe distribution of each sampler for the same eight logits, in percent. Token 2 counts")
        self.print("as already generated. The last column is the entropy in nats.")
        self.console.print(table)


def wrap(text: str, width: int) -> str:
    """Wrap each line between words, and indent its continuation like its beginning."""
    lines = []
    for line in text.split("\n"):
        margin = line[: len(line) - len(line.lstrip())]
        wrapper = textwrap.TextWrapper(
            width, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
        )
        lines += wrapper.wrap(line) or [""]
    return "\n".join(lines)


def size_text(sheet: Sheet) -> str:
    """Return the totals of a size sheet. `glass size` prints every formula."""
    assert sheet.training is not None
    return (
        f"GPT-2 small: {sheet.parameters:,} parameters, {byte_unit(sheet.inference.weights)} of weights.\n"
        f"A training step on {sheet.batch} x {sheet.context:,} tokens: {flop_unit(sheet.flops.training)}, "
        f"{byte_unit(sheet.training.peak)} of memory at the peak.\n"
        f"The next token, with a KV cache: {flop_unit(sum(sheet.decode.values()))}; "
        f"the cache grows by {byte_unit(sheet.inference.cache_per_token)} per token.\n"
        f"Compute-optimal training takes about {quantity(sheet.chinchilla.allocations[0].tokens)} tokens.\n"
        "Each number with its formula: glass size gpt2 --batch 8 --context 1024"
    )


def corpus_text(corpus: Corpus) -> str:
    """Return the size of the corpus and the loss of its baselines."""
    losses = "   ".join(f"{name} {value:.3f}" for name, value in corpus.baselines.items())
    note = f"{corpus.note}\n" if corpus.note else ""
    return (
        f"{note}{corpus.name}: {corpus.train_tokens:,} characters for training, {corpus.validation_tokens:,} for "
        f"validation, vocabulary of {corpus.vocab_size} characters.\n"
        f"Loss of the n-gram baselines (nats per character):\n   {losses}"
    )


def sample_text(sample: Sample) -> str:
    """Return the name of the sampler and its text."""
    text = sample.text.strip("\n").replace("\n", "\n            ")
    return f"{sample.sampler:>10}  {text}"


def timing_text(timing: CacheTiming) -> str:
    """Return the seconds without and with a cache, and whether the tokens are the same."""
    same = "same tokens" if timing.same_tokens else "DIFFERENT tokens"
    seconds = f"recomputed {timing.recomputed_seconds:6.2f} s   cached {timing.cached_seconds:6.2f} s"
    return f"{timing.length:>4} tokens   {seconds}   {timing.speed_up:4.1f} x   {same}"


def answer_text(answered: Answered) -> str:
    """Return a question, and its answers by the base model and by the adapter."""
    base = " ".join(answered.base.split())
    return f"   {answered.question}\n      bard       {base[:60]}\n      bard-chat  {answered.answer}"


def claim_text(checked: CheckedClaim) -> str:
    """Return the verdict on a claim, on its negative control, and the source that is wrong, if any."""
    outcome, control = checked.outcome, checked.control_outcome
    lines = [
        f"{checked.title}: {outcome.badge}, {len(outcome.parts)} pieces of evidence in {outcome.seconds:.1f} s.",
        f"   Negative control ({checked.control.rstrip('.')}): "
        f"{checked.control_failures} of {len(control.parts)} pieces fail.",
    ]
    if checked.erratum is not None:
        source, statement, reason = checked.erratum
        lines.append(f"   {source} is wrong: “{statement}” {reason}")
    return "\n".join(lines)


def diagnosis_text(diagnosed: DiagnosedModel) -> str:
    """Return the verdict of the doctor in one sentence, and the first diagnosis with its fix."""
    report = diagnosed.report
    lines = [f"{report.verdict()}  ({diagnosed.seconds:.1f} s)"]
    if report.diagnoses:
        first = report.diagnoses[0]
        lines += [f"   {first.evidence[0].id}: {first.evidence[0].numbers()}", f"   fix: {first.remedy}"]
    return "\n".join(lines)


def print_tour(plan: Plan) -> int:
    """Run the tour, print it, write the report. Return 0 if nothing failed, 1 otherwise."""
    printer = Printer(Console())
    try:
        tour = run_tour(plan, printer)
    finally:
        printer.close()
    printer({"event": "stage", "number": len(STAGES), "title": STAGES[-1]})
    path = report.write(tour, plan.out / report.NAME)
    passed = sum(finding.passed for finding in tour.findings)
    skipped = sum(finding.verdict == "skip" for finding in tour.findings)
    others = f", {skipped} skipped" if skipped else ""
    printer.print(f"{passed} of {len(tour.findings)} findings passed{others}, in {tour.seconds / 60:.1f} minutes.")
    printer.print(f"The report page:           {path}")
    prompt = shlex.quote(tour.samples[0].prompt.strip())
    printer.print(f"Sample from the model:     glass sample --model {shlex.quote(tour.run.out)}/best {prompt}")
    printer.print("All checks passed." if tour.passed else "Some checks FAILED: see above.")
    return 0 if tour.passed else 1
