"""The adapter for lm_eval gives what lm_eval's own `hf` model gives for the same folder."""

import random
import subprocess
import sys

import pytest
import torch

import glassformer as gf
from glassformer import config as c
from glassformer.evaluation.score import EvaluationError
from tests import folders
from tests.evaluation import peers
from tests.evaluation.test_cross_entropy import CONFIG

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=peers.FAMILIES)
def pair(request, tmp_path_factory):
    """lm_eval's model and ours, of the same folder."""
    peers.require_harness()
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from glassformer.evaluation.harness import GlassformerLM

    folder = peers.write(tmp_path_factory.mktemp("peer") / request.param, request.param)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)
    return theirs, GlassformerLM(str(folder), device="cpu:0")


def requests(kind: str, arguments: list) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


def ask(pair, kind: str, arguments: list) -> tuple[list, list]:
    return tuple(getattr(model, kind)(requests(kind, arguments), disable_tqdm=True) for model in pair)


def test_log_likelihoods_equal_those_of_hf(pair):
    draw = random.Random(0)
    given = [(peers.text(draw, draw.randint(1, 40)), " " + peers.text(draw, draw.randint(1, 8))) for _ in range(40)]
    given += [("", "the cat"), ("the cat ", "sat"), ("<s>the cat", " sat")]
    theirs, ours = ask(pair, "loglikelihood", given)
    # lm_eval adds up in float32, whose resolution is 8e-6 at 100 nats
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-5, rel=2e-7)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert min(value for value, _ in ours) < -20


def test_a_greedy_continuation_is_recognised(pair):
    _, ours = pair
    context = ours.tok_encode("the cat")
    best = int(ours.model(torch.tensor([context]))[0, -1].argmax())
    given = [(None, context, [best]), (None, context, [(best + 1) % 300])]
    found = [model._loglikelihood_tokens(given, disable_tqdm=True) for model in pair]
    assert [[greedy for _, greedy in one] for one in found] == [[True, False], [True, False]]


def test_rolling_log_likelihoods_equal_those_of_hf(pair):
    draw = random.Random(1)
    texts = [(peers.text(draw, words),) for words in (200, 3, 1, 64)]
    theirs, ours = ask(pair, "loglikelihood_rolling", texts)
    assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-6 / 20)
    assert min(ours) < -1000


@pytest.mark.parametrize("pair", ["gpt2"], indirect=True)  # lm_eval would give Llama a second beginning of text
def test_evaluation_with_the_stride_of_the_context_is_the_rolling_log_likelihood(pair):
    theirs, ours = pair
    text = peers.text(random.Random(2), 200)
    found = gf.evaluate(ours.model, text, ours.encoder, stride=64)
    (expected,) = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert -found.nats.sum() == pytest.approx(expected, abs=1e-4)


def test_generations_equal_those_of_hf(pair):
    draw = random.Random(3)
    short, stopped = (
        {"until": ["\n", "cat"], "max_gen_toks": 20},
        {"until": "a", "max_gen_toks": 10, "do_sample": False},
    )
    given = [(peers.text(draw, words), short) for words in (5, 2, 9)] + [(peers.text(draw, 90), stopped)]
    given += [(peers.text(draw, 4), short)]
    theirs, ours = ask(pair, "generate_until", given)
    assert ours == theirs
    assert len(set(ours)) > 2


@pytest.fixture
def ours():
    peers.require_harness()
    from glassformer.evaluation.harness import GlassformerLM

    return lambda **changes: GlassformerLM(gf.build(c.replace(CONFIG, vocab_size=300, **changes)), folders.tokenizer())


def test_peft_names_an_adapter_as_in_hf(tmp_path):
    """Compared on merged weights: with `peft`, lm_eval's own model cuts rows of the vocabulary off that are padding."""
    peers.require_harness()
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    from glassformer.evaluation.harness import GlassformerLM

    folder = peers.write(tmp_path / "base", peers.FAMILIES[0])
    adapter = str(folders.write_adapter(folder, tmp_path / "adapter"))
    gf.save(gf.load(folder, adapter=adapter), tmp_path / "merged")
    theirs = HFLM(pretrained=str(tmp_path / "merged"), device="cpu", dtype="float32", batch_size=4)
    given = [("the cat", " sat on the mat"), ("a", " dog")]
    wanted, found = ask((theirs, GlassformerLM(str(folder), peft=adapter, device="cpu")), "loglikelihood", given)
    assert [a for a, _ in found] == pytest.approx([a for a, _ in wanted], abs=1e-4)
    plain = ask((GlassformerLM(str(folder), device="cpu"),), "loglikelihood", given)[0]
    assert abs(plain[0][0] - found[0][0]) > 0.1


def test_what_is_not_supported_is_one_sentence(ours):
    with pytest.raises(EvaluationError, match="'num_beams', which is not supported"):
        ours().generate_until(requests("generate_until", [("a", {"until": [], "max_gen_toks": 3, "num_beams": 2})]))
    with pytest.raises(EvaluationError, match="max_gen_toks=16 of the task leaves no room"):
        ours().generate_until(requests("generate_until", [("a", {"until": [], "max_gen_toks": 16})]))
    with pytest.raises(EvaluationError, match="no beginning-of-text or end-of-text token"):
        ours().loglikelihood_rolling(requests("loglikelihood_rolling", [("abc",)]))
    with pytest.raises(EvaluationError, match="no beginning-of-text or end-of-text token"):
        ours().loglikelihood(requests("loglikelihood", [("", "abc")]), disable_tqdm=True)


def test_sampling_follows_the_task(ours):
    given = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.9}
    arguments = requests("generate_until", [("the cat", given), ("the cat", given | {"temperature": 5.0})])
    first, second = ours(init_std=0.4).generate_until(arguments)
    assert first != second


def test_models_of_other_kinds_are_refused():
    peers.require_harness()
    from glassformer.evaluation.harness import GlassformerLM

    with pytest.raises(EvaluationError, match="EncoderLM does not predict"):
        GlassformerLM(gf.build(gf.presets.bert_base(n_layers=1, d_model=16, n_heads=2, d_ff=32)), folders.tokenizer())
    with pytest.raises(EvaluationError, match="this model has no tokenizer"):
        GlassformerLM(gf.build(CONFIG))


@pytest.mark.slow
def test_the_command_line_of_lm_eval_knows_the_model(tmp_path):
    peers.require_harness()
    pytest.importorskip("pytablewriter", reason="the table that lm_eval prints needs pytablewriter")
    folder, tasks = folders.write(tmp_path / "model"), peers.task_files(tmp_path)
    words = ["--model", "glassformer", "--model_args", f"pretrained={folder}", "--device", "cpu", "--tasks", "choice"]
    run = [sys.executable, "-m", "glassformer.evaluation", *words, "--include_path", str(tasks)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "acc_norm" in done.stdout
