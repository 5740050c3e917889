"""Tying in an encoder-decoder: source table, target table and head are one matrix where that is declared.

Declared tying of an encoder-decoder covers both tables (as in the Transformer paper, T5 and BART), unless the field
speaks of the decoder, the target or the head alone, or source and target have vocabularies of their own. A class that
lists the parameters it ties (`_tied_weights_keys`) without the source table declares that this one is not among them.
"""

from typing import Any

from glassformer.anatomy.record import Node, ancestors
from glassformer.doctor.probes.structure.recording import Recording
from glassformer.doctor.subject.declared import NAMES
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding, Verdict

ID = "weight_tying/tables"
REMEDY = "Make them one Parameter: encoder.embedding.weight = decoder.embedding.weight = head.weight."
ONE_SIDE = ("decoder", "target", "tgt", "trg", "head", "output", "out_")
TWO_SIDES = ("encoder", "source", "src", "all")


def declared_tying(raw: dict[str, Any]) -> str | None:
    """The field that declares one table for both sides; None where none does, or one says otherwise."""
    found = None
    for name, value in raw.items():
        low = name.lower()
        sharing = name in NAMES["tied"] or (("share" in low or "tie" in low) and ("emb" in low or "vocab" in low))
        if not sharing or not isinstance(value, bool):
            continue
        both = any(word in low for word in TWO_SIDES)
        if not both and any(word in low for word in ONE_SIDE):
            continue
        if not value:
            return None
        found = name if found is None or both else found
    return found


def shared_tables(subject: Subject, recording: Recording) -> Finding:
    """Source tokens, target tokens and the head use one matrix."""
    if subject.kind != "seq2seq":
        return Finding.skip(ID, "not an encoder-decoder")
    declared = declared_tying(subject.facts.raw)
    if declared is None:
        return Finding.skip(ID, "no tying of source and target table is declared")
    size = recording.logits.shape[-1]
    target, source = (_table(recording, node, size) for node in recording.graph.nodes[:2])
    if target is None or source is None:
        return Finding.skip(ID, "the tables of source and target were not seen, or have different vocabularies")
    linears = [n for n in recording.graph.nodes if n.is_linear and n.value.shape[-1] == size]
    head = recording.weight(linears[-1]) if linears else None
    tables = {"source table": source, "target table": target, **({} if head is None else {"head": head.storage})}
    names = {what: recording.names.get(storage, ["?"])[0] for what, storage in tables.items()}
    if len(set(tables.values())) == 1:
        return Finding(ID, Verdict.PASS, 1.0, 1.0, "source table, target table and head are one tensor")
    if target == tables.get("head") and not _lists(subject, recording.names.get(source, [])):
        return Finding.skip(ID, "head and target table are one tensor, and the class does not list the source table")
    shown = ", ".join(f"{what} {name}" for what, name in names.items())
    why = f"{declared} is declared, yet there are {len(set(tables.values()))} tensors: {shown}"
    return Finding(ID, Verdict.FAIL, float(len(set(tables.values()))), 1.0, why, REMEDY, {"tables": names})


def _lists(subject: Subject, names: list[str]) -> bool:
    """Whether the table of these names is among those that the classes of the model tie, where any says which."""
    listed: list[str] = []
    for module in subject.module.modules() if subject.module is not None else ():
        keys = getattr(module, "_tied_weights_keys", None) or {}
        listed += [*keys, *(keys.values() if isinstance(keys, dict) else ())]
    return not listed or any(name.endswith(key) for name in names for key in listed)


def _table(recording: Recording, tokens: Node, size: int) -> int | None:
    """The storage of the table in which these tokens are looked up."""
    for node in recording.graph.nodes:
        lookup = node.op == "embedding" and node.live and len(node.inputs[0].value) == size
        if lookup and tokens.index in ancestors(node.inputs[1]):
            return node.inputs[0].storage
    return None
