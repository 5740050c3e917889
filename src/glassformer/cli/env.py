"""`glass env`: this machine, and what `glass train` and `glass sample` use on it."""

import json as json_module
import textwrap
from typing import TYPE_CHECKING, Any

from glassformer.cli.common import Json, terminal_width

if TYPE_CHECKING:
    from glassformer.model.device import Throughput

PACKAGES = ("numpy", "safetensors", "tokenizers", "transformers", "huggingface_hub", "triton")
INDENT = 8


def env(json: Json = False) -> int:
    """Print the device, precision and implementation of `glass train` and `glass sample` here, and versions.

    The commands' own functions give the answers: for the default run, and for the default prompt length of the bundled
    model. The measured matmul throughput is information only; it decides nothing. It takes up to three seconds.
    """
    from glassformer.model.device import choose_device

    device = choose_device()
    commands = {"train": train_answer(), "sample": sample_answer()}
    measured = throughputs(device)
    if json:
        gflops = {name: None if found.disturbed else found.gflops for name, found in measured.items()}
        facts = {"device": device, "machine": machine(device), **commands, "gflops": gflops}
        print(json_module.dumps({**facts, "versions": versions()}))
        return 0
    _line("device", f"{device}: {machine(device)}")
    for name, answer in commands.items():
        used = f"{answer['device']}, {answer['precision']}, {answer['implementation']}"
        _line(name, f"{used}: {answer['why']}")
    _line("matmul", throughput_text(measured))
    for name, version in versions().items():
        print(f"{name:<16}{version}")
    return 0


def train_answer() -> dict[str, Any]:
    """What `glass train` uses for the default run."""
    from glassformer.model.device import choose_for_training
    from glassformer.training import read_run
    from glassformer.training.accelerate import choose, choose_machine, kernel_request
    from glassformer.training.events import implementation

    run = read_run("", (), source="the default run")
    device, dtype, compiled = choose_machine(run)
    kernels = choose(run.model, **kernel_request(run, device, dtype, compiled))
    return {
        "device": device.type,
        "precision": str(dtype).removeprefix("torch."),
        "implementation": implementation(compiled, kernels),
        "why": choose_for_training(run.machine.device, run.machine.precision, run.model.d_model).why,
    }


def sample_answer() -> dict[str, Any]:
    """What `glass sample` uses for the bundled model."""
    from glassformer.cli.sample import BUNDLED, load_to_sample
    from glassformer.generation.engine import Call, choose_engine
    from glassformer.generation.request import GenerationRequest
    from glassformer.generation.text import NEW_TOKENS

    model = load_to_sample(BUNDLED, "auto", "auto")
    chosen = choose_engine(Call.of(model, GenerationRequest(prompts=[[0]], max_new_tokens=NEW_TOKENS)))
    used = {"device": chosen.device, "precision": chosen.precision, "implementation": chosen.engine}
    return {**used, "why": chosen.why}


def machine(device: str) -> str:
    """The GPU's name, or the number of threads and the vector instructions of the processor."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads > 1)}, {torch.backends.cpu.get_cpu_capability()}"


def throughputs(device: str) -> "dict[str, Throughput]":
    import torch

    from glassformer.model.device import bfloat16_support, measure_throughput

    dtypes = [torch.float32, *([torch.bfloat16] if bfloat16_support(device)[0] else [])]
    size = 4096 if device == "cuda" else 1024
    return {str(dtype).removeprefix("torch."): measure_throughput(device, dtype, size) for dtype in dtypes}


def throughput_text(measured: "dict[str, Throughput]") -> str:
    """One sentence; a dtype whose rounds were all disturbed has no number."""
    parts = []
    for name, found in measured.items():
        if found.disturbed:
            parts.append(f"{name} not measured: other work disturbed all {found.rounds} rounds")
        else:
            parts.append(f"{decimals(found.gflops)} GFLOP/s in {name} ({found.size} x {found.size})")
    return "; ".join(parts)


def decimals(value: float) -> str:
    """Three digits that carry meaning: 1,234, 87.6, 0.432."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def versions() -> dict[str, str]:
    import importlib.metadata
    import platform

    import torch

    from glassformer import __version__

    found = {"glassformer": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _line(name: str, text: str) -> None:
    wrapped = textwrap.wrap(text, (terminal_width() or 10_000) - INDENT)
    print(f"{name:<{INDENT}}" + f"\n{'':{INDENT}}".join(wrapped))
