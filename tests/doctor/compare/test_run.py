"""Planted differences are found at the first operation they touch and named; other spellings of one model are same."""

import copy
import dataclasses
from unittest import mock

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import transformers.models.gpt2.modeling_gpt2 as hf_gpt2
import transformers.models.llama.modeling_llama as hf_llama
from hypothesis import strategies as st
from torch import nn

import glassformer as gf
from glassformer import config as c
from glassformer.doctor.compare import CannotCompareError, compare
from tests import sampled, variants
from tests.doctor.compare.pairs import Nano, ours, swap, theirs

D, K = 24, 8
GPT2, LLAMA = ours("gpt2").config, ours("llama").config


def attention(config, **changes):
    return dataclasses.replace(config.attention, **changes)


def rotary(**changes):
    return dataclasses.replace(LLAMA.position, **changes)


class OtherNorm(nn.Module):
    """LayerNorm as it is often written by hand: variance over D - 1."""

    def __init__(self, norm, outside=False):
        super().__init__()
        self.weight, self.bias, self.eps, self.outside = norm.weight, norm.bias, norm.eps, outside

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        if self.outside:
            return self.weight * centred / (x.std(-1, keepdim=True) + self.eps) + self.bias
        return self.weight * centred / (x.var(-1, keepdim=True) + self.eps).sqrt() + self.bias


def planted(family, plant):
    """Our model with one thing done to it."""
    model = ours(family)
    with torch.no_grad():
        plant(model)
    return model


def transpose_o(m):
    m.decoder.blocks[1].attention.o.weight.copy_(m.decoder.blocks[1].attention.o.weight.T.clone())


def transpose_q(m):
    m.decoder.blocks[0].attention.q.weight.copy_(m.decoder.blocks[0].attention.q.weight.T.clone())


def shift_positions(m):
    m.decoder.position.weight.copy_(m.decoder.position.weight.roll(-1, 0))


def see_all(m):
    m.decoder.causal = False


def exchange_k_and_v(m):
    a = m.decoder.blocks[0].attention
    a.k, a.v = a.v, a.k


def exchange_gate_and_up(m):
    for block in m.decoder.blocks:
        block.feedforward.gate, block.feedforward.up = block.feedforward.up, block.feedforward.gate


def forget_the_bias(m):
    m.decoder.blocks[1].feedforward.down.bias.zero_()


def drop_the_final_norm(m):
    m.decoder.norm = None


# what differs from transformers' GPT-2 or Llama -> (our model, first place, convention)
PLANTS = {
    "exact GELU": (
        lambda: ours("gpt2", feedforward=c.Dense(d_ff=40, activation="gelu")),
        "blocks.0.feedforward.post",
        "gelu_variant",
    ),
    "ReLU": (
        lambda: ours("gpt2", feedforward=c.Dense(d_ff=40, activation="relu")),
        "blocks.0.feedforward.post",
        "activation",
    ),
    "eps": (lambda: ours("gpt2", norm=c.LayerNorm(eps=1e-6)), "blocks.0.attention.normed", "norm_eps"),
    "RMS norm": (lambda: ours("gpt2", norm=c.RMSNorm(eps=1e-5)), "blocks.0.attention.normed", "norm_kind"),
    "scale": (
        lambda: ours("gpt2", attention=attention(GPT2, scale=D**-0.5)),
        "blocks.0.attention.scores",
        "attn_scale",
    ),
    "transposed output": (lambda: planted("gpt2", transpose_o), "blocks.1.attention.out", "transposed_weight"),
    "transposed query": (
        lambda: planted("gpt2", transpose_q),
        "blocks.0.attention.projected_q",
        "transposed_weight",
    ),
    "position offset": (lambda: planted("gpt2", shift_positions), "embed", "position_offset"),
    "no positions": (lambda: ours("gpt2", position=c.NoPosition()), "embed", "position_missing"),
    "untied head": (lambda: ours("gpt2", head=c.Head(tied=False)), "logits", "weight_tying"),
    "no causal mask": (lambda: planted("gpt2", see_all), "blocks.0.attention.mask", "mask"),
    "window": (lambda: ours("gpt2", attention=attention(GPT2, window=4)), "blocks.0.attention.mask", "mask"),
    "no final norm": (lambda: planted("gpt2", drop_the_final_norm), "final", "final_norm"),
    "post-norm": (lambda: ours("gpt2", placement="post"), "blocks.0.attention.normed", "norm_placement"),
    "k and v exchanged": (lambda: planted("gpt2", exchange_k_and_v), "blocks.0.attention.projected_k", "qkv_order"),
    "embedding scale": (lambda: ours("gpt2", embedding=c.Embedding(scale=D**0.5)), "embed", "embedding_scale"),
    "missing bias": (lambda: planted("gpt2", forget_the_bias), "blocks.1.feedforward.out", "bias"),
    "rotary pairing": (
        lambda: ours("llama", position=rotary(pairing="interleaved")),
        "blocks.0.attention.q",
        "rope_pairing",
    ),
    "rotary base": (lambda: ours("llama", position=rotary(base=500000.0)), "blocks.0.attention.q", "rope_base"),
    "rotary fraction": (lambda: ours("llama", position=rotary(fraction=0.5)), "blocks.0.attention.q", "rope_fraction"),
    "no rotation": (lambda: ours("llama", position=c.NoPosition()), "blocks.0.attention.q", "rope_missing"),
    "RMS eps": (lambda: ours("llama", norm=c.RMSNorm(eps=1e-5)), "blocks.0.attention.normed", "norm_eps"),
    "qk norm": (
        lambda: ours("llama", attention=attention(LLAMA, qk_norm=c.RMSNorm())),
        "blocks.0.attention.q",
        "qk_norm",
    ),
    "Llama scale": (
        lambda: ours("llama", attention=attention(LLAMA, scale=1.0)),
        "blocks.0.attention.scores",
        "attn_scale",
    ),
    "GELU gate": (
        lambda: ours("llama", feedforward=c.Gated(d_ff=40, activation="gelu")),
        "blocks.0.feedforward.post",
        "activation",
    ),
    "gate and up exchanged": (
        lambda: planted("llama", exchange_gate_and_up),
        "blocks.0.feedforward.post",
        "gate_order",
    ),
}


