"""From a plan to a result: choose contenders, write the model, convert it, measure in turns, judge."""

import signal
from collections.abc import Callable, Sequence

from glassformer.bench import judge, race, startup, training
from glassformer.bench import plan as plans
from glassformer.bench import subject as subjects
from glassformer.bench.contenders import FIRST_STEPS, NAMED, Contender, choose, kinds_of
from glassformer.bench.machine import facts
from glassformer.bench.peers.base import Order
from glassformer.bench.plan import BenchError, Plan
from glassformer.bench.processes import Died, Worker, ending_workers
from glassformer.bench.result import Bandwidth, Group, Result, Row, compare_bandwidths
from glassformer.config import ModelConfig
from glassformer.finding import Finding

Say = Callable[[str], None]
REFERENCE = "glassformer-torch"
"""The contender whose float32 ids all others must match: our torch engine, which is tested against `reference/`."""


def run(plan: Plan, say: Say = lambda line: None) -> Result:
    """Measure. `say` is called with progress messages."""
    if not hasattr(signal, "SIGSTOP"):
        raise BenchError("this system has no SIGSTOP, which stops the contenders that wait: use Linux or macOS.")
    require_device(plan.device)
    chosen, missing = choose(plan)
    result = Result(plan.to_dict(), facts(plan.device), missing, [])
    plain: list[Row] = []
    if plan.task == "train" and not plan.model:
        result.groups, result.findings = _train_settings(plan, chosen, say)
    elif plan.task == "train":
        result.groups, result.findings = _train_model(plan, chosen, missing, say)
    elif plan.training:
        result.groups, plain = _start_training(plan, chosen, missing, say)
    else:
        result.groups, result.findings, plain = _generate(plan, chosen, missing, say)
    compare_bandwidths(result.groups)
    targets = judge.targets(result.plan, result.groups, plain)
    if plain:
        result.groups.append(Group("", "seconds", "without a model", rows=plain, fewer_is_better=True, compared=False))
    result.findings = [*judge.failed_contenders(result.groups), *result.findings, *targets]
    return result


def require_device(device: str) -> None:
    """Raise BenchError if this machine has no such device."""
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise BenchError("--device cuda: torch finds no CUDA device: use a machine with a GPU, or leave --device out.")


def _fitting(chosen: Sequence[Contender], config: ModelConfig, missing: dict[str, str]) -> list[Contender]:
    """Return the contenders that have such a model; the others are added to the missing ones."""
    kinds = kinds_of(config)
    refused = [contender for contender in chosen if not kinds & set(contender.only)]
    missing |= {c.name: f"it is measured here with models of kind {' and '.join(c.only)}" for c in refused}
    return [contender for contender in chosen if contender not in refused]


def _generate(
    plan: Plan, chosen: Sequence[Contender], missing: dict[str, str], say: Say
) -> tuple[list[Group], list[Finding], list[Row]]:
    """Measure decoding, prefill, encoding or start-up: one group per precision."""
    subject = subjects.subject(plan)
    chosen = _fitting(chosen, subject.config, missing)
    draw = subject.texts if plan.task == "encode" else subject.prompts
    prompts = draw(plan.sequences, plan.length_prompt, plan.seed)

    def order(contender: Contender, precision: str, task: str) -> Order:
        return Order(
            contender.name, contender.module, task, precision, str(subject.root), plan.n_threads, prompts,
            plan.length_new, plan.checkout(contender.name),
            {"cpu_time": plan.cpu_time, "sampled": plan.sampled, "beams": plan.beams},
            plan.device,
        )  # fmt: skip

    say("computing the reference with the torch engine")
    task = "encode" if plan.task == "encode" else "reference"
    reference = _reference(order(NAMED[REFERENCE], "float32", task))
    comparable = {contender.name for contender in chosen if contender.same_model}
    groups: list[Group] = []
    findings: list[Finding] = []
    plain = startup.plain_rows() if plan.task == "startup" else []
    for precision in plan.chosen_precisions:
        able = [contender for contender in chosen if precision in contender.precisions]
        if not able:  # int8 and int4 in a copy without kernels
            continue
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
            reading = Order("memory", "bandwidth", "bandwidth", precision, "", plan.n_threads, device=plan.device)
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


