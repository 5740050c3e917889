"""Examine every text model class of the installed `transformers`, tiny and random, and print what the doctor reports.

    python -m glassformer.bench.developer.doctor_sweep [--classes NAME ...] [--alarms] [--every N] [--gpt2]
        [--results FILE] [--again]

Each class is examined without a hint, in a worker process that is killed if it does not end in time. Results are
appended to FILE, one JSON object per line; a class that has a result there is not examined again unless `--again`.
`--alarms` takes only classes with a known defect or with a diagnosis in FILE. `--every 8` takes each eighth class,
which is enough for the times. `--gpt2` also times GPT-2 small (124 M parameters), on as many threads as torch uses.

`KNOWN` lists the defects of transformers 5.22.2 that were confirmed by independent experiments. Exit code 0: exactly
these are reported, nothing crashed and every refusal has a reason. 1: anything else.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glassformer.bench.commands import parser, seconds_of
from glassformer.bench.developer.old_releases import examined
from glassformer.bench.developer.tiny_transformers import build, class_names, kind_of

SECONDS = 120.0
UNSHIFTED = ("Bart", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "CpmAnt", "MBart", "Marian", "Mvp", "PLBart",
             "Pegasus", "TrOCR", "Whisper")  # fmt: skip
"""Causal classes that compare labels with logits of the same position."""
KNOWN: dict[str, frozenset[str]] = {
    name: frozenset(ids.split())
    for name, ids in {
        **{f"{name}ForCausalLM": "label_shift" for name in UNSHIFTED},
        "BigBirdPegasusForCausalLM": "weight_tying label_shift",
        "BambaForCausalLM": "decode_position",
        "ClvpForCausalLM": "residual_growth",
        "ConvBertForMaskedLM": "pad_leak",
        "CpmAntForCausalLM": "causal_leak label_shift",
        "DeepseekV4ForCausalLM": "cache_rollback cache_reorder pad_leak",
        "FSMTForConditionalGeneration": "cache_mask",
        "FalconMambaForCausalLM": "cache_mismatch",
        "FunnelForMaskedLM": "mask_value pad_leak",
        "JambaForCausalLM": "cache_mismatch",
        "LukeForMaskedLM": "weight_tying",
        "MambaForCausalLM": "cache_mismatch",
        "MiniMaxForCausalLM": "cache_reorder",
        "MobileBertForMaskedLM": "pad_leak",
        "MraForMaskedLM": "dead_gradient",
        "NemotronHForCausalLM": "cache_mismatch",
        "NystromformerForMaskedLM": "pad_leak",
        "OpenAIGPTLMHeadModel": "mask_value",
        "Pop2PianoForConditionalGeneration": "weight_tying",
        "ProphetNetForCausalLM": "causal_leak",
        "ProphetNetForConditionalGeneration": "causal_leak",
        "RecurrentGemmaForCausalLM": "pad_leak",
        "ReformerModelWithLMHead": "causal_leak",
        "RwkvForCausalLM": "pad_leak",
        "YosoForMaskedLM": "pad_leak",
        "Zamba2ForCausalLM": "cache_mismatch",
    }.items()
}
"""Class -> diagnoses of real defects in transformers 5.22.2."""


def examine(name: str, seconds: float) -> dict[str, Any]:
    """Build and examine one class; errors become part of the result."""
    import glassformer as gf
    from glassformer.errors import GlassformerError

    found: dict[str, Any] = {"subject": name, "kind": kind_of(name)}
    began = time.monotonic()
    try:
        model = build(name)
    except Exception as error:
        return {**found, "not_built": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    try:
        report = gf.diagnose(model, kind=kind_of(name), seconds=seconds)  # type: ignore[arg-type]
    except GlassformerError as error:
        return {**found, "refused": str(error), "seconds": time.monotonic() - began}
    except Exception as error:
        return {**found, "error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    diagnoses = [
        {
            "id": d.id,
            "where": d.where(),
            "evidence": [(f.id, f.measured, f.bound, f.why, f.evidence) for f in d.evidence],
            "consequences": [f.id for f in d.consequences],
        }
        for d in report.diagnoses
    ]
    return {
        **found,
        "diagnoses": diagnoses,
        "counts": report.counts,
        "verdict": report.verdict(),
        "skips": [(f.id, f.why) for f in report.findings if str(f.verdict) == "skip"],
        "notes": list(report.notes),
        "seconds": report.seconds,
    }


def state_of(found: dict[str, Any]) -> str:
    """Return healthy, alarm, refused, not examined, error or not built."""
    for name in ("not_built", "refused", "error"):
        if name in found:
            return name.replace("_", " ")
    if found["diagnoses"]:
        return "alarm"
    return "not examined" if "not examined" in found["verdict"] else "healthy"


def table(results: list[dict[str, Any]]) -> str:
    """Return one line per diagnosis, known or not, and the totals."""
    lines = ["| class | kind | diagnosis | evidence | known |", "|---|---|---|---|---|"]
    missing, unknown, kept = [], 0, 0
    for found in results:
        known = KNOWN.get(found["subject"], frozenset())
        ids = [d["id"] for d in found.get("diagnoses", ())]
        missing += [f"{found['subject']}: {name}" for name in sorted(known - set(ids))]
        for diagnosis in found.get("diagnoses", ()):
            is_known = diagnosis["id"] in known
            unknown, kept = unknown + (not is_known), kept + is_known
            id, measured, bound, why, _ = diagnosis["evidence"][0]
            numbers = f"{measured:.3g}" if isinstance(measured, float) else "-"
            limit = f"{bound:.3g}" if isinstance(bound, float) else "-"
            words = f"{id} {numbers} / {limit}: {why[:150]}"
            cells = [found["subject"], str(found["kind"]), diagnosis["id"], words, "yes" if is_known else "NO"]
            lines.append(f"| {' | '.join(cells)} |")
        if state_of(found) in ("refused", "error", "not built"):
            reason = found.get("refused") or found.get("error") or found.get("not_built")
            lines.append(f"| {found['subject']} | {found.get('kind')} | {state_of(found).upper()} | {reason} | |")
    states = Counter(state_of(found) for found in results)
    times = [found["seconds"] for found in results if state_of(found) in ("healthy", "alarm")]
    lines += ["", ", ".join(f"{n} {state}" for state, n in states.most_common()) + f" of {len(results)} classes"]
    lines.append(f"known defects named: {kept} of {kept + len(missing)}; other diagnoses: {unknown}")
    lines += [f"missing: {words}" for words in missing]
    if times:
        low, middle, high = quartiles(times)
        lines.append(f"median {middle:.2f} s (quartiles {low:.2f} and {high:.2f}, longest {max(times):.1f}) per class")
    return "\n".join(lines)


def quartiles(times: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile of at least one number."""
    return times * 3 if len(times) == 1 else statistics.quantiles(times, n=4, method="inclusive")


