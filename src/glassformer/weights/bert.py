"""BERT, RoBERTa and DistilBERT: post-norm encoders with learned positions and a masked-LM head.

BERT and RoBERTa differ in the names of the head, in the positions and in the activation of the head. RoBERTa's
positions start after the padding id (at row 2 if that id is 1), and its head always uses the exact gelu. Without a head
the tensors have the same names, so `model_type` decides. DistilBERT has no segments and no pooler, its own tensor
names, and eps of the norms fixed at 1e-12.
"""

import re
from typing import Any

from glassformer.config import Learned, ModelConfig
from glassformer.weights.convert import Drop
from glassformer.weights.encoders.bert import CLS, LM_HEAD
from glassformer.weights.encoders.parts import (
    BASE,
    COMMON,
    EMBEDDINGS,
    EPS,
    GELU,
    POOLER,
    WORDS,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    Table,
    names,
    segments,
)
from glassformer.weights.encoders.parts import BERT as BLOCK
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.keys import INIT, Dropout, Values, activation, describe, integer

POSITION_IDS = Drop("{p}embeddings.position_ids", "0, 1, 2, ..., stored by old versions")
DROPS = (
    POSITION_IDS,
    Drop("cls.seq_relationship.weight", "the next-sentence classifier is not part of the model", notice=True),
    Drop("cls.seq_relationship.bias", "the next-sentence classifier is not part of the model", notice=True),
)
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size")
TYPICAL_NAMES = (WORDS, "embeddings.position_embeddings.weight")


def update_name(name: str) -> str:
    """Return today's name of a tensor: checkpoints from before 2019 call weight and bias of a norm gamma and beta."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_GREEK[m[1]]}", name)


_GREEK = {"gamma": "weight", "beta": "bias"}


class PadBeforePositions:
    """RoBERTa's padding id, which is written as the one before the first row of positions."""

    def read(self, source: Source, values: Values) -> None:
        source.data.setdefault("pad_token_id", 1)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        assert isinstance(config.position, Learned)
        offset, pad = config.position.offset, config.special.pad
        if pad not in (None, offset - 1):
            raise WeightsError(
                f"special.pad={pad} cannot be written with position.offset={offset}: RoBERTa's positions start at the "
                f"padding id plus 1, so set special.pad={offset - 1}, or {SAVE_AS_GLASS}."
            )
        data["pad_token_id"] = offset - 1


class Sinusoids:
    """DistilBERT's sinusoids. They are stored as an ordinary table, from which transformers reads them too."""

    def read(self, source: Source, values: Values) -> None:
        if source.flag("sinusoidal_pos_embds", False):
            source.notes.append("sinusoidal positions are read from the table stored in the weights.")

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["sinusoidal_pos_embds"] = False


BERT = describe(
    "bert",
    ("BertForMaskedLM", "BertModel"),
    BASE,
    (*COMMON, GELU, EPS, Pad(0), Table(), segments(), MaskedHead("bert.", CLS), Pooler("bert.")),
    names(BLOCK, CLS, outside={**EMBEDDINGS, **POOLER}),
    prefix="bert.",
    embed=WORDS,
    drops=DROPS,
    name="BERT",
    keys=KEYS,
    typical_names=TYPICAL_NAMES,
    excluded_prefixes=("roberta.", "lm_head."),
    update_name=update_name,
)
ROBERTA = describe(
    "roberta",
    ("RobertaForMaskedLM", "RobertaModel"),
    BASE,
    (
        *(*COMMON, GELU, EPS, PadBeforePositions(), Table(offset=None), segments()),
        *(MaskedHead("roberta.", LM_HEAD, transform="gelu"), Pooler("roberta.")),
    ),
    names(BLOCK, LM_HEAD, outside={**EMBEDDINGS, **POOLER}),
    prefix="roberta.",
    embed=WORDS,
    drops=(POSITION_IDS,),
    aliases=("xlm-roberta", "camembert"),
    name="RoBERTa",
    keys=KEYS,
    typical_names=TYPICAL_NAMES,
    excluded_prefixes=("bert.", "cls."),
    update_name=update_name,
)
DISTIL_HEAD = HeadNames("vocab_transform", "vocab_layer_norm", "vocab_projector")
DISTILBERT = describe(
    "distilbert",
    ("DistilBertForMaskedLM", "DistilBertModel"),
    {**BASE, "norm": {"kind": "layer_norm", "eps": 1e-12}},
    (
        integer("vocab_size", "vocab_size"),
        integer("dim", "d_model"),
        integer("n_layers", "n_layers"),
        integer("n_heads", "attention.n_heads"),
        integer("hidden_dim", "feedforward.d_ff"),
        *(activation("activation", "gelu"), Dropout("dropout", "attention_dropout"), INIT),
        *(Pad(0), Table(), Sinusoids(), MaskedHead("distilbert.", DISTIL_HEAD)),
    ),
    names(
        {
            **{
                f"attention.{x}": f"attention.{theirs}_lin"
                for x, theirs in zip("qkvo", ("q", "k", "v", "out"), strict=True)
            },
            **{"norm_attention": "sa_layer_norm", "norm_feedforward": "output_layer_norm"},
            **{"feedforward.up": "ffn.lin1", "feedforward.down": "ffn.lin2"},
        },
        DISTIL_HEAD,
        layers="{p}transformer.layer.{i}",
        outside={name: theirs for name, theirs in EMBEDDINGS.items() if name != "embed.segments"},
    ),
    prefix="distilbert.",
    embed=WORDS,
    drops=(POSITION_IDS,),
    name="DistilBERT",
    keys=("dim", "n_layers", "n_heads", "hidden_dim"),
    typical_names=TYPICAL_NAMES,
)
