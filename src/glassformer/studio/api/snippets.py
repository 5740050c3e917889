"""Copy as Python: for each panel, a snippet that computes the numbers on screen. A test runs every snippet."""

import json
import sys
from collections.abc import Callable
from typing import Any

from glassformer.config import Seq2SeqConfig
from glassformer.studio import schema
from glassformer.studio.api import theory
from glassformer.studio.api.inputs import greedy_target_length
from glassformer.studio.errors import StudioError
from glassformer.studio.models import ModelStore
from glassformer.studio.training import NAME
from glassformer.theory.claims.registry import ClaimError


def snippet(models: ModelStore, given: dict[str, str]) -> dict[str, Any]:
    """Return the snippet of a panel. `view` names it; the other values are the fields of its request body."""
    view = given.get("view", "")
    if view not in _VIEWS:
        raise StudioError(f"view={view[:60]!r} does not exist: use one of {', '.join(_VIEWS)}.")
    kind, write = _VIEWS[view]
    if view == "train" and "run" in given:
        return {"python": _training_log(given["run"])}
    if view == "chinchilla":
        return {"python": _chinchilla(given)}
    not_fields = ("view", "claim", "what")
    request = kind.model_validate_json(json.dumps({k: _value(v) for k, v in given.items() if k not in not_fields}))
    if view == "theory":
        return {"python": _claim(given.get("claim", ""), request)}
    return {"python": write(models, request)}


def _value(text: str) -> Any:
    """Parse a value of the query: JSON if it is valid, otherwise the text itself."""
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text
    return value


def _load(models: ModelStore, request: Any) -> list[str]:
    name = _text_source(models, request.model)
    out = ["import torch", "import glassformer as gf", "", f"model = {_load_call(models, request.model)}"]
    if getattr(request, "text", None) is not None:
        out += [f"tokens = gf.load_tokenizer({name!r}).encode({request.text!r}).ids", "tokens = torch.tensor([tokens])"]
    elif getattr(request, "ids", None) is not None:
        out += [f"tokens = torch.tensor([{request.ids!r}])"]
    else:
        return out
    config = _seq2seq_config(models, request)
    if config is None or isinstance(request, schema.Beam | schema.Tokens):
        return out
    if request.target is not None:
        out += [f"target = torch.tensor([{request.target!r}])"]
    elif isinstance(request, schema.Next):
        out += ["target = torch.tensor([[model.config.special.start]])"]
    elif not isinstance(request, schema.Generate):
        target = f"gf.generate(model, tokens, {greedy_target_length(config)}, gf.Sampling(0.0))"
        out += [f"target = torch.tensor({target})  # generated greedily"]
    return out


def _seq2seq_config(models: ModelStore, request: Any) -> Seq2SeqConfig | None:
    """Return the config of an encoder-decoder, which also needs a target; None for other models."""
    config = models.config(request.model, torch_ready="torch" in sys.modules)
    return config if isinstance(config, Seq2SeqConfig) else None


def _name(models: ModelStore, model: str) -> str:
    entry = models.entry(model)
    return entry.name if entry.bundled else str(entry.path)


def _text_source(models: ModelStore, model: str) -> str:
    """Return the folder with the tokenizer and the chat template of a model."""
    entry = models.entry(model)
    if entry.base is not None and not entry.bundled and not (entry.path / "tokenizer.json").exists():
        return str(entry.base)
    return _name(models, model)


def _load_call(models: ModelStore, model: str) -> str:
    """Return the call that loads the model in the dtype in which the studio computes it."""
    entry = models.entry(model)
    base = None if entry.bundled else entry.base
    given = repr(_name(models, model)) if base is None else f"{str(base)!r}, adapter={_name(models, model)!r}"
    return f"gf.load({given}, dtype={models.dtype(model)!r})"


def _target_argument(models: ModelStore, request: Any) -> str:
    return "" if _seq2seq_config(models, request) is None else ", target=target"


def _stack(models: ModelStore, request: Any) -> str:
    """Return the prefix of the decoder's sites of an encoder-decoder."""
    return "" if _seq2seq_config(models, request) is None else "decoder."


def _logits(models: ModelStore, request: Any) -> str:
    return "model(tokens)" if _seq2seq_config(models, request) is None else "model(tokens, target)"


