"""Heads view: attention patterns, head scores, and ablation of heads."""

from typing import Any

from glassformer.studio import schema
from glassformer.studio.api.inputs import ModelInputs, read_inputs, top_tokens
from glassformer.studio.encoding import TensorResponse
from glassformer.studio.errors import StudioError, TooLargeError
from glassformer.studio.models import ModelStore
from glassformer.studio.settings import LIMITS


def patterns(models: ModelStore, request: schema.Patterns, limit: int = LIMITS.pattern_bytes) -> TensorResponse:
    """Return the attention patterns of all heads, or of one layer, as (L,H,T,S) with one byte per weight."""
    from glassformer.lens.sites import stacks_of
    from glassformer.lens.trace import trace

    inputs = read_inputs(models, request)
    stack, kind = _where(inputs, request.where)
    layers = stacks_of(inputs.model.config)[stack]
    if request.layer is not None and request.layer >= layers:
        raise StudioError(f"layer {request.layer} does not exist in this model: its layers are 0 to {layers - 1}.")
    T = len(inputs.ids if inputs.target is None or stack == "encoder." else inputs.target)
    S = len(inputs.ids) if kind == "cross" else T
    size = (1 if request.layer is not None else layers) * inputs.model.config.n_heads * T * S
    if size > limit:
        raise TooLargeError(
            f"these patterns have {size:,} bytes, more than {limit:,}: select one layer, or use fewer tokens."
        )
    site = f"{stack}blocks.{'*' if request.layer is None else request.layer}.{kind}.pattern"
    maps = trace(inputs.model, inputs.tokens, sites=site, **inputs.trace_arguments).stack(site)[:, 0]
    source = [inputs.loaded.token_text(i) for i in inputs.ids]
    queries = source if stack == "encoder." else inputs.token_texts
    meta = {"pieces": queries, "keys": source if kind == "cross" else queries, "layer": request.layer, "site": site}
    return TensorResponse({"pattern": (maps, "uint8")}, meta, {"pattern": (0.0, 1.0)})


def _where(inputs: ModelInputs, where: str) -> tuple[str, str]:
    """Return (prefix of the stack's sites, kind of attention)."""
    if inputs.target is None:
        if where != "self":
            raise StudioError(f"where={where!r} needs an encoder-decoder, which this model is not: use self.")
        return "", "attention"
    return {"self": ("decoder.", "attention"), "cross": ("decoder.", "cross")}.get(where, ("encoder.", "attention"))


def scores(models: ModelStore, request: schema.HeadScores) -> dict[str, Any]:
    """Return the scores of every head, measured on repeated random tokens and on its weights; null if undefined."""
    from glassformer.lens.heads import head_table

    loaded = models.get(request.model)

    def compute() -> dict[str, Any]:
        table = head_table(loaded.model, seed=request.seed)
        rows = [{"layer": row.layer, "head": row.head, "scores": row.scores} for row in table.rows]
        return {"rows": rows, "names": list(table.names), "notes": table.notes}

    scores: dict[str, Any] = loaded.cached(("heads", request.seed), compute)
    return scores


def ablate(models: ModelStore, request: schema.Ablate) -> dict[str, Any]:
    """Return the next-token distribution before and after heads are set to zero or to their mean over the text."""
    from glassformer.lens.patch import mean, patch, zero
    from glassformer.lens.sites import output_stack
    from glassformer.lens.trace import trace

    inputs = read_inputs(models, request)
    config = inputs.model.config
    by_layer: dict[int, list[int]] = {}
    for layer, head in request.heads:
        if layer >= config.n_layers or head >= config.n_heads:
            raise StudioError(
                f"head {layer}.{head} does not exist: layers are 0 to {config.n_layers - 1}, heads 0 to "
                f"{config.n_heads - 1}."
            )
        by_layer.setdefault(layer, []).append(head)
    ablation = zero if request.mode == "zero" else mean
    stack = output_stack(config)
    edits = {f"{stack}blocks.{layer}.attention.heads": ablation(heads=heads) for layer, heads in by_layer.items()}
    before = trace(inputs.model, inputs.tokens, sites=(), **inputs.trace_arguments).logits[0, -1]
    after = patch(inputs.model, inputs.tokens, edits, **inputs.trace_arguments)[0, -1]
    old, new = (logits.double().log_softmax(-1) for logits in (before, after))
    return {
        "before": top_tokens(inputs.loaded, before, request.top),
        "after": top_tokens(inputs.loaded, after, request.top),
        "kl": float((old.exp() * (old - new)).sum()),
    }
