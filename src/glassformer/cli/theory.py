"""`glass check` runs the claims of the theory; `glass exercise` shows and grades exercises."""

import json as json_module
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli.common import Force, InputError, Json, check_seed, check_writable, fitted, option, terminal_width
from glassformer.errors import plural

if TYPE_CHECKING:
    from glassformer.theory.claims.run import Outcome, Plan
    from glassformer.theory.exercises import Exercise

WORKERS = 2
"""Default number of processes for several claims."""

HELP = {
    "names": "Ids of claims, chapters or errata. Default: all claims.",
    "source": 'Run only the claims of a source, such as "Bishop 12.3". Default: of all sources.',
    "slow": "Also run the claims that train a model, which takes minutes.",
    "control": "Run the negative controls: every check must fail.",
    "explain": "Print derivation, evidence and errata in full.",
    "list": "List the claims and their sources, and run nothing.",
    "figure": "Draw one claim to this .png, .svg, .pdf or .html file. Default: no figure.",
    "report": "Write the results as a self-contained HTML page to this file. Default: no page.",
    "seed": "Seed of all random numbers.",
    "workers": "Number of processes. Default: 2, or 1 on a machine with one core.",
    "exercise": "Id of an exercise. Default: list all.",
    "stub": "Write a file to start from; it must not exist. Default: show the exercise.",
    "grade": "Grade the solution in this file. Default: show the exercise.",
    "solution": "Show the reference solution. Default: show the exercise.",
    "draw": "Seed of the hidden cases for --grade.",
}


def check(
    names: Annotated[tyro.conf.Positional[tuple[str, ...]], option(HELP["names"], "ID")] = (),
    source: Annotated[str | None, option(HELP["source"], "SOURCE")] = None,
    slow: Annotated[bool, option(HELP["slow"])] = False,
    control: Annotated[bool, tyro.conf.arg(name="break", help=HELP["control"])] = False,
    explain: Annotated[bool, option(HELP["explain"])] = False,
    list: Annotated[bool, option(HELP["list"])] = False,
    figure: Annotated[Path | None, option(HELP["figure"], "FILE")] = None,
    report: Annotated[Path | None, option(HELP["report"], "FILE")] = None,
    seed: Annotated[int, option(HELP["seed"])] = 0,
    workers: Annotated[int | None, option(HELP["workers"], "INT")] = None,
    force: Force = False,
    json: Json = False,
) -> int:
    """Check what textbooks claim about Transformers. Exit code 1: a verdict is not the recorded one."""
    from glassformer.theory.claims import selection
    from glassformer.theory.claims.run import Plan

    _consistent(control=control, explain=explain, list=list, figure=figure, report=report)
    check_seed(seed)
    if report is not None:
        check_writable("--report", report, suffixes=(".html", ".htm"), force=force)
    if figure is not None:
        check_writable("--figure", figure, makes_folders=True, force=force)
    ids = selection.select(names, source)
    rows = () if source is None else selection.find_sources(source)
    if list:
        return _list(ids, json)
    if figure is not None:
        return _figure(ids, figure, seed, json)
    plan = Plan(seed=seed, slow=slow, broken=control, draw=report is not None)
    workers = min(WORKERS, os.cpu_count() or 1) if workers is None else workers
    outcomes = _run(ids, plan, workers, rows, json, explain)
    if report is not None:
        from glassformer.theory.claims.page import write

        write(outcomes, plan, report)
    _report(outcomes, plan, rows, report, json, explain)
    return 0 if all(outcome.held for outcome in outcomes) else 1


def _consistent(**given: Any) -> None:
    asked = [name for name, value in given.items() if value]
    pair = {"control": "--break"}
    if len(asked) > 1:
        first, second = (pair.get(name, f"--{name}") for name in asked[:2])
        raise InputError(f"{first} and {second} do not go together: give one of them.")


def _list(ids: "list[str]", json: bool) -> int:
    from glassformer.theory.claims import registry, show

    if not json:
        show.print_list(ids, show.console())
        return 0
    claims = registry.load_all()
    rows = [
        {
            "id": id,
            "chapter": claims[id].chapter,
            "title": claims[id].title,
            "badge": str(claims[id].badge),
            "kinds": [str(kind) for kind in claims[id].kinds],
            "slow": claims[id].slow,
            "sources": [source.cite for source in claims[id].sources],
            "errata": [erratum.id for erratum in claims[id].errata],
        }
        for id in ids
    ]
    print(json_module.dumps({"claims": rows}))
    return 0


def _figure(ids: "list[str]", path: Path, seed: int, json: bool) -> int:
    if len(ids) != 1:
        raise InputError(f"--figure draws one claim and {len(ids)} are named: give one id.")
    from glassformer.lens.figure import format_of
    from glassformer.theory.claims.run import draw

    format_of(path)
    drawn = draw(ids[0], seed)
    drawn.save(path)
    print(json_module.dumps({"id": ids[0], "written": str(path)}) if json else fitted(f"{path}: {drawn.title}"))
    return 0


