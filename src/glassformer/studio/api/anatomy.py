"""Anatomy view: the parts of a model with formulas, parameters and FLOPs, and the tensor at one site."""

import math
from typing import Any, assert_never

from glassformer.config import (
    Dense,
    EncoderConfig,
    FeedForward,
    Gated,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    NoPosition,
    Seq2SeqConfig,
)
from glassformer.config.model import Placement
from glassformer.sizing import flops, parameters
from glassformer.studio import schema
from glassformer.studio.api.inputs import read_inputs
from glassformer.studio.encoding import TensorResponse
from glassformer.studio.errors import LoadingError, StudioError, TooLargeError
from glassformer.studio.mathml import mathml
from glassformer.studio.models import ModelStore
from glassformer.studio.settings import LIMITS

DEFAULT_CONTEXT = 512
NORMS = {
    "layer_norm": r"\operatorname{norm}(x) = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}} \odot w + b",
    "rms_norm": r"\operatorname{norm}(x) = \frac{x}{\sqrt{\overline{x^2} + \varepsilon}} \odot w",
}
ATTENTION = (
    r"\operatorname{softmax}\left(\frac{Q K^\top}{\sqrt{d_k}} + M\right) V W_O^\top, \quad "
    r"Q = x W_Q^\top, \; K = x W_K^\top, \; V = x W_V^\top"
)
CROSS = ATTENTION.replace("K = x", "K = m").replace("V = x", "V = m")


def anatomy(models: ModelStore, request: schema.ModelRequest, torch_ready: bool = True) -> dict[str, Any]:
    """Return the parts of a model in the order of computation. Needs no torch for a glassformer folder."""
    config = models.config(request.model, torch_ready)
    if config is None:
        raise LoadingError("torch is still being imported: try again in a moment.")
    return describe(config)


def describe(config: ModelConfig) -> dict[str, Any]:
    """Return the parts of a config: paths, formulas, shapes, and FLOPs per token at full context."""
    context = config.max_len or DEFAULT_CONTEXT
    shapes = parameters(config)
    parts: list[dict[str, Any]] = []
    counted: set[str] = set()  # a part that shares its parameters with an earlier one has none of its own

    def add(path: str, title: str, site: str, letters: str, formula: str, prefixes: tuple[str, ...], more: int = 0,
            is_matmul: bool = True, layer: int = 0) -> None:  # fmt: skip
        own = {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}
        work = 2 * _matmul_weights(config.layer_feedforward(layer), own) if is_matmul else 0
        parts.append(
            {
                "path": path,
                "title": title,
                "site": site,
                "letters": letters,
                "parameters": sum(math.prod(shape) for name, shape in own.items() if name not in counted),
                "flops_per_token": work + more,
                "formula": formula,
                "mathml": mathml(formula, True),
                "params": [{"name": name, "shape": list(shape)} for name, shape in own.items()],
            }
        )
        counted.update(own)

    add("embed", "Token embedding", _first_site(config), "B,T,D", r"x_t = c\,E_{id_t}", ("embed.",), is_matmul=False)
    for stack, prefix, layers, cross in _stacks(config):
        _stack_parts(config, add, stack, prefix, layers, cross, context)
    if config.head is not None:
        tied = 2 * config.head_width * config.vocab_size if config.head.tied else 0
        add("head", "Output head", "logits", "B,T,V", r"l_t = c\, x_t W^\top + b", ("head.",), tied)
    if isinstance(config, EncoderConfig) and config.pooler:
        add("pooler", "Pooler", "final", "B,D", r"\tanh(W x_0 + b)", ("pooler.",), is_matmul=False)
    letters = {"D": config.d_model, "H": config.n_heads, "G": config.n_kv_heads, "K": config.d_head,
               "U": config.d_value, "F": config.d_ff, "L": config.n_layers, "V": config.vocab_size}  # fmt: skip
    totals = {
        "parameters": sum(map(math.prod, shapes.values())),
        "flops_per_token": sum(part["flops_per_token"] for part in parts),
        "forward_flops": flops(config, 1, context).total_forward,
        "context": context,
    }
    return {"parts": parts, "totals": totals, "letters": letters}


def _first_site(config: ModelConfig) -> str:
    return "decoder.embed" if isinstance(config, Seq2SeqConfig) else "embed"


def _stacks(config: ModelConfig) -> list[tuple[str, str, int, bool]]:
    """Return (stack name in parameter names, prefix of site names, layers, has cross-attention) of each stack."""
    if isinstance(config, Seq2SeqConfig):
        return [("encoder", "encoder.", config.n_encoder_layers, False), ("decoder", "decoder.", config.n_layers, True)]
    return [("encoder" if isinstance(config, EncoderConfig) else "decoder", "", config.n_layers, False)]


