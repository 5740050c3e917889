"""MPNet: RoBERTa without segments, and a T5 bias on the scores next to the learned positions.

transformers uses 32 buckets up to a distance of 128, whatever config.json says, and the padding id 1.
"""

from glassformer.weights.encoders.parts import (
    BASE,
    COMMON,
    EMBEDDINGS,
    EPS,
    FEEDFORWARD,
    GELU,
    IGNORED,
    POOLER,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    Table,
    names,
)
from glassformer.weights.keys import describe, only

HEAD = HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
BLOCK = {
    **{f"attention.{x}": f"attention.attn.{x}" for x in "qkvo"},
    **FEEDFORWARD,
    **{"norm_attention": "attention.LayerNorm", "norm_feedforward": "output.LayerNorm"},
}
OUTSIDE = {name: theirs for name, theirs in EMBEDDINGS.items() if name != "embed.segments"}

MPNET = describe(
    "mpnet",
    ("MPNetForMaskedLM", "MPNetModel"),
    {**BASE, "score_bias": {"kind": "t5_bias", "buckets": 32, "max_distance": 128}},
    (
        *(*COMMON, GELU, EPS, Pad(1), Table(offset=2)),
        only("relative_attention_num_buckets", 32, why="which transformers ignores: it always uses 32 buckets"),
        only("pad_token_id", 1, why="but transformers counts positions with the padding id 1"),
        MaskedHead("mpnet.", HEAD, transform="gelu"),
        Pooler("mpnet."),
    ),
    names(BLOCK, HEAD, outside={**OUTSIDE, **POOLER, "encoder.score_bias": "encoder.relative_attention_bias"}),
    prefix="mpnet.",
    embed="embeddings.word_embeddings.weight",
    drops=IGNORED,
)
