"""Describe the machine of a measurement: processor, instructions, system and versions."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from glassformer import __version__
from glassformer.bench.plan import available_cores

PACKAGES = (
    *("torch", "numpy", "transformers", "ctranslate2", "onnxruntime", "onnx"),
    *("llama-cpp-python", "gguf", "safetensors", "tokenizers"),
)
FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
)
"""Instructions that determine the speed of matmuls; the whole list is hundreds long."""


def facts(device: str = "cpu") -> dict[str, Any]:
    """Return the machine as JSON values, with the name of its GPU if that is what is measured."""
    cpu = cpu_info()
    present = set(cpu.get("flags", cpu.get("Features", "")).split())
    return {
        "processor": cpu.get("model name") or platform.processor() or platform.machine(),
        "gpu": None if device == "cpu" else _gpu(),
        "cores": available_cores(),
        "flags": [flag for flag in FLAGS if flag in present],
        "memory_bytes": _memory(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else [],
        "system": platform.platform(),
        "versions": {"glassformer": __version__, "python": platform.python_version(), **_versions()},
    }


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def cpu_info() -> dict[str, str]:
    """Return /proc/cpuinfo of the first core; empty if it does not exist."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first = text.strip().split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
