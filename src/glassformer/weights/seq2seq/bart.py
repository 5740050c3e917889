"""BART and its descendants: encoder-decoders with LayerNorm, biases, learned positions and a tied head.

BART and PLBART have their norms after the branches, the others before them, with a final norm. BART, PLBART and mBART
also have a norm on the embedding. Pegasus stores its sinusoids as a table, which is read as learned positions.
"""

from typing import Any

from glassformer.weights.seq2seq.parts import bart_like

POST: dict[str, Any] = {"placement": "post", "embedding": {"norm": True}}
PRE: dict[str, Any] = {"placement": "pre"}
OFFSET = {"position": {"kind": "learned", "offset": 2}}
IDS = {"pad": 1, "bos": 0, "eos": 2, "forced_eos": 2}

BART = bart_like("bart", "Bart", {**POST, **OFFSET}, ids={**IDS, "decoder_start": 2})
PLBART = bart_like("plbart", "PLBart", {**POST, **OFFSET}, scaled=True, sizes=(768, 6, 12, 3072), ids=IDS)
MBART = bart_like("mbart", "MBart", {**PRE, **OFFSET, "embedding": {"norm": True}}, ids=IDS)
BLENDERBOT = bart_like(
    "blenderbot",
    "Blenderbot",
    {**PRE, "position": {"kind": "learned"}},
    sizes=(2560, 24, 32, 10240),
    context=128,
    ids={"pad": 0, "bos": 1, "eos": 2, "forced_eos": 2, "decoder_start": 1},
)
PEGASUS = bart_like(
    "pegasus",
    "Pegasus",
    {**PRE, "position": {"kind": "learned"}},
    ids={"pad": 0, "eos": 1, "forced_eos": 1, "decoder_start": 0},
)
FAMILIES = (BART, MBART, PEGASUS, PLBART, BLENDERBOT)
