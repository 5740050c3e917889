"""Copy as Python: the lines that give the numbers on screen. Every view's lines are run in a test."""

import json
import sys
from collections.abc import Callable
from typing import Any

from glassformer.config import Seq2SeqConfig
from glassformer.studio import schema
from glassformer.studio.api import theory
from glassformer.studio.api.reading import answer_room
from glassformer.studio.errors import StudioError
from glassformer.studio.shelf import Shelf
from glassformer.studio.training import NAME
from glassformer.theory.claims.registry import ClaimError


def lines(shelf: Shelf, given: dict[str, str]) -> dict[str, Any]:
    """`view` names the panel; the rest are the fields of its request, as in its JSON body."""
    view = given.get("view", "")
    if view not in _VIEWS:
        raise StudioError(f"view={view[:60]!r} is not known: use one of {', '.join(_VIEWS)}.")
    kind, write = _VIEWS[view]
    if view == "train" and "run" in given:
        return {"python": _watch(given["run"])}
    if view == "chinchilla":
        return {"python": _chinchilla(given)}
    apart = ("view", "claim", "what")
    asked = kind.model_validate_json(json.dumps({k: _value(v) for k, v in given.items() if k not in apart}))
    if view == "theory":
        return {"python": _claim(given.get("claim", ""), asked)}
    return {"python": write(shelf, asked)}


