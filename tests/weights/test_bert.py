"""BERT and RoBERTa folders compute here what they compute in transformers: logits, hidden states, pooled vector."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from glassformer.config import Learned, Special, presets
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, save
from tests.weights.tiny import (
    BOUND,
    DTYPES,
    PADDING,
    B,
    T,
    batch,
    edit,
    gap,
    precision,
    random_model,
    reopen,
    round_trip,
    saved,
)

SIZES = {
    **{"vocab_size": 97, "hidden_size": 35, "intermediate_size": 53, "num_hidden_layers": 3, "num_attention_heads": 5},
    **{"max_position_embeddings": 23, "layer_norm_eps": 1e-3},
}


def bert(**changes):
    return hf.BertConfig(**{**SIZES, "type_vocab_size": 3, **changes})


def roberta(cls=hf.RobertaConfig, **changes):
    return cls(**{**SIZES, "type_vocab_size": 2, "pad_token_id": 1, **changes})


SEGMENTS = torch.randint(3, (B, T), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def compare(model, folder, side, dtype, segments=None):
    """Logits of a masked-LM; RoBERTa finds positions by the padding id itself, BERT is given them."""
    tokens, mask, positions = batch(side)
    given = {"token_type_ids": segments} if segments is not None else {}
    if not isinstance(model.config, hf.RobertaConfig | hf.XLMRobertaConfig | hf.CamembertConfig):
        given["position_ids"] = positions
    with precision(dtype):
        theirs = model(tokens, attention_mask=mask.long(), **given)
    ours = load(folder)(tokens, mask=None if side == "none" else mask, segments=segments)
    assert ours.dtype == dtype
    return gap(ours, theirs.prediction_logits if "prediction_logits" in theirs else theirs.logits, mask)


@DTYPES
@PADDING
def test_bert_logits_equal_transformers_with_segments(tmp_path, dtype, side):
    model = random_model(hf.BertForMaskedLM, bert(), dtype)
    assert compare(model, saved(model, tmp_path), side, dtype, SEGMENTS) <= BOUND[dtype]


@DTYPES
@PADDING
def test_roberta_logits_equal_transformers(tmp_path, dtype, side):
    model = random_model(hf.RobertaForMaskedLM, roberta(), dtype)
    folder = saved(model, tmp_path)
    assert load_config(folder).position == Learned(offset=2)
    assert load_config(folder).max_len == 21
    assert compare(model, folder, side, dtype) <= BOUND[dtype]


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (hf.XLMRobertaForMaskedLM, roberta(hf.XLMRobertaConfig)),
        (hf.CamembertForMaskedLM, roberta(hf.CamembertConfig)),
        (hf.RobertaForMaskedLM, roberta(hidden_act="relu", tie_word_embeddings=False)),
        (hf.BertForMaskedLM, bert(hidden_act="relu", tie_word_embeddings=False)),
        (hf.BertForMaskedLM, bert(hidden_act="gelu_new")),
    ],
    ids=["xlm-roberta", "camembert", "roberta-untied-relu", "bert-untied-relu", "bert-gelu-new"],
)
def test_variants_equal_transformers(tmp_path, cls, config):
    model = random_model(cls, config, torch.float64)
    assert compare(model, saved(model, tmp_path), "left", torch.float64) <= BOUND[torch.float64]


@torch.no_grad()
@DTYPES
def test_pretraining_model_gives_logits_and_pooled_vector_and_its_classifier_is_dropped(tmp_path, dtype):
    model = random_model(hf.BertForPreTraining, bert(), dtype)
    folder = saved(model, tmp_path)
    assert compare(model, folder, "right", dtype, SEGMENTS) <= BOUND[dtype]
    tokens, mask, _ = batch("right")
    with precision(dtype):
        theirs = model.bert(tokens, attention_mask=mask.long(), token_type_ids=SEGMENTS).pooler_output
    ours = load(folder)
    pooled = ours.pool(ours.encode(tokens, mask=mask, segments=SEGMENTS))
    assert (pooled - theirs).abs().max() <= BOUND[dtype]
    assert any("next-sentence" in note for note in ours.origin.notes)


@torch.no_grad()
@pytest.mark.parametrize("pooler", [True, False])
@pytest.mark.parametrize(("cls", "config"), [(hf.BertModel, bert), (hf.RobertaModel, roberta)], ids=["bert", "roberta"])
def test_bare_encoder_gives_hidden_states_and_has_no_head(tmp_path, cls, config, pooler):
    model = random_model(lambda c: cls(c, add_pooling_layer=pooler), config(), torch.float64)
    tokens, mask, _ = batch("right")
    with precision(torch.float64):
        theirs = model(tokens, attention_mask=mask.long())
    ours = load(saved(model, tmp_path))
    assert ours.config.head is None
    assert ours.config.pooler is pooler
    hidden = ours.encode(tokens, mask=mask)
    assert gap(hidden, theirs.last_hidden_state, mask) <= 1e-9
    if pooler:
        assert (ours.pool(hidden) - theirs.pooler_output).abs().max() <= 1e-9


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (hf.BertForMaskedLM, bert()),
        (hf.RobertaForMaskedLM, roberta()),
    ],
    ids=["bert", "roberta"],
)
def test_round_trip_gives_the_same_file_and_logits(tmp_path, cls, config):
    model = random_model(cls, config)
    round_trip(model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(batch("none")[0]).logits)


@pytest.mark.parametrize(
    ("cls", "config"), [(hf.BertModel, bert()), (hf.RobertaModel, roberta())], ids=["bert", "roberta"]
)
def test_bare_round_trip_gives_the_same_file_and_pooled_vector(tmp_path, cls, config):
    model = random_model(cls, config)
    round_trip(model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(batch("none")[0]).pooler_output)


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "config"), [(hf.BertForMaskedLM, bert), (hf.RobertaForMaskedLM, roberta)], ids=["bert", "roberta"]
)
def test_untied_head_keeps_the_bias_that_is_computed_with(tmp_path, cls, config):
    model = random_model(cls, config(tie_word_embeddings=False))
    out = save(load(saved(model, tmp_path / "in")), tmp_path / "out")
    tokens = batch("none")[0]
    hf.logging.set_verbosity_error()  # the unused twin of the bias is missing, as it should be
    again = cls.from_pretrained(out, attn_implementation="eager").eval()
    hf.logging.set_verbosity_warning()
    assert (again(tokens).logits - model(tokens).logits).abs().max() <= 1e-5


@torch.no_grad()
def test_pooler_and_head_travel_together(tmp_path):
    ours = build(presets.bert_base(d_model=24, n_layers=2, n_heads=3, d_ff=31, vocab_size=97), seed=2).eval()
    out = save(ours, tmp_path / "out")
    tokens = batch("none")[0]
    assert (reopen(out)(tokens).logits - ours(tokens)).abs().max() <= 1e-5
    pooled = hf.BertModel.from_pretrained(out)(tokens).pooler_output
    assert (pooled - ours.pool(ours.encode(tokens))).abs().max() <= 1e-5
    assert load(out).config == ours.config


def test_names_and_buffers_of_old_files_are_understood(tmp_path):
    saved(random_model(hf.BertForMaskedLM, bert()), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    want = load(tmp_path).state_dict()
    old = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t.clone()
           for n, t in tensors.items()}  # fmt: skip
    old["bert.embeddings.position_ids"] = torch.arange(23)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(old, file)
    got = load(tmp_path).state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    save_file(old | {"cls.predictions.decoder.bias": tensors["cls.predictions.bias"] + 1}, file)
    with pytest.raises(WeightsError, match="must be equal"):
        load(tmp_path)


def test_bare_file_without_model_type_could_be_either_and_is_refused(tmp_path):
    folder = saved(random_model(hf.BertModel, bert()), tmp_path)
    edit(folder, model_type=...)
    with pytest.raises(WeightsError, match="BERT or RoBERTa"):
        load(folder)


@pytest.mark.parametrize("cls", [hf.BertForMaskedLM, hf.RobertaForMaskedLM])
def test_a_head_tells_the_family_without_model_type(tmp_path, cls):
    config = bert() if cls is hf.BertForMaskedLM else roberta()
    folder = saved(random_model(cls, config), tmp_path)
    found = load_config(folder)
    edit(folder, model_type=...)
    assert load_config(folder) == found


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"num_attention_heads": 6}, "n_heads=6"),
        ({"model_type": "roberta"}, "not named like"),
        ({"model_type": "electra"}, "electra"),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused(tmp_path, changes, word):
    folder = saved(random_model(hf.BertForMaskedLM, bert()), tmp_path)
    edit(folder, **changes)
    with pytest.raises(WeightsError, match=word) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


def test_a_classifier_is_reported_not_ignored(tmp_path):
    folder = saved(random_model(hf.BertForSequenceClassification, bert()), tmp_path)
    with pytest.raises(WeightsError, match=r"classifier\.weight"):
        load(folder)


def test_positions_that_do_not_start_after_the_padding_id_are_not_written(tmp_path):
    config = presets.roberta_base(d_model=24, n_layers=1, n_heads=3, d_ff=31, vocab_size=97, special=Special(pad=0))
    with pytest.raises(WeightsError, match=r"special\.pad=0"):
        save(build(config), tmp_path / "out")


@pytest.mark.slow
def test_full_size_bert_base(tmp_path):
    model = hf.BertForPreTraining(hf.BertConfig(attn_implementation="eager")).eval()
    ours = load(saved(model, tmp_path))
    assert sum(p.numel() for p in ours.parameters()) == 110_104_890
    for dtype, length in ((torch.float32, 100), (torch.float64, 50)):
        ours, model = ours.to(dtype), model.to(dtype)
        for side in ("right", "left"):
            tokens, mask, positions = batch(side, vocab=30522, length=length)
            with torch.no_grad():
                theirs = model(tokens, attention_mask=mask.long(), position_ids=positions).prediction_logits
                assert gap(ours(tokens, mask=mask), theirs, mask) <= BOUND[dtype]
