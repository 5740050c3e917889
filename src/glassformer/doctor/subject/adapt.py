"""From a model of any kind to a Subject: how it is called, what it returns, how long its inputs may be."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from glassformer.doctor.subject import interface as calls
from glassformer.doctor.subject.calling import settle_call
from glassformer.doctor.subject.classifier import Tokenwise, tokenwise
from glassformer.doctor.subject.declared import Declared, declared
from glassformer.doctor.subject.device import find_device, moved
from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.guess import guess_kind
from glassformer.doctor.subject.isolate import LARGE_BYTES, n_bytes, quiet
from glassformer.doctor.subject.measure import gap, rms
from glassformer.doctor.subject.snapshot import copies_faithfully
from glassformer.doctor.subject.subject import LENGTHS, Kind, Subject


def subject_of(
    thing: Any,
    kind: Kind | None = None,
    vocab_size: int | None = None,
    expect: Mapping[str, Any] | None = None,
    name: str | None = None,
    device: str | torch.device | None = None,
) -> Subject:
    """Adapt a model, on a device if one is given. Raises CannotExamineError, one sentence, if that cannot be done."""
    if isinstance(thing, Subject):
        return thing
    place = None if device is None else find_device(device)
    if not callable(thing):
        raise CannotExamineError(f"{type(thing).__name__} cannot be called: give a model, tokens in and logits out.")
    if isinstance(thing, type):
        raise CannotExamineError(f"{thing.__name__} is a class: give an instance, or a function that builds one.")
    expect = {key.replace("-", "_"): value for key, value in (expect or {}).items()}
    face = calls.inspect_call(thing)
    facts = declared(thing, expect)
    size = vocab_size or _vocabulary(thing, facts)
    own = type(thing).__name__ if isinstance(thing, nn.Module) else getattr(thing, "__name__", "callable")
    label = name or str(own)
    if place is not None:
        thing = moved(thing, place)
    subject = Subject(thing, kind or "decoder", size, face, facts, label, expect, place=place)
    if isinstance(thing, nn.Module) and any(p.device.type == "meta" for p in thing.parameters()):
        raise CannotExamineError(f"{label} has no weights yet (device meta): load or initialise them first.")
    settle_call(subject)
    if kind in (None, "encoder") and _settle_classifier(subject):
        kind = "encoder"
    _settle_copies(subject)
    if face.target_is_optional and kind != "seq2seq" and _answers_alone(subject):
        subject.interface = face = calls.inspect_call(thing, single=True)
    _settle(subject)
    subject.kind = kind or guess_kind(subject)
    if subject.kind == "seq2seq" and not face.is_seq2seq:
        raise CannotExamineError(
            f"{label} takes no second token argument, so it is no encoder-decoder: use kind='decoder'."
        )
    return subject


def _vocabulary(thing: Any, facts: Declared) -> int:
    declared = facts.whole("vocab_size")
    if declared:
        return declared
    tables = [m for m in thing.modules() if isinstance(m, nn.Embedding)] if isinstance(thing, nn.Module) else []
    heads = [m for m in thing.modules() if isinstance(m, nn.Linear)] if isinstance(thing, nn.Module) else []
    if tables and heads and heads[-1].out_features in {t.num_embeddings for t in tables}:
        return heads[-1].out_features
    if tables:
        return tables[0].num_embeddings
    if heads:
        return heads[-1].out_features
    with contextlib.suppress(Exception, SystemExit), quiet(), torch.no_grad():
        return calls.find_logits(thing(torch.zeros(2, 5, dtype=torch.long)), (2, 5)).shape[-1]
    raise CannotExamineError("no vocabulary to guess from (no config, no embedding): give vocab_size.")


def _settle_classifier(subject: Subject) -> bool:
    """Whether it returns one vector for each sequence; then the encoder inside it is examined."""
    if subject.module is None or subject.interface.is_seq2seq:
        return False
    with quiet(), subject.isolated() as isolated:
        tokens = isolated.tokens(2, isolated.length(5))
        try:
            isolated.logits(tokens)
        except calls.OneVectorError:
            given = {**isolated.filled(tokens), **isolated.interface.flags}
            wrapped = tokenwise(isolated.model, tokens, **given)
            if wrapped is None:
                return False
        except (Exception, SystemExit):
            return False
        else:
            return False
    subject.model = Tokenwise(subject.module, wrapped.path).train(subject.module.training)
    subject.notes.append(
        f"it returns one vector for each sequence: it was examined as an encoder, by what {wrapped.path} gives for "
        "each token and by that vector."
    )
    return True


def _settle_copies(subject: Subject) -> None:
    """Whether probes may run on deep copies; a model over 1 GB is not copied in any case."""
    module = subject.module
    if module is None or n_bytes(module) > LARGE_BYTES:
        return
    tokens = subject.tokens(2, subject.length(5))

    def call(model: nn.Module) -> Any:
        return replace(subject, model=model).output(tokens)

    with quiet():
        subject.in_place = not copies_faithfully(module, call)
    if subject.in_place:
        subject.notes.append(
            "a deep copy of it fails, or still computes with the original's modules: it was examined in place and "
            "restored after each probe."
        )


def _answers_alone(subject: Subject) -> bool:
    """Whether one sequence gives logits: then an optional argument such as `target` holds labels."""
    with contextlib.suppress(Exception, SystemExit), quiet(), subject.isolated() as isolated:
        tokens = isolated.tokens(2, isolated.length(5))
        given = {**isolated.filled(tokens), **isolated.interface.flags}
        with contextlib.suppress(Unsupported):  # logits of the last position only
            isolated.logits_in(isolated.model(tokens, **given), tokens)
        return True
    return False


def _settle(subject: Subject) -> None:
    """First calls: does it run, what does it return, how long may inputs be, how does it want its mask."""
    printed: list[str] = []
    limit = subject.facts.whole("max_len") or LENGTHS[-1]
    with quiet(printed), subject.isolated() as isolated:
        _first_call(isolated, subject)
        for length in [] if subject.multiple == subject.limit else sorted({*LENGTHS, limit}, reverse=True):
            length -= length % subject.multiple
            if not 0 < length <= min(limit, LENGTHS[-1]):
                continue
            with contextlib.suppress(Exception):
                isolated.logits(isolated.tokens(1, length))
                subject.limit = length
                break
        else:
            subject.limit = subject.limit if subject.multiple > 1 else 5
    subject.interface.needs_labels = isolated.interface.needs_labels
    if printed:
        subject.notes.append(
            f"it prints while computing (kept off this report): {printed[0].strip().splitlines()[0][:80]!r}"
        )
    for name in ("mask", "source_mask"):
        if getattr(subject.interface, name) is not None:
            _settle_mask(subject, name)


def _first_call(isolated: Subject, subject: Subject) -> None:
    tokens = isolated.tokens(2, isolated.length(5))
    shape = tuple(tokens.shape)
    try:
        try:
            logits = isolated.logits(tokens)
        except Unsupported as error:
            if isolated.interface.labels is None:
                raise CannotExamineError(
                    f"{subject.name}: {error}, and takes no targets: return all positions."
                ) from None
            isolated.interface.needs_labels = True
            logits = isolated.logits(tokens)
        given = tokens.t().clone() if isolated.interface.time_first else tokens.clone()
        source = isolated.source(2) if isolated.interface.is_seq2seq else None
        arguments = {**isolated.filled(tokens, source), **isolated.interface.flags}
        if source is not None:
            arguments[cast(str, isolated.interface.target)] = given
        isolated.model(given if source is None else source, **arguments)
    except CannotExamineError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:200].rstrip(".")
        text = f"{type(error).__name__}: {text}" if isinstance(error, SystemExit) else text or type(error).__name__
        here = subject.device.type
        hint = "it must take (B,T) token ids"
        if here != "cpu" and "device" in text:
            hint = f"what is no parameter stays where it is when a model moves to {here}: use register_buffer"
        elif "cuda" in text.lower():
            hint = "give a CPU copy, or run where its device is"
        raise CannotExamineError(f"{subject.name} failed on tokens of shape {shape}: {text}: {hint}.") from None
    if not torch.equal(given, tokens.t() if isolated.interface.time_first else tokens):
        raise CannotExamineError(
            f"{subject.name} changes its input tokens in place: clone them before writing to them."
        )
    subject.vocabulary_logits = logits.shape[-1] >= subject.vocab_size or logits.shape[-1] == subject.vocab_size


def _settle_mask(subject: Subject, name: str) -> None:
    """Type and polarity of a mask argument: all real must be the same as no mask at all."""
    face = subject.interface
    wanted = getattr(face, name)
    inverted = wanted in calls.PADDING_NAMES
    rows, length = 2, subject.length(8)
    trials: list[tuple[torch.dtype, bool]] = [
        (d, i) for i in (inverted, not inverted) for d in (torch.long, torch.bool)
    ]
    fallback: tuple[torch.dtype, bool] | None = None
    with quiet(), subject.isolated() as isolated:
        tokens = isolated.tokens(rows, length)
        plain = isolated.logits(tokens)
        for dtype, flip in trials:
            face.mask_dtype, face.mask_inverted = dtype, flip
            real = torch.ones_like(tokens if name == "mask" else isolated.source(rows))
            try:
                masked = isolated.logits(tokens, **{name: real})
            except Exception:
                continue
            if gap(masked, plain) <= 1e-3 * rms(plain):
                return
            if fallback is None and flip == inverted:
                fallback = (dtype, flip)
    if fallback is None:
        setattr(face, name, None)
        subject.notes.append(
            f"its argument {wanted!r} takes no (B,T) mask of real tokens, so padding was not examined."
        )
        return
    face.mask_dtype, face.mask_inverted = fallback
