"""GPT-2 as a GGUF file: llama.cpp's names, its (out, in) matrices, and an artificial vocabulary."""

from pathlib import Path
from typing import Any

import numpy as np

from glassformer.bench.peers.base import library

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_OUTER = {"wte.weight": "token_embd.weight", "wpe.weight": "position_embd.weight"}
_INNER = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def name_of(name: str) -> str:
    """llama.cpp's name of one of GPT-2's tensors."""
    if name in _OUTER:
        return _OUTER[name]
    if name.startswith("ln_f."):
        return f"output_norm.{name.removeprefix('ln_f.')}"
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_INNER[part]}.{kind}"


def write(path: Path, cfg: dict[str, Any], tensors: dict[str, Any], precision: str) -> None:
    """Write the file at `path`. Matrices in the precision, everything else (norms, biases, positions) in float32.

    The head is not written: llama.cpp then reads the token table, which GPT-2 shares with it.
    """
    gguf = library("gguf")
    kind = gguf.GGMLQuantizationType[KINDS[precision]]
    writer = gguf.GGUFWriter(str(path), "gpt2")
    writer.add_name("bench")
    writer.add_block_count(cfg["n_layer"])
    writer.add_context_length(cfg["n_positions"])
    writer.add_embedding_length(cfg["n_embd"])
    writer.add_feed_forward_length(cfg["n_inner"])
    writer.add_head_count(cfg["n_head"])
    writer.add_layer_norm_eps(cfg["layer_norm_epsilon"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    size = cfg["vocab_size"]
    writer.add_token_list([f"t{i}" for i in range(size)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    for name, value in tensors.items():
        theirs = name_of(name)
        array = np.ascontiguousarray(value.T if name.endswith(_TRANSPOSED) else value, dtype=np.float32)
        if kind == gguf.GGMLQuantizationType.F32 or array.ndim != 2 or name == "wpe.weight":
            writer.add_tensor(theirs, array)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
