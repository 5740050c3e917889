"""`glass env`: this machine, and what each command would use on it."""

import json as json_module
import textwrap

from glassformer.cli.common import Json, terminal_width


def env(json: Json = False) -> int:
    """What device and precision would be used here, and why; versions of what matters."""
    import importlib.metadata
    import platform

    import torch

    from glassformer import __version__
    from glassformer.model.device import choose_device

    choice = choose_device()
    names = ("numpy", "safetensors", "tokenizers", "transformers", "huggingface_hub", "triton")
    versions = {"glassformer": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    dtype = str(choice.dtype).removeprefix("torch.")
    if json:
        facts = {"device": choice.device, "dtype": dtype, "why": choice.why, "gflops": choice.gflops}
        print(json_module.dumps({**facts, "versions": versions}))
        return 0
    why = "\n        ".join(textwrap.wrap(choice.why, (terminal_width() or 10_000) - 8))
    print(f"device  {choice.device}\ndtype   {dtype}\nwhy     {why}")
    for name, version in versions.items():
        print(f"{name:<16}{version}")
    return 0
