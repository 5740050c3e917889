"""The model everybody runs: written once, alive, and with a known number of bytes."""

import pytest
from tokenizers import Tokenizer

import glassformer as gf
from glassformer import sizing
from glassformer.bench import subject as subjects
from glassformer.bench.plan import BenchError, Plan
from tests.bench import tiny


def test_it_is_written_once_and_depends_on_config_and_seed(tmp_path):
    first = tiny.write(tmp_path)
    stamp = (first.root / "hf" / "model.safetensors").stat().st_mtime_ns
    again = tiny.write(tmp_path)
    assert again.root == first.root
    assert (again.root / "hf" / "model.safetensors").stat().st_mtime_ns == stamp
    assert tiny.write(tmp_path, n_layers=1).root != first.root
    assert subjects.write(tmp_path, tiny.config(), "tiny", seed=1).root != first.root
    assert subjects.write(tmp_path, tiny.config(), "tiny", seed=0, perturbed=False).root != first.root


def test_its_words_change_where_a_fresh_model_repeats_itself(subject, tmp_path):
    given = tiny.order(subject, "glassformer-torch", "ours", new=24, rows=1)
    assert len(set(tiny.engine_ids(subject, given)[0])) > 8
    still = subjects.write(tmp_path, tiny.config(init_std=0.02), "still", 0, perturbed=False)
    assert len(set(tiny.engine_ids(still, given)[0])) <= 2


def test_no_bias_is_zero_and_no_norm_is_one(subject):
    for name, parameter in gf.load(subject.root / "hf").named_parameters():
        if parameter.dim() == 1:
            assert not ((parameter == 0) | (parameter == 1)).any(), name


def test_bytes_per_token_of_gpt2_are_the_published_ones(tmp_path):
    made = subjects.Subject(tmp_path, gf.presets.gpt2(), "gpt2")
    millions = [round(made.weight_bytes(p) / 1e6) for p in ("float32", "bfloat16", "int8", "int4")]
    assert millions == [495, 247, 124, 62]
    untied = gf.presets.llama_tiny(head=gf.config.Head(tied=False))
    inside = sizing.count(untied) - untied.vocab_size * untied.d_model
    assert subjects.Subject(tmp_path, untied, "").weight_bytes("float32") == 4 * inside


def test_only_active_experts_are_read(tmp_path):
    config = gf.presets.moe_tiny()
    made = subjects.Subject(tmp_path, config, "")
    assert made.weight_bytes("bfloat16") == 2 * sizing.active(config) < 2 * sizing.count(config)


def test_weights_for_a_gpu_alone_are_stored_in_16_bits(tmp_path):
    wide = tiny.write(tmp_path)
    narrow = subjects.write(tmp_path, tiny.config(), "tiny", seed=0, dtype="bfloat16")
    assert narrow.root != wide.root
    stored = gf.load(narrow.root / "hf")
    assert str(next(stored.parameters()).dtype) == "torch.bfloat16"


def test_words_for_training_use_the_first_ids_only(tmp_path):
    text, tokenizer = tmp_path / "words.txt", tmp_path / "words.json"
    subjects.write_words(text, tokenizer, used=5, vocabulary=61, seed=0)
    assert set(text.read_text().split()) == {f"t{i}" for i in range(5)}
    words = Tokenizer.from_file(str(tokenizer))
    assert (words.get_vocab_size(), words.encode("t3 t60 t1").ids) == (61, [3, 60, 1])


def test_prompts_are_seeded_and_inside_the_vocabulary(subject):
    rows = subject.prompts(3, 5, seed=4)
    assert rows == subject.prompts(3, 5, seed=4) != subject.prompts(3, 5, seed=5)
    assert all(0 <= token < tiny.VOCAB for row in rows for token in row)


def test_a_folder_is_taken_as_it_is(subject, tmp_path):
    plan = Plan("decode", model=str(subject.root / "hf"), keep=tmp_path, prompt=4, new=4)
    made = subjects.subject(plan)
    assert made.config == subject.config
    ours, theirs = gf.load(made.root / "hf").state_dict(), gf.load(subject.root / "hf").state_dict()
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert subjects.subject(plan).root == made.root


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "bert_base"}, "--model bert_base cannot decode: give a model that generates text"),
        ({"task": "encode"}, "--model gpt2 cannot encode: give an encoder"),
        ({"model": "gtp2"}, "is not a preset. Did you mean gpt2"),
        ({"prompt": 1000}, "exceed the model's context of 1024"),
        ({"task": "train", "model": "nano", "prompt": 65}, "sequences of 65 tokens exceed the model's context of 64"),
    ],
)
def test_a_model_that_cannot_be_measured_is_one_sentence(changes, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        subjects.subject(Plan(**{"task": "decode", "keep": tmp_path, **changes}))


def test_layers_are_those_of_the_plan_in_both_stacks(subject, tmp_path):
    for name, layers in (("nano", [2]), ("t5_small", [1, 1])):
        config = subjects._preset(Plan("decode", model=name, layers=layers[0]))
        assert [config.n_layers, *([config.n_encoder_layers] if len(layers) > 1 else [])] == layers
    with pytest.raises(BenchError, match="changes a preset"):
        subjects.subject(Plan("decode", model=str(subject.root / "hf"), layers=1, keep=tmp_path))


def test_texts_are_seeded_and_unequal_and_the_first_is_the_longest(subject):
    texts = subject.texts(20, 40, seed=1)
    lengths = [len(text) for text in texts]
    assert texts == subject.texts(20, 40, seed=1)
    assert lengths[0] == max(lengths) == 40
    assert min(lengths) >= 10
    assert len(set(lengths)) > 5


def test_a_file_is_no_shelf(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BenchError, match="is a file"):
        subjects.model_folder(tmp_path / "file")
