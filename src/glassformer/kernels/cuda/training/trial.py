"""Whether fused blocks work on this GPU: tried once for each kind of block, in a process of its own.

The kernels cannot have been tried on every GPU, driver and version of torch, and an illegal access ends a process. So
before the first run with such blocks, two layers of the model compute the gradients of random tokens: by the engine in
float32, by the engine in bfloat16, and by the kernels, called and replayed from a CUDA graph. If the kernels fail or
are less exact than the engine, training goes without them. Success is remembered in the cache folder, with the machine
code that was compiled for it, which the run needs too.
"""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.config import ModelConfig
from glassformer.files import in_writable_cache, write_atomically
from glassformer.kernels.cuda.training import blocks, causal, copies
from glassformer.kernels.replacement import replace_modules
from glassformer.model import DecoderLM, build

MODULE = "glassformer.kernels.cuda.training.trial"
SECONDS = 300
"""Time limit of the process, which takes some seconds."""
TOKENS, HEADS = 1024, 128
"""Tokens of a sequence, and heads of all sequences: attention has a kernel of its own for so many."""
STREAMS = (torch.float32, torch.bfloat16)
"""The dtypes that the residual stream can have (`machine.stream`)."""
TIMES, LEAST = 2.0, 1e-2
"""The kernels may be so many times as far from float32 as the engine in bfloat16, plus this share of a gradient."""


def is_successful(config: ModelConfig, device: torch.device) -> bool:
    """Return whether fused blocks of a config work on a GPU. The first call for a kind of block takes some seconds."""
    return _is_successful(json.dumps(c.to_dict(_small(config))), str(device))


@cache
def _is_successful(text: str, device: str) -> bool:
    file = in_writable_cache(f"cuda/trial-{_mark(text, device)}")
    if file.exists():
        return True
    reason = _run(text, device)
    if reason is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, b"")
        return True
    warnings.warn(
        f"fused blocks are not used for training on this GPU ({reason}): torch.compile is used instead. Report it with "
        "the output of `glass env`.",
        stacklevel=2,
    )
    return False


def _mark(text: str, device: str) -> str:
    """Return a name for everything that the result depends on: blocks, GPU, torch and the kernels."""
    sources = [path.read_bytes() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file()]
    machine = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)} {torch.__version__}"
    return hashlib.sha256(b"\0".join([text.encode(), machine.encode(), *sources])).hexdigest()[:16]


def _run(text: str, device: str) -> str | None:
    """Try a config in a process; return why it failed, or None."""
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, device], input=text, env={**os.environ, "PYTHONPATH": paths},
            capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no message"]
    return lines[-1] if done.returncode else None


def _small(config: ModelConfig) -> ModelConfig:
    """Return two layers of a config with few words; if some layers have a window, the first of the two has one."""
    changes = {} if config.attention.window_layers is None else {"attention__window_layers": (0,)}
    shared = None if config.shared_blocks is None else (0,) * min(2, config.n_layers)
    few = {"vocab_size": 512, "special": c.Special(), "n_layers": min(2, config.n_layers), "shared_blocks": shared}
    return c.replace(config, **few, **changes)


def failure(config: ModelConfig, device: torch.device) -> str | None:
    """Compute gradients in all ways; return which of the kernels' are wrong, or None."""
    model = build(config, seed=0, device=device).train()
    assert isinstance(model, DecoderLM)
    length = min(TOKENS, config.max_len or TOKENS)
    draw = torch.Generator().manual_seed(0)
    sequences = -(-HEADS // config.n_heads) if device.type == "cuda" else 2
    ids = torch.randint(0, config.vocab_size, (sequences, length), generator=draw).to(device)
    exact = _gradients(model, ids, None)
    engine = {stream: _gradients(model, ids, stream) for stream in STREAMS}
    replace_modules([*blocks.replacements(model), *causal.replacements(model)])
    for stream in STREAMS:
        ways = {"the kernels": _gradients(model, ids, stream)}
        copies.make(model.parameters())  # from now on matmuls read copies, and write gradients in bfloat16
        ways["the kernels with copies of weights"] = _gradients(model, ids, stream)
        if device.type == "cuda":
            ways["a CUDA graph of the kernels"] = _replayed(model, ids, stream)
        for way, found in ways.items():
            if reason := _difference(found, engine[stream], exact):
                return f"{way}, residual stream in {stream}: {reason}"
    return None


Gradients = dict[str, Tensor]


def _difference(found: Gradients, engine: Gradients, exact: Gradients) -> str | None:
    """Return which gradient is further from float32 than it may be."""
    for name, wanted in exact.items():
        error = float((found[name] - wanted).norm())
        most = TIMES * float((engine[name] - wanted).norm()) + LEAST * float(wanted.norm())
        if not error <= most:  # also if it is NaN
            return f"the gradient of {name} is off by {error:.3g}, more than {most:.3g}"
    return None


def _gradients(model: DecoderLM, ids: Tensor, stream: torch.dtype | None) -> Gradients:
    """Return the gradients with matmuls in bfloat16 and a residual stream in a dtype; all in float32 for None."""
    model.zero_grad()
    _backward(model, ids, stream)
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def _backward(model: DecoderLM, ids: Tensor, stream: torch.dtype | None) -> None:
    cast = model.embed.register_forward_hook(lambda module, given, x: x if stream is None else x.to(stream))
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=stream is not None):
        logits = model(ids)
    cast.remove()
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()


def _replayed(model: DecoderLM, ids: Tensor, stream: torch.dtype) -> Gradients:
    """Return the gradients of a step that was captured, and then replayed."""
    model.zero_grad()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _backward(model, ids, stream)
    graph.replay()
    torch.cuda.synchronize()
    return {name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}


def main() -> int:
    reason = failure(c.from_dict(json.loads(sys.stdin.read())), torch.device(sys.argv[1]))
    if reason is not None:
        print(reason)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
