"""A trace records what transformers computes at the same place (TransformerLens: test_aliases.py)."""

import numpy as np
import pytest
import torch
import transformers as hf

import glassformer as gf
from glassformer import config as c
from glassformer.lens.sites import LensError, MissingSite, sites_of
from glassformer.lens.trace import trace
from glassformer.weights import load
from tests import folders, variants
from tests.variants import lively, tokens
from tests.weights.tiny import batch, random_model, saved

SIZES = {"vocab_size": 97, "max_position_embeddings": 23}
BERT = {"hidden_size": 35, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 5}
LLAMA = {"hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 6}
BOUND = 1e-5
DECODER, SEQ2SEQ = variants.decoder(), variants.seq2seq()


def gap(ours, theirs):
    return (ours - theirs).abs().max().item()


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(heads):
    return heads.transpose(1, 2).flatten(2)


class Hooked:
    """Outputs (and first inputs) of named submodules of a transformers model in one forward."""

    def __init__(self, model, names):
        self.outputs, self.inputs, modules = {}, {}, dict(model.named_modules())
        self.handles = [modules[name].register_forward_hook(self._note(name)) for name in names]

    def _note(self, name):
        def hook(module, inputs, output):
            self.outputs[name] = output[0] if isinstance(output, tuple) else output
            self.inputs[name] = inputs[0] if inputs else None

        return hook


@torch.no_grad()
def hf_run(cls, config, names, tmp_path):
    model = random_model(cls, config)
    folder = saved(model, tmp_path)
    ids = batch("none")[0]
    hooked = Hooked(model, names)
    out = model(ids, output_attentions=True, output_hidden_states=True)
    return trace(load(folder), ids), out, hooked


def check_streams(seen, out, layers):
    for layer in range(layers):
        assert gap(seen[f"blocks.{layer}.resid_pre"], out.hidden_states[layer]) <= BOUND
        assert gap(seen[f"blocks.{layer}.attention.pattern"], out.attentions[layer]) <= BOUND
    assert gap(seen["final"], out.hidden_states[-1]) <= BOUND
    assert gap(seen.logits, out.logits) <= BOUND


def test_gpt2_sites_equal_transformers(tmp_path):
    config = hf.GPT2Config(vocab_size=97, n_embd=35, n_layer=2, n_head=5, n_positions=23)
    block = "transformer.h.{}"
    parts = ["", ".ln_1", ".attn.c_attn", ".attn.c_proj", ".ln_2", ".mlp.c_fc", ".mlp.c_proj"]
    names = [block.format(i) + part for i in range(2) for part in parts]
    seen, out, hooked = hf_run(hf.GPT2LMHeadModel, config, names, tmp_path)
    check_streams(seen, out, 2)
    for layer in range(2):
        ours, theirs = f"blocks.{layer}.", block.format(layer)
        q, k, v = hooked.outputs[f"{theirs}.attn.c_attn"].split(35, dim=-1)
        for name, value in (("q", q), ("k", k), ("v", v)):
            assert gap(seen[f"{ours}attention.{name}"], split(value, 5)) <= BOUND
        assert gap(joined(seen[f"{ours}attention.heads"]), hooked.inputs[f"{theirs}.attn.c_proj"]) <= BOUND
        assert gap(seen[f"{ours}attention.out"], hooked.outputs[f"{theirs}.attn.c_proj"]) <= BOUND
        assert gap(seen[f"{ours}attention.normed"], hooked.outputs[f"{theirs}.ln_1"]) <= BOUND
        assert gap(seen[f"{ours}resid_mid"], hooked.inputs[f"{theirs}.ln_2"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.pre"], hooked.outputs[f"{theirs}.mlp.c_fc"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.post"], hooked.inputs[f"{theirs}.mlp.c_proj"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.out"], hooked.outputs[f"{theirs}.mlp.c_proj"]) <= BOUND
        assert gap(seen[f"{ours}resid_post"], hooked.outputs[theirs]) <= BOUND


def test_llama_sites_equal_transformers(tmp_path):
    config = hf.LlamaConfig(**SIZES, **LLAMA, num_key_value_heads=2, head_dim=6)
    names = [f"model.layers.{i}{part}" for i in range(2) for part in ("", ".self_attn.v_proj", ".self_attn.o_proj",
             ".input_layernorm", ".post_attention_layernorm", ".mlp.gate_proj", ".mlp.down_proj")]  # fmt: skip
    rotated = []
    llama = hf.models.llama.modeling_llama
    original = llama.apply_rotary_pos_emb

    def noting(q, k, *args, **kwargs):
        rotated.append(original(q, k, *args, **kwargs))
        return rotated[-1]

    llama.apply_rotary_pos_emb = noting
    try:
        seen, out, hooked = hf_run(hf.LlamaForCausalLM, config, names, tmp_path)
    finally:
        llama.apply_rotary_pos_emb = original
    check_streams(seen, out, 2)
    for layer in range(2):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}"
        assert gap(seen[f"{ours}attention.q"], rotated[layer][0]) <= BOUND
        assert gap(seen[f"{ours}attention.k"], rotated[layer][1]) <= BOUND
        assert gap(seen[f"{ours}attention.v"], split(hooked.outputs[f"{theirs}.self_attn.v_proj"], 2)) <= BOUND
        assert gap(joined(seen[f"{ours}attention.heads"]), hooked.inputs[f"{theirs}.self_attn.o_proj"]) <= BOUND
        assert gap(seen[f"{ours}attention.normed"], hooked.outputs[f"{theirs}.input_layernorm"]) <= BOUND
        assert gap(seen[f"{ours}resid_mid"], hooked.inputs[f"{theirs}.post_attention_layernorm"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.pre"], hooked.outputs[f"{theirs}.mlp.gate_proj"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.post"], hooked.inputs[f"{theirs}.mlp.down_proj"]) <= BOUND
        assert gap(seen[f"{ours}resid_post"], hooked.outputs[theirs]) <= BOUND


def test_bert_sites_equal_transformers(tmp_path):
    names = [f"bert.encoder.layer.{i}{part}" for i in range(2) for part in ("", ".attention.self.query",
             ".attention.self.key", ".attention.self.value", ".attention.output", ".attention.output.dense",
             ".intermediate.dense", ".output.dense")]  # fmt: skip
    seen, out, hooked = hf_run(hf.BertForMaskedLM, hf.BertConfig(**SIZES, **BERT), names, tmp_path)
    check_streams(seen, out, 2)
    for layer in range(2):
        ours, theirs = f"blocks.{layer}.", f"bert.encoder.layer.{layer}"
        for name, long in (("q", "query"), ("k", "key"), ("v", "value")):
            value = hooked.outputs[f"{theirs}.attention.self.{long}"]
            assert gap(seen[f"{ours}attention.{name}"], split(value, 5)) <= BOUND
        assert gap(joined(seen[f"{ours}attention.heads"]), hooked.inputs[f"{theirs}.attention.output.dense"]) <= BOUND
        assert gap(seen[f"{ours}attention.out"], hooked.outputs[f"{theirs}.attention.output.dense"]) <= BOUND
        assert gap(seen[f"{ours}resid_mid"], hooked.outputs[f"{theirs}.attention.output"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.pre"], hooked.outputs[f"{theirs}.intermediate.dense"]) <= BOUND
        assert gap(seen[f"{ours}feedforward.out"], hooked.outputs[f"{theirs}.output.dense"]) <= BOUND
        assert gap(seen[f"{ours}resid_post"], hooked.outputs[theirs]) <= BOUND


def test_only_selected_sites_are_recorded_and_patterns_select_many():
    model, _ = lively(variants.decoder())
    seen = trace(model, tokens(2, 7), sites=["blocks.*.attention.pattern", "final"])
    assert list(seen) == ["blocks.0.attention.pattern", "blocks.1.attention.pattern", "final"]
    assert seen.stack("blocks.*.attention.pattern").shape == (2, 2, 6, 7, 7)
    assert seen.get("embed") is None
    assert "embed" not in seen
    assert seen.n_bytes() == 2 * (2 * 6 * 7 * 7 * 8) + 2 * 7 * 14 * 8


def test_without_scores_or_pattern_the_fused_path_runs(monkeypatch):
    from glassformer.model import attention

    def refuse(*args, **kwargs):
        raise AssertionError("the explicit path ran")

    monkeypatch.setattr(attention, "explicit_attention", refuse)
    model, _ = lively(variants.decoder())
    ids = tokens(2, 7)
    quiet = [name for name in sites_of(model) if not name.endswith(("scores", "pattern"))]
    assert torch.equal(trace(model, ids, sites=quiet).logits, model(ids))
    assert torch.equal(trace(model, ids, sites=()).logits, model(ids))
    with pytest.raises(AssertionError, match="explicit path"):
        trace(model, ids, sites="blocks.1.attention.scores")


def test_tokens_may_be_a_list_a_row_or_text():
    model, _ = lively(variants.decoder())
    ids = tokens(1, 7)
    expected = trace(model, ids, sites=()).logits
    assert torch.equal(trace(model, ids[0], sites=()).logits, expected)
    assert torch.equal(trace(model, ids[0].tolist(), sites=()).logits, expected)

    class Letters:
        def encode(self, text):
            return np.array([ord(letter) - ord("a") for letter in text])

    text = "".join(chr(ord("a") + i % 26) for i in range(5))
    assert torch.equal(trace(model, text, tokenizer=Letters(), sites=()).tokens, torch.arange(5)[None])
    words = folders.tokenizer(300)
    wide, _ = lively(variants.decoder(vocab_size=300))
    assert trace(wide, "the cat", tokenizer=words).tokens[0].tolist() == words.encode("the cat").ids


def test_masks_positions_and_caches_reach_the_model():
    model, _ = lively(variants.decoder())
    ids, mask = tokens(2, 7), variants.ragged_mask([7, 4], 7, "left")
    assert torch.equal(trace(model, ids, mask=mask, sites="embed").logits, model(ids, mask=mask))
    shifted = torch.arange(7)[None] + 3
    assert torch.equal(trace(model, ids, positions=shifted, sites="embed").logits, model(ids, positions=shifted))
    cache = model.new_cache("static", capacity=9)
    first = trace(model, ids[:, :5], cache=cache)
    kept = first["blocks.0.attention.k"].clone()
    second = trace(model, ids[:, 5:], cache=cache)
    assert second["blocks.0.attention.pattern"].shape == (2, 6, 2, 7)
    cache.crop(2)
    trace(model, tokens(2, 5, seed=5), cache=cache)
    assert torch.equal(first["blocks.0.attention.k"], kept)  # a static cache writes over its own buffer
    assert gap(second.logits, model(ids)[:, 5:]) <= 1e-12


def test_nothing_is_dropped_and_every_module_keeps_its_mode():
    model, _ = lively(c.replace(variants.decoder(), dropout=0.5))
    ids = tokens(2, 7)
    still = model(ids)
    model.train()
    model.blocks[0].eval()
    assert torch.equal(trace(model, ids, sites="embed").logits, still)
    assert model.training
    assert model.blocks[1].attention.training
    assert not model.blocks[0].attention.training


def test_gradients_are_kept_only_when_asked_for():
    model, _ = lively(variants.decoder())
    ids = tokens(2, 7)
    assert not any(value.requires_grad for value in trace(model, ids).values())
    seen = trace(model, ids, grad=True)
    grad = torch.autograd.grad(seen.logits[0, -1, 3], seen["blocks.1.resid_pre"])[0]
    assert grad[0].abs().max() > 0
    assert not grad[1].any()


def test_a_trace_moves_between_devices():
    model, _ = lively(variants.decoder())
    seen = trace(model, tokens(2, 7))
    moved = seen.to("meta")
    assert {value.device.type for value in moved.values()} == {moved.logits.device.type} == {"meta"}
    assert seen["embed"].device.type == "cpu"
    assert str(moved.sites) == str(seen.sites)


def test_an_encoder_decoder_keeps_its_source_and_its_target():
    model, _ = lively(SEQ2SEQ)
    source, target = tokens(2, 7), tokens(2, 5, seed=1)
    seen = trace(model, source, target=target.tolist(), sites="decoder.blocks.*.cross.pattern")
    assert torch.equal(seen.tokens, source)
    assert torch.equal(seen.target, target)
    assert seen["decoder.blocks.1.cross.pattern"].shape == (2, 6, 5, 7)
    assert seen.to("meta").target.device.type == "meta"


def test_a_model_without_a_head_is_traced_up_to_its_last_stream():
    model, _ = lively(variants.decoder(head=None))
    seen = trace(model, tokens(2, 7))
    assert gap(seen["final"], model.encode(tokens(2, 7))) <= 1e-12
    with pytest.raises(LensError, match="no head"):
        seen.logits  # noqa: B018


def test_trace_is_a_public_function():
    import glassformer.lens.trace  # noqa: F401

    assert gf.trace is trace


def test_the_error_of_an_unrecorded_site_explains_how_to_record_it():
    model, _ = lively(DECODER)
    seen = trace(model, tokens(1, 3), sites="embed")
    with pytest.raises(ValueError, match="trace again with sites="):
        seen["final"]
    with pytest.raises(KeyError, match="trace again with sites="):
        seen.stack("blocks.*.resid_pre")
    with pytest.raises(MissingSite, match="Did you mean final"):
        seen["finall"]


def test_bad_input_is_refused_in_a_sentence():
    model, _ = lively(variants.decoder(position=c.Rotary()))
    both, _ = lively(SEQ2SEQ)
    encoder, _ = lively(c.EncoderConfig(**DECODER.__dict__))
    row = tokens(1, 3)
    cases = [
        (model, tokens(1, 30), {}, "the text has 30 tokens, more than the context of 29"),
        (model, "text", {}, "text was given without a tokenizer"),
        (model, [[1, 2], [3]], {}, "rows of one length"),
        (model, [], {}, "at least one"),
        (model, torch.rand(2, 3), {}, "integers"),
        (model, row, {"target": row}, "target= was given, which a model with one stack does not accept"),
        (model, [31], {}, "token id 31 is outside the vocabulary of 31"),
        (both, row, {}, "give target="),
        (both, row, {"target": row, "positions": row}, "positions= was given"),
        (encoder, row, {"cache": model.new_cache()}, "cache= was given, which an encoder does not accept"),
    ]
    for subject, ids, given_, sentence in cases:
        with pytest.raises(ValueError) as refused:
            trace(subject, ids, **given_)
        assert sentence in str(refused.value)
    cache = model.new_cache()
    trace(model, tokens(1, 20), cache=cache)
    with pytest.raises(LensError, match="30 tokens, more than the context of 29"):
        trace(model, tokens(1, 10), cache=cache)
    far = torch.arange(40)[None]
    assert trace(model, tokens(1, 40), positions=far, sites=()).logits.shape[1] == 40  # asked for by naming positions
