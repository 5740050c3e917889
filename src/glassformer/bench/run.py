"""From a plan to a result: choose contenders, write the model, convert it, measure in turns, judge."""

import signal
from collections.abc import Callable, Sequence

from glassformer.bench import judge, race, startup, training
from glassformer.bench import subject as subjects
from glassformer.bench.contenders import NAMED, Contender, choose, kinds_of
from glassformer.bench.machine import facts
from glassformer.bench.peers.base import Order
from glassformer.bench.plan import PRECISIONS, BenchError, Plan
from glassformer.bench.processes import Died, Worker, ending_workers
from glassformer.bench.result import Bandwidth, Group, Result, Row, compare_bandwidths
from glassformer.finding import Finding

Say = Callable[[str], None]
REFERENCE = "glassformer-torch"
"""The contender whose float32 ids all others must match: our torch engine, which is tested against `reference/`."""


def run(plan: Plan, say: Say = lambda line: None) -> Result:
    """Measure. `say` is called with progress messages."""
    if not hasattr(signal, "SIGSTOP"):
        raise BenchError("this system has no SIGSTOP, which stops the contenders that wait: use Linux or macOS.")
    chosen, missing = choose(plan)
    result = Result(plan.to_dict(), facts(), missing, [])
    plain: list[Row] = []
    if plan.task == "train":
        result.groups, result.findings = _train(plan, chosen, say)
    else:
        result.groups, result.findings, plain = _generate(plan, chosen, missing, say)
    compare_bandwidths(result.groups)
    targets = judge.targets(result.plan, result.groups, plain)
    if plain:
        result.groups.append(Group("", "seconds", "without a model", rows=plain, fewer_is_better=True, compared=False))
    result.findings = [*judge.failed_contenders(result.groups), *result.findings, *targets]
    return result


def _generate(
    plan: Plan, chosen: Sequence[Contender], missing: dict[str, str], say: Say
) -> tuple[list[Group], list[Finding], list[Row]]:
    """Measure decoding, prefill, encoding or start-up: one group per precision."""
    subject = subjects.subject(plan)
    kinds = kinds_of(subject.config)
    refused = [contender for contender in chosen if not kinds & set(contender.only)]
    missing |= {c.name: f"it is measured here with models of kind {' and '.join(c.only)}" for c in refused}
    chosen = [contender for contender in chosen if contender not in refused]
    draw = subject.texts if plan.task == "encode" else subject.prompts
    prompts = draw(plan.sequences, plan.length_prompt, plan.seed)

    def order(contender: Contender, precision: str, task: str) -> Order:
        return Order(
            contender.name, contender.module, task, precision, str(subject.root), plan.n_threads, prompts,
            plan.length_new, plan.checkout(contender.name), {"cpu_time": True} if plan.cpu_time else {},
        )  # fmt: skip

    say("computing the reference with the torch engine")
    task = "encode" if plan.task == "encode" else "reference"
    reference = _reference(order(NAMED[REFERENCE], "float32", task))
    comparable = {contender.name for contender in chosen if contender.same_model}
    groups: list[Group] = []
    findings: list[Finding] = []
    plain = startup.plain_rows() if plan.task == "startup" else []
    for precision in dict.fromkeys(plan.precisions or PRECISIONS):
        able = [contender for contender in chosen if precision in contender.precisions]
        rows = {contender.name: Row(contender.name, precision, contender.ours) for contender in able}
        group = Group(precision, _unit(plan), rows=list(rows.values()), batch=plan.sequences)
        group.fewer_is_better = plan.task == "startup"
        converting = [(order(c, precision, "prepare"), rows[c.name]) for c in able if c.converts]
        race.prepare(converting, say)
        racing = [(order(c, precision, plan.task), rows[c.name]) for c in able if not rows[c.name].died]
        if plan.task == "startup":
            startup.measure(racing, plain if not groups else [], subject.root / "hf", plan.rounds, say)
        elif plan.task == "decode":
            group.weight_bytes = subject.weight_bytes(precision)
            group.bandwidth = Bandwidth("memory", precision, ours=False)
            reading = Order("memory", "bandwidth", "bandwidth", precision, "", plan.n_threads)
            race.race([*racing, (reading, group.bandwidth)], plan.rounds, say)
        else:
            race.race(racing, plan.rounds, say)
        compare = judge.compare_states if plan.task == "encode" else judge.compare_ids
        findings += compare(group, reference, comparable)
        groups.append(group)
    return groups, findings, plain


def _unit(plan: Plan) -> str:
    return {"startup": "seconds to the first token", "encode": "texts/s"}.get(plan.task, "tokens/s")


def _reference(order: Order) -> list[list[int]]:
    """Return the greedy ids (or hidden states) of the torch engine, computed in a separate process."""
    with ending_workers() as workers:
        workers.append(Worker(order))
        try:
            workers[0].load()
            found: list[list[int]] = workers[0].turn(0)["ids"]
        except Died as death:
            raise BenchError(f"the torch engine, which the others are compared with, failed: {death}.") from None
    return found


def _train(plan: Plan, chosen: Sequence[Contender], say: Say) -> tuple[list[Group], list[Finding]]:
    """Measure training: one group per setting and precision."""
    groups, findings = [], []
    wanted = [p for p in ("float32", "bfloat16") if p in (plan.precisions or PRECISIONS)]
    if not wanted:
        raise BenchError("training supports float32 and bfloat16: give one of them as --precision.")
    folder = subjects.model_folder(plan.keep)
    for setting in training.settings():
        label = f"train-{setting.config.n_layers}x{setting.config.d_model}"
        start = subjects.write(folder, setting.config, label, training.SEED, perturbed=False)
        for precision in wanted:
            say(f"{setting.name}, {precision}")
            group = Group(precision, "steps/s", setting.name)
            orders = []
            for contender in chosen:
                row = Row(contender.name, precision, contender.ours)
                group.rows.append(row)
                orders.append((
                    Order(
                        contender.name, contender.module, "train", precision, str(start.root), plan.n_threads, (),
                        plan.length_new, plan.checkout(contender.name), setting.facts(),
                    ),
                    row,
                ))  # fmt: skip
            race.race(orders, plan.rounds, say)
            findings += judge.compare_losses(group)
            groups.append(group)
    return groups, findings