def gpt2_small() -> float:
    """Return the seconds of one examination of a random GPT-2 small."""
    import transformers

    import glassformer as gf

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    return seconds_of(lambda: gf.diagnose(model))


def is_as_known(results: list[dict[str, Any]]) -> bool:
    """True if exactly the known defects are reported, nothing crashed, and each refusal has a reason."""
    for found in results:
        ids = {d["id"] for d in found.get("diagnoses", ())}
        if found.get("error") or ids != KNOWN.get(found["subject"], frozenset()):
            return False
    return True


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each class in a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["subject"]: found for found in map(json.loads, lines)}


def sweep(names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """Examine classes in worker processes, which import transformers once for many classes."""
    command = [sys.executable, "-m", "glassformer.bench.developer.doctor_sweep", "--worker"]
    yield from examined(command, names, seconds)


def worker(names: list[str], seconds: float) -> int:
    """Print one JSON object per class."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps(examine(name, seconds), default=str), flush=True)
    return 0


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--classes", nargs="+", default=[], metavar="NAME", help="Only these classes.")
    options.add_argument("--alarms", action="store_true", help="Only classes with a known defect or with a diagnosis.")
    options.add_argument("--every", type=int, default=1, metavar="N", help="Take each N-th class. Default: all.")
    options.add_argument("--gpt2", action="store_true", help="Also time one examination of GPT-2 small.")
    options.add_argument("--results", type=Path, metavar="FILE", help="Read and append results, one JSON per line.")
    options.add_argument("--again", action="store_true", help="Examine classes again that have a result in FILE.")
    options.add_argument("--seconds", type=float, default=SECONDS, help="Time limit of one examination. Default: 120.")
    options.add_argument("--worker", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    given, rest = options.parse_known_args()
    if rest and given.worker is None:
        options.error(f"unknown argument {rest[0]!r}.")
    if given.every < 1:
        options.error(f"--every is {given.every}: give a number of at least 1.")
    given.rest = rest
    return given


def main() -> int:
    given = arguments()
    if given.worker is not None:
        return worker([*given.worker, *given.rest], given.seconds)
    results = read_results(given.results) if given.results else {}
    names = (given.classes or class_names())[:: given.every]
    if given.alarms:
        names = [n for n in names if n in KNOWN or results.get(n, {}).get("diagnoses")]
    waiting = [n for n in names if given.again or n not in results]
    for found in sweep(waiting, given.seconds):
        results[found["subject"]] = found
        words = ", ".join(d["id"] for d in found.get("diagnoses", ())) or state_of(found)
        print(f"{found['subject']}: {words}", file=sys.stderr, flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    chosen = [results[n] for n in names if n in results]
    print(table(chosen))
    if given.gpt2:
        print(f"GPT-2 small: {gpt2_small():.1f} s")
    return 0 if is_as_known(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