def _train_settings(plan: Plan, chosen: Sequence[Contender], say: Say) -> tuple[list[Group], list[Finding]]:
    """Measure training in nanoGPT's two CPU settings: one group per setting and precision."""
    groups, findings = [], []
    folder = subjects.model_folder(plan.keep)
    for setting in training.settings():
        label = f"train-{setting.config.n_layers}x{setting.config.d_model}"
        start = subjects.write(folder, setting.config, label, training.SEED, perturbed=False)
        for precision in plan.chosen_precisions:
            say(f"{setting.name}, {precision}")
            group = Group(precision, "steps/s", setting.name)
            rows = [(contender, Row(contender.name, precision, contender.ours)) for contender in chosen]
            group.rows = [row for _, row in rows]
            race.race([(_step_order(plan, c, setting, start, row), row) for c, row in rows], plan.rounds, say)
            findings += judge.compare_losses(group)
            groups.append(group)
    return groups, findings


def _step_order(
    plan: Plan, contender: Contender, setting: training.Setting, start: subjects.Subject, row: Row, task: str = "train"
) -> Order:
    return Order(
        contender.name, contender.module, task, row.precision, str(start.root), plan.n_threads, (),
        plans.FIRST_STEPS if task == FIRST_STEPS else plan.length_new, plan.checkout(contender.name), setting.facts(),
        plan.device,
    )  # fmt: skip


def _trained_rows(plan: Plan, chosen: Sequence[Contender]) -> dict[str, list[tuple[Contender, Row]]]:
    """Return the contenders of each group. Ours in float8 is compared with the others in bfloat16, as they have no 8
    bits."""
    names = dict.fromkeys("bfloat16" if precision == "float8" else precision for precision in plan.chosen_precisions)
    made: dict[str, list[tuple[Contender, Row]]] = {name: [] for name in names}
    for precision in plan.chosen_precisions:
        for contender in chosen:
            if contender.ours:
                name = f"{contender.name} {precision}" if precision == "float8" else contender.name
                made["bfloat16" if precision == "float8" else precision].append(
                    (contender, Row(name, precision, ours=True))
                )
    for precision, rows in made.items():
        rows += [(c, Row(c.name, precision, ours=False)) for c in chosen if not c.ours and precision in c.precisions]
    return made


def _train_model(
    plan: Plan, chosen: Sequence[Contender], missing: dict[str, str], say: Say
) -> tuple[list[Group], list[Finding]]:
    """Measure training of one model: one group per precision, in tokens per second."""
    start = subjects.subject(plan)
    setting = training.setting_of(plan, start)
    groups, findings = [], []
    for precision, rows in _trained_rows(plan, _fitting(chosen, start.config, missing)).items():
        group = Group(precision, "tokens/s", setting.name, [row for _, row in rows], batch=plan.sequences)
        race.race([(_step_order(plan, c, setting, start, row), row) for c, row in rows], plan.rounds, say)
        findings += judge.compare_last_losses(group)
        groups.append(group)
    return groups, findings


def _start_training(
    plan: Plan, chosen: Sequence[Contender], missing: dict[str, str], say: Say
) -> tuple[list[Group], list[Row]]:
    """Measure start-up of training: per precision one group for a cold and one for a warm start."""
    start = subjects.subject(plan)
    setting = training.setting_of(plan, start)
    plain = startup.plain_rows(training=True)
    groups: list[Group] = []
    for precision, rows in _trained_rows(plan, _fitting(chosen, start.config, missing)).items():
        orders = []
        pair = {
            kind: Group(precision, f"seconds to training step {plans.FIRST_STEPS}", f"{setting.name}, {kind}")
            for kind in (startup.COLD, startup.WARM)
        }
        for contender, row in rows:
            both = {kind: Row(row.name, row.precision, row.ours) for kind in pair}
            orders.append((_step_order(plan, contender, setting, start, row, FIRST_STEPS), both))
            for kind, group in pair.items():
                group.rows.append(both[kind])
        given = orders[0][0]
        subjects.write_words(given.text, given.words, setting.used, start.config.vocab_size, plan.seed)
        startup.measure_training(orders, plain if not groups else [], plan.rounds, say)
        for group in pair.values():
            group.fewer_is_better = True
            groups.append(group)
    return groups, plain