def _run(ids: "list[str]", plan: "Plan", workers: int, rows: Any, json: bool, explain: bool) -> "list[Outcome]":
    from glassformer.theory.claims.run import run

    if json or explain:
        return [*run(ids, plan, workers=workers)]
    from glassformer.theory.claims import show

    out = show.console()
    for row in rows:
        show.print_line(out, show.source_line(row))
    outcomes = []
    with show.Board(ids, plan, out).shown() as board:
        for outcome in run(ids, plan, workers=workers):
            board.add(outcome)
            outcomes.append(outcome)
    return outcomes


def _report(outcomes: "list[Outcome]", plan: "Plan", rows: Any, report: Path | None, json: bool, explain: bool) -> None:
    from glassformer.theory.claims import run, show
    from glassformer.theory.claims.explain import WIDTH
    from glassformer.theory.claims.explain import explain as in_full

    if json:
        sources = [{"cite": row.cite, "says": row.says, "verdict": str(row.verdict), "note": row.note} for row in rows]
        facts: dict[str, Any] = {"sources": sources} if rows else {}
        if explain:
            facts["explained"] = {o.claim.id: in_full(o) for o in outcomes}
        print(
            json_module.dumps({**run.summary(outcomes, plan), **facts, **({"report": str(report)} if report else {})})
        )
        return
    if explain:
        width = min(WIDTH, terminal_width() or WIDTH)
        print("\n\n\n".join(in_full(outcome, width) for outcome in outcomes))
    elif outcomes:
        print(fitted(show.closing(outcomes, plan)))
    if report is not None:
        print(f"{report}: {plural(len(outcomes), 'claim')} on one page")


def exercise(
    id: Annotated[tyro.conf.Positional[str | None], option(HELP["exercise"], "ID")] = None,
    stub: Annotated[Path | None, option(HELP["stub"], "FILE")] = None,
    grade: Annotated[Path | None, option(HELP["grade"], "FILE")] = None,
    solution: Annotated[bool, option(HELP["solution"])] = False,
    seed: Annotated[int, option(HELP["draw"])] = 0,
    json: Json = False,
) -> int:
    """Show, start or grade an exercise. Exit code 0: correct, 1: incorrect, 2: could not be graded."""
    from glassformer.theory import exercises

    if id is None:
        if stub is not None or grade is not None or solution:
            raise InputError("which exercise? Name one: `glass exercise` lists them.")
        return _exercises(json)
    chosen = exercises.find(id)
    _consistent(stub=stub, grade=grade, solution=solution)
    check_seed(seed)
    if grade is not None:
        result = exercises.grade(chosen, grade, seed=seed)
        print(json_module.dumps(result.to_dict()) if json else fitted(result.text()))
        return result.exit_code
    if stub is not None:
        return _write_stub(chosen, stub, json)
    if solution:
        print(json_module.dumps({"id": chosen.id, "solution": chosen.solution}) if json else chosen.solution.rstrip())
        return 0
    return _show(chosen, json)


def _show(chosen: "Exercise", json: bool) -> int:
    facts = {"id": chosen.id, "title": chosen.title, "problem": chosen.problem, "stub": chosen.stub}
    if json:
        more = {"function": chosen.function, "claims": chosen.claims, "sources": chosen.sources}
        print(json_module.dumps({**facts, **more, "seconds": chosen.seconds}))
        return 0
    print(f"{chosen.title}\n\n{fitted(chosen.problem)}\n")
    print(f"--- a file to start from (--stub FILE writes it) ---\n{chosen.stub}---")
    print(f"then: glass exercise {chosen.id} --grade FILE")
    return 0


def _exercises(json: bool) -> int:
    from glassformer.theory.exercises import ALL

    if json:
        rows = [{"id": e.id, "title": e.title, "function": e.function, "claims": e.claims} for e in ALL.values()]
        print(json_module.dumps({"exercises": rows}))
        return 0
    for one in ALL.values():
        print(f"{one.id:<25}{one.title}")
    print("\nglass exercise ID shows one, --stub FILE starts a file, --grade FILE grades it.")
    return 0


def _write_stub(chosen: "Exercise", path: Path, json: bool) -> int:
    from glassformer.files import write_atomically

    if os.path.lexists(path):  # a solution may be in it, so there is no --force either
        raise InputError(f"{path} exists already and is left as it is: give another name.")
    check_writable("--stub", path)
    write_atomically(path, chosen.stub.encode())
    print(json_module.dumps({"id": chosen.id, "written": str(path)}) if json else f"{path}: write {chosen.function}()")
    return 0
