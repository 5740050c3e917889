"""`glass train` and `glass tour`: models as they learn."""

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from glassformer.cli.common import InputError, Json

if TYPE_CHECKING:
    from glassformer.training import Session


def train(
    run: Annotated[
        tyro.conf.Positional[Path | None], tyro.conf.arg(help="A run file; none: nanoGPT's CPU setting.")
    ] = None,
    set: Annotated[
        tuple[str, ...], tyro.conf.arg(help="Changes to the run, such as optim.lr=3e-4 loop.steps=500.")
    ] = (),
    resume: Annotated[str | None, tyro.conf.arg(help="Go on from a run or a checkpoint.")] = None,
    json: Annotated[bool, tyro.conf.arg(help="Events as JSON lines, the last one the result.")] = False,
) -> int:
    """Train a model on a text. Ctrl-C stops after the step and saves; --resume goes on, bit for bit."""
    from glassformer.training.distributed.ranks import said_once

    with said_once():  # under torchrun, by one process
        _train(run, set, resume, json)
    return 0


def _train(run: Path | None, changes: tuple[str, ...], resume: str | None, json: bool) -> None:
    from glassformer.training import open_session, read_run, resume_session
    from glassformer.training import train as run_training
    from glassformer.training.display import Display
    from glassformer.training.distributed.ranks import is_main

    if resume is not None:
        if run is not None:
            raise InputError("a resumed run has its own run file: leave out the run, or leave out --resume.")
        session = resume_session(resume, changes)
    else:
        text = "" if run is None else _read_text(run)
        session = open_session(read_run(text, changes, source=str(run or "the run")))
    arguments = (session.run, session.data)
    try:
        if not is_main():
            group = run_training(*arguments, None, session.resume).group
            group.close()
            return
        lines = session.data.baselines(session.run.model.vocab_size)
        if json:
            say = lambda event: print(json_module.dumps(event), flush=True)  # noqa: E731
            group = run_training(*arguments, say, session.resume, lines).group
        else:
            with Display() as display:
                group = run_training(*arguments, display, session.resume, lines).group
            print(_next_steps(session))
        group.close()
    except ArithmeticError as error:
        raise InputError(str(error)) from None
    except KeyboardInterrupt:
        if is_main() and any(Path(session.run.out, "checkpoints").glob("step-*")):
            print(f"stopped; glass train --resume {shlex.quote(session.run.out)} goes on from here", file=sys.stderr)
        raise


def _next_steps(session: "Session") -> str:
    """Where the best model is, and a command that runs as it stands."""
    from glassformer.config import EncoderConfig

    folder = shlex.quote(f"{session.run.out}/best")
    told, text = f"the best model is in {folder}", getattr(session.data, "val", None)
    if text is None or isinstance(session.run.model, EncoderConfig):
        return told  # a task has no text, and an encoder does not go on
    word = _prompt(session.data.tokenizer.decode([int(token) for token in text[:40]]))
    return f"{told}: glass sample --model {folder} {shlex.quote(word)}" if word else told


def _prompt(text: str) -> str:
    """The first word that says something: a text may begin with what ends a sentence."""
    words = text.split()
    return next((word for word in words if any(map(str.isalpha, word))), words[0] if words else "")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give a run file.") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is not text: give a TOML run file.") from None


def tour(
    minutes: Annotated[float, tyro.conf.arg(help="Of training; the rest takes about another half minute.")] = 2.0,
    out: Annotated[Path, tyro.conf.arg(help="Folder for report.html and the trained model.")] = Path("tour"),
    json: Json = False,
) -> int:
    """Train, sample from, check, prove and diagnose a small model in a few minutes, and write one HTML page."""
    from glassformer.tour import report
    from glassformer.tour import run as tour_run

    plan = tour_run.Plan(minutes=minutes, out=out)
    try:
        if not json:
            from glassformer.tour.terminal import print_tour

            return print_tour(plan)
        result = tour_run.run_tour(plan)
    except ArithmeticError as error:
        raise InputError(str(error)) from None
    path = report.write(result, out / report.NAME)
    print(json_module.dumps({**result.to_dict(), "report": str(path)}))
    return 0 if result.passed else 1
