"""Views of the residual stream: logit lens, rank, logit attribution and activation patching."""

from collections.abc import Sequence

import torch

from glassformer.lens import figures, rank
from glassformer.lens.figure import Figure
from glassformer.lens.figures.labels import readable
from glassformer.lens.logit_lens import logit_lens
from glassformer.lens.patch import patch_effects
from glassformer.lens.residual import attribute_logits, stream_norms
from glassformer.lens.sites import LensError, output_stack
from glassformer.lens.trace import require_equal_length, trace
from glassformer.lens.views.subject import Choice, Subject, View, index, pick, position_index


def logit_lens_view(subject: Subject, choice: Choice) -> View:
    """Show the most likely token at every depth."""
    quantity = pick("logit-lens", choice, "probability", "entropy")
    reading = logit_lens(subject.model, subject.tokens, top=1, **subject.given)
    top = [[subject.say(i) for i in row] for row in reading.top[:, 0, :, 0].tolist()]
    chances, entropy = reading.probabilities[:, 0, :, 0], reading.entropy[:, 0]
    rows = ["embedding", *(f"block {i}" for i in range(len(top) - 1))]

    def draw() -> Figure:
        title = f"{subject.name}: most likely token at every depth of the residual stream (logit lens)"
        if quantity == "entropy":
            return figures.logit_lens_grid(top, entropy, subject.words, rows, quantity="entropy (nats)", title=title)
        return figures.logit_lens_grid(top, chances, subject.words, rows, title=title)

    numbers = {"depths": rows, "tokens": subject.words, "top": top, "probability": chances.tolist()}
    divergence, agreement = reading.divergence[:, 0].tolist(), reading.agreement.tolist()
    return View({**numbers, "entropy": entropy.tolist(), "divergence": divergence, "agreement": agreement}, draw)


def rank_view(subject: Subject, choice: Choice) -> View:
    """Show the rank of the residual stream: its spectrum, its distance to equal rows, its norms, or the experiment."""
    option = pick("rank", choice, "spectrum", "deviation", "norms", "variants")
    if option == "variants":
        return _variants(choice.seed)
    if option == "norms":
        lengths = stream_norms(subject.model, subject.tokens, **subject.given)
        series = {"stream": lengths.stream[:, 0], **{f"what {k} adds": v[:, 0] for k, v in lengths.branches.items()}}
        named = {name.replace(".out", "").replace("feedf", "feed-f"): value for name, value in series.items()}
        title = f"{subject.name}: norms of the residual stream by depth"
        return View(
            {name: value.tolist() for name, value in named.items()},
            lambda: figures.norms_by_depth(named, title=title),
        )
    stack = output_stack(subject.model.config)
    run = trace(subject.model, subject.tokens, sites=[f"{stack}embed", f"{stack}blocks.*.resid_post"], **subject.given)
    found = rank.stream_rank(run, stack)
    if len(subject.words) < 2:
        raise LensError("the rank needs at least two tokens: give a longer text.")

    def draw() -> Figure:
        if option == "deviation":
            title = f"{subject.name}: relative distance of the residual stream to equal rows, by depth"
            return figures.deviation_by_depth({"residual stream": found.deviation[:, 0]}, title=title)
        title = f"{subject.name}: singular values of the residual stream ({len(subject.words)} tokens) at each depth"
        return figures.singular_values(found.singular_values[:, 0], title=title)

    numbers = {
        "sites": list(found.sites),
        "singular_values": found.singular_values[:, 0].tolist(),
        "effective_rank": found.effective_rank[:, 0].tolist(),
        "stable_rank": found.stable_rank[:, 0].tolist(),
        "deviation": found.deviation[:, 0].tolist(),
    }
    return View(numbers, draw)


def _variants(seed: int) -> View:
    """Show fifty random layers of each kind of block, with the theoretical curve for three of them."""
    runs = {name: rank.collapse(name, seed=seed) for name in rank.VARIANTS}
    theory = {f"{name}, to leading order": run.theory for name, run in runs.items() if run.theory is not None}
    theory |= {f"{name}, cubic bound": run.bound.nan_to_num(0.0) for name, run in runs.items() if run.bound is not None}

    def draw() -> Figure:
        # values below this are rounding errors
        curves = {str(n): torch.where(r.deviation > rank.ROUNDING, r.deviation, 0.0) for n, r in runs.items()}
        lines = {n: torch.where(line > rank.ROUNDING, line, 0.0) for n, line in theory.items()}
        title = "Rank collapse: relative distance to equal rows after each random layer"
        return figures.deviation_by_depth(curves, lines, title=title)

    numbers = {"deviation": {n: r.deviation.tolist() for n, r in runs.items()}}
    return View({**numbers, "theory": {n: line.tolist() for n, line in theory.items()}}, draw)


