"""Export models as ONNX, by their names here or from folders, and print what was verified as JSON.

`python -m tests.weights.formats.onnx.export TARGET NAME...` exports one after the other to TARGET.
"""

import json
import sys

from glassformer import config as c
from glassformer.config import presets
from glassformer.weights import load
from glassformer.weights.export import write_onnx_folder
from tests.weights.formats.gguf.models import CASES, random

SMALL = {"d_model": 24, "n_layers": 2, "n_heads": 4, "vocab_size": 31}
MODELS = {
    **{name: CASES[name] for name in ("gpt2", "llama", "llama-yarn", "mistral", "mixtral", "qwen2", "qwen3")},
    "bloom": presets.bloom_560m(**SMALL),
    "gptj": presets.gptj_6b(**SMALL, d_head=8),
    "bert": presets.bert_base(**SMALL, max_len=40),
    "experts in groups": c.replace(
        CASES["mixtral"],
        attention=c.Attention(6, bias=False, sinks=True, softcap=3.0),
        feedforward=c.MoE(
            *(6, 2, c.Gated(23, limit=2.0, up_offset=1.0)),
            router=c.Router(score="sigmoid", scale=1.5, correction=True, groups=3, top_groups=2),
            shared=c.Gated(17),
            shared_gate=True,
        ),
        placement="sandwich",
        head=c.Head(tied=False, softcap=5.0),
    ),
    "latent attention": c.replace(
        CASES["llama"],
        attention=c.Attention(6, d_head=12, d_value=8, bias=False, latent=c.Latent(kv_rank=14, d_shared=4, q_rank=18)),
        position=c.Rotary(fraction=1 / 3),
    ),
    "t5": presets.t5_small(**SMALL, n_encoder_layers=2),
    "transformer": presets.transformer_base(**SMALL, n_encoder_layers=2),
}


def main():
    target, *names = sys.argv[1:]
    results = {}
    for name in names:
        model = random(MODELS[name]) if name in MODELS else load(name)
        _, findings, notes = write_onnx_folder(model, target, overwrite=True)
        results[name] = [finding.to_dict() for finding in findings], notes
    print(json.dumps(results))


if __name__ == "__main__":
    main()
