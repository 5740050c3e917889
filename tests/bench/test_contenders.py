"""Who takes part: missing peers are named and never an error, wrong names are."""

import importlib.util

import pytest

import glassformer as gf
from glassformer.bench import contenders
from glassformer.bench.plan import BenchError, Plan
from tests.bench import tiny


@pytest.fixture
def installed(monkeypatch):
    """Only these packages are found."""
    here = {"transformers", "llama_cpp"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in here else None)


def test_what_is_installed_takes_part_and_the_rest_is_named_with_its_remedy(installed):
    chosen, missing = contenders.choose(Plan("decode"))
    assert [c.name for c in chosen] == ["glassformer", "glassformer-torch", "transformers", "transformers-compiled"]
    assert missing["ctranslate2"] == "ctranslate2 not installed (pip install ctranslate2 transformers)"
    assert missing["llama.cpp"] == "gguf not installed (pip install llama-cpp-python gguf)"
    assert missing["nanogpt"] == "give its checkout with --nanogpt PATH"
    assert "gpt-fast" in missing


def test_only_named_peers_and_always_our_own_contenders(installed):
    chosen, missing = contenders.choose(Plan("decode", against=("onnxruntime",)))
    assert [c.name for c in chosen] == ["glassformer", "glassformer-torch"]
    assert list(missing) == ["onnxruntime"]


def test_peers_that_do_not_sample_here_are_left_out_of_sampled_decoding(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    chosen, missing = contenders.choose(Plan("decode", sampled=True))
    ours = ["glassformer", "glassformer-torch"]
    assert [c.name for c in chosen] == [*ours, "transformers", "transformers-compiled", "llama.cpp"]
    assert missing["onnxruntime"] == "it is measured here with the most likely tokens only"


def test_peers_without_beam_search_here_are_left_out_of_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    chosen, missing = contenders.choose(Plan("decode", beams=4))
    assert [c.name for c in chosen] == ["glassformer", "glassformer-torch", "transformers", "ctranslate2"]
    assert missing["llama.cpp"] == "it is measured here without beam search"


def test_a_task_that_a_peer_has_no_part_in(installed):
    chosen, missing = contenders.choose(Plan("train", against=("transformers",)))
    assert [c.name for c in chosen] == ["glassformer"]
    assert missing == {"transformers": "is not measured in train"}


def test_training_of_a_model_is_compared_with_transformers(installed):
    chosen, missing = contenders.choose(Plan("train", model="nano", against=("transformers", "llama.cpp")))
    assert [c.name for c in chosen] == ["glassformer", "transformers"]
    assert missing == {"llama.cpp": "is not measured in train"}
    chosen, _ = contenders.choose(Plan("startup", training=True))
    assert [c.name for c in chosen] == ["glassformer", "transformers", "transformers-compiled"]


def test_on_a_gpu_the_others_are_left_out_with_the_reason(installed):
    chosen, missing = contenders.choose(Plan("decode", device="cuda", against=("transformers", "llama.cpp")))
    assert [c.name for c in chosen] == ["glassformer", "transformers"]  # our eager engine only if it is named
    assert missing == {"llama.cpp": "it is measured here on a CPU only"}
    chosen, missing = contenders.choose(Plan("decode", device="cuda"))
    assert "glassformer-torch" in [c.name for c in chosen]
    assert missing["ctranslate2"] == missing["onnxruntime"] == "it is measured here on a CPU only"


def test_an_unknown_contender_is_refused_with_the_nearest():
    with pytest.raises(BenchError, match=r"'lama-cpp' is not a contender. Did you mean llama.cpp"):
        contenders.choose(Plan("decode", against=("lama-cpp",)))


def test_a_checkout_is_known_by_its_files(tmp_path):
    plan = Plan("train", checkouts={"nanogpt": tmp_path})
    with pytest.raises(BenchError, match=r"is not a checkout of nanogpt \(it has no model.py and no train.py\)"):
        contenders.choose(plan)
    for name in ("model.py", "train.py"):
        (tmp_path / name).touch()
    assert "nanogpt" in [c.name for c in contenders.choose(plan)[0]]


def test_names_are_unique_and_modules_exist():
    assert len(contenders.NAMED) == len(contenders.TABLE)
    for contender in contenders.TABLE:
        assert importlib.util.find_spec(f"glassformer.bench.peers.{contender.module}") is not None


def test_kinds_of_models():
    assert contenders.kinds_of(gf.presets.gpt2()) == {"decoder", "gpt2", "dense"}
    assert contenders.kinds_of(gf.presets.qwen3_0_6b()) == {"decoder", "dense"}
    assert contenders.kinds_of(gf.presets.moe_tiny()) == {"decoder"}
    assert contenders.kinds_of(gf.presets.minilm_l6()) == {"encoder", "bert"}
    assert contenders.kinds_of(gf.presets.modernbert_base()) == {"encoder"}
    assert contenders.kinds_of(gf.presets.t5_small()) == {"seq2seq"}


def test_what_the_converters_can_write():
    assert contenders.is_gpt2(gf.presets.gpt2())
    assert contenders.is_gpt2(tiny.config())
    for other in (gf.presets.llama_tiny(), gf.presets.nano(), gf.presets.bert_base(), gf.presets.gpt2(d_ff=100)):
        assert not contenders.is_gpt2(other)
