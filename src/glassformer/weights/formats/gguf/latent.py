"""Latent attention in llama.cpp: the architecture `deepseek2`.

llama.cpp computes it as attention of one key and value head: the matrices of keys, transposed, and of values are stored
head by head.
"""

from collections.abc import Container, Mapping
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import CONCATENATED, Row, Transform
from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.architecture import (
    NAMES,
    SHARED_NAMES,
    Architecture,
    Key,
    Metadata,
    Positions,
    changed,
)
from glassformer.weights.formats.gguf.dense import LLAMA_KEYS, SILU
from glassformer.weights.formats.gguf.layouts import ByHead
from glassformer.weights.formats.gguf.mixtures import DEEPSEEK_EXPERTS, SIGMOID, SOFTMAX, absent, needs_shared
from glassformer.weights.formats.gguf.rope import default_factor, read_rope, write_rope
from glassformer.weights.hf.deepseek import RotatedLast

LITE = ((26, None), (27, None), (48, 128256))
"""Numbers of layers, and vocabularies, by which llama.cpp knows small models, whose queries are not compressed."""
LARGEST_EPS = 1e-5
"""Norms of latent vectors have the epsilon 1e-6 in transformers, and that of all norms in llama.cpp. With 1e-5, which
GLM-4.7-Flash has, logits of random models differ by at most 2e-5 of the largest one. Larger ones are refused."""
Q_RANK, MULTIPLIER, ATTENTION_FACTOR = "attention.q_lora_rank", "rope.scaling.yarn_log_multiplier", "attention_factor"
ROTATED, WIDTH = "rope.dimension_count", "attention.key_length_mla"


def _derived(data: Mapping[str, Any]) -> Metadata:
    _check(data)
    rotated, rank = data["qk_rope_head_dim"], data["kv_lora_rank"]
    out = {
        "attention.head_count_kv": 1,
        **{"attention.key_length": rank + rotated, "attention.value_length": rank},
        WIDTH: data["qk_nope_head_dim"] + rotated,
        Q_RANK: data["q_lora_rank"] or 0,
    }
    if "n_routed_experts" in data:
        return out | {"expert_gating_func": SIGMOID if data["model_type"] == "deepseek_v3" else SOFTMAX}
    dense = {"leading_dense_block_count": data["num_hidden_layers"], "expert_shared_count": 0}
    return out | dense | {"expert_feed_forward_length": data["intermediate_size"]}


def _check(data: Mapping[str, Any]) -> None:
    other, n_layers = None, data["num_hidden_layers"]
    is_lite = (n_layers, None) in LITE or (n_layers, data.get("vocab_size")) in LITE
    if data["q_lora_rank"] is not None and is_lite:
        other = f"num_hidden_layers={n_layers} with q_lora_rank={data['q_lora_rank']}"
    elif data["model_type"] == "deepseek_v2" and data.get("n_group", 1) > 1:
        other = f"n_group={data['n_group']} of {data['model_type']}"
    elif data["rms_norm_eps"] > LARGEST_EPS:
        other = f"rms_norm_eps={data['rms_norm_eps']!r} of a model with latent attention"
    elif data["rope_parameters"]["rope_type"] == "linear":
        other = "rope_type='linear' of a model with latent attention"
    if other is not None:
        raise WeightsError(
            f"{other} cannot be written as GGUF: llama.cpp computes something else; use --to hf or --to glass."
        )
    if "n_routed_experts" in data:
        needs_shared(data)


def _restored(own: Metadata, tensors: Container[str]) -> dict[str, Any]:
    for key in (WIDTH, ROTATED):
        if key not in own:
            raise WeightsError(
                f"the metadata lacks deepseek2.{key}: convert the model again with a newer llama.cpp, which stores the "
                "matrices of keys and values head by head."
            )
    rotated = own[ROTATED]
    out = {"qk_nope_head_dim": own[WIDTH] - rotated, "qk_rope_head_dim": rotated, "head_dim": rotated}
    out |= {"q_lora_rank": own.get(Q_RANK) or None, "num_key_value_heads": own["attention.head_count"]}
    if not own.get("expert_count"):
        return out
    out |= absent(own)
    if own.get("expert_group_count", 1) > 1 and _type(own) == "deepseek_v2":
        # the model scores a group by its best expert, llama.cpp by the sum of two
        out["topk_method"] = "group_limited_greedy"
    return out