def _value(text: str) -> Any:
    """A query's value: JSON where it is some, else the text itself."""
    try:
        value = json.loads(text, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return text
    return value


def _load(shelf: Shelf, asked: Any) -> list[str]:
    name = _name(shelf, asked.model)
    out = ["import torch", "import glassformer as gf", "", f"model = {_loading(shelf, asked.model)}"]
    if getattr(asked, "text", None) is not None:
        out += [f"tokens = gf.load_tokenizer({name!r}).encode({asked.text!r}).ids", "tokens = torch.tensor([tokens])"]
    elif getattr(asked, "ids", None) is not None:
        out += [f"tokens = torch.tensor([{asked.ids!r}])"]
    else:
        return out
    config = _pair(shelf, asked)
    if config is None or isinstance(asked, schema.Beam | schema.Tokens):
        return out
    if asked.target is not None:
        out += [f"target = torch.tensor([{asked.target!r}])"]
    elif isinstance(asked, schema.Next):
        out += ["target = torch.tensor([[model.config.special.start]])"]
    elif not isinstance(asked, schema.Generate):
        answer = f"gf.generate(model, tokens, {answer_room(config)}, gf.Sampling(0.0))"
        out += [f"target = torch.tensor({answer})  # its own answer"]
    return out


def _pair(shelf: Shelf, asked: Any) -> Seq2SeqConfig | None:
    """The config of an encoder-decoder, whose decoder needs a target too; None for other models."""
    config = shelf.config(asked.model, torch_ready="torch" in sys.modules)
    return config if isinstance(config, Seq2SeqConfig) else None


def _name(shelf: Shelf, model: str) -> str:
    entry = shelf.entry(model)
    return entry.name if entry.bundled else str(entry.path)


def _loading(shelf: Shelf, model: str) -> str:
    """Half precisions are computed in float32 here, so they are loaded as such."""
    return f"gf.load({_name(shelf, model)!r}, dtype={shelf.dtype(model)!r})"


def _given(shelf: Shelf, asked: Any) -> str:
    return "" if _pair(shelf, asked) is None else ", target=target"


def _stack(shelf: Shelf, asked: Any) -> str:
    """What stands before the decoder's sites of an encoder-decoder."""
    return "" if _pair(shelf, asked) is None else "decoder."


def _logits(shelf: Shelf, asked: Any) -> str:
    return "model(tokens)" if _pair(shelf, asked) is None else "model(tokens, target)"


def _join(shelf: Shelf, asked: Any, *more: str) -> str:
    return "\n".join([*_load(shelf, asked), *more]) + "\n"


def _sampling(asked: schema.Sampled) -> str:
    return f"gf.Sampling({asked.temperature!r}, top_k={asked.top_k!r}, top_p={asked.top_p!r}, min_p={asked.min_p!r})"


def _next(shelf: Shelf, asked: schema.Next) -> str:
    return _join(
        shelf, asked,
        "with torch.no_grad():",
        f"    logits = {_logits(shelf, asked)}[:, -1]",
        "from glassformer.generation import distribution",
        f"result = distribution(logits, {_sampling(asked)})[0]  # probability of every token",
    )  # fmt: skip


def _generate(shelf: Shelf, asked: schema.Generate) -> str:
    if asked.target is not None and _pair(shelf, asked) is not None:
        return _go_on(shelf, asked)
    return _join(
        shelf, asked,
        f"result = gf.generate(model, tokens, {asked.max_new_tokens}, {_sampling(asked)}, "
        f"seed={asked.seed}, cache={asked.cache}).new[0]",
    )  # fmt: skip


def _go_on(shelf: Shelf, asked: schema.Generate) -> str:
    """An answer that goes on from what was said already: `gf.generate` begins at the start token."""
    return _join(
        shelf, asked,
        "from glassformer.generation.loop import uniforms",
        "from glassformer.generation.sampling import choose",
        f"draws, result = uniforms({asked.seed}, 1, {asked.max_new_tokens}), []",
        "for step in range(draws.shape[1]):",
        "    with torch.no_grad():",
        "        logits = model(tokens, target)[:, -1]",
        f"    said = choose(logits, {_sampling(asked)}, draws[:, step])",
        "    target = torch.cat([target, said[:, None]], 1)",
        "    result.append(int(said))",
        "    if result[-1] in model.config.special.eos:",
        "        break",
    )  # fmt: skip


def _beam(shelf: Shelf, asked: schema.Beam) -> str:
    return _join(shelf, asked, f"result = gf.generate(model, tokens, {asked.steps}, beams={asked.beams}).new[0]")


def _tokens(shelf: Shelf, asked: schema.Tokens) -> str:
    return _join(shelf, asked, "result = tokens[0].tolist()")


def _tensor(shelf: Shelf, asked: schema.OneTensor) -> str:
    head = "" if asked.head is None else f"[{asked.head}]"
    return _join(
        shelf,
        asked,
        f"result = gf.trace(model, tokens, sites={asked.site!r}{_given(shelf, asked)})[{asked.site!r}][0]{head}",
    )


def _anatomy(shelf: Shelf, asked: schema.AboutModel) -> str:
    return _join(shelf, asked, "result = gf.size(model.config)", "print(result.text())")


def _patterns(shelf: Shelf, asked: schema.Patterns) -> str:
    stack = {"encoder": "encoder.", "cross": "decoder."}.get(asked.where, _stack(shelf, asked))
    kind = "cross" if asked.where == "cross" else "attention"
    site = f"{stack}block.{'*' if asked.layer is None else asked.layer}.{kind}.pattern"
    return _join(
        shelf,
        asked,
        f"result = gf.trace(model, tokens, sites={site!r}{_given(shelf, asked)}).stack({site!r})[:, 0]  # (L,H,T,S)",
    )


def _heads(shelf: Shelf, asked: schema.HeadScores) -> str:
    return _join(
        shelf, asked, "from glassformer.lens.heads import head_table", f"result = head_table(model, seed={asked.seed})",
        "print(result.text())",
    )  # fmt: skip


def _ablate(shelf: Shelf, asked: schema.Ablate) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, head in asked.heads:
        by_layer.setdefault(layer, []).append(head)
    stack = _stack(shelf, asked)
    edits = ", ".join(f"'{stack}block.{n}.attention.heads': {asked.mode}(heads={h})" for n, h in by_layer.items())
    return _join(
        shelf, asked,
        "from glassformer.lens import mean, zero",
        f"result = gf.patch(model, tokens, {{{edits}}}{_given(shelf, asked)})[0, -1].softmax(-1)",
    )  # fmt: skip


def _lens(shelf: Shelf, asked: schema.Lens) -> str:
    return _join(
        shelf, asked,
        "from glassformer.lens import logit_lens",
        f"result = logit_lens(model, tokens, top={asked.top}{_given(shelf, asked)})",
    )  # fmt: skip


def _attribution(shelf: Shelf, asked: schema.Attribution) -> str:
    logits, given = f"{_logits(shelf, asked)}[0, {asked.position}]", _given(shelf, asked)
    answer = f"int({logits}.argmax())" if asked.answer is None else str(asked.answer)
    return _join(
        shelf, asked,
        "from glassformer.lens import attribute_logits",
        f"answer = {answer}",
        f"result = attribute_logits(model, tokens, answer, {asked.wrong}, position={asked.position}{given})",
        "print(result.ranked()[:10])",
    )  # fmt: skip


def _depth(shelf: Shelf, asked: schema.AboutText) -> str:
    stack = _stack(shelf, asked)
    return _join(
        shelf, asked,
        "from glassformer.lens import rank, stream_norms",
        f"norms = stream_norms(model, tokens{_given(shelf, asked)})",
        f"sites = [{stack + 'embed'!r}, {stack + 'block.*.resid_post'!r}]",
        f"result = rank.stream_rank(gf.trace(model, tokens, sites=sites{_given(shelf, asked)}), {stack!r})",
    )  # fmt: skip


def _patch(shelf: Shelf, asked: schema.Patch) -> str:
    name = _name(shelf, asked.model)

    def ids(given: list[int] | str) -> str:
        inside = f"gf.load_tokenizer({name!r}).encode({given!r}).ids" if isinstance(given, str) else repr(given)
        return f"torch.tensor([{inside}])"

    def said(token: int | None, text: str) -> str:
        return f"int(model({text})[0, {asked.position}].argmax())" if token is None else str(token)

    each = asked.site != "attention.heads"
    return _join(
        shelf, asked,
        "from glassformer.lens import patch_effects",
        f"clean, corrupt = {ids(asked.clean)}, {ids(asked.corrupt)}",
        f"answer, wrong = {said(asked.answer, 'clean')}, {said(asked.wrong, 'corrupt')}",
        f"result = patch_effects(model, clean, corrupt, answer, wrong, {asked.site!r}, each_position={each}, "
        f"position={asked.position}).effects",
    )  # fmt: skip


def _positions(shelf: Shelf, asked: schema.Positions) -> str:
    head = ["import torch", "import glassformer as gf", "from glassformer.model import positions"]
    n, places = asked.length, f"torch.arange({asked.length})"
    match asked.kind:
        case "sinusoidal":
            spec = f"gf.config.Sinusoidal(base={asked.base!r})"
            body = [f"result = positions.sinusoids({places}, {asked.width}, {spec})"]
        case "rotary":
            spec = f"gf.config.Rotary(base={asked.base!r})"
            turn = f"rotation({places}[None], torch.float64, {n - 1})"
            body = [f"result = positions.Rotary({spec}, {asked.width}).{turn}.cos[0, 0]"]
        case "alibi":
            bias = f"bias({places}[None], {places}[None], torch.float64)"
            body = [f"result = positions.Alibi({asked.heads}).{bias}[0, 0]"]
        case "t5" if asked.model is None:
            body = [f"places = {places}", "offsets = places[None, :] - places[:, None]"]
            body += ["result = positions.t5_buckets(offsets, gf.config.T5Bias(), causal=False)"]
        case _:
            body = ["from glassformer.lens.residual import stack_of", f"model = {_loading(shelf, asked.model or '')}"]
            body += [f"places = {places}[None]"]
            if asked.kind == "t5":
                body += ["result = stack_of(model).position.bias(places, places, torch.float64)[0, 0]"]
            else:
                body += ["offset = model.config.learned_positions.offset  # rows before position 0",
                         f"result = stack_of(model).position.weight[offset:][:{n}]"]  # fmt: skip
    return "\n".join([*head, "", *body]) + "\n"


def _size(shelf: Shelf, asked: schema.Size) -> str:
    head = ["import glassformer as gf", ""]
    if asked.preset is not None:
        config = f"gf.presets.get({asked.preset!r})"
    elif asked.model is not None:
        config = f"gf.load({_name(shelf, asked.model)!r}).config"
    else:
        config = f"gf.config.from_dict({asked.config!r})"
    more = f"batch={asked.batch}, context={asked.context}, dtype={asked.dtype!r}, optimizer={asked.optimizer!r}"
    return "\n".join([*head, f"result = gf.size({config}, {more})", "print(result.text())"]) + "\n"


def _doctor(shelf: Shelf, asked: schema.Doctor) -> str:
    examine = f"result = diagnose(model, quick={asked.quick})"
    return _join(shelf, asked, "from glassformer.doctor import diagnose", examine, "print(result.text())")


def _claim(id: str, asked: Any) -> str:
    claim = theory.known(id)
    try:
        theory.knobs_of(claim, asked.knobs)
    except ClaimError as error:
        raise StudioError(str(error)) from None
    knobs = "".join(f", {name}={value!r}" for name, value in asked.knobs.items())
    call = f"gf.check({id!r}, seed={asked.seed}, slow={asked.slow}, broken={asked.broken}{knobs})"
    return f"import glassformer as gf\n\nresult = {call}\nprint(result.text())\n"


def _cell(shelf: Shelf, asked: schema.Cell) -> str:
    index = ", ".join(map(str, asked.index))
    return _join(
        shelf, asked,
        f"result = gf.trace(model, tokens, sites={asked.site!r}{_given(shelf, asked)})[{asked.site!r}][0, {index}]",
    )  # fmt: skip


def _leak(shelf: Shelf, asked: schema.AboutModel) -> str:
    return _join(
        shelf, asked,
        "tokens = torch.randint(model.config.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0))",
        "result = torch.zeros(8, 8)  # row: answer at, column: token changed",
        "with torch.no_grad():",
        "    before = model(tokens)[0]",
        "    for place in range(8):",
        "        changed = tokens.clone()",
        "        changed[0, place] = (changed[0, place] + 1) % model.config.vocab_size",
        "        result[:, place] = (model(changed)[0] - before).abs().amax(-1)",
    )  # fmt: skip


def _watch(run: str) -> str:
    if not NAME.fullmatch(run):
        raise StudioError(f"{run[:60]!r} is not the name of a run.")
    return (
        "from glassformer.lens.figures.training import losses_of, read_log\n"
        "from glassformer.studio.settings import default_folder\n\n"
        f"events = read_log(default_folder() / 'runs' / {run!r} / 'out')\n"
        "result = losses_of(events)  # name: (steps, values)\n"
    )


def _chinchilla(given: dict[str, str]) -> str:
    numbers = {name: float(text) for name, text in given.items() if name in ("flops", "params", "tokens", "ratio")}
    arguments = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
    return f"import glassformer as gf\n\nresult = gf.size.chinchilla({arguments})\nprint(result.text())\n"


def _train(shelf: Shelf, asked: schema.Train) -> str:
    changes = [f"model.preset={asked.preset}", f"data.corpus={asked.corpus}"]
    changes += [f"{name}={json.dumps(value)}" for name, value in asked.fields.items() if value is not None]
    return (
        "from glassformer.training import open_session, read_run, train\n\n"
        f"session = open_session(read_run('', {tuple(changes)!r}))\n"
        "result = train(session.run, session.data)\n"
    )


_VIEWS: dict[str, tuple[type[schema.Asked], Callable[[Shelf, Any], str]]] = {
    "tokens": (schema.Tokens, _tokens),
    "next": (schema.Next, _next),
    "generate": (schema.Generate, _generate),
    "beam": (schema.Beam, _beam),
    "anatomy": (schema.AboutModel, _anatomy),
    "tensor": (schema.OneTensor, _tensor),
    "patterns": (schema.Patterns, _patterns),
    "heads": (schema.HeadScores, _heads),
    "ablate": (schema.Ablate, _ablate),
    "lens": (schema.Lens, _lens),
    "attribution": (schema.Attribution, _attribution),
    "depth": (schema.AboutText, _depth),
    "patch": (schema.Patch, _patch),
    "positions": (schema.Positions, _positions),
    "cell": (schema.Cell, _cell),
    "leak": (schema.AboutModel, _leak),
    "theory": (schema.RunClaim, lambda shelf, asked: ""),
    "chinchilla": (schema.Asked, lambda shelf, asked: ""),
    "train": (schema.Train, _train),
    "doctor": (schema.Doctor, _doctor),
    "size": (schema.Size, _size),
}
