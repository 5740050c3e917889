"""`glass bench` where the packages of the command line are not installed, such as on a bare GPU machine.

    python -m glassformer.bench decode --model llama3_2_1b --device cuda --gpt-fast CHECKOUT --json FILE

The options are those of `glass bench`, whose help describes them.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from glassformer.bench.commands import parser
from glassformer.bench.plan import ALL, DEVICES, TASKS, Plan
from glassformer.errors import GlassformerError

NUMBERS = ("batch", "prompt", "new", "threads", "layers", "seed")
FLAGS = ("cpu-time", "training", "sampled")
CHECKOUTS = ("nanogpt", "gpt-fast")
PATHS = ("keep", "json")
OTHERS = (*PATHS, "against", "precision", "model", "device", "rounds", "beams")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and return the exit code of `glass bench`."""
    options = parser(__doc__)
    options.add_argument("task", choices=TASKS)
    for name in ("against", "precision"):
        options.add_argument(f"--{name}", action="append", default=[])
    options.add_argument("--model", default="")
    options.add_argument("--device", choices=DEVICES, default="cpu")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--beams", type=int, default=1)
    for name in NUMBERS:
        options.add_argument(f"--{name}", type=int, default=0)
    for name in FLAGS:
        options.add_argument(f"--{name}", action="store_true")
    for name in (*CHECKOUTS, *PATHS):
        options.add_argument(f"--{name}", type=Path, metavar="PATH")
    given = vars(options.parse_args(arguments))
    named = {name: given[_argument(name)] for name in CHECKOUTS}
    try:
        plan = Plan(
            given["task"], tuple(given["against"]) or (ALL,), tuple(given["precision"]), rounds=given["rounds"],
            beams=given["beams"], model=given["model"], device=given["device"], keep=given["keep"],
            checkouts={name: path for name, path in named.items() if path is not None},
            **{name: given[name] for name in NUMBERS}, **{name: given[name] for name in map(_argument, FLAGS)},
        )  # fmt: skip
        return _measure(plan, given["json"])
    except GlassformerError as error:
        print(error, file=sys.stderr)
        return 2


def _argument(option: str) -> str:
    return option.replace("-", "_")


def _measure(plan: Plan, file: Path | None) -> int:
    from glassformer.bench.run import run
    from glassformer.bench.show import show

    if file is not None and file.exists():
        raise GlassformerError(f"--json {file} exists already: give another name.")
    result = run(plan, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    if file is not None:
        file.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
    show(result)
    return 0 if result.sound else 1


if __name__ == "__main__":
    sys.exit(main())
