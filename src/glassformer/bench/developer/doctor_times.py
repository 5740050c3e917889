"""Time the doctor: every eighth text class of the installed `transformers`, tiny, and GPT-2 small (124 M parameters).

    python -m glassformer.bench.developer.doctor_times [--every N] [--without-gpt2]

Each model is examined once with all probes, after a first model that is not counted: tiny ones on one thread, GPT-2
small on as many as torch uses. Prints the median of the wall times of the tiny models with its quartiles, and the wall
time of GPT-2 small.
"""

import argparse
import statistics
import sys
import time
from typing import Any

from glassformer.bench.developer.doctor_sweep import SECONDS, examine, state_of
from glassformer.bench.developer.tiny_transformers import class_names

WANTED = {"tiny": 2.9, "GPT-2 small": 44.0}
"""Seconds that an examination may take."""


def quartiles(times: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of at least one number."""
    if len(times) < 2:
        return times[0], times[0], times[0]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, middle, high


def lines(tiny: list[dict[str, Any]], small: float | None) -> list[str]:
    """What is printed: refused classes and those that were not built have no time of an examination."""
    times = [found["seconds"] for found in tiny if state_of(found) in ("healthy", "alarm")]
    if not times:
        return ["no class could be examined"]
    low, middle, high = quartiles(times)
    words = [f"tiny: median {middle:.2f} s (quartiles {low:.2f} and {high:.2f}, longest {max(times):.1f})"]
    words[0] += f" of {len(times)} classes; wanted {WANTED['tiny']} s"
    if small is not None:
        words.append(f"GPT-2 small: {small:.1f} s; wanted {WANTED['GPT-2 small']:g} s")
    return words


def gpt2_small() -> float:
    """Wall time of one examination of a random GPT-2 small."""
    import transformers

    import glassformer as gf

    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    began = time.perf_counter()
    gf.diagnose(model)
    return time.perf_counter() - began


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=8, metavar="N", help="Take each N-th class. Default: 8.")
    parser.add_argument("--without-gpt2", action="store_true", help="Leave out GPT-2 small.")
    given = parser.parse_args(arguments)
    if given.every < 1:
        parser.error(f"--every is {given.every}: give a number of at least 1.")
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    examine("GPT2LMHeadModel", SECONDS)
    tiny = []
    for name in class_names()[:: given.every]:
        tiny.append(examine(name, SECONDS))
        print(f"{name}: {state_of(tiny[-1])} {tiny[-1].get('seconds', 0.0):.2f} s", file=sys.stderr, flush=True)
    torch.set_num_threads(threads)
    print("\n".join(lines(tiny, None if given.without_gpt2 else gpt2_small())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
