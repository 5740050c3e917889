"""Prepare a corpus: plan its parts, do the jobs of each in several processes, and publish their token files.

Finished parts wait in the folder `.parts`, each under a key of everything that its tokens depend on. So a preparation
that was killed continues with what is missing, and one of a corpus that has grown uses the parts of the earlier one.
Publishing links the files into place; the manifest goes first and comes back last.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.files import flush, write_atomically
from glassformer.training.data import parts, reading
from glassformer.training.data import tokenizer as tok
from glassformer.training.data.corpus import DataError, Document
from glassformer.training.data.parts import SPLITS, Job, Span
from glassformer.training.data.source import FORMAT, MANIFEST, PATTERN, ROW_SPLIT, TEXT_SPLIT, Manifest, is_whole
from glassformer.training.data.tokenizer import Tokenizer
from glassformer.training.data.workers import do_all

STAGE = ".parts"
BPE_BYTES = 100_000_000
"""A longer corpus trains its BPE on about this much of its files: every k-th megabyte of texts, every k-th row."""
RECENT = 2.0
"""Seconds. A file that was written less than this before it was hashed may change without a new time."""
Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, the number of its finished jobs, and how many there are."""


@dataclass(frozen=True)
class Order:
    """What is to be prepared, and how."""

    folder: Path
    name: str
    """Of the corpus."""
    documents: Sequence[Document]
    spec: dict[str, Any]
    """The requested tokenizer, and the field of rows."""
    given: Tokenizer | None
    fraction: float
    shard_bytes: int
    processes: int = 1
    progress: Progress | None = None

    @property
    def field(self) -> str:
        return str(self.spec.get("field", "text"))

    @property
    def has_rows(self) -> bool:
        return self.documents[0].has_rows

    @property
    def stage(self) -> Path:
        return self.folder / STAGE