AGAIN = ("transposed query", "RMS eps", "Llama scale", "GELU gate")
"""Conventions that another plant has as well."""


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in AGAIN)) for name in PLANTS])
def test_a_planted_convention_is_found_where_it_is_and_named(name):
    build, place, convention = PLANTS[name]
    model = build()
    family = "gpt2" if model.config.n_heads == 3 else "llama"
    result = compare(theirs(family), model)
    assert result.verdict == "differ"
    assert (result.first, result.convention) == (place, convention), result.text()
    assert result.explanation.residual < 1e-6 or convention == "mask"  # a mask is read, not fitted
    assert not result.same


@pytest.mark.slow
def test_the_difference_is_named_from_either_side():
    for name in ("exact GELU", "eps", "scale", "rotary pairing", "position offset", "missing bias"):
        build, place, convention = PLANTS[name]
        model = build()
        result = compare(model, theirs("gpt2" if model.config.n_heads == 3 else "llama"))
        assert (result.first, result.convention) == (place, convention), result.text()


def test_numbers_are_named():
    result = compare(theirs("gpt2"), PLANTS["scale"][0]())
    assert "A multiplies q·k by 0.353553 = 1/√K, B by 0.204124 = 1/√D" in result.explanation.text
    result = compare(theirs("gpt2"), PLANTS["eps"][0]())
    assert result.explanation.text == "A is LayerNorm(eps=1e-05), B is LayerNorm(eps=1e-06)"
    result = compare(theirs("llama"), PLANTS["rotary base"][0]())
    assert "base 10000" in result.explanation.text
    assert "base 500000" in result.explanation.text
    assert "window 4" in compare(theirs("gpt2"), PLANTS["window"][0]()).explanation.text


@pytest.mark.sample(1)
@pytest.mark.parametrize("outside", [False, True])
def test_unbiased_variance_in_one_norm_of_theirs(outside):
    model = theirs("gpt2")
    swap(model, "transformer.h.1.ln_2", OtherNorm(model.transformer.h[1].ln_2, outside))
    for pair in ((model, ours("gpt2")), (ours("gpt2"), model)):
        result = compare(*pair)
        assert (result.first, result.convention) == ("blocks.1.feedforward.normed", "norm_variance")


def eager(change):
    """transformers' attention with one line changed."""

    def forward(module, query, key, value, attention_mask, **_):
        scores = query @ key.transpose(-1, -2) * K**-0.5
        pattern = change(scores, attention_mask)
        return (pattern @ value).transpose(1, 2).contiguous(), pattern

    return mock.patch.object(hf_gpt2, "eager_attention_forward", forward)


def masked(scores, mask):
    return scores if mask is None else scores + mask


