"""Measure the cost of taps: time of a forward pass that is not traced, and memory of a trace of all sites.

    python -m glassformer.bench.developer.tracing [--seconds N]

Time: the model without a tap, and traced with no sites selected, compared with an untapped build: the same source
files with every tap removed from their syntax trees (calls, arguments and parameters), and the same weights. The
three take turns in one process with one thread. CPU time is counted, because other work on the machine disturbs it
less than wall time. The ratio of the medians is judged; that of the fastest runs is printed next to it. The logits of
the two builds must be equal, bit for bit.

Memory: `trace` of all sites of GPT-2 small at 512 tokens, in a fresh process. Its memory is the peak resident set
(VmHWM) minus the resident set after the model was built and had run once. It is compared with the bytes of the
recorded tensors; a tensor under two names counts once. MALLOC_MMAP_THRESHOLD_ is set, so that glibc returns a freed
tensor to the system at once; the result with glibc's default is printed next to it.

The exit code is 1 if unused taps cost more than 3 %, or if a trace takes more than 1.5 times the bytes it records.
"""

import argparse
import ast
import ctypes
import json
import statistics
import sys
import time
import types
from pathlib import Path

from glassformer.bench.commands import in_process, parser
from glassformer.bench.developer.memory import resident
from glassformer.bench.race import rotated

MODULE = "glassformer.bench.developer.tracing"
SLOWER, LARGER = 1.03, 1.5
MODULES = ("attention", "layers", "block", "transformer")
CASES = {  # small: the Python between the kernels shows; large: the kernels do
    "nano, 1 x 16 tokens": ("nano", 1, 16),
    "nano, 4 x 64 tokens": ("nano", 4, 64),
    "gpt2, 1 x 16 tokens": ("gpt2", 1, 16),
    "gpt2, 1 x 256 tokens": ("gpt2", 1, 256),
}


class Untap(ast.NodeTransformer):
    """Remove taps from source: `tap("x", v)` becomes v, `tap.wants(...)` becomes False, and no call passes a tap."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "tap":
            return node.args[1]
        if isinstance(node.func, ast.Name) and node.func.id == "scoped":
            return node.args[0]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "wants":
            return ast.Constant(False)
        node.args = [arg for arg in node.args if not is_tap(arg)]
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "tap"]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        self.generic_visit(node)
        return None if all(is_tap(target) for target in node.targets) else node

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        self.generic_visit(node)
        without = len(node.args) - len(node.defaults)
        defaults = [None] * without + list(node.defaults)
        kept = [(arg, default) for arg, default in zip(node.args, defaults, strict=True) if arg.arg != "tap"]
        node.args = [arg for arg, _ in kept]
        node.defaults = [default for _, default in kept if default is not None]
        return node


def is_tap(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("tap", "NO_TAP")


def untapped_package() -> dict[str, types.ModuleType]:
    """Return the modules of `model/` without taps. They import each other, and otherwise what the originals import."""
    import glassformer.model

    folder = Path(glassformer.model.__file__).parent
    made: dict[str, types.ModuleType] = {}
    originals = {f"glassformer.model.{name}": sys.modules[f"glassformer.model.{name}"] for name in MODULES}
    try:
        for name in MODULES:
            tree = ast.fix_missing_locations(Untap().visit(ast.parse((folder / f"{name}.py").read_text())))
            left = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "tap"]
            assert not left, f"{name} still mentions tap at line {left[0].lineno}"
            module = types.ModuleType(f"glassformer.model.{name}")
            sys.modules[module.__name__] = made[name] = module  # so that the modules after it import this one
            exec(compile(tree, f"untapped {name}", "exec"), module.__dict__)
    finally:
        sys.modules.update(originals)
    return made


def compare_time(preset: str, rows: int, length: int, seconds: float) -> dict[str, list[float]]:
    """Return the times of the untapped build, of the model without a tap, and of a trace of no sites, in turns."""
    import torch

    from glassformer.config import presets
    from glassformer.lens import trace
    from glassformer.model import build

    torch.set_num_threads(1)
    model = build(presets.get(preset))
    bare = untapped_package()["init"].build(presets.get(preset))
    bare.load_state_dict(model.state_dict())
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    runs = {
        "untapped": lambda: bare(ids),
        "no tap": lambda: model(ids),
        "no sites": lambda: trace(model, ids, sites=()),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        assert torch.equal(model(ids), bare(ids)), "the untapped build computes something else"
        end, turn = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or turn < 9:
            for name in rotated(list(runs), turn):
                started = time.process_time()
                runs[name]()
                taken[name].append(time.process_time() - started)
            turn += 1
    return taken


def measure_memory() -> dict[str, int]:
    """Trace all sites once in this process; return peak and recorded bytes."""
    import torch

    from glassformer.config import presets
    from glassformer.lens import trace
    from glassformer.model import build

    torch.set_num_threads(1)
    model = build(presets.gpt2())
    ids = torch.randint(0, 50257, (1, 512), generator=torch.Generator().manual_seed(0))
    trace(model, ids[:, :32])  # loads all libraries that a trace uses
    ctypes.CDLL(None).malloc_trim(0)  # return what the warm-up freed before measuring starts
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which would otherwise include building the model
    seen = trace(model, ids)
    return {"peak": resident("VmHWM") - before, "recorded": seen.n_bytes(), "sites": len(seen)}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=8.0, help="Seconds per case of the first table. Default: 8.")
    options.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.measure:
        print(json.dumps(measure_memory()))
        return 0
    columns = f"{'untapped':>10} {'no tap':>10} {'ratio':>7} {'fastest':>8} {'no sites':>10} {'ratio':>7}"
    print(f"{'forward, median ms':24} {columns}")
    worst = 0.0
    for name, (preset, rows, length) in CASES.items():
        taken = compare_time(preset, rows, length, given.seconds)
        median = {key: 1000 * statistics.median(times) for key, times in taken.items()}
        silent, empty = median["no tap"] / median["untapped"], median["no sites"] / median["untapped"]
        fastest = min(taken["no tap"]) / min(taken["untapped"])
        worst = max(worst, silent)
        print(
            f"{name:24} {median['untapped']:>10.2f} {median['no tap']:>10.2f} {silent:>7.3f} {fastest:>8.3f} "
            f"{median['no sites']:>10.2f} {empty:>7.3f}",
            flush=True,
        )
    [tight] = in_process(MODULE, "--measure", MALLOC_MMAP_THRESHOLD_="131072")
    [default] = in_process(MODULE, "--measure")
    recorded = tight["recorded"]
    print(f"\ntrace of all {tight['sites']} sites of gpt2 at 512 tokens: {recorded / 2**20:.0f} MiB recorded")
    ratio = tight["peak"] / recorded
    loose = default["peak"] / recorded
    print(f"peak {tight['peak'] / 2**20:.0f} MiB, {ratio:.3f} of it; {loose:.3f} with glibc's default")
    return int(worst > SLOWER or ratio > LARGER)


if __name__ == "__main__":
    sys.exit(main())
