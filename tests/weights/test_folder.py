"""Folders that are wrong are refused in one sentence; good ones load whole, in their dtype, with their tokenizer."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from glassformer.config import presets, to_dict, to_toml
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, load_tokenizer, save
from glassformer.weights.folder import non_finite
from tests.variants import decoder
from tests.weights.test_gpt2 import config
from tests.weights.test_llama import CASES
from tests.weights.tiny import batch, edit, random_model, saved


@pytest.fixture
def gpt2(tmp_path):
    return saved(random_model(hf.GPT2LMHeadModel, config()), tmp_path / "gpt2")


def refusal(folder, call=load):
    with pytest.raises(WeightsError) as refused:
        call(folder)
    text = str(refused.value)
    assert "\n" not in text
    return text


def change(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_missing_folder_and_file_in_its_place(tmp_path, gpt2):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "is a file" in refusal(gpt2 / "model.safetensors")


@pytest.mark.parametrize(("name", "meant"), [("brad", "bard"), ("inducton", "induction"), ("nothing-like-them", None)])
def test_a_misspelled_bundled_model_is_suggested(name, meant, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refusal(name).endswith(f"the bundled model {meant}?" if meant else "give that folder.")


def test_no_config(tmp_path, gpt2):
    (gpt2 / "config.json").unlink()
    assert "neither config.json nor model.toml" in refusal(gpt2)
    assert "neither config.json nor model.toml" in refusal(gpt2.rename(tmp_path / "pickles"))
    (tmp_path / "pickles").rename(gpt2)
    assert "neither config.json nor model.toml" in refusal(gpt2, load_config)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_a_pickle_instead_of_safetensors_is_never_opened(gpt2, name):
    (gpt2 / "model.safetensors").rename(gpt2 / name)
    assert "pickles are never loaded" in refusal(gpt2)
    (gpt2 / "config.json").unlink()
    assert "pickles are never loaded" in refusal(gpt2)


def test_no_weights_at_all(gpt2):
    (gpt2 / "model.safetensors").unlink()
    assert "no weights" in refusal(gpt2)
    assert load_config(gpt2).n_layers == 3


def test_config_that_is_not_json_or_not_an_object(gpt2):
    (gpt2 / "config.json").write_text("{'n_embd': 3}")
    assert "not JSON" in refusal(gpt2)
    (gpt2 / "config.json").write_text("[]")
    assert "object" in refusal(gpt2)


def test_truncated_weights(gpt2):
    file = gpt2 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "truncated" in refusal(gpt2)


def test_heads_that_do_not_divide(gpt2):
    edit(gpt2, n_head=4)
    assert "d_model=35 is not a multiple of n_heads=4" in refusal(gpt2)


def test_vocabulary_mismatch(gpt2):
    edit(gpt2, vocab_size=96)
    text = refusal(gpt2)
    assert "vocab_size=96" in text
    assert "97 rows" in text


def test_missing_unexpected_and_misshaped_tensors(gpt2):
    change(gpt2, lambda t: t.update({"transformer.wpe.weight": torch.randn(22, 35)}))
    assert "wpe.weight is [22, 35], expected [23, 35]" in refusal(gpt2)
    change(gpt2, lambda t: t.pop("transformer.wpe.weight"))
    assert "1: transformer.wpe.weight [23, 35]" in refusal(gpt2)
    edit(gpt2, n_layer=2)
    change(gpt2, lambda t: t.update({"transformer.wpe.weight": torch.randn(23, 35)}))
    assert "12: transformer.h.2" in refusal(gpt2)


ODD = [None, -1, 0, 3, 1.5, "x", [], {}, [3], True, False, 10**7, float("nan"), float("inf")]


@pytest.mark.parametrize("cls", [hf.GPT2LMHeadModel, hf.Qwen3ForCausalLM])
def test_any_value_of_any_key_loads_or_is_refused_in_one_sentence(tmp_path, cls):
    """Nothing else comes out: no other exception, and no attempt to build ten million layers."""
    known = config() if cls is hf.GPT2LMHeadModel else CASES["qwen3-window-biases"]()[1]
    folder = saved(random_model(cls, known), tmp_path)
    original = json.loads((folder / "config.json").read_text())
    refused = []
    for key in [*original, "rope_scaling", "quantization_config"]:
        for value in ODD:
            edit(folder, **{**original, key: value})
            try:
                load_config(folder)
            except WeightsError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in text for text in refused)


def test_layers_beyond_the_tensors_are_not_built(gpt2):
    edit(gpt2, n_layer=10**8)
    assert "100000000 layers" in refusal(gpt2)


def test_tensors_of_another_model(gpt2):
    save_file({"something.else": torch.ones(3)}, gpt2 / "model.safetensors")
    assert "not named like" in refusal(gpt2)


def test_unsupported_dtype(gpt2):
    change(gpt2, lambda t: t.update({"transformer.wpe.weight": torch.ones(23, 35, dtype=torch.int8)}))
    assert "I8" in refusal(gpt2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtype_is_the_files_unless_asked_for(tmp_path, dtype):
    folder = saved(random_model(hf.GPT2LMHeadModel, config()).to(dtype), tmp_path)
    assert {p.dtype for p in load(folder).parameters()} == {dtype}
    assert {p.dtype for p in load(folder, dtype="float64").parameters()} == {torch.float64}
    assert {p.dtype for p in load(folder, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    with pytest.raises(WeightsError, match="int3"):
        load(folder, dtype="int3")


def test_a_loaded_model_is_in_evaluation_mode_and_can_train(gpt2):
    model = load(gpt2)
    assert not model.training
    assert all(p.requires_grad and not p.is_meta for p in model.parameters())
    before = load_file(gpt2 / "model.safetensors")["transformer.wpe.weight"]
    torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()
    model.train()(batch("none")[0]).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
    assert torch.equal(load_file(gpt2 / "model.safetensors")["transformer.wpe.weight"], before)
    assert not torch.equal(model.decoder.position.weight, before)


def test_sharded_folder_of_transformers(tmp_path):
    model = random_model(hf.GPT2LMHeadModel, config())
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    whole, shards = load(tmp_path / "whole").state_dict(), load(tmp_path / "shards").state_dict()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def test_special_ids_come_from_both_files(gpt2):
    edit(gpt2, "generation_config.json", eos_token_id=[2, 5], pad_token_id=9)
    special = load(gpt2).config.special
    assert (special.bos, special.eos, special.pad) == (2, (2, 5), 9)


def test_our_folder_and_a_run_folder(tmp_path):
    cfg = presets.llama_tiny(n_layers=2)
    folder = save(build(cfg, seed=1), tmp_path / "ours", format="glass")
    assert load(folder).config == cfg == load_config(folder)
    (folder / "model.toml").unlink()
    (folder / "run.toml").write_text(to_toml({"steps": 3, "model": to_dict(cfg)}))
    assert load(folder).config == cfg


def test_our_folder_is_checked_like_any_other(tmp_path):
    folder = save(build(presets.llama_tiny(n_layers=2)), tmp_path / "ours", format="glass")
    change(folder, lambda t: t.pop("decoder.norm.weight"))
    assert "lack tensors that model.toml requires (1: decoder.norm.weight [96])" in refusal(folder)
    (folder / "model.toml").write_text("kind = 3")
    assert "model.toml" in refusal(folder)
    (folder / "model.toml").write_text("kind = [")
    assert "TOML" in refusal(folder)


def test_tokenizer(tmp_path, gpt2):
    assert load_tokenizer(gpt2) is None
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(gpt2 / "tokenizer.json"))
    assert load_tokenizer(gpt2).encode("b").ids == [1]
    (gpt2 / "tokenizer.json").write_text(json.dumps({"version": 9}))
    assert "tokenizer.json" in refusal(gpt2, load_tokenizer)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(gpt2):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(98)}, unk_token="w0"))
    words.save(str(gpt2 / "tokenizer.json"))
    assert "has 98 tokens, but the model has 97: they do not belong together" in refusal(gpt2, load_tokenizer)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.add_special_tokens(["<image>"])  # a text-only model may lack the tokens that were added for images
    words.save(str(gpt2 / "tokenizer.json"))
    assert load_tokenizer(gpt2).get_vocab_size() == 98
    ours = save(load(gpt2), gpt2.parent / "ours", format="glass")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(98)}, unk_token="w0")).save(str(ours / "tokenizer.json"))
    assert "but the model has 97" in refusal(ours, load_tokenizer)


def test_a_loaded_model_does_not_depend_on_its_file(gpt2):
    """A view of a mapped file kills the process (SIGBUS) when somebody truncates the file."""
    model = load(gpt2)
    tokens = batch("none")[0]
    before = model(tokens)
    with (gpt2 / "model.safetensors").open("r+b") as file:
        file.truncate(0)
    assert torch.equal(model(tokens), before)
    assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def test_a_parameter_that_is_not_finite_is_named():
    model = build(decoder())
    assert non_finite(model) is None
    table = model.embed.tokens.weight
    for wrong in (float("nan"), float("inf")):
        with torch.no_grad():
            table[1, 2] = wrong
        assert non_finite(model) == f"1 of the {table.numel():,} numbers in embed.tokens.weight are NaN or infinite"
    table.requires_grad_(False)  # what is not trained may be a mask
    assert non_finite(model) is None
    with torch.no_grad():
        table[0, 0] = float("nan")
    assert non_finite(model).startswith("1 of the")
