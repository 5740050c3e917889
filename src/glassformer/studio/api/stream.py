"""Stream: the residual stream read at every depth, taken apart, measured, and patched between two texts."""

from typing import Any

from glassformer.studio import schema
from glassformer.studio.api.reading import Reading, read
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import Ticket
from glassformer.studio.shelf import Loaded, Shelf


def lens(shelf: Shelf, asked: schema.Lens) -> dict[str, Any]:
    """The likeliest tokens at every depth: cells[depth][place] is a list, likeliest first."""
    from glassformer.lens import logit_lens

    reading = read(shelf, asked)
    found = logit_lens(reading.model, reading.tokens, min(asked.top, reading.model.config.vocab_size), **reading.given)
    say = reading.loaded.say
    cells = [
        [
            [{"id": i, "piece": say(i), "p": p} for i, p in zip(ids, chances, strict=True)]
            for ids, chances in zip(row, chance_row, strict=True)
        ]
        for row, chance_row in zip(found.top[:, 0].tolist(), found.probabilities[:, 0].tolist(), strict=True)
    ]
    return {
        "layers": ["embedding", *(f"block {i}" for i in range(len(cells) - 1))],
        "sites": list(found.depths),
        "pieces": reading.words,
        "cells": cells,
        "entropy": found.entropy[:, 0].tolist(),
        "kl": found.divergence[:, 0].tolist(),
        "agreement": found.agreement.tolist(),
    }


def attribution(shelf: Shelf, asked: schema.Attribution) -> dict[str, Any]:
    """What each part adds to one logit (less another's); the likeliest token's when none is named."""
    from glassformer.lens import attribute_logits

    reading = read(shelf, asked)
    place = _place(reading, asked.position)
    answer = _likeliest(reading, place) if asked.answer is None else asked.answer
    found = attribute_logits(reading.model, reading.tokens, answer, asked.wrong, position=place, **reading.given)
    say = reading.loaded.say
    return {
        "names": list(found.names),
        "values": found.values[:, 0].tolist(),
        "logit": float(found.logit[0]),
        "answer": {"id": answer, "piece": say(answer)},
        "wrong": None if asked.wrong is None else {"id": asked.wrong, "piece": say(asked.wrong)},
        "position": place,
        "finding": found.finding.to_dict(),
        "note": found.note,
    }


def depth(shelf: Shelf, asked: schema.AboutText) -> dict[str, Any]:
    """Norms and rank of the stream by depth, and how pure random attention would lose its rank (the theory's line)."""
    from glassformer.lens import rank, stream_norms, trace

    reading = read(shelf, asked)
    stack = "" if reading.target is None else "decoder."
    lengths = stream_norms(reading.model, reading.tokens, **reading.given)
    sites = [f"{stack}embed", f"{stack}block.*.resid_post"]
    found = rank.stream_rank(trace(reading.model, reading.tokens, sites=sites, **reading.given), stack)
    return {
        "pieces": reading.words,
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
        "theory": _theory(reading),
    }


def _theory(reading: Reading) -> dict[str, Any]:
    """Deviation from equal rows of random layers without and with a skip, as many layers as the model has."""
    from glassformer.lens import rank

    layers = reading.model.config.n_layers

    def make() -> dict[str, Any]:
        pure, skip = rank.collapse("attention", layers), rank.collapse("skip", layers)
        assert skip.theory is not None
        return {
            "attention": pure.deviation.tolist(),
            "skip": skip.deviation.tolist(),
            "skip_predicted": skip.theory.tolist(),
        }

    made: dict[str, Any] = reading.loaded.remember(("collapse", layers), make)
    return made


def patch(shelf: Shelf, asked: schema.Patch, ticket: Ticket, emit: Emit) -> None:
    """Patching from a clean into a corrupt text, layer by layer: `layer` events, then `done` with the whole map."""
    import torch

    from glassformer.lens import patch_effects
    from glassformer.model import Seq2Seq

    loaded = shelf.get(asked.model)
    if isinstance(loaded.model, Seq2Seq):
        raise StudioError("patching here is between two prompts of one stack: use glassformer.lens.patch_effects.")
    clean, corrupt = (_tokens(loaded, given) for given in (asked.clean, asked.corrupt))
    place = _place(Reading(loaded, clean), asked.position)
    if len(clean) != len(corrupt):
        raise StudioError(f"the clean text has {len(clean)} tokens, the corrupt one {len(corrupt)}: make them equal.")
    answer = _likeliest(Reading(loaded, clean), place) if asked.answer is None else asked.answer
    wrong = _likeliest(Reading(loaded, corrupt), place) if asked.wrong is None else asked.wrong
    if answer == wrong:
        raise StudioError(
            f"both texts make the model say {loaded.say(answer)!r} here: give others, or answer and wrong."
        )
    by_head = asked.site == "attention.heads"
    rows, texts = [], (torch.tensor([clean]), torch.tensor([corrupt]))
    for layer in range(loaded.config.n_layers):
        ticket.check()
        found = patch_effects(
            loaded.model, *texts, answer, wrong, asked.site, layers=[layer], each_position=not by_head, position=place
        )
        rows.append(found.effects[0].tolist())
        emit("layer", {"layer": layer, "layers": loaded.config.n_layers, "effects": rows[-1]})
    words = {"clean": [loaded.say(i) for i in clean], "corrupt": [loaded.say(i) for i in corrupt]}
    asked_for = {
        "answer": {"id": answer, "piece": loaded.say(answer)},
        "wrong": {"id": wrong, "piece": loaded.say(wrong)},
    }
    differences = {"clean_difference": found.clean, "corrupt_difference": found.corrupt}
    facts = {"site": asked.site, "axis": "head" if by_head else "position", "position": place, "effects": rows}
    emit("done", {**facts, **asked_for, **differences, "pieces": words})


def _tokens(loaded: Loaded, given: list[int] | str) -> list[int]:
    return loaded.checked(loaded.encode(given) if isinstance(given, str) else given)


def _place(reading: Reading, position: int) -> int:
    length = len(reading.words)
    if not -length <= position < length:
        raise StudioError(f"position {position} is outside a text of {length} tokens: use {-length} to {length - 1}.")
    return position % length


def _likeliest(reading: Reading, place: int) -> int:
    from glassformer.lens import trace

    return int(trace(reading.model, reading.tokens, sites=(), **reading.given).logits[0, place].argmax())
