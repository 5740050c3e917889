"""`glass eval`: how well a model predicts a text, or answers questions."""

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glassformer.cli.common import Adapter, InputError, Json, fitted, option, refuse_unused
from glassformer.config import choices

if TYPE_CHECKING:
    from glassformer.evaluation import Difference, Evaluation
    from glassformer.evaluation.questions import Answers, Metric
    from glassformer.evaluation.rows import Row

HELP = {
    "model": "Model folder, GGUF file, bundled model such as bard, or a hub name such as gpt2.",
    "text": "UTF-8 text files, each a document, or one JSONL file: documents (text), questions (context, choices, "
    "answer) or cloze rows (context, target). Required without --tasks.",
    "against": "A second model, given like MODEL, or the folder of an adapter: also print the paired difference of "
    "both on the same text. Default: none.",
    "stride": "Tokens by which the window moves. Smaller values give every token more context and take longer. "
    "Default: half the context.",
    "context": "Tokens per window. Default: the longest context of the model, 512 if it has no limit.",
    "prefix": "Score the first token of a document after the beginning-of-text token of the model, if it has one. "
    "Without, the first token is not scored.",
    "tasks": "Run a local task file of lm-evaluation-harness (.yaml), or all of a folder, in place of TEXT. Needs the "
    "extra `eval`. Default: none.",
    "precision": "Dtype of the weights. `auto` is float32 on a CPU and the stored dtype on a GPU.",
}

FEWEST = 30
"""Fewest targets of which a mean by context is printed; --json has all."""
LABELS = {
    "acc": "accuracy",
    "acc_norm": "accuracy, per character",
    "acc_bytes": "accuracy, per byte",
    "nats": "nats per target",
}


def eval(
    model: Annotated[tyro.conf.Positional[str], option(HELP["model"], "MODEL")],
    text: Annotated[tyro.conf.Positional[tuple[str, ...]], option(HELP["text"], "TEXT|JSONL")] = (),
    adapter: Adapter = None,
    against: Annotated[str | None, option(HELP["against"], "DIR|NAME")] = None,
    stride: Annotated[int | None, option(HELP["stride"], "INT")] = None,
    context: Annotated[int | None, option(HELP["context"], "INT")] = None,
    prefix: Annotated[bool, option(HELP["prefix"])] = True,
    tasks: Annotated[str | None, option(HELP["tasks"], "FILE|DIR")] = None,
    precision: Annotated[Literal["auto", "float32", "bfloat16", "float16"], option(HELP["precision"])] = "auto",
    device: Annotated[choices.Device, option("Where to compute. `auto` is the GPU if there is one.")] = "auto",
    json: Json = False,
) -> int:
    """Measure how well a model predicts a text: bits per byte, nats per token and perplexity, with standard errors.

    On questions it prints the accuracy of the choices by log-likelihood.
    """
    windows = {"stride": stride, "context": context}
    for name, value in windows.items():
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be a whole number of at least 1.")
    if tasks is not None:
        if text:
            raise InputError(f"{text[0]} and --tasks {tasks} are two evaluations: leave one of them out.")
        given = {"against": against, **windows, "prefix": prefix}
        refuse_unused("glass eval with --tasks", given, (), {"prefix": True})
        return _run_tasks(model, tasks, precision, device, adapter, json)
    if not text:
        raise InputError(f"there is nothing to evaluate {model} on: give a text file or a JSONL file.")
    kind, rows = _read(text)
    if kind != "documents":
        refuse_unused(f"glass eval with {kind}", windows | {"prefix": prefix}, (), {"prefix": True})
    from glassformer.evaluation import open_model
    from glassformer.weights import resolve

    sources = [(model, adapter)] if against is None else [(model, adapter), (against, None)]
    for place in [model, adapter, against]:
        if place is not None:
            resolve(place)  # a wrong name is refused before the first model runs
    names, results = [_named(*source) for source in sources], []
    for name, (source, merged) in zip(names, sources, strict=True):  # so that only one model is in memory
        loaded, tokenizer = open_model(source, precision, device, merged)
        if tokenizer is None:
            raise InputError(f"{name} has no tokenizer.json, so it cannot read a text: put it into the folder.")
        results.append(_evaluate(kind, loaded, rows, tokenizer, windows | {"prefix": prefix}))
        del loaded
    _print(names, results, _difference(results), json)
    return 0


def _named(model: str, adapter: str | None) -> str:
    """Return what a model is called in the output."""
    return model if adapter is None else f"{model} with {adapter}"


def _run_tasks(model: str, tasks: str, precision: str, device: str, adapter: str | None, json: bool) -> int:
    from glassformer.evaluation import open_model
    from glassformer.evaluation.tasks import check_tasks, run_tasks

    check_tasks(tasks)  # before the model is loaded
    found = run_tasks(*open_model(model, precision, device, adapter), tasks)
    model = _named(model, adapter)
    if json:
        print(json_module.dumps({"model": model, **found.to_dict()}))
        return 0
    lines = [f"{model}, lm_eval {found.version}"]
    for metric in found.metrics:
        name = metric.metric if metric.filter == "none" else f"{metric.metric} ({metric.filter})"
        shown = _with_error(metric.value, metric.standard_error) if isinstance(metric.value, float) else metric.value
        lines.append(f"  {metric.task:<20} {name:<16} {shown} ({found.samples[metric.task]:,} documents)")
    print(fitted("\n".join(lines)))
    return 0