def build(order: Order, old: Manifest | None) -> None:
    """Write the token files, tokenizer.json and manifest.json of a corpus. `old` is the manifest that is replaced."""
    order.stage.mkdir(parents=True, exist_ok=True)
    ends = _ends(order, old)
    spans = parts.divide(order.documents, max(1, order.shard_bytes // parts.SHARE), ends)
    started = time.time_ns()
    kind = order.spec["kind"] if order.given is None else "file"
    scans = None
    if not order.has_rows or kind == "char":
        scans = _scan(order, spans, alphabet=kind == "char")
    tokenizer = _tokenizer(order, kind, spans, scans)
    text = tokenizer.to_json()
    file = order.stage / f"{_key(text)}-{tok.FILE}"
    write_atomically(file, text.encode())
    total = sum(count for found in scans or () for count in found["characters"])
    cut = int(total * (1 - Fraction(str(order.fraction)))) if not order.has_rows else 0
    if not order.has_rows and not total:
        raise DataError(f"the corpus {order.name} has no characters: there is nothing to train on.")
    jobs = _encoding(order, spans, scans, cut, file)
    _adopt(order, jobs, old)
    records = _run(order, "encode", jobs, lambda job: _finished(order.stage, job["key"]))
    hashes = _hash(order)
    if not any(record[split] for record in records for split in SPLITS):
        raise DataError(f"the corpus {order.name} has no characters: there is nothing to train on.")
    _publish(order, tokenizer, jobs, records, hashes, started, ends)


def _ends(order: Order, old: Manifest | None) -> tuple[int, ...]:
    """Return after how many files parts end: where an earlier preparation of fewer files ended, if these are first."""
    if old is None or not order.has_rows or old.format != FORMAT:
        return ()
    was = [(f["name"], f["bytes"]) for f in old.files]
    now = [(d.name, d.size) for d in order.documents[: len(was)]]
    return (*old.ends, len(was)) if was == now and len(order.documents) > len(was) else ()


def _key(*values: Any) -> str:
    text = json.dumps([FORMAT, *values], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


# jobs


def _scan(order: Order, spans: list[list[Span]], alphabet: bool) -> list[Any]:
    jobs: list[Job] = [
        {
            "kind": "scan",
            "spans": part,
            "field": order.field,
            "alphabet": alphabet,
            "key": _key(part, order.field, alphabet),
        }
        for part in spans
    ]

    def known(job: Job) -> Any:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((order.stage / f"scan-{job['key']}.json").read_bytes())
        return None

    def keep(job: Job, result: Any) -> None:
        write_atomically(order.stage / f"scan-{job['key']}.json", json.dumps(result).encode())

    return _run(order, "scan", jobs, known, keep)


def _tokenizer(order: Order, kind: str, spans: list[list[Span]], scans: list[Any] | None) -> Tokenizer:
    """Return the tokenizer: the given one, or one of the corpus, which is kept for a preparation that continues."""
    if order.given is not None:
        return order.given
    if kind == "byte":
        return tok.ByteTokenizer()
    if kind == "char":
        assert scans is not None
        joined = "\n" if len(order.documents) > 1 or order.has_rows else ""
        return tok.train_tokenizer("char", [*(found["alphabet"] for found in scans), joined])
    kept = order.stage / f"bpe-{_key(spans, order.spec)}.json"
    if not kept.is_file():
        every = ceil(sum(document.size for document in order.documents) / BPE_BYTES)
        texts = reading.stream(order.documents, order.field, every)
        trained = tok.train_tokenizer("bpe", texts, order.spec["vocab_size"])
        write_atomically(kept, trained.to_json().encode())
    return tok.load(kept)


def _encoding(order: Order, spans: list[list[Span]], scans: list[Any] | None, cut: int, file: Path) -> list[Job]:
    jobs, before = [], 0
    last = len(order.documents) - 1
    for number, part in enumerate(spans):
        placed = []
        for index, span in enumerate(part):
            characters = 0 if scans is None else scans[number]["characters"][index]
            joined = not order.has_rows and span["end"] == span["bytes"] and span["file"] < last
            placed.append(span | {"cut": min(max(cut - before, -1), characters + 1), "joined": joined})
            before += characters
        settings = {"field": order.field, "fraction": order.fraction, "limit": order.shard_bytes}
        key = _key(placed, settings, file.name)
        jobs.append(
            {"kind": "encode", "spans": placed, "tokenizer": str(file), "out": str(order.stage), "key": key} | settings
        )
    return jobs


def _hash(order: Order) -> list[str]:
    """Return the SHA-256 of each file."""
    whole = [span for part in parts.divide(order.documents, sys.maxsize) for span in part]
    return _run(order, "hash", [{"kind": "hash", "span": span} for span in whole], lambda job: None)


def _finished(stage: Path, key: str) -> Any:
    """Return the record of a finished part; None if it is not complete."""
    try:
        record = json.loads((stage / f"{key}.json").read_bytes())
        whole = all((stage / shard["file"]).is_file() for split in SPLITS for shard in record[split])
    except (OSError, ValueError, KeyError):
        return None
    return record if whole else None


def _adopt(order: Order, jobs: Sequence[Job], old: Manifest | None) -> None:
    """Link the files of parts that the folder already holds into the folder of finished parts."""
    if old is None or not is_whole(order.folder, old):
        return
    for job in jobs:
        record = old.parts.get(job["key"])
        if record is None or _finished(order.stage, job["key"]) is not None:
            continue
        held = [shard for shard in old.shards if shard["part"] == job["key"]]
        record = record | {split: [] for split in SPLITS}
        try:
            for shard in held:
                name = f"{job['key']}-{shard['split']}-{len(record[shard['split']])}.bin"
                (order.stage / name).unlink(missing_ok=True)
                os.link(order.folder / shard["name"], order.stage / name)
                record[shard["split"]].append({"file": name, "tokens": shard["tokens"], "sha256": shard["sha256"]})
            write_atomically(order.stage / f"{job['key']}.json", json.dumps(record).encode())
        except OSError:
            continue  # a file system without links: the part is made again


def _run(
    order: Order,
    stage: str,
    jobs: Sequence[Job],
    known: Callable[[Job], Any],
    keep: Callable[[Job, Any], None] = lambda job, result: None,
) -> list[Any]:
    """Return the results of jobs in their order; those that are known are not done again."""
    results = [known(job) for job in jobs]
    missing = [number for number, result in enumerate(results) if result is None]
    report = order.progress or (lambda stage, done, total: None)
    report(stage, len(jobs) - len(missing), len(jobs))
    for count, (index, result) in enumerate(do_all([jobs[number] for number in missing], order.processes), 1):
        number = missing[index]
        keep(jobs[number], result)
        results[number] = result
        report(stage, len(jobs) - len(missing) + count, len(jobs))
    return results


# publishing


def _publish(
    order: Order,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    records: Sequence[Any],
    hashes: Sequence[str],
    started: int,
    ends: tuple[int, ...],
) -> None:
    """Link the token files into place. A crash at any moment leaves the old corpus, none, or the new one."""
    folder, text = order.folder, tokenizer.to_json()
    parts.check_unchanged([span for job in jobs for span in job["spans"]])
    shards, kept, numbers = [], {}, dict.fromkeys(SPLITS, 0)
    for job, record in zip(jobs, records, strict=True):
        kept[job["key"]] = {name: record[name] for name in ("characters", "documents", "empty")}
        for split in SPLITS:
            for shard in record[split]:
                name = f"{split}-{numbers[split]:05d}.bin"
                numbers[split] += 1
                shards.append({"name": name, "split": split, "part": job["key"]} | shard)
    manifest = Manifest(
        format=FORMAT,
        corpus=order.name,
        files=_files(order, jobs, records, hashes, started),
        spec=order.spec,
        tokenizer={"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "sha256": _sha256(text)},
        separator=tokenizer.separator,
        split=_split(order, records),
        tokens={split: sum(shard["tokens"] for shard in shards if shard["split"] == split) for split in SPLITS},
        dtype=np.dtype(tokenizer.dtype).name,
        shards=tuple({key: shard[key] for key in ("name", "split", "tokens", "sha256", "part")} for shard in shards),
        parts=kept,
        ends=ends,
    )
    (folder / MANIFEST).unlink(missing_ok=True)
    for shard in shards:
        _place(order.stage / shard["file"], folder / shard["name"])
    flush(folder)
    write_atomically(folder / tok.FILE, text.encode())
    manifest.write(folder)
    named = {shard["name"] for shard in shards}
    for file in folder.iterdir():
        if PATTERN.fullmatch(file.name) and file.name not in named:
            file.unlink(missing_ok=True)
    shutil.rmtree(order.stage, ignore_errors=True)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _place(file: Path, target: Path) -> None:
    """Give a finished file its name. It keeps its old one as well, if links are possible, until all are in place."""
    linked = file.with_name(f".{target.name}")
    linked.unlink(missing_ok=True)
    try:
        os.link(file, linked)
    except OSError:
        linked = file
    os.replace(linked, target)


def _files(
    order: Order, jobs: Sequence[Job], records: Sequence[Any], hashes: Sequence[str], started: int
) -> tuple[dict[str, Any], ...]:
    """Return what the manifest holds about each source file."""
    counts = [0] * len(order.documents)
    for job, record in zip(jobs, records, strict=True):
        for span, characters in zip(job["spans"], record["characters"], strict=True):
            counts[span["file"]] += sum(characters)
    found = []
    for document, sha256, characters in zip(order.documents, hashes, counts, strict=True):
        changed = document.changed
        if changed is not None and changed > started - RECENT * 1e9:
            changed = None  # it could be changed again without a new time: hash it the next time
        facts = {"name": document.name, "sha256": sha256, "bytes": document.size, "characters": characters}
        found.append(facts | {"changed": changed})
    return tuple(found)


def _split(order: Order, records: Sequence[Any]) -> dict[str, Any]:
    sides = [sum(characters[side] for record in records for characters in record["characters"]) for side in (0, 1)]
    facts: dict[str, Any] = {"rule": ROW_SPLIT if order.has_rows else TEXT_SPLIT, "validation_fraction": order.fraction}
    facts |= {"train": sides[0], "val": sides[1]}
    if order.has_rows:
        facts |= {name: sum(record[name] for record in records) for name in ("documents", "empty")}
    return facts


def refresh(folder: Path, manifest: Manifest, documents: Sequence[Document]) -> None:
    """Write the times of files whose content is known to be the same, so that they are not hashed again.

    A folder of an earlier version also gets the hashes of its token files.
    """
    limit = time.time_ns() - RECENT * 1e9
    files = tuple(
        held | {"changed": changed if (changed := document.changed) is not None and changed < limit else None}
        for held, document in zip(manifest.files, documents, strict=True)
    )
    shards = tuple(
        shard if shard["sha256"] else shard | {"sha256": Document(shard["name"], folder / shard["name"]).hash()}
        for shard in manifest.shards
    )
    with contextlib.suppress(OSError):  # a folder that cannot be written is still good to read
        replace(manifest, files=files, shards=shards, format=FORMAT).write(folder)
