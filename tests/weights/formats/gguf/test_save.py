"""What is saved as GGUF computes the same in llama.cpp and here, or nothing is written."""

import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.config import Alibi, Gated, Head, LayerNorm, MoE, RMSNorm, Rotary, YarnScaling
from glassformer.model import build
from glassformer.model.layers import ACTIVATIONS
from glassformer.weights import WeightsError
from glassformer.weights.export import write_gguf_file
from glassformer.weights.formats.gguf import check, layouts, llama, save
from glassformer.weights.formats.gguf.file import open_gguf
from glassformer.weights.formats.unverified import UnverifiedError
from tests.weights.formats.gguf import models
from tests.weights.formats.gguf.models import CASES, NEEDS_LLAMA, bpe, random

BOUND = 3e-4
"""Of the largest logit. Measured: at most 2e-6 with SiLU, and 1.3e-4 with GELU, which llama.cpp reads from a table."""


def by_table(x):
    """GELU as llama.cpp computes it: argument and result are rounded to float16."""
    return F.gelu(x.half().float(), approximate="tanh").half().float()


def written(model, path, quantization=None, **options):
    path, findings, notes = write_gguf_file(model, path, quantization, **options)
    return {finding.id: finding for finding in findings}, notes


@pytest.mark.sample(8)
@NEEDS_LLAMA
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(tmp_path, case, monkeypatch):
    for name in ("gelu", "gelu_tanh"):
        monkeypatch.setitem(ACTIVATIONS, name, by_table)
    model = random(CASES[case])
    findings, notes = written(model, tmp_path / "m.gguf", "f32")
    logits, greedy = findings["llama.cpp-logits"], findings["llama.cpp-greedy"]
    largest = logits.bound / check.relative_bound(model.config, "f32")
    assert largest > 1
    assert logits.measured <= BOUND * largest
    architecture = "command-r" if case == "command-r" else case.partition("-")[0]
    architecture = architecture.replace("mistral", "llama").replace("mixtral", "llama")
    assert open_gguf(tmp_path / "m.gguf").metadata["general.architecture"] == architecture
    assert greedy.measured == 0
    assert any("window of 16" in note for note in notes) == (case == "mistral")


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", CASES)
def test_a_file_reads_back_bit_for_bit_and_is_written_again_as_it_was(tmp_path, case, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    model = random(CASES[case])
    path = gf.save(model, tmp_path / "m.gguf", format="gguf")
    back = gf.load(path)
    ours, theirs = model.state_dict(), back.state_dict()
    for name, tensor in theirs.items():
        rounding = 3e-7 if "norm" in name and case.startswith("gemma") else 0.0  # stored as 1 + weight
        assert not tensor.any() if name not in ours else (ours[name] - tensor).abs().max() <= rounding, name
    assert ours.keys() <= theirs.keys()
    tokens = torch.arange(2, 18)[None]
    assert (model(tokens) - back(tokens)).abs().max() <= 1e-5
    again = gf.save(back, tmp_path / "again.gguf", format="gguf")
    a, b = open_gguf(path), open_gguf(again)
    assert {k: v for k, v in a.metadata.items() if k != "general.name"} == {
        k: v for k, v in b.metadata.items() if k != "general.name"
    }
    for name, tensor in a.tensors.items():
        rounding = 3e-7 if "norm" in name and case.startswith("gemma") else 0.0
        assert (tensor.read() - b.tensors[name].read()).abs().max() <= rounding
    assert a.tensors.keys() == b.tensors.keys()


@pytest.mark.sample(3)
@NEEDS_LLAMA
@pytest.mark.parametrize("quantization", ["f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_quantised_files(tmp_path, quantization):
    model = random(models.wide())
    findings, _ = written(model, tmp_path / "m.gguf", quantization)
    assert findings["llama.cpp-logits"].passed
    types = {tensor.type for name, tensor in open_gguf(tmp_path / "m.gguf").tensors.items() if "ffn_up" in name}
    assert types == {quantization.upper()}
    back = gf.load(tmp_path / "m.gguf")
    weight = "decoder.blocks.1.feedforward.up.weight"
    error = (back.get_parameter(weight) - model.get_parameter(weight)).abs().max() / model.get_parameter(weight).std()
    assert 0 < error < {"f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2}.get(quantization, 0.5)
    assert torch.equal(back.decoder.norm.weight.float(), model.decoder.norm.weight)


@pytest.mark.sample(1)
@NEEDS_LLAMA
@pytest.mark.parametrize("seed", range(3))
def test_experts_with_rounding_are_compared_by_their_median(tmp_path, seed, monkeypatch):
    """A router near a tie chooses another expert, which is no mistake of the file; a wrong layout still is one."""
    model = random(models.wide(feedforward=MoE(5, 2, Gated(64))), seed)
    findings, _ = written(model, tmp_path / "m.gguf", "bf16")
    assert findings.keys() == {"llama.cpp-logits"}
    monkeypatch.setattr(layouts.Interleaved, "theirs", lambda self, ours: ours[0])
    monkeypatch.setattr(layouts.Interleaved, "ours", lambda self, theirs, shapes: [theirs])
    with pytest.raises(UnverifiedError):
        written(model, tmp_path / "m.gguf", "bf16", overwrite=True)


def test_the_default_quantization_is_that_of_the_weights(tmp_path):
    for dtype, expected in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")):
        written(random(models.wide(), dtype=dtype), tmp_path / "m.gguf", overwrite=True)
        assert open_gguf(tmp_path / "m.gguf").tensors["output.weight"].type == expected


def test_the_output_matrix_keeps_8_bits_and_rows_without_whole_blocks_16(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    for tied in (False, True):
        model = random(models.wide(head=Head(tied=tied), feedforward=Gated(53)))
        written(model, tmp_path / "m.gguf", "q4_0", overwrite=True)
        types = {name: tensor.type for name, tensor in open_gguf(tmp_path / "m.gguf").tensors.items()}
        assert types["token_embd.weight"] == ("Q8_0" if tied else "Q4_0")
        assert types.get("output.weight", "Q8_0") == "Q8_0"
        assert types["blk.0.ffn_up.weight"] == "Q4_0"
        assert types["blk.0.ffn_down.weight"] == "F16"
        assert types["blk.0.attn_norm.weight"] == "F32"


@NEEDS_LLAMA
def test_the_tokenizer_and_the_chat_template_travel(tmp_path):
    tokenizer, model = bpe(300), random(models.llama(vocab_size=304))
    folder = gf.save(model, tmp_path / "folder", tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    findings, _ = written(gf.load(folder), tmp_path / "m.gguf")
    assert findings["llama.cpp-tokens"].passed
    assert "of 5" in findings["llama.cpp-tokens"].why
    back = gf.save(gf.load(tmp_path / "m.gguf"), tmp_path / "back")
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"
    for text in check.TEXTS:
        assert gf.load_tokenizer(back).encode(text).ids == tokenizer.encode(text).ids
        assert gf.load_tokenizer(tmp_path / "m.gguf").decode(tokenizer.encode(text).ids) == text


@NEEDS_LLAMA
def test_bard_continues_a_text_in_llama_cpp_as_it_does_here(tmp_path):
    model = gf.load("bard")
    gf.save(model, tmp_path / "bard.gguf", format="gguf")
    prompt = "ROMEO:\nBut soft"
    answer = llama.run_llama(tmp_path / "bard.gguf", gf.load_tokenizer("bard").encode(prompt).ids, 100, [prompt])
    ours = gf.generate(model, prompt, max_new_tokens=100, engine="torch")
    assert answer["ids"] == [gf.load_tokenizer("bard").encode(prompt).ids]
    assert answer["greedy"] == ours.new[0]


@NEEDS_LLAMA
def test_a_wrong_rotation_and_a_wrong_splitting_rule_are_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts.Interleaved, "theirs", lambda self, ours: ours[0])
    monkeypatch.setattr(layouts.Interleaved, "ours", lambda self, theirs, shapes: [theirs])
    with pytest.raises(UnverifiedError, match=r"llama.cpp-logits [\d.]+ > ") as refused:
        written(random(CASES["llama"]), tmp_path / "m.gguf")
    assert "\n" not in str(refused.value)
    monkeypatch.undo()
    real = save.write_vocabulary

    def wrong(*arguments):
        vocabulary = real(*arguments)
        vocabulary.metadata["tokenizer.ggml.pre"] = "llama-bpe"
        return vocabulary

    monkeypatch.setattr(save, "write_vocabulary", wrong)
    with pytest.raises(UnverifiedError, match=r"llama\.cpp-tokens"):
        written(random(models.llama(vocab_size=300)), tmp_path / "m.gguf", tokenizer=bpe(300))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"feedforward": Gated(53, activation="gelu")}, "hidden_act='gelu'"),
        ({"head": None}, "without a head"),
        ({"position": Alibi()}, "Alibi"),
        ({"position": Rotary(pairing="interleaved"), "norm": LayerNorm()}, "cannot be written"),
        ({"position": Rotary(scaling=YarnScaling(4.0, 16, truncate=False))}, "truncate=False"),
        ({"feedforward": MoE(4, 2, Gated(53), normalize=False)}, "qwen2_moe"),
        ({"attention": models.Attention(6, bias=True, qk_norm=RMSNorm(eps=1e-5))}, "attention_bias=True"),
    ],
    ids=str,
)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(tmp_path, changes, word):
    with pytest.raises(WeightsError) as refused:
        written(build(models.llama(**changes)), tmp_path / "m.gguf")
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="has 300 tokens, but the model has 97: they do not belong together"):
        written(random(CASES["llama"]), tmp_path / "m.gguf", tokenizer=bpe(300))


