"""gpt-oss: attention sinks, windows in every other layer, and limited gated experts packed into one tensor."""

from glassformer.config import ModelConfig, MoE
from glassformer.weights.convert import Row
from glassformer.weights.hf.common import RMS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.experts import Limit, Mixture, Packed, fixed, packed_row
from glassformer.weights.hf.layers import Windows, every
from glassformer.weights.hf.layouts import ATTENTION, OURS, PRE_NORMS, names
from glassformer.weights.keys import Constant, describe, eps, flag, only

GATE_UP, DOWN = Packed(2, interleaved=True, transposed=True), Packed(transposed=True)


def rows(config: ModelConfig) -> tuple[Row, ...]:
    E = config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 1
    return (
        *names({**PRE_NORMS, **ATTENTION, "feedforward.router": "mlp.router"}),
        Row("{p}layers.{i}.self_attn.sinks", (f"{OURS}.attention.sinks",)),
        packed_row("mlp.experts.gate_up_proj", ("gate.weight", "up.weight"), E, GATE_UP),
        packed_row("mlp.experts.gate_up_proj_bias", ("gate.bias", "up.bias"), E, GATE_UP),
        packed_row("mlp.experts.down_proj", ("down.weight",), E, DOWN),
        packed_row("mlp.experts.down_proj_bias", ("down.bias",), E, DOWN),
    )


GPT_OSS = describe(
    "gpt_oss",
    classes("GptOss"),
    {**RMS, "attention": {"sinks": True}},
    (
        *(*sizes(131072, n_kv_heads=8, d_head=64), eps(1e-5), UNTIED, rope(150000.0), Windows(128, every(2))),
        flag("attention_bias", "attention.bias", True),
        only("swiglu_alpha", 1.702, why="another slope of the gate"),
        Constant("hidden_act", "silu"),  # what transformers writes; x sigmoid(1.702 x) is computed
        Mixture(
            *(("num_local_experts", 128), ("num_experts_per_tok", 4), ("intermediate_size", 2880)),
            normalize=("", True),
            router=fixed(bias=True),
            gated={"activation": "quick_gelu", "up_offset": 1.0},
            bias=True,
        ),
        Limit("swiglu_limit", 7.0),
    ),
    rows,
)
FAMILIES = (GPT_OSS,)
