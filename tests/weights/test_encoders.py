"""Every encoder family: the logits of transformers, padded on either side, and the way back.

transformers counts positions by index in BERT and most descendants, also where a batch is padded on the left, and by
real tokens in RoBERTa's descendants. We count real tokens; `positions=` gives the others.
"""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from glassformer import config as c
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, save
from glassformer.weights.encoders import ENCODERS
from glassformer.weights.encoders.albert import grouping
from tests.weights.tiny import BOUND, B, T, batch, edit, gap, precision, random_model, round_trip, saved

SIZES = {
    **{"vocab_size": 97, "hidden_size": 35, "intermediate_size": 53, "num_hidden_layers": 3, "num_attention_heads": 5},
    **{"max_position_embeddings": 23, "layer_norm_eps": 1e-3},
}
EVEN = {
    **{"vocab_size": 97, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3, "num_attention_heads": 6},
    **{"max_position_embeddings": 64},
}
SEGMENTS = torch.randint(3, (B, T), generator=torch.Generator().manual_seed(5))


def modernbert(**changes):
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return hf.ModernBertConfig(**{**EVEN, **ids, "local_attention": 6, "norm_eps": 1e-3, **changes})


CASES = {
    "electra": lambda: (hf.ElectraForMaskedLM, hf.ElectraConfig(**SIZES, embedding_size=13, type_vocab_size=3)),
    "electra, one width": lambda: (
        hf.ElectraForMaskedLM,
        hf.ElectraConfig(**SIZES, embedding_size=35, type_vocab_size=3, hidden_act="relu"),
    ),
    "albert": lambda: (
        hf.AlbertForMaskedLM,
        hf.AlbertConfig(
            **{**SIZES, "num_hidden_layers": 4},
            **{"embedding_size": 13, "type_vocab_size": 3, "num_hidden_groups": 2, "inner_group_num": 2},
        ),
    ),
    "albert, one group": lambda: (
        hf.AlbertForMaskedLM,
        hf.AlbertConfig(**SIZES, embedding_size=35, type_vocab_size=3, hidden_act="gelu"),
    ),
    "mpnet": lambda: (hf.MPNetForMaskedLM, hf.MPNetConfig(**SIZES)),
    "ernie": lambda: (hf.ErnieForMaskedLM, hf.ErnieConfig(**SIZES, type_vocab_size=3)),
    "megatron-bert": lambda: (hf.MegatronBertForMaskedLM, hf.MegatronBertConfig(**SIZES, type_vocab_size=3)),
    "roberta-prelayernorm": lambda: (
        hf.RobertaPreLayerNormForMaskedLM,
        hf.RobertaPreLayerNormConfig(**SIZES, type_vocab_size=3, hidden_act="relu"),
    ),
    "xlm-roberta-xl": lambda: (
        hf.XLMRobertaXLForMaskedLM,
        hf.XLMRobertaXLConfig(**SIZES, type_vocab_size=3),
    ),
    "modernbert": lambda: (hf.ModernBertForMaskedLM, modernbert()),
    "modernbert, biases": lambda: (
        hf.ModernBertForMaskedLM,
        modernbert(
            **{"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
            **{"decoder_bias": False, "classifier_activation": "relu"},
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gte": lambda: (hf.GteForMaskedLM, hf.GteConfig(**EVEN, type_vocab_size=3)),
    "gte, no segments": lambda: (hf.GteForMaskedLM, hf.GteConfig(**EVEN, type_vocab_size=0, hidden_act="silu")),
    "jina_embeddings_v3": lambda: (
        hf.JinaEmbeddingsV3ForMaskedLM,
        hf.JinaEmbeddingsV3Config(**EVEN, type_vocab_size=3, hidden_act="relu"),
    ),
    "nomic_bert": lambda: (hf.NomicBertForMaskedLM, hf.NomicBertConfig(**EVEN, layer_norm_eps=1e-3, type_vocab_size=3)),
    "eurobert": lambda: (
        hf.EuroBertForMaskedLM,
        hf.EuroBertConfig(
            **EVEN,
            **{"num_key_value_heads": 3, "rms_norm_eps": 1e-3, "head_dim": 10, "mask_token_id": 3},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        ),
    ),
    "rembert": lambda: (
        hf.RemBertForMaskedLM,
        hf.RemBertConfig(
            **SIZES,
            **{"input_embedding_size": 13, "output_embedding_size": 17, "type_vocab_size": 3},
            **{"bos_token_id": 1, "eos_token_id": 2},
        ),
    ),
}
BY_TOKENS = {"mpnet", "roberta-prelayernorm", "xlm-roberta-xl"}
"""Model types in which transformers counts real tokens."""


def reference(case, dtype=torch.float32):
    return random_model(*CASES[case](), dtype)


@torch.no_grad()
def outputs(model, ours, side, dtype=torch.float32):
    """Logits of transformers and of ours, and the mask; each counts positions as transformers does."""
    tokens, mask, _ = batch(side)
    segments = SEGMENTS if getattr(model.config, "type_vocab_size", 0) > 1 else None
    with precision(dtype):
        given = {} if segments is None else {"token_type_ids": segments}
        theirs = model(tokens, attention_mask=mask.long(), **given).logits
    by_index = model.config.model_type not in BY_TOKENS
    positions = torch.arange(T)[None] if by_index and side == "left" else None
    return theirs, ours(tokens, mask=mask, positions=positions, segments=segments), mask


def difference(model, ours, side, dtype=torch.float32):
    theirs, logits, mask = outputs(model, ours, side, dtype)
    assert logits.dtype == dtype
    return gap(logits, theirs, mask) / max(1.0, float(theirs.abs().max()))


@pytest.mark.sample(7)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_and_the_way_back(tmp_path, case):
    model = reference(case)
    folder = saved(model, tmp_path / "in")
    ours = load(folder)
    for side in ("right", "left"):
        assert difference(model, ours, side) <= BOUND[torch.float32], side
    out = round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).logits)
    assert json.loads((out / "config.json").read_text())["model_type"] == model.config.model_type
    double = reference(case, torch.float64)
    folder = saved(double, tmp_path / "double")
    assert difference(double, load(folder), "left", torch.float64) <= BOUND[torch.float64]


# A feature of a family turned off: the error must then be at least this large.
CONTROLS = {
    "head activation": ("electra, one width", {"head__transform": "relu"}, 1e-3),
    "activation": ("albert", {"feedforward__activation": "relu"}, 1e-3),
    "embedding norm": ("albert", {"embedding__norm": False}, 1e-2),
    "score bias": ("mpnet", {"score_bias": None}, 1e-3),
    "two bases": ("modernbert", {"layer_kinds": ()}, 1e-3),
    "windows": ("modernbert", {"attention__window": 64}, 1e-3),
    "one window more": ("modernbert", {"attention__window": 5}, 1e-3),
    "first norm": ("modernbert", {"first_norm": True}, 1e-3),
    "rotary base": ("nomic_bert", {"position": c.Rotary()}, 1e-3),
    "pre-norm": ("megatron-bert", {"placement": "post"}, 1e-2),
    "groups": ("albert", {"shared_blocks": (0, 1, 2, 3, 0, 1, 2, 3)}, 1e-2),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CONTROLS)
def test_a_feature_that_is_turned_off_shows(tmp_path, name):
    case, changes, least = CONTROLS[name]
    model = reference(case)
    ours = load(saved(model, tmp_path))
    changed = build(c.replace(ours.config, **changes))
    changed.load_state_dict(ours.state_dict(), strict=False)
    assert difference(model, ours, "left") <= BOUND[torch.float32]
    assert difference(model, changed, "left") >= least


def test_every_family_is_in_the_table():
    own = {"BERT", "RoBERTa", "DistilBERT"}  # test files of their own
    assert {family.name for family in ENCODERS} - own == {make()[1].model_type for make in CASES.values()}


BASES = {
    "electra": (hf.ElectraModel, hf.ElectraConfig(**SIZES, embedding_size=13)),
    "mpnet": (hf.MPNetModel, hf.MPNetConfig(**SIZES)),
    "xlm-roberta-xl": (hf.XLMRobertaXLModel, hf.XLMRobertaXLConfig(**SIZES)),
    "rembert": (hf.RemBertModel, hf.RemBertConfig(**SIZES, input_embedding_size=13, bos_token_id=1, eos_token_id=2)),
    "modernbert": (hf.ModernBertModel, modernbert()),
    "nomic_bert": (hf.NomicBertModel, hf.NomicBertConfig(**EVEN)),
    "eurobert": (hf.EuroBertModel, hf.EuroBertConfig(**EVEN, pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "albert": (hf.AlbertModel, hf.AlbertConfig(**SIZES, embedding_size=13)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BASES)
@torch.no_grad()
def test_base_models_have_no_head_and_give_the_same_hidden_states(tmp_path, name):
    model = random_model(*BASES[name])
    ours = load(saved(model, tmp_path / "in"))
    assert ours.config.head is None
    tokens = batch("none")[0]
    theirs = model(tokens)
    hidden = ours.encode(tokens)
    assert (hidden - theirs.last_hidden_state).abs().max() <= BOUND[torch.float32]
    assert ours.config.pooler == (getattr(theirs, "pooler_output", None) is not None)
    if ours.config.pooler:
        assert (ours.pool(hidden) - theirs.pooler_output).abs().max() <= BOUND[torch.float32]
    round_trip(model, tmp_path / "in", tmp_path, lambda m: m(tokens).last_hidden_state)


def test_other_heads_are_dropped_with_a_notice(tmp_path):
    model = random_model(hf.ElectraForPreTraining, hf.ElectraConfig(**SIZES, embedding_size=13))
    ours = load(saved(model, tmp_path))
    assert ours.config.head is None
    assert "the classifier of replaced tokens" in " ".join(ours.origin.notes)


def test_the_published_keys_of_nomic_bert_are_read(tmp_path):
    model = reference("nomic_bert")
    saved(model, tmp_path)
    ours = load_config(tmp_path)
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rope_parameters")
    old = {"n_embd": 36, "n_layer": 3, "n_head": 6, "n_inner": 53, "rotary_emb_base": 1000, "n_positions": 64}
    edit(tmp_path, **dict.fromkeys([*names, "max_position_embeddings", "head_dim"], ...), **old)
    assert load_config(tmp_path) == ours
    edit(tmp_path, num_experts=8)
    with pytest.raises(WeightsError, match="a mixture of experts"):
        load_config(tmp_path)


def test_the_old_keys_of_modernbert_are_read(tmp_path):
    model = reference("modernbert")
    saved(model, tmp_path)
    ours = load_config(tmp_path)
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    edit(tmp_path, rope_parameters=..., layer_types=..., **old)
    assert load_config(tmp_path) == ours
    edit(tmp_path, local_rope_theta=500.0)
    assert load_config(tmp_path).layer_position(1) == c.Rotary(base=500.0)


def test_albert_blocks_exist_once_and_groups_can_be_written(tmp_path):
    model = reference("albert")
    ours = load(saved(model, tmp_path))
    assert ours.config.shared_blocks == (0, 1, 0, 1, 2, 3, 2, 3)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in model.parameters())
    changed = c.replace(ours.config, shared_blocks=(0, 1, 2, 3, 3, 2, 1, 0))
    other = type(ours)(changed)
    with pytest.raises(WeightsError, match="cannot be written as BERT"):  # the plainest family; ALBERT cannot either
        save(other, tmp_path / "out")
    with pytest.raises(WeightsError, match="not groups of layers as ALBERT has them"):
        grouping(changed)


def test_albert_refuses_groups_that_it_cannot_name(tmp_path):
    saved(reference("albert"), tmp_path)
    edit(tmp_path, num_hidden_groups=4)
    with pytest.raises(WeightsError, match="inner_group_num=2 and as many groups as layers"):
        load_config(tmp_path)
    edit(tmp_path, num_hidden_groups=5)
    with pytest.raises(WeightsError, match="cannot be more groups than num_hidden_layers=4"):
        load_config(tmp_path)


def test_an_untied_head_and_copies_of_a_tied_one(tmp_path):
    model = reference("electra")
    folder = saved(model, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors["electra.embeddings.word_embeddings.weight"]
    save_file({**tensors, "generator_lm_head.weight": table.clone()}, file, metadata={"format": "pt"})
    assert load(folder).config.head.tied
    save_file({**tensors, "generator_lm_head.weight": 2 * table}, file, metadata={"format": "pt"})
    assert not load(folder).config.head.tied
