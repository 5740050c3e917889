"""Copy as Python: for each panel, a snippet that computes the numbers on screen. A test runs every snippet.

The snippets are in `studio/snippets.jinja`; here is what they are filled with.
"""

import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.config import Seq2SeqConfig
from glassformer.studio import schema
from glassformer.studio.api import theory
from glassformer.studio.api.inputs import greedy_target_length
from glassformer.studio.errors import StudioError
from glassformer.studio.models import ModelStore
from glassformer.studio.training import NAME
from glassformer.theory.claims.registry import ClaimError

if TYPE_CHECKING:
    from jinja2 import Template

VIEWS: dict[str, type[schema.ApiRequest]] = {
    "tokens": schema.Tokens,
    "next": schema.Next,
    "generate": schema.Generate,
    "chat": schema.ChatPanel,
    "beam": schema.Beam,
    "anatomy": schema.ModelRequest,
    "tensor": schema.TensorRequest,
    "patterns": schema.Patterns,
    "heads": schema.HeadScores,
    "ablate": schema.Ablate,
    "lens": schema.Lens,
    "attribution": schema.Attribution,
    "depth": schema.TextRequest,
    "patch": schema.Patch,
    "positions": schema.Positions,
    "cell": schema.Cell,
    "leak": schema.ModelRequest,
    "theory": schema.RunClaim,
    "chinchilla": schema.ChinchillaQuery,
    "train": schema.Train,
    "doctor": schema.Doctor,
    "size": schema.Size,
}
"""The request body of each panel."""
WITHOUT_MODEL = ("chat", "positions", "theory", "chinchilla", "train", "size")
"""Panels whose snippets do not begin with a model and its tokens."""


@functools.cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined  # the page starts without it

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined, autoescape=False
    )
    environment.filters["repr"] = repr
    return environment.from_string((Path(__file__).parents[1] / "snippets.jinja").read_text(encoding="utf-8"))


def snippet(models: ModelStore, given: dict[str, str]) -> dict[str, Any]:
    """Return the snippet of a panel. `view` names it; the other values are the fields of its request body."""
    view = given.get("view", "")
    if view not in VIEWS:
        raise StudioError(f"view={view[:60]!r} does not exist: use one of {', '.join(VIEWS)}.")
    if view == "train" and "run" in given:
        return {"python": _template().render(view=view, with_model=False, run=_run_name(given["run"]))}
    fields = {name: value for name, value in given.items() if name not in ("view", "claim", "what")}
    if view == "chinchilla":
        request: Any = schema.ChinchillaQuery.model_validate(fields)
    else:
        request = VIEWS[view].model_validate_json(json.dumps({name: _value(text) for name, text in fields.items()}))
    return {"python": _template().render(_words(models, view, request, given.get("claim", "")))}


def _value(text: str) -> Any:
    """Parse a value of the query: JSON if it is valid, otherwise the text itself."""
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text
    return value


def _run_name(run: str) -> str:
    if not NAME.fullmatch(run):
        raise StudioError(f"{run[:60]!r} is not the name of a run.")
    return run


def _words(models: ModelStore, view: str, request: Any, claim: str) -> dict[str, Any]:
    """Return the values that the template needs: the fields of the request, and what follows from them."""
    words = {"text": None, "ids": None, **dict(request), "view": view, "with_model": view not in WITHOUT_MODEL}
    if words.get("model") is not None or words.get("kind") == "learned":  # a learned table is that of a model
        words |= _model_words(models, request.model or "")
    words["given_tokens"] = words["text"] is not None or words["ids"] is not None
    if isinstance(request, schema.SamplingRequest):
        temperature, *options = request.sampling().items()
        more = ", ".join(f"{name}={value!r}" for name, value in options)
        words["sampling"] = f"gf.Sampling({temperature[1]!r}, {more})"
    match view:
        case "ablate":
            by_layer: dict[int, list[int]] = {}
            for layer, head in request.heads:
                by_layer.setdefault(layer, []).append(head)
            words["heads_by_layer"] = by_layer
        case "theory":
            words["claim"] = _checked_claim(claim, request)
        case "chinchilla":
            numbers = request.model_dump(exclude_none=True)
            words["arguments"] = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
        case "train":
            changes = [f"model.preset={request.preset}", f"data.corpus={request.corpus}"]
            changes += [f"{name}={json.dumps(value)}" for name, value in request.fields.items() if value is not None]
            words |= {"run": None, "changes": tuple(changes)}
    return words


def _model_words(models: ModelStore, model: str) -> dict[str, Any]:
    """Return how a model is loaded, where its tokenizer is, and what an encoder-decoder needs besides its tokens."""
    entry = models.entry(model)
    name = entry.name if entry.bundled else str(entry.path)
    base = None if entry.bundled else entry.base
    # the adapter of a base model may lack a tokenizer and a chat template of its own
    source = name if base is None or (entry.path / "tokenizer.json").exists() else str(base)
    given = repr(name) if base is None else f"{str(base)!r}, adapter={name!r}"
    config = models.config(model, torch_ready="torch" in sys.modules)
    seq2seq = isinstance(config, Seq2SeqConfig)
    return {
        "load": f"gf.load({given}, dtype={models.dtype(model)!r})",
        "text_source": source,
        "seq2seq": seq2seq,
        "target_length": greedy_target_length(config) if isinstance(config, Seq2SeqConfig) else 0,
        "with_target": ", target=target" if seq2seq else "",
        "stack": "decoder." if seq2seq else "",
        "logits": "model(tokens, target)" if seq2seq else "model(tokens)",
    }


def _checked_claim(id: str, request: Any) -> str:
    claim = theory.find_claim(id)
    try:
        theory.knob_values(claim, request.knobs)
    except ClaimError as error:
        raise StudioError(str(error)) from None
    return id