def test_what_is_there_is_replaced_only_with_force_and_only_if_it_is_gguf(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "is_installed", lambda: False)
    first, second = random(CASES["llama"], 1), random(CASES["llama"], 2)
    path = gf.save(first, tmp_path / "deep" / "m.gguf", format="gguf")
    before = path.read_bytes()
    with pytest.raises(WeightsError, match="already holds a model: pass --force"):
        gf.save(second, path, format="gguf")
    assert path.read_bytes() == before
    gf.save(second, path, format="gguf", overwrite=True)
    assert torch.equal(gf.load(path).embed.tokens.weight, second.embed.tokens.weight)
    (tmp_path / "notes.gguf").write_text("mine")
    (tmp_path / "link.gguf").symlink_to(path)
    for name, word in (("notes.gguf", "another format"), ("link.gguf", "symbolic link"), ("deep", "is a folder")):
        with pytest.raises(WeightsError, match=word):
            gf.save(second, tmp_path / name, format="gguf", overwrite=True)
    assert (tmp_path / "notes.gguf").read_text() == "mine"
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_a_file_that_reads_back_differently_is_not_put_in_place(tmp_path, monkeypatch):
    from glassformer.weights.formats.gguf import write

    real = write._quantize
    monkeypatch.setattr(write, "_quantize", lambda full, tensor, kind: real(full, tensor + 1, kind))
    monkeypatch.setattr(save, "compare_file", lambda *a: (monkeypatch.undo(), write.compare_file(*a)))
    with pytest.raises(WeightsError, match="reads back differently"):
        written(random(CASES["llama"]), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_float16_and_unknown_arguments(tmp_path):
    model = random(models.wide())
    with torch.no_grad():
        model.embed.tokens.weight[0, 0] = 1e5
    with pytest.raises(WeightsError, match="beyond 65504, the largest of f16"):
        written(model, tmp_path / "m.gguf", "f16")
    with pytest.raises(WeightsError, match="q2_k"):
        written(model, tmp_path / "m.gguf", "q2_k")
    with pytest.raises(WeightsError, match="is for format='gguf'"):
        gf.save(model, tmp_path / "m", quantization="f16")
    assert list(tmp_path.iterdir()) == []
