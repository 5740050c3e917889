"""ELECTRA: BERT whose embeddings may be narrower than the model, and a masked-LM head as wide as the embeddings.

Published discriminators have a classifier of replaced tokens in place of the head.
"""

from glassformer.weights.convert import Drop
from glassformer.weights.encoders.parts import (
    BASE,
    BERT,
    COMMON,
    EMBEDDINGS,
    EPS,
    GELU,
    IGNORED,
    HeadNames,
    MaskedHead,
    Pad,
    Table,
    names,
    segments,
)
from glassformer.weights.encoders.width import Width
from glassformer.weights.keys import describe

HEAD = HeadNames("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")

ELECTRA = describe(
    "electra",
    ("ElectraForMaskedLM", "ElectraModel"),
    BASE,
    (
        *(*COMMON, GELU, EPS, Pad(0), Table(), segments()),
        MaskedHead("electra.", HEAD, transform="gelu"),
        Width("embedding_size", 128, always=False),
    ),
    names(BERT, HEAD, outside={**EMBEDDINGS, "encoder.project": "embeddings_project"}),
    prefix="electra.",
    embed="embeddings.word_embeddings.weight",
    drops=(
        *IGNORED,
        *(
            Drop(f"discriminator_predictions.{x}.{y}", "the classifier of replaced tokens", notice=True)
            for x in ("dense", "dense_prediction")
            for y in ("weight", "bias")
        ),
    ),
)
