"""Run local task files of lm-evaluation-harness (lm_eval) on a model. Needs the extra `eval`."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.errors import install, missing
from glassformer.evaluation.score import EvaluationError
from glassformer.model import Model

BOOTSTRAP = 1000
"""Resamplings for the standard error of metrics that are not means."""


@dataclass(frozen=True)
class TaskMetric:
    """One number of a task."""

    task: str
    metric: str
    filter: str
    """Name of the filter of the answers; `none` if the task has none."""
    value: Any
    standard_error: float | None
    """As lm_eval estimates it; None where it does not."""


@dataclass(frozen=True, repr=False)
class TaskResults:
    """What lm_eval measured."""

    metrics: tuple[TaskMetric, ...]
    samples: dict[str, int]
    """Number of documents of each task."""
    version: str
    """Version of lm_eval."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "tasks": [vars(metric) for metric in self.metrics],
            "samples": self.samples,
            "lm_eval": self.version,
        }

    def __repr__(self) -> str:
        return f"<TaskResults: {len(self.metrics)} metrics of {', '.join(self.samples)}>"


def check_tasks(source: str | Path) -> Path:
    """Return the path of a task file or of a folder of them. Refuse what is missing, before a model is loaded."""
    if missing("eval"):
        raise EvaluationError(f"tasks need lm_eval, which is not installed: {install('eval')}.")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        return path
    if path.is_dir():
        if any(path.rglob("*.yaml")):
            return path
        raise EvaluationError(f"the folder {source} has no task files: they are named *.yaml.")
    if path.exists():
        raise EvaluationError(f"{source} is not a task file: give a .yaml file of lm_eval, or a folder of them.")
    raise EvaluationError(
        f"there is no file {source}: give a local task file; for tasks that lm_eval downloads, see docs/evaluate.md."
    )


def run_tasks(model: Model, tokenizer: Any, source: str | Path) -> TaskResults:
    """Run a task file of lm_eval, or all task files of a folder. Nothing is downloaded.

    As in lm_eval, relative `data_files` of a task are relative to the working directory.
    """
    path = check_tasks(source)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when these libraries are imported
        os.environ.setdefault(name, "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every default of a task file
    import lm_eval
    from lm_eval.tasks import TaskManager

    from glassformer.evaluation.harness import GlassformerLM

    adapter = GlassformerLM(model, tokenizer)
    try:
        manager = TaskManager(include_path=str(path) if path.is_dir() else None, include_defaults=False)
        names = list(manager.all_tasks) if path.is_dir() else [str(path)]
        loaded = manager.load(names)["tasks"]  # also reads the data
    except Exception as error:  # any exception of lm_eval, of datasets or of the YAML reader
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise EvaluationError(f"lm_eval cannot load the tasks of {source}: {reason}") from None
    found = lm_eval.simple_evaluate(
        adapter, tasks=list(loaded.values()), task_manager=manager, bootstrap_iters=BOOTSTRAP, log_samples=False
    )
    return _results(found, lm_eval.__version__)


def _results(found: Any, version: str) -> TaskResults:
    metrics = []
    for task, values in found["results"].items():
        for key, value in values.items():
            name, _, chosen = key.partition(",")
            if not chosen or name.endswith("_stderr"):
                continue
            error = values.get(f"{name}_stderr,{chosen}")
            error = float(error) if isinstance(error, int | float) else None
            metrics.append(TaskMetric(task, name, chosen, value, error))
    samples = {task: int(count["effective"]) for task, count in found["n-samples"].items()}
    return TaskResults(tuple(metrics), samples, version)