def _read(files: tuple[str, ...]) -> tuple[str, "list[str] | list[Row]"]:
    """Return what the files contain: `documents`, `questions` or `clozes`, and the texts or rows."""
    from glassformer.evaluation.rows import read_rows, read_text

    tables = [file for file in files if file.lower().endswith(".jsonl")]
    if not tables:
        return "documents", [read_text(file) for file in files]
    if len(files) > 1:
        raise InputError(f"{tables[0]} is a JSONL file and must be the only file: evaluate one after the other.")
    return read_rows(files[0])


def _evaluate(kind: str, model: Any, given: Any, tokenizer: Any, options: dict[str, Any]) -> "Evaluation | Answers":
    from glassformer.evaluation import evaluate
    from glassformer.evaluation.questions import answer

    if kind == "documents":
        return evaluate(model, given, tokenizer, **options)
    return answer(model, given, tokenizer)


def _difference(results: list[Any]) -> "Difference | dict[str, Metric] | None":
    from glassformer.evaluation import Evaluation, paired_difference
    from glassformer.evaluation.questions import paired_answers

    if len(results) < 2:
        return None
    first, second = results
    return paired_difference(first, second) if isinstance(first, Evaluation) else paired_answers(first, second)


def _print(names: list[str], results: list[Any], difference: Any, json: bool) -> None:
    from glassformer.evaluation import Evaluation

    if json:
        found = {"model": names[0], **results[0].to_dict()}
        if difference is not None:
            delta = difference
            plain = {name: one.to_dict() for name, one in delta.items()} if isinstance(delta, dict) else delta.to_dict()
            found |= {"against": {"model": names[1], **results[1].to_dict()}, "difference": plain}
        print(json_module.dumps(found))
        return
    for name, result in zip(names, results, strict=True):
        lines = _text_lines(result) if isinstance(result, Evaluation) else _answer_lines(result)
        print(fitted("\n".join([name, *lines])))
    if difference is not None:
        print(fitted("\n".join(_difference_lines(names, difference))))


def _with_error(value: float, error: float | None, digits: int = 4) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def _between(interval: tuple[float, float] | None, digits: int = 4) -> str:
    return "" if interval is None else f" (95 % interval {interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def _text_lines(found: "Evaluation") -> list[str]:
    lines, spread = [], found.spread
    if found.bits_per_byte is not None and found.bits_spread is not None:
        bits = found.bits_spread
        shown = _with_error(found.bits_per_byte, bits.standard_error) + _between(bits.interval(found.bits_per_byte))
        lines.append(f"  bits per byte   {shown}")
    lines += [
        f"  nats per token  {_with_error(found.nats_per_token, found.standard_error)}"
        f"{_between(spread.interval(found.nats_per_token))}",
        f"  perplexity      {found.perplexity:.4f} per token",
        f"  scored          {found.tokens:,} tokens, {found.n_bytes:,} bytes; {found.first_token()}",
        f"  windows         {found.windows:,} of up to {found.context:,} tokens, stride {found.stride:,}",
        f"  error           {spread.text()}",
        "  nats by tokens  " + _by_context(found),
    ]
    return lines + [f"  note            {note}" for note in found.notes]


def _by_context(found: "Evaluation") -> str:
    """Return the loss by the number of tokens before the target, where enough targets have so many."""
    parts = [part for part in found.by_context if part.tokens >= FEWEST]
    spans = [str(part.fewest) if part.fewest == part.most else f"{part.fewest}-{part.most}" for part in parts]
    return ", ".join(f"{span}: {part.nats_per_token:.3f}" for span, part in zip(spans, parts, strict=True))


def _answer_lines(found: "Answers") -> list[str]:
    width = max(map(len, LABELS.values()))
    lines = []
    for name, metric in found.metrics.items():
        shown = _with_error(metric.value, metric.spread.standard_error) + _between(metric.spread.interval(metric.value))
        lines.append(f"  {LABELS[name]:<{width}}  {shown}")
    if found.perplexity is not None:
        lines.append(f"  {'perplexity':<{width}}  {found.perplexity:.4f} per target")
    if found.chance is not None:
        lines.append(f"  {'chance':<{width}}  {found.chance:.4f}")
    metric = found.metrics["acc"]
    return [*lines, f"  {'scored':<{width}}  {found.count:,} {found.kind}; {metric.spread.text()}"]


def _difference_lines(names: list[str], difference: Any) -> list[str]:
    lines = [f"{names[0]} minus {names[1]}"]
    if isinstance(difference, dict):
        width = max(map(len, LABELS.values()))
        for name, metric in difference.items():
            spread = metric.spread
            shown = _with_error(metric.value, spread.standard_error) + _between(spread.interval(metric.value))
            lines.append(f"  {LABELS[name]:<{width}}  {shown}")
        return lines
    shown = _with_error(difference.value, difference.standard_error) + _between(difference.interval)
    lines.append(f"  {difference.measure:<15} {shown}")
    if difference.standard_error is not None:
        better = {"first": f"{names[0]} is better", "second": f"{names[1]} is better", None: "not decided"}
        unpaired = (
            "" if difference.unpaired_error is None else f"; unpaired it would be {difference.unpaired_error:.4f}"
        )
        lines.append(f"  verdict         {better[difference.better]} (paired {difference.spread.text()}{unpaired})")
    return lines
