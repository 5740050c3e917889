"""mT5: T5 v1.1, whose output is never divided by sqrt(D), whatever the head is tied to."""

import dataclasses
from typing import Any

from glassformer.config import EncoderConfig, ModelConfig, Seq2SeqConfig
from glassformer.weights import t5
from glassformer.weights.family import Source

DEFAULTS = {"feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 32, "num_layers": 8, "num_heads": 6}


def read(source: Source) -> ModelConfig:
    for name, value in DEFAULTS.items():
        source.data.setdefault(name, value)
    source.data["scale_decoder_outputs"] = False
    return t5.read(source)


def write(config: ModelConfig) -> dict[str, Any]:
    data = t5.write(config)
    data.pop("scale_decoder_outputs")
    cls = "MT5ForConditionalGeneration" if isinstance(config, Seq2SeqConfig) else "MT5EncoderModel"
    return {**data, "model_type": "mt5", "architectures": [cls]}


MT5 = dataclasses.replace(
    t5.T5,
    name="mt5",
    types=("mt5",),
    keys=("d_model", "d_kv", "d_ff"),
    read=read,
    write=write,
    needs_type=True,
    kinds=(Seq2SeqConfig, EncoderConfig),
)
