"""BERT and its descendants with learned positions and a masked-LM head.

BERT, ERNIE and RoBERTa have their norms after each branch. RoBERTa's positions start after the padding id (at row 2 if
that id is 1), and its head always uses the exact gelu. Without a head the tensors of BERT and RoBERTa have the same
names, so `model_type` decides. DistilBERT has no segments and no pooler, its own tensor names, and eps of the norms
fixed at 1e-12.

Megatron-BERT, RoBERTa-PreLayerNorm and XLM-RoBERTa-XL have their norms before each branch. RemBERT has narrow
embeddings and a wide output matrix that is not tied to them. ELECTRA's embeddings may be narrower than the model, and
its head is as wide as they are; published discriminators have a classifier of replaced tokens in place of the head.
MPNet has no segments, and a T5 bias on the scores next to the learned positions. transformers uses 32 buckets up to a
distance of 128, whatever config.json says, and the padding id 1.
"""

import re
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop
from glassformer.weights.encoders.parts import (
    ATTENTION,
    BASE,
    CLS,
    FEEDFORWARD,
    IGNORED,
    LM_HEAD,
    POSITION_IDS,
    WORDS,
    HeadNames,
    MaskedHead,
    Pad,
    Table,
    Width,
    bert_like,
    names,
)
from glassformer.weights.family import Source
from glassformer.weights.keys import INIT, Dropout, Values, activation, describe, integer, only

TYPICAL_NAMES = (WORDS, "embeddings.position_embeddings.weight")
PRE = {**BASE, "placement": "pre"}
PROJECT = {"encoder.project": "encoder.embedding_hidden_mapping_in"}


def update_name(name: str) -> str:
    """Return today's name of a tensor: checkpoints from before 2019 call weight and bias of a norm gamma and beta."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_GREEK[m[1]]}", name)


_GREEK = {"gamma": "weight", "beta": "bias"}
KNOWN: dict[str, Any] = {
    "keys": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size"),
    "typical_names": TYPICAL_NAMES,
    "update_name": update_name,
}
"""How BERT and RoBERTa are known without a `model_type`."""


class Sinusoids:
    """DistilBERT's sinusoids. They are stored as an ordinary table, from which transformers reads them too."""

    def read(self, source: Source, values: Values) -> None:
        if source.flag("sinusoidal_pos_embds", False):
            source.notes.append("sinusoidal positions are read from the table stored in the weights.")

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["sinusoidal_pos_embds"] = False


BERT = bert_like(
    *("bert", "Bert", "bert.", CLS),
    drops=(
        POSITION_IDS,
        Drop("cls.seq_relationship.weight", "the next-sentence classifier is not part of the model", notice=True),
        Drop("cls.seq_relationship.bias", "the next-sentence classifier is not part of the model", notice=True),
    ),
    name="BERT",
    excluded_prefixes=("roberta.", "lm_head."),
    **KNOWN,
)
ROBERTA = bert_like(
    *("roberta", "Roberta", "roberta.", LM_HEAD),
    offset=None,
    transform="gelu",
    drops=(POSITION_IDS,),
    aliases=("xlm-roberta", "camembert"),
    name="RoBERTa",
    excluded_prefixes=("bert.", "cls."),
    **KNOWN,
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
            **{f"attention.{x}": f"attention.{x}_lin" for x in "qkv"},
            **{"attention.o": "attention.out_lin", "norm_attention": "sa_layer_norm"},
            **{"feedforward.up": "ffn.lin1", "feedforward.down": "ffn.lin2", "norm_feedforward": "output_layer_norm"},
        },
        DISTIL_HEAD,
        layers="{p}transformer.layer.{i}",
    ),
    prefix="distilbert.",
    embed=WORDS,
    drops=(POSITION_IDS,),
    name="DistilBERT",
    keys=("dim", "n_layers", "n_heads", "hidden_dim"),
    typical_names=TYPICAL_NAMES,
)
ERNIE = bert_like(
    *("ernie", "Ernie", "ernie.", CLS),
    only("use_task_id", False, why="task embeddings, which are not implemented"),
)
MEGATRON_BERT = bert_like(
    *("megatron-bert", "MegatronBert", "bert.", CLS),
    base={**PRE, "embedding": {"norm": False}},
    block={**ATTENTION, **FEEDFORWARD, "norm_attention": "attention.ln", "norm_feedforward": "ln"},
    outside={"encoder.norm": "encoder.ln"},
)
ROBERTA_PRELAYERNORM = bert_like(
    *("roberta-prelayernorm", "RobertaPreLayerNorm", "roberta_prelayernorm.", LM_HEAD),
    base=PRE,
    block={
        **{**ATTENTION, **FEEDFORWARD},
        **{"norm_attention": "attention.LayerNorm", "norm_feedforward": "intermediate.LayerNorm"},
    },
    outside={"encoder.norm": "LayerNorm"},
    offset=None,
    transform="gelu",
)
XLM_ROBERTA_XL = bert_like(
    *("xlm-roberta-xl", "XLMRobertaXL", "roberta.", LM_HEAD),
    base={**PRE, "embedding": {"norm": False}},
    block={
        **{**ATTENTION, **FEEDFORWARD},
        **{"norm_attention": "attention.self_attn_layer_norm", "norm_feedforward": "LayerNorm"},
    },
    outside={"encoder.norm": "encoder.LayerNorm"},
    offset=None,
    norm_eps=1e-5,
    n_segments=1,
    transform="gelu",
)
REMBERT = bert_like(
    *("rembert", "RemBert", "rembert."),
    HeadNames("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder"),
    Width("input_embedding_size", 256, always=True, output="output_embedding_size", output_default=1664),
    outside=PROJECT,
    tied=False,
)
ELECTRA = bert_like(
    *("electra", "Electra", "electra."),
    HeadNames("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    Width("embedding_size", 128, always=False),
    outside={"encoder.project": "embeddings_project"},
    transform="gelu",
    pooler="",
    drops=(
        *IGNORED,
        *(
            Drop(f"discriminator_predictions.{x}.{y}", "the classifier of replaced tokens", notice=True)
            for x in ("dense", "dense_prediction")
            for y in ("weight", "bias")
        ),
    ),
)
MPNET = bert_like(
    *("mpnet", "MPNet", "mpnet.", LM_HEAD),
    only("relative_attention_num_buckets", 32, why="which transformers ignores: it always uses 32 buckets"),
    only("pad_token_id", 1, why="but transformers counts positions with the padding id 1"),
    base={**BASE, "score_bias": {"kind": "t5_bias", "buckets": 32, "max_distance": 128}},
    block={
        **{f"attention.{x}": f"attention.attn.{x}" for x in "qkvo"},
        **{**FEEDFORWARD, "norm_attention": "attention.LayerNorm", "norm_feedforward": "output.LayerNorm"},
    },
    outside={"encoder.score_bias": "encoder.relative_attention_bias"},
    pad=1,
    offset=2,
    n_segments=0,
    transform="gelu",
)
FAMILIES = (
    BERT,
    ROBERTA,
    DISTILBERT,
    ELECTRA,
    MPNET,
    ERNIE,
    MEGATRON_BERT,
    ROBERTA_PRELAYERNORM,
    XLM_ROBERTA_XL,
    REMBERT,
)
