"""StarCoder 1 (gpt_bigcode: GPT-2 with one key/value head) and StarCoder 2 (rotary positions, windows)."""

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, PerHead, Row
from glassformer.weights.hf.common import DENSE, LAYER_NORM, SAME_BIAS, TIED, classes, rope, sizes
from glassformer.weights.hf.layers import Windows
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, PRE_NORMS, QKV, names
from glassformer.weights.hf.neox import GPT2_SIZES
from glassformer.weights.keys import Dropout, Tied, activation, describe, eps, flag, max_len

STARCODER2 = describe(
    "starcoder2",
    classes("Starcoder2"),
    {**LAYER_NORM, **DENSE},
    (
        *(*sizes(4096, n_kv_heads=2, act="gelu_pytorch_tanh"), eps(1e-5, "norm_epsilon"), TIED),
        flag("use_bias", "attention.bias", True),
        SAME_BIAS,
        Windows(None),
        rope(),
        Dropout("residual_dropout", "embedding_dropout", "attention_dropout"),
    ),
    names({**PRE_NORMS, **ATTENTION, "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}),
    drops=FREQUENCIES,
)

BIGCODE_NAMES = {
    **{"norm_attention": "ln_1", "norm_feedforward": "ln_2", "attention.o": "attn.c_proj"},
    **{"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"},
}


def bigcode_rows(config: ModelConfig) -> tuple[Row, ...]:
    fused = {QKV: ("attn.c_attn", PerHead(config.n_kv_heads))}
    return names({**BIGCODE_NAMES, **fused}, layers="{p}h.{i}", embed="wte", norm="ln_f", position="wpe")


BIGCODE = describe(
    "gpt_bigcode",
    classes("GPTBigCode"),
    {**LAYER_NORM, **DENSE, "position": {"kind": "learned"}},
    (
        *(*GPT2_SIZES, max_len(1024, "n_positions"), activation("activation_function", "gelu_pytorch_tanh")),
        flag("multi_query", "attention.n_kv_heads", True, 1, None, get=lambda config: config.n_kv_heads),
        flag("scale_attn_weights", "attention.scale", True, None, 1.0),
        Dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        Tied("transformer.", "lm_head.weight", "wte.weight", default=True),
    ),
    bigcode_rows,
    prefix="transformer.",
    embed="wte.weight",
    drops=(Drop("{p}h.{i}.attn.bias", "the causal mask, stored by old versions"),),
)
FAMILIES = (STARCODER2, BIGCODE)
