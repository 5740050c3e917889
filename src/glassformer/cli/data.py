"""`glass data prepare`: turn a corpus into token files, in several processes."""

import json as json_module
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from glassformer.cli.common import InputError, Json, check_parent, option

if TYPE_CHECKING:
    from glassformer.training.data.source import Prepared
    from glassformer.training.sections import Data

HELP = {
    "action": "What to do: prepare.",
    "corpus": "A text, JSONL (.gz, .zst) or Parquet file, a folder of them, or a pattern such as 'data/*.jsonl'.",
    "out": "Write the token files to this folder. Default: the folder in the cache that glass train looks in.",
    "tokenizer": "Tokenizer: char, byte, bpe (trained on the corpus; needs --vocab-size), or a tokenizer.json.",
    "vocab_size": "Number of tokens of a bpe tokenizer. Default: not set.",
    "field": "JSONL and Parquet only: the field of a row that holds its text. a.b is the field b of the object a.",
    "validation": "Fraction that is kept for validation: the end of a text, or documents chosen by their hash.",
    "processes": "Number of processes. The tokens do not depend on it. Default: one for each core.",
    "shard_mib": "Largest size of a token file in MiB.",
    "force": "Replace a corpus in --out that was prepared with other settings.",
}


def data(
    action: Annotated[tyro.conf.Positional[Literal["prepare"]], option(HELP["action"])],
    corpus: Annotated[tyro.conf.Positional[str], option(HELP["corpus"], "CORPUS")],
    out: Annotated[Path | None, option(HELP["out"], "DIR")] = None,
    tokenizer: Annotated[str, option(HELP["tokenizer"])] = "char",
    vocab_size: Annotated[int | None, option(HELP["vocab_size"], "INT")] = None,
    field: Annotated[str, option(HELP["field"])] = "text",
    validation: Annotated[float, option(HELP["validation"])] = 0.1,
    processes: Annotated[int | None, option(HELP["processes"], "INT")] = None,
    shard_mib: Annotated[int, option(HELP["shard_mib"])] = 2048,
    force: Annotated[bool, option(HELP["force"])] = False,
    json: Json = False,
) -> int:
    """Turn a corpus into token files for `glass train`. A killed preparation continues where it was.

    If the corpus has grown since, only what is new is prepared.
    """
    from glassformer.training.data.source import prepare_corpus
    from glassformer.training.sections import Data

    for name, value in (("processes", processes), ("shard-mib", shard_mib)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} must be a whole number of at least 1.")
    asked = Data(
        corpus=corpus,
        field=field,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        validation=validation,
        cache=None if out is None else str(out),
    )
    if out is not None:
        check_parent(f"--out {out}", out, makes_folders=True)
        if not force:
            _check_free(out, asked)
    made = prepare_corpus(
        asked, None, processes or cores(), shard_mib << 20, _progress if sys.stderr.isatty() else None
    )
    facts = describe(made)
    if json:
        print(json_module.dumps(facts))
        return 0
    for line in report(facts):
        print(line)
    return 0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_free(out: Path, asked: "Data") -> None:
    """Refuse a folder with other files than a prepared corpus, or with one of other settings."""
    from glassformer.training.data.build import STAGE
    from glassformer.training.data.source import MANIFEST, read_manifest

    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(f"--out {out} is a file: give a folder.")
    held = read_manifest(out)
    if held is None:
        if not (out / STAGE).is_dir() and any(out.iterdir()):
            raise InputError(f"--out {out} is not empty and has no {MANIFEST}: give another folder.")
        return
    kind = asked.tokenizer if asked.tokenizer in ("char", "byte", "bpe") else "file"
    wanted = {"tokenizer": kind, "vocab_size": asked.vocab_size, "validation": asked.validation}
    given = {"tokenizer": held.spec["kind"], "vocab_size": held.spec.get("vocab_size")}
    given |= {"validation": held.split["validation_fraction"]}
    if kind == "file":
        wanted["vocab_size"] = given["vocab_size"]
    for name, value in wanted.items():
        if given[name] != value:
            raise InputError(
                f"--out {out} holds a corpus that was prepared with {name}={given[name]}, not {value}: give another "
                "folder, or replace it with --force."
            )


def _progress(stage: str, done: int, total: int) -> None:
    print(f"\r{stage}: {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def describe(made: "Prepared") -> dict[str, Any]:
    """Return what `--json` prints."""
    manifest = made.manifest
    return {
        "folder": str(made.folder),
        "corpus": manifest.corpus,
        "tokens": manifest.tokens,
        "files": len(manifest.shards),
        "dtype": manifest.dtype,
        "tokenizer": manifest.tokenizer["kind"],
        "vocab_size": manifest.tokenizer["vocab_size"],
        "source_files": len(manifest.files),
        "source_bytes": sum(file["bytes"] for file in manifest.files),
        "documents": manifest.split.get("documents"),
        "empty": manifest.split.get("empty"),
        "sha256": made.digest,
    }


def report(facts: dict[str, Any]) -> list[str]:
    """Return the lines that are printed."""
    import shlex

    from glassformer.errors import plural

    tokens, folder = facts["tokens"], facts["folder"]
    lines = [
        f"{folder}: {plural(tokens['train'], 'token')} for training and {tokens['val']:,} for validation in "
        f"{plural(facts['files'], 'file')} ({facts['dtype']}); the {facts['tokenizer']} tokenizer has "
        f"{plural(facts['vocab_size'], 'id')}"
    ]
    if facts["documents"] is not None:
        empty = f"; {facts['empty']:,} more had no text and were left out" if facts["empty"] else ""
        lines.append(f"{plural(facts['documents'], 'document')} of {plural(facts['source_files'], 'file')}{empty}")
    return [*lines, f"train on it: glass train {shlex.quote(folder)}"]