def _join(models: ModelStore, request: Any, *more: str) -> str:
    return "\n".join([*_load(models, request), *more]) + "\n"


def _sampling(request: schema.SamplingRequest) -> str:
    temperature, *options = request.sampling().items()
    return f"gf.Sampling({temperature[1]!r}, {', '.join(f'{name}={value!r}' for name, value in options)})"


def _fill(template: str) -> Callable[[ModelStore, Any], str]:
    """Return a writer that fills a template with the fields of the request and with what the model needs.

    `target` is the argument for the target of an encoder-decoder, and `logits` the call of the model.
    """

    def write(models: ModelStore, request: Any) -> str:
        words = dict(request)
        words |= {"target": _target_argument(models, request), "logits": _logits(models, request)}
        words |= {"stack": _stack(models, request)}
        if isinstance(request, schema.SamplingRequest):
            words["sampling"] = _sampling(request)
        if isinstance(request, schema.Cell):
            words["index"] = ", ".join(map(str, request.index))
        if isinstance(request, schema.TensorRequest):
            words["head"] = "" if request.head is None else f"[{request.head}]"
        return _join(models, request, template.strip("\n").format_map(words))

    return write


def _generate(models: ModelStore, request: schema.Generate) -> str:
    if request.target is not None and _seq2seq_config(models, request) is not None:
        return _continue_target(models, request)
    return _join(
        models, request,
        f"result = gf.generate(model, tokens, {request.max_new_tokens}, {_sampling(request)}, "
        f"seed={request.seed}, cache={request.cache}).new[0]",
    )  # fmt: skip


def _continue_target(models: ModelStore, request: schema.Generate) -> str:
    """Return a loop that continues a given target: `gf.generate` always begins at the start token."""
    return _join(
        models, request,
        "from glassformer.generation.loop import uniforms",
        "from glassformer.generation.sampling import choose",
        f"draws, result = uniforms({request.seed}, 1, {request.max_new_tokens}), []",
        "for step in range(draws.shape[1]):",
        "    with torch.no_grad():",
        "        logits = model(tokens, target)[:, -1]",
        f"    token = choose(logits, {_sampling(request)}, draws[:, step])",
        "    target = torch.cat([target, token[:, None]], 1)",
        "    result.append(int(token))",
        "    if result[-1] in model.config.special.eos:",
        "        break",
    )  # fmt: skip


def _patterns(models: ModelStore, request: schema.Patterns) -> str:
    stack = {"encoder": "encoder.", "cross": "decoder."}.get(request.where, _stack(models, request))
    kind = "cross" if request.where == "cross" else "attention"
    site = f"{stack}blocks.{'*' if request.layer is None else request.layer}.{kind}.pattern"
    target = _target_argument(models, request)
    return _join(
        models,
        request,
        f"result = gf.trace(model, tokens, sites={site!r}{target}).stack({site!r})[:, 0]  # (L,H,T,S)",
    )


def _ablate(models: ModelStore, request: schema.Ablate) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, head in request.heads:
        by_layer.setdefault(layer, []).append(head)
    stack = _stack(models, request)
    edits = ", ".join(f"'{stack}blocks.{n}.attention.heads': {request.mode}(heads={h})" for n, h in by_layer.items())
    return _join(
        models, request,
        "from glassformer.lens import mean, zero",
        f"result = gf.patch(model, tokens, {{{edits}}}{_target_argument(models, request)})[0, -1].softmax(-1)",
    )  # fmt: skip


def _attribution(models: ModelStore, request: schema.Attribution) -> str:
    logits, given = f"{_logits(models, request)}[0, {request.position}]", _target_argument(models, request)
    answer = f"int({logits}.argmax())" if request.answer is None else str(request.answer)
    return _join(
        models, request,
        "from glassformer.lens import attribute_logits",
        f"answer = {answer}",
        f"result = attribute_logits(model, tokens, answer, {request.wrong}, position={request.position}{given})",
        "print(result.ranked()[:10])",
    )  # fmt: skip