def _stack_parts(
    config: ModelConfig, add: Any, stack: str, prefix: str, layers: int, cross: bool, context: int
) -> None:
    """Add the position embedding, the blocks and the final norm of one stack."""
    norm = NORMS["layer_norm" if isinstance(config.norm, LayerNorm) else "rms_norm"]
    scores = 2 * config.n_heads * (config.d_head + config.d_value) * context
    if not isinstance(config.position, NoPosition):
        scheme = config.position
        title = scheme.title[0].upper() + scheme.title[1:]
        add(f"{prefix}position", title, f"{prefix}embed", "B,T,D", scheme.formula, (f"{stack}.position.",),
            is_matmul=False)  # fmt: skip
    if config.score_bias is not None:
        add(f"{prefix}score_bias", "Score bias", f"{prefix}blocks.0.attention.scores", "B,H,T,S",
            config.score_bias.formula, (f"{stack}.score_bias.",), is_matmul=False)  # fmt: skip
    if config.embedding.norm:
        add(f"{prefix}embed_norm", "Embedding norm", f"{prefix}embed", "B,T,D", norm, (f"{stack}.embed_norm.",))
    if config.embedding.width is not None:
        add(f"{prefix}project", "Projection", f"{prefix}embed", "B,T,D", r"W x + b", (f"{stack}.project.",))
    for layer in range(layers):
        site, own = f"{prefix}blocks.{layer}.", f"{stack}.blocks.{config.block_of_layer(layer)}."
        branches = [("attention", "Attention", ATTENTION, scores)]
        branches += [("cross", "Cross-attention", CROSS, scores)] if cross else []
        feedforward = config.layer_feedforward(layer)
        if not isinstance(feedforward, NoFeedForward):
            branches.append(("feedforward", "Feed-forward", feed_formula(feedforward), 0))
        if config.placement == "parallel":
            add(f"{site}norm", "Norm", f"{site}attention.normed", "B,T,D", norm, (f"{own}norm.",))
        for name, title, formula, more in branches:
            before, after = _norms(config.placement, name, name == branches[-1][0])
            if before and (name != "attention" or config.has_attention_norm(layer)):
                add(f"{site}{before[0]}", "Norm", f"{site}{before[1]}", "B,T,D", norm, (f"{own}{before[0]}.",))
            add(f"{site}{name}", title, f"{site}{name}.out", "B,T,D", formula, (f"{own}{name}.",), more, layer=layer)
            if after:
                add(f"{site}{after[0]}", "Norm", f"{site}{after[1]}", "B,T,D", norm, (f"{own}{after[0]}.",))
    if config.placement != "post":
        add(f"{prefix}norm", "Final norm", f"{prefix}final", "B,T,D", norm, (f"{stack}.norm.",))


def _norms(placement: Placement, branch: str, last: bool) -> tuple[tuple[str, str] | None, tuple[str, str] | None]:
    """Return parameter name and site of the norms before and after a branch of a block; None where there is none."""
    own, before = f"norm_{branch}", f"{branch}.normed"
    match placement:
        case "pre" | "parallel_two":
            return (own, before), None
        case "post":
            return None, (own, "resid_post" if last else "resid_mid")
        case "after":
            return None, (own, f"{branch}.out_normed")
        case "sandwich":
            return (own, before), (f"{own}_out", f"{branch}.out_normed")
        case "parallel":
            return None, None
        case _:
            assert_never(placement)


def _matmul_weights(feedforward: FeedForward, own: dict[str, tuple[int, ...]]) -> int:
    """Return the number of weights in the matmuls of one token; of experts, only the active ones count."""
    matrices = {name: math.prod(shape) for name, shape in own.items() if len(shape) == 2 and "norm" not in name}
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    active = experts * feedforward.n_active // feedforward.n_experts if isinstance(feedforward, MoE) else experts
    return sum(matrices.values()) - experts + active


def feed_formula(feedforward: FeedForward) -> str:
    """Return the formula of a feed-forward layer."""
    match feedforward:
        case Dense():
            return r"\operatorname{act}(x W_{up}^\top + b)\, W_{down}^\top + b"
        case Gated():
            return r"\left(\operatorname{act}(x W_{gate}^\top) \odot x W_{up}^\top\right) W_{down}^\top"
        case MoE():
            router = r"p = \operatorname{softmax}(x W_r^\top)"
            return r"\sum_{e \in \operatorname{top}_A} p_e \operatorname{expert}_e(x), \quad " + router
        case NoFeedForward():
            return ""
        case _:
            assert_never(feedforward)


def tensor(models: ModelStore, request: schema.TensorRequest, limit: int = LIMITS.tensor_bytes) -> TensorResponse:
    """Return the tensor at one site of one forward pass as float16, without the batch axis; one head if given."""
    from glassformer.lens.sites import sites_of
    from glassformer.lens.trace import trace

    inputs = read_inputs(models, request)
    run = trace(inputs.model, inputs.tokens, sites=[request.site], **inputs.trace_arguments)
    names = run.sites
    if len(names) != 1:
        raise StudioError(f"{request.site} matches {len(names)} sites: name one of them.")
    (name,) = names
    value, letters = run[name][0], sites_of(inputs.model)[name].letters.removeprefix("B,")
    if request.head is not None:
        if value.dim() != 3:
            raise StudioError(f"{name} has no head axis, its shape is {tuple(value.shape)}: leave head out.")
        if request.head >= value.shape[0]:
            raise StudioError(f"head {request.head} does not exist at {name}: use 0 to {value.shape[0] - 1}.")
        value, letters = value[request.head], letters.split(",", 1)[1]
    if 2 * value.numel() > limit:
        remedy = "select one head" if value.dim() == 3 else "use fewer tokens"
        raise TooLargeError(f"{name} has {2 * value.numel():,} bytes here, more than {limit:,}: {remedy}.")
    meta = {"site": name, "letters": letters, "pieces": inputs.token_texts}
    return TensorResponse({"value": (value, "float16" if value.is_floating_point() else "int32")}, meta)
