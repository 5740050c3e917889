"""Whether a model is a decoder, an encoder or both, from what it says and, where that is faint, from what it computes.

A declaration decides: a word in the config or in an attribute, of the instance or of its class, or a class name that
says what the model is trained for (`...ForCausalLM`, `Bert`). A class name with `Encoder` or `Enc` in it, and arguments
that encoders have, are hints: decoders made of encoder layers have them as well. A single hint yields to what the model
computes. Two hints that agree make an encoder, so that one with a causal mask is found.
"""

import contextlib
import inspect
import re
from typing import Any, cast

from glassformer.doctor.subject.isolate import quiet
from glassformer.doctor.subject.measure import same_shape_bound
from glassformer.doctor.subject.subject import Kind, Subject

OWN_KIND = {"is_decoder": True, "is_causal": True, "causal": True, "is_encoder": False, "bidirectional": False}
"""Attributes of a model, or fields of its config, that say its kind -> the value that a decoder has."""
KINDS = ("kind", "model_kind", "architecture", "arch", "objective", "training_objective", "task", "pretraining")
"""Attributes and fields that say the kind in words."""
WORDS = (
    ("encoder", "encoder"), ("decoder", "decoder"), ("causal", "decoder"), ("autoregressive", "decoder"),
    ("bert", "encoder"), ("mlm", "encoder"), ("masked", "encoder"), ("bidirectional", "encoder"),
    ("denois", "encoder"), ("gpt", "decoder"),
)  # fmt: skip
"""Words -> the kind they stand for, the first that is met."""
FAINT = ("src_key_padding_mask", "token_type_ids", "segment_ids", "segments", "type_ids")
"""Arguments that encoders have."""
ONLY_ENCODERS = (*FAINT[1:], "masked_positions", "masked_lm_positions", "mlm_labels", "masked_lm_labels")
"""Those of them that no decoder made of encoder layers has a use for."""
MASK_TOKEN = ("mask_token_id", "mask_id", "mask_idx", "mask_token", "mask_index")
ENCODER_HEADS = ("mlm", "nsp", "pooler")
"""Words in names of parts that encoders have."""


def guess_kind(subject: Subject) -> Kind:
    """The kind of a subject for which none was given. Notes what was only guessed."""
    face, model = subject.interface, subject.model
    if face.is_seq2seq:
        return "seq2seq"
    if (kind := _in_words(subject) or _by_flag(subject) or _by_class_name(subject)) is not None:
        return kind
    decodes = bool(face.cache or face.maker or face.internal or callable(getattr(model, "generate", None)))
    if _has_encoder_name(subject):
        return _named_encoder(subject, decodes)
    if decodes:
        return "decoder"
    if (name := _faint(subject)) is not None and _reads_both_ways(subject):
        subject.notes.append(
            f"taken for an encoder: it takes {name} and every position reads later tokens. Give kind='decoder' if it "
            "must not."
        )
        return "encoder"
    subject.notes.append("taken for a decoder: nothing says otherwise. Give kind='encoder' if it reads both ways.")
    return "decoder"


def _has_encoder_name(subject: Subject) -> bool:
    own = type(subject.model).__name__
    return "encoder" in own.lower() or "enc" in _words(own)


def _named_encoder(subject: Subject, decodes: bool) -> Kind:
    """The kind of a model whose class is called an encoder, and that says nothing else about its kind."""
    if _second_hint(subject):
        return "encoder"
    looks_back = _looks_back(subject)
    if looks_back or (looks_back is False and decodes):
        why = "its positions read earlier tokens" if looks_back else "it generates or keeps a cache"
        subject.notes.append(
            f"taken for a decoder although its class is called {type(subject.model).__name__}: {why}. Give "
            "kind='encoder' if it reads both ways."
        )
        return "decoder"
    return "encoder"


def _second_hint(subject: Subject) -> bool:
    """Whether something else than the class name belongs to encoders: an argument, a mask token, a head, no head."""
    if subject.module is None:
        return False
    with contextlib.suppress(TypeError, ValueError):
        if set(inspect.signature(subject.module.forward).parameters) & set(ONLY_ENCODERS):
            return True
    held = {**vars(subject.module), **subject.facts.raw}
    if any(isinstance(held.get(name), int) and not isinstance(held[name], bool) for name in MASK_TOKEN):
        return True
    heads = (word for name, _ in subject.module.named_children() for word in _words(name))
    return not subject.vocabulary_logits or any(word in ENCODER_HEADS for word in heads)