def _chat(models: ModelStore, request: schema.ChatPanel) -> str:
    name = _text_source(models, request.model)
    return (
        "\n".join(
            [
                "import glassformer as gf",
                "from glassformer.chat.render import load_renderer",
                "",
                f"model = {_load_call(models, request.model)}",
                f"renderer = load_renderer({name!r})",
                f"prompt = renderer.prompt({request.messages!r})",
                f"sampling = gf.Sampling({request.temperature!r}, top_p={request.top_p!r})",
                "stop = [*model.config.special.eos, *renderer.ends]",
                "room = model.config.max_len - len(prompt) if model.config.max_len else 10**9",
                f"new = min({request.max_new_tokens}, room)",
                f"result = gf.generate(model, [prompt], new, sampling, seed={request.seed}, stop=stop).new[0]",
                "print(renderer.tokenizer.decode(result))",
            ]
        )
        + "\n"
    )


def _patch(models: ModelStore, request: schema.Patch) -> str:
    name = _text_source(models, request.model)

    def ids(given: list[int] | str) -> str:
        inside = f"gf.load_tokenizer({name!r}).encode({given!r}).ids" if isinstance(given, str) else repr(given)
        return f"torch.tensor([{inside}])"

    def argmax_or(token: int | None, text: str) -> str:
        return f"int(model({text})[0, {request.position}].argmax())" if token is None else str(token)

    each = request.site != "attention.heads"
    return _join(
        models, request,
        "from glassformer.lens import patch_effects",
        f"clean, corrupt = {ids(request.clean)}, {ids(request.corrupt)}",
        f"answer, wrong = {argmax_or(request.answer, 'clean')}, {argmax_or(request.wrong, 'corrupt')}",
        f"result = patch_effects(model, clean, corrupt, answer, wrong, {request.site!r}, each_position={each}, "
        f"position={request.position}).effects",
    )  # fmt: skip


def _positions(models: ModelStore, request: schema.Positions) -> str:
    head = ["import torch", "import glassformer as gf", "from glassformer.model import positions"]
    n, positions = request.length, f"torch.arange({request.length})"
    match request.kind:
        case "sinusoidal":
            spec = f"gf.config.Sinusoidal(base={request.base!r})"
            body = [f"result = positions.sinusoids({positions}, {request.width}, {spec})"]
        case "rotary":
            spec = f"gf.config.Rotary(base={request.base!r})"
            rotation = f"rotation({positions}[None], torch.float64, {n - 1})"
            body = [f"result = positions.Rotary({spec}, {request.width}).{rotation}.cos[0, 0]"]
        case "alibi":
            bias = f"bias({positions}[None], {positions}[None], torch.float64)"
            body = [f"result = positions.Alibi({request.heads}).{bias}[0, 0]"]
        case "t5" if request.model is None:
            body = [f"position = {positions}", "offsets = position[None, :] - position[:, None]"]
            body += ["result = positions.t5_buckets(offsets, gf.config.T5Bias(), causal=False)"]
        case _:
            body = [
                "from glassformer.lens.residual import stack_of",
                f"model = {_load_call(models, request.model or '')}",
            ]
            body += [f"position = {positions}[None]"]
            if request.kind == "t5":
                body += ["result = stack_of(model).position.bias(position, position, torch.float64)[0, 0]"]
            else:
                body += ["offset = model.config.learned_positions.offset  # rows before position 0",
                         f"result = stack_of(model).position.weight[offset:][:{n}]"]  # fmt: skip
    return "\n".join([*head, "", *body]) + "\n"


def _size(models: ModelStore, request: schema.Size) -> str:
    head = ["import glassformer as gf", ""]
    if request.preset is not None:
        config = f"gf.presets.get({request.preset!r})"
    elif request.model is not None:
        config = f"{_load_call(models, request.model)}.config"
    else:
        config = f"gf.config.from_dict({request.config!r})"
    more = f"batch={request.batch}, context={request.context}, dtype={request.dtype!r}, optimizer={request.optimizer!r}"
    return "\n".join([*head, f"result = gf.size({config}, {more})", "print(result.text())"]) + "\n"


def _claim(id: str, request: Any) -> str:
    claim = theory.find_claim(id)
    try:
        theory.knob_values(claim, request.knobs)
    except ClaimError as error:
        raise StudioError(str(error)) from None
    knobs = "".join(f", {name}={value!r}" for name, value in request.knobs.items())
    call = f"gf.check({id!r}, seed={request.seed}, slow={request.slow}, broken={request.broken}{knobs})"
    return f"import glassformer as gf\n\nresult = {call}\nprint(result.text())\n"