def _type(own: Metadata) -> str:
    if not own.get("expert_count"):
        return "youtu"
    return "deepseek_v3" if own.get("expert_gating_func") == SIGMOID else "deepseek_v2"


def _write_rope(data: Mapping[str, Any]) -> Metadata:
    """Like `write_rope`, with the factor on the scores.

    llama.cpp multiplies the scores by (A (1 + 0.1 m ln F))^2, where F is the factor of YaRN, A its factor on sines and
    cosines, and `MULTIPLIER` is stored as 0.1 m.
    """
    out, table = write_rope(data), data["rope_parameters"]
    if table["rope_type"] != "yarn" or table["factor"] == 1:
        return out
    usual = default_factor(table["factor"])
    given = table.get(ATTENTION_FACTOR)
    factor = usual if given is None else given
    growth = 1 + table["mscale_all_dim"] * (usual - 1)
    weight = (growth / factor - 1) / (usual - 1)
    if abs(weight) < 1e-6:
        return out
    return out | {"rope.scaling.attn_factor": factor, MULTIPLIER: 0.1 * weight}


def _read_rope(own: Metadata) -> dict[str, Any]:
    data = read_rope({**own, "attention.key_length": own[ROTATED]})
    table = data["rope_parameters"]
    if table["rope_type"] != "yarn":
        return data
    usual = default_factor(table["factor"])
    weight = own.get(MULTIPLIER, 0.0) / 0.1
    factor = own.get("rope.scaling.attn_factor", 1.0) * (1 if weight else usual)
    growth = factor * (1 + weight * (usual - 1))
    table |= {ATTENTION_FACTOR: factor, "mscale_all_dim": (growth - 1) / (usual - 1) if usual > 1 else 0.0}
    if abs(factor - usual) < 1e-6:
        del table[ATTENTION_FACTOR]
    return data


def _layouts(config: ModelConfig) -> dict[str, Transform]:
    latent = config.attention.latent
    assert latent is not None
    heads = config.n_heads
    queries = RotatedLast(heads, latent.d_shared)
    keys_and_values = {"attn_k_b": ByHead(heads, transposed=True), "attn_v_b": ByHead(heads)}
    return {"attn_q": queries, "attn_q_b": queries, "attn_kv_a_mqa": CONCATENATED, **keys_and_values}


class Latent(Architecture):
    """An architecture with latent attention, whose queries may be compressed."""

    def rows(self, config: ModelConfig) -> tuple[Row, ...]:
        assert config.attention.latent is not None
        absent = "attn_q_b" if config.attention.latent.q_rank is None else "attn_q"
        return tuple(row for row in super().rows(config) if not row.theirs.startswith(f"blk.{{i}}.{absent}."))


_NAMES = changed("attn_k", "attn_v", "attn_q_norm", "attn_k_norm", of=NAMES | SHARED_NAMES)
_LENGTHS = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
DEEPSEEK2 = Latent(
    name="deepseek2",
    types=("deepseek_v3", "deepseek_v2", "youtu"),
    keys=(
        *(key for key in LLAMA_KEYS if key.gguf not in _LENGTHS),
        Key("attention.kv_lora_rank", "kv_lora_rank"),
        Key("attention.value_length_mla", "v_head_dim"),
        *(Key(key.gguf, key.hf, key.kind, required=False) for key in DEEPSEEK_EXPERTS),
    ),
    names=_NAMES
    | {"attn_q_b": "attention.q", "attn_q_a": "attention.q_down", "attn_q_a_norm": "attention.q_down_norm"}
    | {"attn_kv_a_mqa": "attention.kv_down attention.k_shared", "attn_kv_a_norm": "attention.kv_down_norm"}
    | {"attn_k_b": "attention.k", "attn_v_b": "attention.v"},
    layouts=_layouts,
    fixed={**SILU, "attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
    rope=Positions(_write_rope, _read_rope),
    derived=_derived,
    restored=_restored,
    read_type=_type,
)
