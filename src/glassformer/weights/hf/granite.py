"""Granite: Llama with factors on embedding, scores, branches and logits; also with experts."""

from glassformer.config import ModelConfig, MoE
from glassformer.weights.convert import CONCATENATED, Row
from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, MLP_BIAS, RMS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.experts import Mixture, Packed, packed_row, shared_width
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, LLAMA, PRE_NORMS, Block, names
from glassformer.weights.keys import describe, eps, number

FACTORS = (
    number("embedding_multiplier", "embedding.scale", 1.0),
    number("residual_multiplier", "residual_scale", 1.0),
    # the factor on q.k itself; it is 1 if it is absent, not 1/sqrt(K)
    number("attention_multiplier", "attention.scale", 1.0, get=lambda config: config.scale),
    number("logits_scaling", "head.scale", 1.0, decode=lambda given: 1 / given, encode=lambda scale: 1 / scale),
)
GRANITE = describe(
    "granite",
    classes("Granite"),
    {**RMS, **GATED},
    (*sizes(2048), ATTENTION_BIAS, MLP_BIAS, eps(1e-6), UNTIED, rope(), *FACTORS),
    names(LLAMA),
    drops=FREQUENCIES,
)


def packed(config: ModelConfig) -> tuple[Row, ...]:
    """Return the rows of Granite with experts: all experts of a layer in one tensor, gate before up."""
    E = config.feedforward.n_experts if isinstance(config.feedforward, MoE) else 1
    block = {**PRE_NORMS, **ATTENTION, "feedforward.router": "block_sparse_moe.router.layer", **SHARED}
    return (
        *names(block),
        packed_row("block_sparse_moe.input_linear.weight", ("gate.weight", "up.weight"), E, Packed(2)),
        packed_row("block_sparse_moe.output_linear.weight", ("down.weight",), E, Packed()),
    )


SHARED: Block = {
    "feedforward.shared.gate feedforward.shared.up": ("shared_mlp.input_linear", CONCATENATED),
    "feedforward.shared.down": "shared_mlp.output_linear",
}
EXPERTS = (("num_local_experts", 8), ("num_experts_per_tok", 2), ("intermediate_size", 11008))
MOE_KEYS = (*sizes(2048), ATTENTION_BIAS, eps(1e-6), UNTIED, rope(), *FACTORS)


GRANITE_MOE = describe("granitemoe", classes("GraniteMoe"), RMS, (*MOE_KEYS, Mixture(*EXPERTS)), packed)
GRANITE_MOE_SHARED = describe(
    "granitemoeshared",
    classes("GraniteMoeShared"),
    RMS,
    (
        *MOE_KEYS,
        Mixture(*EXPERTS, shared=shared_width("shared_intermediate_size", 0)),
    ),
    packed,
)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED)
