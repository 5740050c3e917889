"""Marian (opus-mt) and M2M-100 (NLLB): BART without a norm on the embedding and with sinusoidal positions.

Neither stores its positions. Marian is post-norm with the sinusoids of tensor2tensor; M2M-100 is pre-norm with those of
fairseq, whose first position is 2.
"""

from typing import Any

from glassformer.weights.convert import Drop
from glassformer.weights.keys import SameAs, only
from glassformer.weights.seq2seq.parts import bart_like

STORED = tuple(
    Drop(f"{{p}}{stack}.embed_positions.{name}", "sinusoids, stored by old versions")
    for stack in ("encoder", "decoder")
    for name in ("weight", "weights")
)
HALVES: dict[str, Any] = {"position": {"kind": "sinusoidal", "layout": "halves"}}
FAIRSEQ: dict[str, Any] = {"kind": "sinusoidal", "layout": "halves", "spacing": "inclusive", "offset": 2}

MARIAN = bart_like(
    "marian",
    "MarianMTModel",
    {"placement": "post", **HALVES},
    SameAs("decoder_vocab_size", "vocab_size", "a vocabulary of the decoder's own, which is not implemented"),
    only("share_encoder_decoder_embeddings", True, why="two token tables, which are not implemented"),
    ids={"pad": 58100, "eos": 0, "forced_eos": 0, "decoder_start": 58100},
    drops=STORED,
)
M2M_100 = bart_like(
    "m2m_100",
    "M2M100",
    {"placement": "pre", "position": FAIRSEQ},
    only("pad_token_id", 1, why="which moves the first position: it is one after the padding id, and 2 here"),
    scaled=True,
    act="relu",
    ids={"pad": 1, "bos": 0, "eos": 2, "decoder_start": 2},
    drops=STORED,
    bias=False,
)
FAMILIES = (MARIAN, M2M_100)