def upside_down(scores, mask):
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).triu()
    return scores.masked_fill(~allowed, -1e30).softmax(-1)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "place", "convention"),
    [
        (lambda s, m: masked(5 * torch.tanh(s / 5), m).softmax(-1), "scores", "softcap"),
        (lambda s, m: masked(s, m).softmax(-2), "pattern", "softmax_axis"),
        (upside_down, "mask", "mask"),
    ],
    ids=["softcap", "axis", "polarity"],
)
def test_changes_inside_their_attention(change, place, convention):
    with eager(change):
        result = compare(theirs("gpt2"), ours("gpt2"))
    assert (result.first, result.convention) == (f"blocks.0.attention.{place}", convention)


def test_the_patched_attention_alone_changes_nothing():
    with eager(lambda s, m: masked(s, m).softmax(-1)):
        assert compare(theirs("gpt2"), ours("gpt2")).verdict == "same"


def test_grouped_heads_tiled_instead_of_repeated():
    with mock.patch.object(hf_llama, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1)):
        result = compare(theirs("llama"), ours("llama"))
    assert (result.first, result.convention) == ("blocks.0.attention.k", "gqa_order")


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_the_same_weights_in_transformers_and_here_are_the_same(family):
    result = compare(theirs(family), ours(family))
    assert result.verdict == "same"
    assert max(m.exact for m in result.measured) < 1e-12
    assert max(m.own for m in result.measured) > 1e-8, "float32 must round, or nothing was run in it"


def test_a_rotary_table_kept_in_float32_is_rounding():
    result = compare(theirs("llama"), ours("llama"))
    assert result.verdict == "rounding"
    assert result.same
    assert any("called rounding" in note for note in result.notes)
    assert 1e-9 < max(m.exact for m in result.measured) < 1e-6


def test_a_real_difference_behind_rounding_is_still_found():
    model = planted("llama", lambda m: m.decoder.blocks[1].feedforward.down.weight.mul_(1.01))
    result = compare(theirs("llama"), model)
    assert (result.first, result.convention) == ("blocks.1.feedforward.out", "factor")


def test_precisions_of_one_model_are_the_same():
    model, _ = variants.lively(GPT2)
    for dtype in (torch.float32, torch.bfloat16):
        result = compare(model, copy.deepcopy(model).to(dtype))
        assert result.verdict == "same", result.text()
        assert max(m.own for m in result.measured) > 1e-8


def test_eager_and_fused_attention_are_the_same():
    fused = theirs("llama")
    for module in fused.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "sdpa"
    assert compare(theirs("llama"), fused).verdict == "same"


def test_a_refactor_with_fused_qkv_is_the_same():
    assert compare(Nano(ours("gpt2")), ours("gpt2")).verdict == "same"


def test_a_fused_qkv_laid_out_head_by_head_is_named():
    model = Nano(ours("gpt2"))
    with torch.no_grad():
        for p in (model.h[1].qkv.weight, model.h[1].qkv.bias):
            p.copy_(p.reshape(3, 3, K, *p.shape[1:]).transpose(0, 1).reshape(p.shape).clone())
    result = compare(model, ours("gpt2"))
    assert (result.first, result.convention) == ("blocks.1.attention.projected_q", "qkv_order")


def test_components_of_heads_permuted_alike_in_q_and_k_have_no_consequence():
    model = planted("gpt2", lambda m: [_permute(p) for b in m.decoder.blocks for p in (b.attention.q, b.attention.k)])
    result = compare(theirs("gpt2"), model)
    assert result.verdict == "same"
    model.decoder.blocks[1].attention.o.weight.data.mul_(2)
    result = compare(theirs("gpt2"), model)
    assert result.first == "blocks.1.attention.out"
    assert {s.name for s in result.steps if s.absolved} >= {"blocks.0.attention.projected_q", "blocks.0.attention.q"}


def _permute(linear):
    order = torch.arange(D).view(3, K).flip(1).flatten()
    linear.weight.copy_(linear.weight[order].clone())
    linear.bias.copy_(linear.bias[order].clone())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_a_compiled_model_differs_by_rounding_only():
    # not one of ours: the shape annotations that the tests execute cannot be compiled
    model = theirs("llama")
    result = compare(model, torch.compile(copy.deepcopy(model)))
    assert result.same, result.text()
    broken = copy.deepcopy(model)
    broken.model.layers[1].mlp.act_fn = nn.GELU()
    result = compare(model, torch.compile(broken))
    assert (result.first, result.convention) == ("blocks.1.feedforward.post", "activation")


