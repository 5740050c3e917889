"""Descendants of BERT that need no part of their own: other names, norms in other places, other widths.

ERNIE is BERT. Megatron-BERT, RoBERTa-PreLayerNorm and XLM-RoBERTa-XL have their norms before each branch, not after it.
RemBERT has narrow embeddings and a wide output matrix that is not tied to them.
"""

from glassformer.weights.encoders.parts import (
    ATTENTION,
    BASE,
    BERT,
    COMMON,
    EMBEDDINGS,
    EPS,
    FEEDFORWARD,
    GELU,
    IGNORED,
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
from glassformer.weights.encoders.width import Width
from glassformer.weights.keys import describe, number, only

CLS = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
LM_HEAD = HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
REMBERT_HEAD = HeadNames("cls.predictions.dense", "cls.predictions.LayerNorm", "cls.predictions.decoder")
PRE = {**BASE, "placement": "pre"}
WITHOUT_NORM = {name: theirs for name, theirs in EMBEDDINGS.items() if name != "encoder.embed_norm"}


ERNIE = describe(
    "ernie",
    ("ErnieForMaskedLM", "ErnieModel"),
    BASE,
    (
        *(*COMMON, GELU, EPS, Pad(0), Table(), segments(), MaskedHead("ernie.", CLS), Pooler("ernie.")),
        only("use_task_id", False, why="task embeddings, which are not implemented"),
    ),
    names(BERT, CLS, outside={**EMBEDDINGS, **POOLER}),
    prefix="ernie.",
    embed=WORDS,
    drops=IGNORED,
)
MEGATRON_BERT = describe(
    "megatron-bert",
    ("MegatronBertForMaskedLM", "MegatronBertModel"),
    {**PRE, "embedding": {"norm": False}},
    (*COMMON, GELU, EPS, Pad(0), Table(), segments(), MaskedHead("bert.", CLS), Pooler("bert.")),
    names(
        {**ATTENTION, **FEEDFORWARD, "norm_attention": "attention.ln", "norm_feedforward": "ln"},
        CLS,
        outside={**WITHOUT_NORM, **POOLER, "encoder.norm": "encoder.ln"},
    ),
    prefix="bert.",
    embed=WORDS,
    drops=IGNORED,
)
ROBERTA_PRELAYERNORM = describe(
    "roberta-prelayernorm",
    ("RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormModel"),
    PRE,
    (
        *(*COMMON, GELU, EPS, Pad(1), Table(offset=None), segments()),
        *(MaskedHead("roberta_prelayernorm.", LM_HEAD, transform="gelu"), Pooler("roberta_prelayernorm.")),
    ),
    names(
        {
            **{**ATTENTION, **FEEDFORWARD},
            **{"norm_attention": "attention.LayerNorm", "norm_feedforward": "intermediate.LayerNorm"},
        },
        LM_HEAD,
        outside={**EMBEDDINGS, **POOLER, "encoder.norm": "LayerNorm"},
    ),
    prefix="roberta_prelayernorm.",
    embed=WORDS,
    drops=IGNORED,
)
XLM_ROBERTA_XL = describe(
    "xlm-roberta-xl",
    ("XLMRobertaXLForMaskedLM", "XLMRobertaXLModel"),
    {**PRE, "embedding": {"norm": False}},
    (
        *(*COMMON, GELU, number("layer_norm_eps", "norm.eps", 1e-5), Pad(1), Table(offset=None), segments(1)),
        *(MaskedHead("roberta.", LM_HEAD, transform="gelu"), Pooler("roberta.")),
    ),
    names(
        {
            **{**ATTENTION, **FEEDFORWARD},
            **{"norm_attention": "attention.self_attn_layer_norm", "norm_feedforward": "LayerNorm"},
        },
        LM_HEAD,
        outside={**WITHOUT_NORM, **POOLER, "encoder.norm": "encoder.LayerNorm"},
    ),
    prefix="roberta.",
    embed=WORDS,
    drops=IGNORED,
)
REMBERT = describe(
    "rembert",
    ("RemBertForMaskedLM", "RemBertModel"),
    BASE,
    (
        *(*COMMON, GELU, EPS, Pad(0), Table(), segments(), MaskedHead("rembert.", REMBERT_HEAD, default=False)),
        Pooler("rembert."),
        Width("input_embedding_size", 256, always=True, output="output_embedding_size", output_default=1664),
    ),
    names(
        BERT,
        REMBERT_HEAD,
        outside={**EMBEDDINGS, **POOLER, "encoder.project": "encoder.embedding_hidden_mapping_in"},
    ),
    prefix="rembert.",
    embed=WORDS,
    drops=IGNORED,
)
FAMILIES = (ERNIE, MEGATRON_BERT, ROBERTA_PRELAYERNORM, XLM_ROBERTA_XL, REMBERT)