def attribution(subject: Subject, choice: Choice) -> View:
    """Show the direct logit attribution of the most likely token, or the chosen one, at one position."""
    order = pick("attribution", choice, "size", "depth")
    _require_two(subject, choice)
    position = position_index(subject, choice.position)
    answer = _most_likely(subject, subject.ids, position) if choice.answer is None else choice.answer
    found = attribute_logits(subject.model, subject.tokens, answer, choice.wrong, position=position, **subject.given)
    names, values = [_part(name) for name in found.names], found.values[:, 0]
    what = f"the logit of “{readable(subject.say(answer))}”"
    if choice.wrong is not None:
        what += f" minus that of “{readable(subject.say(choice.wrong))}”"

    def draw() -> Figure:
        title = f"{subject.name}: what adds to {what} at “{readable(subject.words[position])}” (position {position})"
        total = float(found.logit[0])
        return figures.attribution_bars(
            names, values, total, order="depth" if order == "depth" else "size", what=what, title=title
        )

    numbers = {"position": position, "answer": subject.say(answer), "logit": float(found.logit[0]), "note": found.note}
    parts = dict(zip(found.names, values.tolist(), strict=True))
    return View({**numbers, "parts": parts, "finding": found.finding.to_dict()}, draw)


def _require_two(subject: Subject, choice: Choice) -> None:
    if choice.answer is not None and choice.answer == choice.wrong:
        raise LensError(
            f"--answer and --wrong are the same token {subject.say(choice.answer)!r}, so their logits do not differ: "
            "give two different tokens."
        )


def _most_likely(subject: Subject, ids: Sequence[int], position: int) -> int:
    return int(trace(subject.model, torch.tensor([list(ids)]), sites=(), **subject.given).logits[0, position].argmax())


def _part(name: str) -> str:
    """blocks.3.attention.head.1 -> head 3.1; blocks.3.feedforward -> feed-forward 3."""
    parts = name.removeprefix("decoder.").split(".")
    match parts:
        case ["embed"]:
            return "embedding"
        case ["blocks", layer, "attention", "head", head]:
            return f"head {layer}.{head}"
        case ["blocks", layer, "cross", "head", head]:
            return f"cross head {layer}.{head}"
        case ["blocks", layer, "feedforward"]:
            return f"feed-forward {layer}"
        case ["blocks", layer, *rest]:
            return f"{' '.join(rest)} {layer}".replace("_", " ")
    return " ".join(parts).replace("_", " ")


PATCHED = {
    "stream": "resid_pre",
    "heads": "attention.heads",
    "attention": "attention.out",
    "feedforward": "feedforward.out",
}


def patch(subject: Subject, choice: Choice) -> View:
    """Show how much of the clean answer each clean value restores when it alone is patched into the other run."""
    option = pick("patch", choice, *PATCHED)
    if choice.against is None:
        raise LensError("patching needs a second text: give --against, with as many tokens as --text.")
    require_equal_length(len(subject.ids), len(choice.against), ("--text", "--against"))
    layer = index("layer", choice.layer, subject.model.config.n_layers)
    position = position_index(subject, choice.position)
    answer = _most_likely(subject, subject.ids, position) if choice.answer is None else choice.answer
    wrong = _most_likely(subject, choice.against, position) if choice.wrong is None else choice.wrong
    _require_two(subject, choice)
    if answer == wrong:
        raise LensError(
            f"the model predicts {subject.say(answer)!r} for both texts: give other texts, or --answer and --wrong."
        )
    by_head = option == "heads" and layer is None
    found = patch_effects(
        subject.model, subject.tokens, torch.tensor([list(choice.against)]), answer, wrong, PATCHED[option],
        layers=None if layer is None else [layer], each_position=not by_head, position=position, **subject.given,
    )  # fmt: skip
    # (L,T), (L,H), or of one layer (H,T)
    effects = found.effects[0] if option == "heads" and layer is not None else found.effects
    scope = {"stream": "the residual stream before a layer", "heads": "one head", "attention": "one attention output"}
    titles = f"{subject.name}: how much of “{readable(subject.say(answer))}” over “{readable(subject.say(wrong))}”"
    title = f"{titles} is restored by the clean value of {scope.get(option, 'one feed-forward output')}"

    def draw() -> Figure:
        if by_head:
            return figures.patching_map(effects, None, None, columns="head", title=title)
        rows = None if layer is None or option == "heads" else [str(layer)]
        axis = f"head of layer {layer}" if option == "heads" else "layer"
        return figures.patching_map(effects, subject.words, rows, axis=axis, title=title)

    numbers = {
        "site": PATCHED[option],
        "answer": subject.say(answer),
        "wrong": subject.say(wrong),
        "position": position,
    }
    differences = {"clean_difference": found.clean, "corrupt_difference": found.corrupt}
    return View({**numbers, **differences, "effects": effects.tolist()}, draw)