def _words(name: str) -> set[str]:
    """The words of an identifier, in lower case: {"tiny", "enc"} of `TinyEnc` and of `tiny_enc`."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def _in_words(subject: Subject) -> Kind | None:
    raw, model = subject.facts.raw, subject.model
    values = [subject.facts.kind]
    if not subject.interface.library:
        values += [raw.get(name) for name in KINDS]
        values += [getattr(model, name, None) for name in KINDS] if subject.module is not None else []
    for value in values:
        text = str(getattr(value, "value", value)).lower() if isinstance(value, str) or hasattr(value, "value") else ""
        if re.search(r"encoder[-_ ]decoder|seq2seq", text):
            continue
        for word, kind in WORDS:
            if word in text:
                return cast(Kind, kind)
    return None


def _by_flag(subject: Subject) -> Kind | None:
    """A flag of the model or its class. Configs of transformers have `is_decoder=False` unless it is set."""
    if subject.module is None:
        return None
    held = vars(subject.model)
    for name, when in OWN_KIND.items():
        value = held.get(name) if subject.interface.library else getattr(subject.model, name, None)
        if isinstance(value, bool):
            return "decoder" if value == when else "encoder"
    return None


def _by_class_name(subject: Subject) -> Kind | None:
    """By the class name, together with flags of the config."""
    facts, raw, own = subject.facts, subject.facts.raw, type(subject.model).__name__
    if isinstance(facts.causal, bool) and "is_decoder" not in raw:
        return "decoder" if facts.causal else "encoder"
    if raw.get("is_decoder") or any(word in own.lower() for word in ("causal", "gpt", "decoder", "lmheadmodel")):
        return "decoder"
    if any(word in own.lower() for word in ("maskedlm", "bert", "electra")):
        return "encoder"
    if _words(own) & {"mlm", "bidirectional"}:
        return "encoder"
    if raw.get("is_decoder") is False and not _of_library(subject.model):
        return "encoder"
    for name, when in OWN_KIND.items():
        if isinstance(raw.get(name), bool) and not _of_library(subject.model):
            return "decoder" if raw[name] == when else "encoder"
    return None


def _of_library(model: Any) -> bool:
    """Whether the config is one of transformers, in which every field has a value."""
    return type(getattr(model, "config", None)).__module__.startswith("transformers.")


def _faint(subject: Subject) -> str | None:
    if subject.module is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        taken = inspect.signature(subject.module.forward).parameters
        return next((name for name in FAINT if name in taken), None)
    return None


def _looks_back(subject: Subject) -> bool | None:
    """Whether tokens reach later positions at least twice as far as earlier ones; None where it cannot be measured.

    A decoder whose mask is off by one looks back as well. An encoder looks both ways, and so does one with windows.
    """
    with contextlib.suppress(Exception), quiet(), subject.isolated(subject.warmth) as isolated:
        tokens = isolated.tokens(2, isolated.length(16))
        fresh, base = isolated.other(tokens), isolated.logits(tokens)
        bound = same_shape_bound(base)
        reached = []
        for at, seen in ((0, slice(1, None)), (tokens.shape[1] - 1, slice(-1))):
            changed = tokens.clone()
            changed[:, at] = fresh[:, at]
            moved = (isolated.logits(changed) - base)[:, seen].abs().amax((0, 2)) > bound
            reached.append(int(moved.sum()))
        return reached[0] > 2 * reached[1]
    return None


def _reads_both_ways(subject: Subject) -> bool:
    """Whether the last token moves the logits at every position before it."""
    with contextlib.suppress(Exception), quiet(), subject.isolated() as isolated:
        tokens = isolated.tokens(2, isolated.length(8))
        changed = tokens.clone()
        changed[:, -1] = isolated.other(tokens)[:, -1]
        one, two = isolated.logits(tokens), isolated.logits(changed)
        return bool(((one - two)[:, :-1].abs().amax(-1) > same_shape_bound(one)).all())
    return False