def _training_log(run: str) -> str:
    if not NAME.fullmatch(run):
        raise StudioError(f"{run[:60]!r} is not the name of a run.")
    return (
        "from glassformer.lens.figures.training import losses_of, read_log\n"
        "from glassformer.studio.settings import default_folder\n\n"
        f"events = read_log(default_folder() / 'runs' / {run!r} / 'out')\n"
        "result = losses_of(events)  # name: (steps, values)\n"
    )


def _chinchilla(given: dict[str, str]) -> str:
    query = schema.ChinchillaQuery.model_validate({k: v for k, v in given.items() if k != "view"})
    numbers = query.model_dump(exclude_none=True)
    arguments = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
    return f"from glassformer import sizing\n\nresult = sizing.chinchilla({arguments})\nprint(result.text())\n"


def _train(models: ModelStore, request: schema.Train) -> str:
    changes = [f"model.preset={request.preset}", f"data.corpus={request.corpus}"]
    changes += [f"{name}={json.dumps(value)}" for name, value in request.fields.items() if value is not None]
    return (
        "from glassformer.training import open_session, read_run, train\n\n"
        f"session = open_session(read_run('', {tuple(changes)!r}))\n"
        "result = train(session.run, session.data)\n"
    )


_NEXT = """
with torch.no_grad():
    logits = {logits}[:, -1]
from glassformer.generation import distribution
result = distribution(logits, {sampling})[0]  # probability of every token
"""
_HEADS = """
from glassformer.lens.heads import head_table
result = head_table(model, seed={seed})
print(result.text())
"""
_LENS = """
from glassformer.lens import logit_lens
result = logit_lens(model, tokens, top={top}{target})
"""
_DEPTH = """
from glassformer.lens import rank, stream_norms
norms = stream_norms(model, tokens{target})
sites = ['{stack}embed', '{stack}blocks.*.resid_post']
result = rank.stream_rank(gf.trace(model, tokens, sites=sites{target}), {stack!r})
"""
_LEAK = """
tokens = torch.randint(model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))
result = torch.zeros(8, 8)  # row: position of the output, column: position of the changed token
with torch.no_grad():
    before = model(tokens)[0]
    for position in range(8):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % model.config.vocab_size
        result[:, position] = (model(changed)[0] - before).abs().amax(-1)
"""
_DOCTOR = """
from glassformer.doctor import diagnose
result = diagnose(model, quick={quick})
print(result.text())
"""
_TRACE = "result = gf.trace(model, tokens, sites={site!r}{target})[{site!r}]"


_VIEWS: dict[str, tuple[type[schema.ApiRequest], Callable[[ModelStore, Any], str]]] = {
    "tokens": (schema.Tokens, _fill("result = tokens[0].tolist()")),
    "next": (schema.Next, _fill(_NEXT)),
    "generate": (schema.Generate, _generate),
    "chat": (schema.ChatPanel, _chat),
    "beam": (schema.Beam, _fill("result = gf.generate(model, tokens, {steps}, beams={beams}).new[0]")),
    "anatomy": (schema.ModelRequest, _fill("result = gf.size(model.config)\nprint(result.text())")),
    "tensor": (schema.TensorRequest, _fill(_TRACE + "[0]{head}")),
    "patterns": (schema.Patterns, _patterns),
    "heads": (schema.HeadScores, _fill(_HEADS)),
    "ablate": (schema.Ablate, _ablate),
    "lens": (schema.Lens, _fill(_LENS)),
    "attribution": (schema.Attribution, _attribution),
    "depth": (schema.TextRequest, _fill(_DEPTH)),
    "patch": (schema.Patch, _patch),
    "positions": (schema.Positions, _positions),
    "cell": (schema.Cell, _fill(_TRACE + "[0, {index}]")),
    "leak": (schema.ModelRequest, _fill(_LEAK)),
    "theory": (schema.RunClaim, lambda models, request: ""),
    "chinchilla": (schema.ApiRequest, lambda models, request: ""),
    "train": (schema.Train, _train),
    "doctor": (schema.Doctor, _fill(_DOCTOR)),
    "size": (schema.Size, _size),
}
