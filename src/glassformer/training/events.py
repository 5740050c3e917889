"""What a run reports: events in log.jsonl and TensorBoard, its throughput, and the display in a terminal."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from glassformer.errors import install, plural
from glassformer.files import write_atomically

Report = Callable[[dict[str, Any]], None]
BARS = "▁▂▃▄▅▆▇█"


class Log:
    """Writes events to log.jsonl and passes them on. A resumed run drops the lines of steps that will be repeated."""

    def __init__(
        self, path: Path, listen: Report | None, from_step: int, is_main: bool = True, tensorboard: bool = False
    ):
        self.listen, self.is_main = listen, is_main
        self.tensorboard: Any = None
        if not is_main:  # only one rank writes and reports
            return
        if tensorboard:
            self.tensorboard = _tensorboard(path.parent / "tensorboard")
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line cut off by a crash
                    if json.loads(line).get("step", 0) <= from_step:
                        kept.append(line + "\n")
        write_atomically(path, "".join(kept).encode())
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, **event: Any) -> None:
        if not self.is_main:
            return
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        if self.tensorboard is not None and event["event"] in ("step", "validation"):
            for name, value in event.items():
                if isinstance(value, float):
                    self.tensorboard.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if self.listen is not None:
            self.listen(event)

    def close(self) -> None:
        if self.is_main:
            self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()


class Throughput:
    """Steps per second of a run, and its ETA."""

    def __init__(self, step: int, steps: int, before: float = 0.0):
        """`step` of `steps` were done in an earlier process, in `before` seconds."""
        self.step, self.steps, self.since, self.excluded = step, steps, time.perf_counter(), 0.0
        self.began = self.since - before
        self.first: tuple[int, float] | None = None

    def seconds(self) -> float:
        """Return the seconds that the run has taken, earlier processes included."""
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent here from steps/s. It is included in the ETA."""
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def read(self, step: int) -> dict[str, float]:
        """Return steps/s since the last reading, and the ETA in seconds.

        The ETA uses the mean time of a step after the first reading, so that the start-up is not part of it.
        """
        now = time.perf_counter()
        rate = (step - self.step) / max(now - self.since - self.excluded, 1e-9)
        self.step, self.since, self.excluded = step, now, 0.0
        if self.first is None:
            self.first = step, now
            return {"steps_per_second": rate}
        mean = (now - self.first[1]) / (step - self.first[0])
        return {"steps_per_second": rate, "seconds_left": mean * (self.steps - step)}


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"loop.tensorboard=true needs tensorboard: {install('logs')}, or leave it out (see log.jsonl)."
        ) from None
    return SummaryWriter(str(folder))


