"""`glass train` and `glass tour`: train models."""

import json as json_module
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli.common import (
    InputError,
    Json,
    fitted,
    free_name,
    option,
    refuse_unused,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from glassformer.training import Session

HELP = {
    "run": "A run file (TOML), or a text file or a folder of text files to train on with the default settings. "
    "Default: nanoGPT's CPU setting on Shakespeare.",
    "chat": "Train on the conversations of this file or folder (JSONL, JSON, Parquet; see docs/chat.md). Sets "
    "data.corpus and [chat]. Default: train on a text.",
    "show": "With --chat or [chat]: print this many rendered conversations, the learned tokens between ⟦ and ⟧, and "
    "exit.",
    "set": "Change a field of the run, such as --set optim.lr=3e-4; repeat it for more. --fields lists all fields. "
    "Default: no changes.",
    "out": "Write the run to this folder. Default: the run file's `out`, or else a new folder runs/CORPUS-N.",
    "from": "Fine-tune this model: a model folder, a bundled model, a GGUF file or a Hugging Face hub name. It brings "
    "its config and tokenizer. Default: the run file's start.model, or else fresh weights.",
    "lora": "Train LoRA adapters of this rank and nothing else; [lora] in a run file has the other settings. Needs "
    "--from or start.model. Default: train all weights, or what [lora] of the run file says.",
    "resume": "Continue a run from its newest checkpoint, or from the given checkpoint folder. The result is the same, "
    "bit for bit, as without the interruption. `auto` continues the run that the output folder holds, or starts it. "
    "Default: start a new run; after a restart by torchrun, `auto`.",
    "log_to": "Also send the events to this logger: tensorboard, wandb, mlflow, or a class as package.module:Class. "
    "Default: the run file's loop.sinks.",
    "replay": "Send log.jsonl of a run to the loggers of --log-to, and exit; nothing is trained. Default: train.",
    "force": "Replace the run that the output folder already holds.",
    "latest": "Point the link runs/latest to this run.",
    "fields": "Print every field of a run file with its type, default and meaning, and exit.",
    "json": "Print events as JSON, one object per line; the last event has the result.",
}


def train(
    run: Annotated[tyro.conf.Positional[Path | None], option(HELP["run"], "RUN.toml|TEXT")] = None,
    from_: Annotated[str | None, option(HELP["from"], "MODEL", name="from")] = None,
    lora: Annotated[int | None, option(HELP["lora"], "RANK")] = None,
    chat: Annotated[Path | None, option(HELP["chat"], "FILE|DIR")] = None,
    show: Annotated[int, option(HELP["show"])] = 0,
    set: Annotated[tuple[str, ...], option(HELP["set"], "FIELD=VALUE")] = (),
    out: Annotated[Path | None, option(HELP["out"], "DIR")] = None,
    resume: Annotated[str | None, option(HELP["resume"], "DIR|auto")] = None,
    log_to: Annotated[tuple[str, ...], option(HELP["log_to"], "NAME")] = (),
    replay: Annotated[Path | None, option(HELP["replay"], "DIR")] = None,
    force: Annotated[bool, option(HELP["force"])] = False,
    latest: Annotated[bool, option(HELP["latest"])] = True,
    fields: Annotated[bool, option(HELP["fields"])] = False,
    json: Annotated[bool, option(HELP["json"])] = False,
) -> int:
    """Train a model on a text. Ctrl-C, SIGTERM and SIGUSR1 stop after the current step and save a checkpoint."""
    if fields:
        _print_fields(json)
        return 0
    if replay is not None:
        if run is not None:
            raise InputError(f"glass train with --replay has no use for a run file: leave out {run}.")
        given = {"set": set, "out": out, "resume": resume, "force": force}
        refuse_unused("glass train with --replay", given, (), {"set": (), "force": False})
        return _replay(replay, log_to, json)
    if log_to:
        if any(change.partition("=")[0].strip() == "loop.sinks" for change in set):
            raise InputError("--log-to and --set loop.sinks=... name the loggers twice: leave one of them out.")
        set = (*set, f"loop.sinks={json_module.dumps(log_to)}")
    from glassformer.training.distributed.group import report_error_once, restarted

    if restarted() and resume is None:
        resume, force = "auto", False  # a second attempt of torchrun must not replace what the first one wrote
    with report_error_once():  # under torchrun, one process prints it
        if resume is not None and force:
            raise InputError("--resume continues a run and --force replaces one: leave one of them out.")
        new = resume in (None, "auto")
        changes = _changes(set, out, from_, lora, new)
        if chat is not None:
            changes = (*_chat_changes(chat, run, new), *changes)
        session, about = _open(run, changes, resume)
        for sentence in session.notes:
            _note(f"{sentence}.")
        if show:
            _show(session, show)
            return 0
        if session.resume is not None and session.resume[0]["step"] >= session.run.loop.steps:
            _note(f"the run in {session.run.out} is finished; go further with --set loop.steps=N.")
        else:
            _train(session, about, force, latest, json)
    return 0


def _changes(
    changes: tuple[str, ...], out: Path | None, start: str | None, lora: int | None, new: bool
) -> tuple[str, ...]:
    """Return the changes of --set with those that --out, --from and --lora mean. `new`: the run may be a new one."""
    if out is not None:
        if any(change.partition("=")[0].strip() == "out" for change in changes):
            raise InputError(f"--out {out} and --set out=... name the folder twice: leave one of them out.")
        changes = (*changes, f"out={json_module.dumps(str(out), ensure_ascii=False)}")
    if start is not None:
        if not new:
            raise InputError("--resume continues a run and --from starts a new one: leave one of them out.")
        changes = (f"start.model={json_module.dumps(start, ensure_ascii=False)}", *changes)
    if lora is not None:
        if not new:
            raise InputError("--resume continues a run with its own adapters: leave out --lora.")
        changes = (f"lora.rank={lora}", *changes)
    return changes


def _chat_changes(chat: Path, run: Path | None, new: bool) -> tuple[str, ...]:
    """Return the changes that --chat makes to a run."""
    from glassformer.training.session import read_run_file

    if not new:
        raise InputError("a resumed run has its own data: leave out --chat.")
    if run is not None and read_run_file(run) is None:
        raise InputError(f"{run} is a text to train on and --chat {chat} are conversations: leave one of them out.")
    return (f"data.corpus={json_module.dumps(str(chat), ensure_ascii=False)}", "chat.format='auto'")


def _show(session: "Session", count: int) -> None:
    """Print rendered conversations."""
    if session.run.chat is None:
        raise InputError(f"--show {count} prints conversations, and this run has none: give --chat FILE.")
    from glassformer.training.data.chats import show

    print(show(session.data, count))


def _print_fields(json: bool) -> None:
    from glassformer.training.fields import fields_to_dict, run_file_page

    print(json_module.dumps(fields_to_dict()) if json else wrapped(run_file_page().rstrip(), terminal_width()))


def _replay(folder: Path, names: tuple[str, ...], json: bool) -> int:
    from glassformer.training.run import read_run, run_to_dict
    from glassformer.training.sinks import replay

    if not names:
        raise InputError(f"--replay {folder} needs the loggers: add --log-to tensorboard, wandb or mlflow.")
    file = folder / "run.toml"
    if not file.is_file():
        raise InputError(f"--replay {folder} is not the folder of a run: it has no run.toml.")
    count = replay(folder, names, run_to_dict(read_run(file.read_text(encoding="utf-8"), source=str(file))))
    if json:
        print(json_module.dumps({"event": "replay", "run": str(folder), "sinks": list(names), "events": count}))
    else:
        print(f"sent {count:,} events of {folder} to {', '.join(names)}")
    return 0


def _open(run: Path | None, changes: tuple[str, ...], resume: str | None) -> tuple["Session", str]:
    """Return the session of a new or a resumed run, and a line about the defaults for a text without a run file."""
    from glassformer.training import open_session, read_run, resume_session
    from glassformer.training.session import open_or_resume, read_run_file

    if resume is not None and resume != "auto":
        if run is not None:
            raise InputError("a resumed run has its own run file: leave out the run, or leave out --resume.")
        return resume_session(resume, changes, _note), ""
    opened = open_or_resume if resume == "auto" else open_session
    text = "" if run is None else read_run_file(run)
    if run is None or text is not None:
        return opened(read_run(text or "", changes, str(run or "the run"), _note)), ""
    for change in changes:
        if change.partition("=")[0].strip() == "data.corpus":
            raise InputError(f"{run} is the text to train on, and so is --set {change}: leave one of them out.")
    corpus = f"data.corpus={json_module.dumps(str(run), ensure_ascii=False)}"
    session = opened(read_run("", (corpus, *changes), str(run), _note))
    return session, _defaults(run, session)


def _defaults(text: Path, session: "Session") -> str:
    """Return one line: the settings with which a text without a run file is trained."""
    from glassformer.errors import plural
    from glassformer.files import model_name

    run = session.run
    if run.start.model:
        name = model_name(run.start.model)
        return f"fine-tuning {name} on {text}, with the default settings of fine-tuning (--fields lists them)"
    return (
        f"training on {text} without a run file, with the default settings: {plural(run.model.n_layers, 'layer')} "
        f"of width {run.model.d_model}, a context of {plural(run.context, 'token')}, the {session.data.tokenizer.kind} "
        f"tokenizer, {plural(run.loop.steps, 'step')} (--fields lists what can be changed)"
    )


def _note(sentence: str) -> None:
    """Print one sentence on standard error, from one process only."""
    from glassformer.training.distributed.group import is_main

    if is_main():
        print(fitted(f"note: {sentence}", sys.stderr), file=sys.stderr)  # not "glass: ", which begins an error


class _Listener:
    """Passes on the events of a run. At the first one it points runs/latest to the run's folder."""

    def __init__(self, show: Callable[[dict[str, Any]], None], about: str, latest: bool):
        self.show, self.about, self.latest = show, about, latest
        self.out = ""
        """The folder of the run, once it has started."""

    def __call__(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            from glassformer.training.checkpoint import point_latest

            self.out = event["out"]
            if self.about:
                _note(f"{self.about}; the run is in {self.out}.")
            if event["frozen"] and not event["step"]:
                _note(f"{event['frozen']:,} parameters are frozen; {event['trained']:,} are trained.")
            if self.latest and (problem := point_latest(self.out)):
                _note(problem)
        self.show(event)


def _train(session: "Session", about: str, force: bool, latest: bool, json: bool) -> None:
    from glassformer.training import train as run_training
    from glassformer.training.distributed.group import is_main, resume_command
    from glassformer.training.events import Display

    run, data, resume = session.run, session.data, session.resume
    listener: _Listener | None = None
    try:
        if not is_main():
            run_training(run, data, None, resume, None, force).group.close()
            return
        # n-grams are counted while the model is built and torch's compiler is imported
        background = ThreadPoolExecutor(1)
        lines = background.submit(data.baselines, run.model.vocab_size).result
        background.shutdown(wait=False)  # the thread ends when it is done
        if json:
            listener = _Listener(lambda event: print(json_module.dumps(event), flush=True), about, latest)
            group = run_training(run, data, listener, resume, lines, force).group
        else:
            with Display() as display:
                listener = _Listener(display, about, latest)
                group = run_training(run, data, listener, resume, lines, force).group
            print(_next_steps(session, listener.out))
        group.close()
    except ArithmeticError as error:
        raise InputError(str(error)) from None
    except KeyboardInterrupt:
        if listener is not None and listener.out and any(Path(listener.out, "checkpoints").glob("step-*")):
            print(f"stopped; continue with: {resume_command(listener.out)}", file=sys.stderr)
        raise


def _next_steps(session: "Session", out: str) -> str:
    """Return where the best model is, and a command that samples from it."""
    from glassformer.config import EncoderConfig
    from glassformer.training.data.source import Prepared

    folder = shlex.quote(f"{out}/best")
    text = f"the best model is in {folder}"
    if session.run.chat is not None:
        return f"{text}: glass chat --model {folder}"
    if not isinstance(session.data, Prepared) or isinstance(session.run.model, EncoderConfig):
        return text  # a task has no text, and an encoder does not continue one
    word = session.data.first_word()
    return f"{text}: glass sample --model {folder} {shlex.quote(word)}" if word else text


TOUR_HELP = {
    "minutes": "Minutes of training. The other parts of the tour take about half a minute more.",
    "out": "Folder for report.html and the trained model. Default: tour, or tour-2, … if that exists.",
    "force": "Replace the earlier tour in --out.",
}


def tour(
    minutes: Annotated[float, option(TOUR_HELP["minutes"])] = 2.0,
    out: Annotated[Path | None, option(TOUR_HELP["out"], "DIR")] = None,
    force: Annotated[bool, option(TOUR_HELP["force"])] = False,
    json: Json = False,
) -> int:
    """Train, sample from, check, prove and diagnose a small model in a few minutes, and write one HTML page."""
    from glassformer.tour import report
    from glassformer.tour import run as tour_run

    out = free_name(Path("tour"), force) if out is None else out
    plan = tour_run.Plan(minutes=minutes, out=out, force=force)
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
