"""TransformerLens names: each means the tensor that TransformerLens records under it, or is refused with the reason."""

import pytest
import torch
import transformers as hf

import glassformer as gf
from glassformer import config as c
from glassformer.lens import decompose, patch_effects, path_effect, zero
from glassformer.lens.aliases import aliases_of
from glassformer.lens.sites import MissingSite, site_name, sites_of
from glassformer.weights import load
from tests import folders, variants
from tests.variants import lively, tokens
from tests.weights.tiny import batch, random_model, saved

BOUND = 1e-5
ROTARY = variants.decoder(position=c.Rotary())


def gap(ours, theirs):
    return (ours - theirs).abs().max().item()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A GPT-2-shaped model, ours and in TransformerLens (its own weights, nothing folded), on the same tokens."""
    from transformer_lens import TransformerBridge

    config = hf.GPT2Config(vocab_size=97, n_embd=35, n_layer=2, n_head=5, n_positions=23)
    model = random_model(hf.GPT2LMHeadModel, config)
    ours = load(saved(model, tmp_path_factory.mktemp("gpt2")))
    words = hf.PreTrainedTokenizerFast(tokenizer_object=folders.tokenizer())  # required, never used
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=words)
    ids = batch("none")[0]
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids)
    return ours, gf.trace(ours, ids), cache


GPT2 = aliases_of(gf.presets.gpt2())
HEADS_AFTER_POSITIONS = ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z")


@pytest.mark.filterwarnings("ignore")  # TransformerLens' own
@pytest.mark.parametrize("name", [n for n in GPT2 if n.startswith(("blocks.0.", "blocks.1.")) or "blocks" not in n])
def test_a_name_gives_what_transformer_lens_records_under_it(gpt2, name):
    _, seen, cache = gpt2
    if GPT2[name].refused:
        with pytest.raises(MissingSite, match="TransformerLens"):
            seen[name]
        if name in cache:  # refused because the tensor at our site is a different one
            assert gap(seen[GPT2[name].site], cache[name]) > 0.01
        return
    ours, theirs = seen[name], cache[name]
    if name.endswith(HEADS_AFTER_POSITIONS):
        ours = ours.transpose(1, 2)
    if name.endswith("scores"):
        visible = torch.ones(ours.shape[-2:], dtype=torch.bool).tril()
        assert torch.isinf(ours[..., ~visible]).all()  # TransformerLens writes a very small number instead
        ours, theirs = ours[..., visible], theirs[..., visible]
    assert gap(ours, theirs.view_as(ours)) <= BOUND
    assert gap(ours, theirs.view_as(ours).flip(0)) > 0.01  # the control: the sequences differ


def test_names_and_patterns_select_sites():
    model, ids = lively(variants.decoder())[0], tokens(2, 7)
    seen = gf.trace(model, ids, sites=["blocks.*.attn.hook_pattern", "hook_unembed"])
    assert list(seen) == ["blocks.0.attention.pattern", "blocks.1.attention.pattern", "logits"]
    assert seen["blocks.1.attn.hook_pattern"] is seen["blocks.1.attention.pattern"]
    assert "blocks.1.attn.hook_pattern" in seen
    assert torch.equal(seen.stack("blocks.*.attn.hook_pattern"), seen.stack("blocks.*.attention.pattern"))
    with pytest.raises(MissingSite, match=r"trace again with sites=\['blocks.0.attn.hook_z'\]"):
        seen["blocks.0.attn.hook_z"]
    both = gf.trace(model, ids, sites="*.hook_resid_*")
    assert list(both) == [name for name in sites_of(model) if ".resid_" in name]


def test_patching_accepts_the_names():
    model, ids = lively(variants.decoder())[0], tokens(2, 7)
    with_alias = gf.patch(model, ids, {"blocks.1.attn.hook_z": zero(heads=[2])})
    assert torch.equal(with_alias, gf.patch(model, ids, {"blocks.1.attention.heads": zero(heads=[2])}))
    other = (ids + 1) % model.config.vocab_size
    effects = patch_effects(model, ids, other, 3, 4, site="attn.hook_z")
    assert effects.sites == ("blocks.0.attention.heads", "blocks.1.attention.heads")
    paths = [
        path_effect(model, ids, other, 3, 4, (f"blocks.0.{sender}", 1), {f"blocks.1.{receiver}": [0]}).change
        for sender, receiver in (("attn.hook_z", "attn.hook_v"), ("attention.heads", "attention.v"))
    ]
    assert torch.equal(*paths)
    parts = [decompose(model, ids, at=f"blocks.0.{name}").names for name in ("hook_resid_mid", "resid_mid")]
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("config", "name", "sentence"),
    [
        (ROTARY, "blocks.0.attn.hook_q", "before the rotary rotation, and this model records q after it"),
        (ROTARY, "blocks.9.attn.hook_q", "layers are 0 to 1"),
        (variants.decoder(position=c.Learned()), "blocks.0.attn.hook_rot_k", "no rotary positions: use attn.hook_k"),
        (variants.decoder(position=c.Learned()), "hook_embed", "the token embedding alone"),
        (variants.decoder(placement="post"), "blocks.0.hook_resid_post", "use resid_post"),
        (variants.decoder(placement="post"), "ln_final.hook_out", "no final norm"),
        (
            variants.decoder(feedforward=c.NoFeedForward()),
            "blocks.*.mlp.hook_pre",
            "attention only and no feed-forward",
        ),
        (variants.decoder(), "blocks.0.attn.hook_patern", "Did you mean blocks.0.attn.hook_pattern"),
        (variants.decoder(), "ln_final.hook_normalized", "before the norm's weight and bias"),
    ],
)
def test_a_tensor_that_the_model_does_not_record_is_refused(config, name, sentence):
    model, _ = lively(config)
    with pytest.raises(MissingSite) as refused:
        gf.trace(model, tokens(1, 3), sites=name)
    assert sentence in str(refused.value)


def test_rotary_models_have_the_rotated_queries_and_the_plain_embedding():
    assert site_name(ROTARY, "blocks.0.attn.hook_rot_q") == "blocks.0.attention.q"
    assert site_name(ROTARY, "hook_embed") == "embed"
    assert aliases_of(variants.seq2seq()) == {}