class Display:
    """Shows the events of a run: as a live display in a terminal, as plain lines elsewhere."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(file=sys.stdout)
        self.live: Live | None = None
        self.facts: dict[str, Any] = {}
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.probes: list[dict[str, Any]] = []
        self.text = ""
        self.last: dict[str, Any] = {}

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self.live = Live(console=self.console, refresh_per_second=4, transient=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "start":
                self.facts = event
            case "step":
                self.last = event
                self.losses.append(event["loss"])
            case "validation":
                self.validation.append((event["step"], event["loss"]))
            case "probe":
                self.probes.append(event)
            case "sample":
                self.text = event["text"]
        if self.live is not None:
            self.live.update(self.render())
        else:
            line = self.line(event)
            if line:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def line(self, event: dict[str, Any]) -> str:
        """Return one plain line for an event, or an empty text for an event that is not printed."""
        match event["event"]:
            case "start":
                lines = "  ".join(f"{name} {value:.3f}" for name, value in baseline_lines(event).items())
                source = f" of the task {event['task']}" if "task" in event else ""
                folder = f"run folder: {event['out']}\n" if "out" in event else ""
                kernels = f"kernels: {', '.join(event['kernels'])}\n" if event.get("kernels") else ""
                return (
                    f"{event['parameters']:,} parameters, {event['train_tokens']:,} training tokens{source}, "
                    f"{computed_by(event)}\n{kernels}{folder}baselines (nats per token):  {lines}"
                )
            case "step":
                if event["step"] % 100 and event["step"] != 1:
                    return ""
                return (
                    f"step {event['step']:>6}  loss {event['loss']:.3f}  gradient {event['gradient_norm']:.2f}  "
                    f"{event['steps_per_second']:.1f} steps/s"
                )
            case "validation":
                return f"step {event['step']:>6}  validation {event['loss']:.4f}{'  best' if event['best'] else ''}"
            case "probe":
                return f"step {event['step']:>6}  {probe_text(event)}"
            case "sample":
                return "\n".join(f"  | {line}".rstrip() for line in event["text"].split("\n"))
            case "end":
                done = plural(event["step"], "step")
                return f"done: {done} in {event['seconds']:.0f} s, best validation {event['best']:.4f}"
        return ""

    def render(self) -> Group:
        """Return the live display: progress, loss and baselines, throughput, the latest sample."""
        step, steps = self.last.get("step", 0), self.facts.get("steps", 1)
        rate = self.last.get("steps_per_second", 0.0)
        left = self.last.get("seconds_left", 0.0)
        tokens, flops = rate * self.facts.get("tokens_per_step", 0), rate * self.facts.get("flops_per_step", 0)
        table = Table.grid(padding=(0, 2))
        if "out" in self.facts:
            table.add_row("run folder", self.facts["out"])
        if used := computed_by(self.facts):
            table.add_row("computed by", used)
        if self.facts.get("kernels"):
            table.add_row("kernels", ", ".join(self.facts["kernels"]))
        table.add_row("step", f"{step:,} of {steps:,}   {time_left(left)}")
        table.add_row("", ProgressBar(total=steps, completed=step, width=50))
        if self.losses:
            table.add_row("loss", f"{self.losses[-1]:.3f}  {sparkline(self.losses)}")
        if self.validation:
            best = min(loss for _, loss in self.validation)
            table.add_row("validation", f"{self.validation[-1][1]:.4f}   best {best:.4f}")
        if self.probes:
            table.add_row("probes", probe_text(self.probes[-1]))
            if seen := [value for event in self.probes if (value := best_head(event, "induction")) is not None]:
                table.add_row("induction", f"{seen[-1]:.2f}  {sparkline(seen)}")
        table.add_row("baselines", self.against_baselines())
        # relative to the throughput of a plain matmul on this machine, not to a data sheet
        mfu = flops / self.facts.get("peak_flops", math.inf)
        speed = f"{rate:.1f} steps/s   {tokens:,.0f} tokens/s   {flops / 1e9:,.0f} GFLOP/s   MFU {mfu:.0%}"
        table.add_row("speed", speed)
        parts: list[Any] = [Panel(table, title="training", expand=False)]
        if self.text:
            parts.append(Panel(Text(self.text), title="sample", expand=False))
        return Group(*parts)

    def against_baselines(self) -> Text:
        """Return the baselines; those above the validation loss are green."""
        now = self.validation[-1][1] if self.validation else math.inf
        shown = Text()
        for name, value in baseline_lines(self.facts).items():
            shown.append(f"{name} {value:.3f}  ", style="green" if now < value else "dim")
        return shown


def implementation(compiled: bool, installed: Sequence[str]) -> str:
    """Return what computes the steps, as `glass train` and `glass env` name it. `installed` are names of kernels."""
    return "torch.compile" if compiled else "native" if installed else "torch"


def computed_by(start: dict[str, Any]) -> str:
    """Return device, precision and implementation of a run, from its start event."""
    return ", ".join(start[name] for name in ("device", "precision", "implementation") if name in start)


def time_left(seconds: float) -> str:
    """Return the remaining time in seconds, minutes or hours; an empty text if it is 0 or unknown."""
    if seconds < 60:
        return f"{math.ceil(seconds)} s left" if seconds else ""
    return f"{seconds / 60:.1f} minutes left" if seconds < 90 * 60 else f"{seconds / 3600:.1f} hours left"


def best_head(event: dict[str, Any], score: str) -> float | None:
    """Return the highest score of any head in one probe event; None if it was not measured or is undefined."""
    grid = event.get("heads", {}).get(score, [])
    return max((value for row in grid for value in row if value is not None), default=None)


def probe_text(event: dict[str, Any]) -> str:
    """Return a probe event in one line: accuracy, best heads, weight norm."""
    parts = [f"{split} accuracy {value:.3f}" for split, value in event.get("accuracy", {}).items()]
    heads = {score: best_head(event, score) for score in event.get("heads", {})}
    parts += [f"best {score} head {value:.2f}" for score, value in heads.items() if value is not None]
    if "norms" in event:
        parts.append(f"weight norm {event['norms']['total']:.2f}")
    return "  ".join(parts)


def baseline_lines(facts: dict[str, Any]) -> dict[str, float]:
    """Return the loss of the uniform distribution and of the n-gram baselines, highest first."""
    lines = {"uniform": facts.get("uniform", math.nan), **facts.get("baselines", {})}
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


def sparkline(values: list[float], width: int = 40) -> str:
    """Return a series of values as one line of block characters."""
    step = max(1, len(values) // width)
    picked = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)][-width:]
    low, high = min(picked), max(picked)
    return "".join(BARS[int((v - low) / ((high - low) or 1) * (len(BARS) - 1))] for v in picked)