def test_padding_that_is_not_read_is_found_in_the_padded_case():
    class Deaf(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner, self.config = model, model.config

        def forward(self, input_ids, attention_mask=None, position_ids=None):
            return self.inner(input_ids, position_ids=position_ids)

    result = compare(Deaf(theirs("gpt2")), ours("gpt2"))
    assert result.case == "padded on the left"
    assert (result.first, result.convention) == ("blocks.0.attention.mask", "mask")


def test_a_callable_is_compared_by_its_logits_where_nothing_else_shows():
    model = ours("gpt2")
    same = compare(lambda tokens: model(tokens), model)
    assert same.verdict == "same"
    assert all(m.exact is None for m in same.measured)

    def hidden(tokens):
        return torch.from_numpy(model(tokens).detach().numpy()[:, ::-1].copy())

    result = compare(hidden, model)
    assert result.verdict == "differ"
    assert any("position 0" in note for note in result.notes) or result.first == "logits"


@hypothesis.settings(max_examples=12 if sampled.thorough else 2, phases=[hypothesis.Phase.generate])
@hypothesis.given(variants.decoders, st.data())
def test_a_changed_weight_is_found_in_its_own_part(config, data):
    model, _ = variants.lively(config)
    other = copy.deepcopy(model)
    names = [n for n, p in other.named_parameters() if ".blocks." in n and "experts" not in n and "router" not in n]
    name = data.draw(st.sampled_from(names))
    with torch.no_grad():
        weight = other.get_parameter(name)
        weight.add_(torch.linspace(0.1, 0.3, weight.numel()).view_as(weight))
    result = compare(model, other)
    layer, part = int(name.split(".")[2]), name.split(".")[3]
    if result.verdict == "same":
        # softmax does not notice a constant on every key, nor anything of q and k where a query sees one key
        assert name.endswith("k.bias") or (config.attention.window == 1 and ".attention." in name), name
    elif config.placement == "post" and part.startswith("norm"):
        # what a norm after the sum gives is read by the next part
        after = {"norm_attention": f"blocks.{layer}.feedforward", "norm_feedforward": f"blocks.{layer + 1}.attention"}
        last = part == "norm_feedforward" or isinstance(config.feedforward, c.NoFeedForward)
        expected = (f"blocks.{layer + 1}.", "final") if last else (after[part], f"blocks.{layer}.feedforward")
        assert result.first.startswith(expected), (name, result.first)
    else:
        assert result.first.startswith(f"blocks.{layer}."), (name, result.first)
        assert part in ("norm", "norm_attention", "norm_feedforward") or f".{part}." in result.first, (
            name,
            result.first,
        )


@pytest.mark.parametrize(
    ("a", "b", "sentence"),
    [
        (
            lambda: ours("gpt2"),
            lambda: gf.build(c.replace(GPT2, vocab_size=98)),
            "vocabularies differ, 97 ids in A and 98",
        ),
        (lambda: ours("gpt2"), lambda: gf.build(c.replace(GPT2, n_layers=3)), "2 layers and B has 3"),
        (lambda: ours("gpt2"), lambda: ours("bert"), "a decoder and B for an encoder"),
        (lambda: ours("gpt2"), lambda: 3, "int cannot be called"),
        (lambda: ours("gpt2"), lambda: nn.Linear(3, 3), "failed on tokens"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(a, b, sentence):
    with pytest.raises(CannotCompareError, match=sentence):
        compare(a(), b())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": [[1, 2], [3]]}, "equal length"),
        ({"tokens": [97]}, "id 97 is outside"),
        ({"dtype": "int8"}, "'int8' is not"),
    ],
)
def test_bad_arguments_are_one_sentence(given, sentence):
    with pytest.raises(CannotCompareError, match=sentence):
        compare(ours("gpt2"), ours("gpt2"), **given)


def test_a_padded_vocabulary_is_compared_when_asked():
    wide = gf.build(c.replace(GPT2, vocab_size=104))
    state = ours("gpt2").state_dict()
    state["embed.tokens.weight"] = F.pad(state["embed.tokens.weight"], (0, 0, 0, 7))
    wide.load_state_dict(state)
    assert compare(ours("gpt2"), wide, vocab_size=97).verdict == "same"


def test_the_models_are_left_as_they_were():
    a, b = theirs("gpt2").train(), ours("gpt2", feedforward=c.Dense(d_ff=40, activation="gelu")).train()
    before = [{n: t.clone() for n, t in m.state_dict().items()} for m in (a, b)]
    usual = torch.get_default_dtype()
    gf.compare(a, b)
    assert a.training
    assert b.training
    assert torch.get_default_dtype() == usual
    for model, state in zip((a, b), before, strict=True):
        assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
