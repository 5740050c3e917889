"""Local task files of lm_eval, by our adapter and by lm_eval's own model."""

import pytest

import glassformer as gf
from glassformer.evaluation import tasks as tasks_module
from glassformer.evaluation.load import open_model
from glassformer.evaluation.questions import answer
from glassformer.evaluation.rows import Row
from glassformer.evaluation.score import EvaluationError
from glassformer.evaluation.tasks import check_tasks, run_tasks
from tests import folders
from tests.evaluation import peers

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """lm_eval, with the cache of `datasets` in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        peers.run_offline(patch, tmp_path_factory.mktemp("cache"))
        yield


def test_all_metrics_equal_those_of_hf(offline, tmp_path):
    pytest.importorskip("transformers")
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder, tasks = peers.write(tmp_path / "gpt2", "gpt2"), peers.task_files(tmp_path)
    model, tokenizer = open_model(str(folder))
    found = run_tasks(model, tokenizer, tasks)
    assert found.samples == {"choice": 12, "rolling": 12, "generate": 12}
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4),
        tasks=["choice", "rolling", "generate"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=10,
        log_samples=False,
    )["results"]
    held = {(one.task, one.metric): one for one in found.metrics}
    names = {("choice", "acc"), ("choice", "acc_norm"), ("choice", "acc_bytes"), ("generate", "exact_match")}
    assert held.keys() == names | {("rolling", "bits_per_byte"), ("rolling", "byte_perplexity")}
    for (task, metric), one in held.items():
        assert one.value == pytest.approx(theirs[task][f"{metric},none"], rel=1e-6), (task, metric)
    assert held["choice", "acc"].standard_error == pytest.approx(theirs["choice"]["acc_stderr,none"])


def test_our_own_questions_have_the_accuracy_of_the_harness(offline, tmp_path):
    import json

    folder, tasks = folders.write(tmp_path / "model"), peers.task_files(tmp_path)
    model, tokenizer = open_model(str(folder))
    theirs = {one.metric: one for one in run_tasks(model, tokenizer, tasks / "choice.yaml").metrics}
    lines = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [Row(r["question"], tuple(r["choices"]), r["gold"], i) for i, r in enumerate(map(json.loads, lines), 1)]
    ours = answer(model, rows, tokenizer)
    for name in ("acc", "acc_norm", "acc_bytes"):
        assert ours.metrics[name].value == pytest.approx(theirs[name].value)
        assert ours.metrics[name].spread.standard_error == pytest.approx(theirs[name].standard_error)


def test_what_cannot_be_run_is_one_sentence(offline, tmp_path):
    model, tokenizer = open_model(str(folders.write(tmp_path / "model")))
    (tmp_path / "bad.yaml").write_text("task: [")
    (tmp_path / "missing.yaml").write_text(
        "task: missing\noutput_type: loglikelihood\ndataset_path: json\ndataset_kwargs:\n  data_files: nowhere.jsonl\n"
        'test_split: train\ndoc_to_text: ""\ndoc_to_target: ""\n'
    )
    (tmp_path / "empty").mkdir()
    for name, words in {
        "bad.yaml": "lm_eval cannot load the tasks",
        "missing.yaml": "nowhere.jsonl",
        "nothing.yaml": "there is no file",
        "empty": "has no task files",
        "model/model.toml": "is not a task file",
    }.items():
        with pytest.raises(gf.GlassformerError, match=words) as raised:
            run_tasks(model, tokenizer, tmp_path / name)
        assert "\n" not in str(raised.value)


def test_without_lm_eval_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks_module, "missing", lambda extra: ["lm_eval"])
    with pytest.raises(
        EvaluationError, match=r"tasks need lm_eval, which is not installed: run pip install .*\[eval\]"
    ):
        check_tasks(tmp_path)
