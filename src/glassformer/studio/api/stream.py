"""Stream view: logit lens, logit attribution, norms and rank of the residual stream, activation patching."""

from typing import Any

from glassformer.studio import schema
from glassformer.studio.api.inputs import ModelInputs, read_inputs
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.models import LoadedModel, ModelStore


def lens(models: ModelStore, request: schema.Lens) -> dict[str, Any]:
    """Return the most likely tokens at every depth: cells[depth][position] is a list, most likely first."""
    from glassformer.lens import logit_lens

    inputs = read_inputs(models, request)
    found = logit_lens(
        inputs.model, inputs.tokens, min(request.top, inputs.model.config.vocab_size), **inputs.trace_arguments
    )
    token_text = inputs.loaded.token_text
    cells = [
        [
            [{"id": i, "piece": token_text(i), "p": p} for i, p in zip(ids, probabilities, strict=True)]
            for ids, probabilities in zip(row, probability_row, strict=True)
        ]
        for row, probability_row in zip(found.top[:, 0].tolist(), found.probabilities[:, 0].tolist(), strict=True)
    ]
    return {
        "layers": ["embedding", *(f"block {i}" for i in range(len(cells) - 1))],
        "sites": list(found.depths),
        "pieces": inputs.token_texts,
        "cells": cells,
        "entropy": found.entropy[:, 0].tolist(),
        "kl": found.divergence[:, 0].tolist(),
        "agreement": found.agreement.tolist(),
    }


def attribution(models: ModelStore, request: schema.Attribution) -> dict[str, Any]:
    """Return what each component adds to one logit, or to the difference of two. Default: the most likely token."""
    from glassformer.lens import attribute_logits

    inputs = read_inputs(models, request)
    position = _position(inputs, request.position)
    answer = _argmax_token(inputs, position) if request.answer is None else request.answer
    found = attribute_logits(
        inputs.model, inputs.tokens, answer, request.wrong, position=position, **inputs.trace_arguments
    )
    token_text = inputs.loaded.token_text
    return {
        "names": list(found.names),
        "values": found.values[:, 0].tolist(),
        "logit": float(found.logit[0]),
        "answer": {"id": answer, "piece": token_text(answer)},
        "wrong": None if request.wrong is None else {"id": request.wrong, "piece": token_text(request.wrong)},
        "position": position,
        "finding": found.finding.to_dict(),
        "note": found.note,
    }


def depth(models: ModelStore, request: schema.TextRequest) -> dict[str, Any]:
    """Return norms and rank of the residual stream by depth, and the rank collapse of pure attention for comparison."""
    from glassformer.lens import rank, stream_norms, trace
    from glassformer.lens.sites import output_stack

    inputs = read_inputs(models, request)
    stack = output_stack(inputs.model.config)
    lengths = stream_norms(inputs.model, inputs.tokens, **inputs.trace_arguments)
    sites = [f"{stack}embed", f"{stack}blocks.*.resid_post"]
    found = rank.stream_rank(trace(inputs.model, inputs.tokens, sites=sites, **inputs.trace_arguments), stack)
    return {
        "pieces": inputs.token_texts,
        "norms": {
            "stream": lengths.stream[:, 0].tolist(),
            "branches": {name: value[:, 0].tolist() for name, value in lengths.branches.items()},
        },
        "rank": {
            "sites": list(found.sites),
            "singular": found.singular_values[:, 0].tolist(),
            "effective": found.effective_rank[:, 0].tolist(),
            "stable": found.stable_rank[:, 0].tolist(),
            "deviation": found.deviation[:, 0].tolist(),
        },
        "theory": _theory(inputs),
    }


def _theory(inputs: ModelInputs) -> dict[str, Any]:
    """Return the deviation from equal rows for random attention layers without and with skip connections."""
    from glassformer.lens import rank

    layers = inputs.model.config.n_layers

    def compute() -> dict[str, Any]:
        pure, skip = rank.collapse("attention", layers), rank.collapse("skip", layers)
        assert skip.theory is not None
        return {
            "attention": pure.deviation.tolist(),
            "skip": skip.deviation.tolist(),
            "skip_predicted": skip.theory.tolist(),
        }

    curves: dict[str, Any] = inputs.loaded.cached(("collapse", layers), compute)
    return curves


def patch(models: ModelStore, request: schema.Patch, emit: Emit) -> None:
    """Patch activations of a clean text into a corrupt one: one `layer` event per layer, then `done` with the map."""
    import torch

    from glassformer.lens import patch_effects
    from glassformer.lens.trace import require_equal_length
    from glassformer.model import Seq2Seq

    loaded = models.get(request.model)
    if isinstance(loaded.model, Seq2Seq):
        raise StudioError("patching an encoder-decoder is not supported here: use glassformer.lens.patch_effects.")
    clean, corrupt = (_tokens(loaded, text) for text in (request.clean, request.corrupt))
    position = _position(ModelInputs(loaded, clean), request.position)
    require_equal_length(len(clean), len(corrupt))
    answer = _argmax_token(ModelInputs(loaded, clean), position) if request.answer is None else request.answer
    wrong = _argmax_token(ModelInputs(loaded, corrupt), position) if request.wrong is None else request.wrong
    if answer == wrong:
        raise StudioError(
            f"the model predicts {loaded.token_text(answer)!r} for both texts: change a text, or give answer and wrong."
        )
    by_head = request.site == "attention.heads"
    rows, texts = [], (torch.tensor([clean]), torch.tensor([corrupt]))
    for layer in range(loaded.config.n_layers):
        found = patch_effects(
            loaded.model,
            *texts,
            answer,
            wrong,
            request.site,
            layers=[layer],
            each_position=not by_head,
            position=position,
        )
        rows.append(found.effects[0].tolist())
        emit("layer", {"layer": layer, "layers": loaded.config.n_layers, "effects": rows[-1]})
    pieces = {"clean": [loaded.token_text(i) for i in clean], "corrupt": [loaded.token_text(i) for i in corrupt]}
    tokens = {
        "answer": {"id": answer, "piece": loaded.token_text(answer)},
        "wrong": {"id": wrong, "piece": loaded.token_text(wrong)},
    }
    differences = {"clean_difference": found.clean, "corrupt_difference": found.corrupt}
    facts = {"site": request.site, "axis": "head" if by_head else "position", "position": position, "effects": rows}
    emit("done", {**facts, **tokens, **differences, "pieces": pieces})


def _tokens(loaded: LoadedModel, text: list[int] | str) -> list[int]:
    return loaded.check_ids(loaded.encode(text) if isinstance(text, str) else text)


def _position(inputs: ModelInputs, position: int) -> int:
    """Return a position counted from the start; negative ones count from the end."""
    length = len(inputs.token_texts)
    if not -length <= position < length:
        raise StudioError(f"position {position} is outside a text of {length} tokens: use {-length} to {length - 1}.")
    return position % length


def _argmax_token(inputs: ModelInputs, position: int) -> int:
    from glassformer.lens import trace

    return int(trace(inputs.model, inputs.tokens, sites=(), **inputs.trace_arguments).logits[0, position].argmax())
