"""Measure what a lower precision costs a trained model: divergence from float32 and change of the loss.

    glass train recipes/shakespeare_fast.toml --set out=RUN
    python -m glassformer.bench.developer.precision RUN [--device cpu|cuda] [--windows 128] [--length 64]

Windows of the run's validation text are read by the compiled kernels, as in `generate`: token by token, one sequence
and sixteen sequences at a time (on a CPU, activations are rounded too from sixteen on), and on a CPU as whole prompts.
KL(float32 || precision) is the mean over tokens of sum p (log p - log q).
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.bench.commands import parser
from glassformer.kernels.cpu.decode import NativeDecoder
from glassformer.kernels.cpu.decode.pack import Precision
from glassformer.training import open_session, read_run
from glassformer.weights import load

KINDS: dict[str, tuple[str, ...]] = {"cpu": ("bfloat16", "int8", "int4"), "cuda": ("bfloat16", "int8", "fp8")}
SLOTS = 256
"""Tokens of the KV cache of captured steps."""


def token_by_token(model: Any, windows: Tensor, kind: Precision, batch: int) -> Tensor:
    """Return log-probabilities (windows, tokens, V) after each token but the last, `batch` windows at a time."""
    length, found = windows.shape[1] - 1, []
    for first in range(0, len(windows), batch):
        some = windows[first : first + batch]
        decoder = NativeDecoder(model, len(some), length + 1, kind)
        first_logits = decoder.read(some[:, :1].tolist())
        found.append(torch.stack([first_logits, *(decoder.step(some[:, t]).clone() for t in range(1, length))], 1))
    return torch.cat(found).double().log_softmax(-1)


def captured(model: Any, windows: Tensor, kind: str, batch: int) -> Tensor:
    """Return what `token_by_token` does, by captured steps on a GPU; "float32" by the model itself."""
    if kind == "float32":
        return torch.cat([model(some[:, :-1]).double() for some in windows.split(batch)]).log_softmax(-1)
    from glassformer.kernels.cuda.graph.steps import captured_steps

    half, found = copy.deepcopy(model).bfloat16(), []
    for some in windows.split(batch):
        cache = half.new_cache("static", capacity=SLOTS)
        logits = [half(some[:, :1], cache=cache)[:, -1].float()]
        steps = captured_steps(half, cache, len(some), SLOTS, kind)
        found.append(torch.stack([*logits, *(steps.step(some[:, t]) for t in range(1, some.shape[1] - 1))], 1))
    return torch.cat(found).double().log_softmax(-1)


def at_once(model: Any, windows: Tensor, kind: Precision) -> Tensor:
    """Return log-probabilities (windows, 1, V) after whole windows."""
    decoder = NativeDecoder(model, len(windows), windows.shape[1], kind)
    return decoder.read(windows[:, :-1].tolist())[:, None].double().log_softmax(-1)


def compare(read: Callable[[Any], Tensor], targets: Tensor, label: str) -> None:
    exact = read("float32")
    loss = -exact.gather(-1, targets[..., None])[..., 0]
    print(f"{label}: {targets.numel():,} tokens, loss in float32 {loss.mean():.5f}")
    for kind in KINDS[targets.device.type]:
        other = read(kind)
        divergence = (exact.exp() * (exact - other)).sum(-1)
        change = -other.gather(-1, targets[..., None])[..., 0] - loss
        error = change.std() / change.numel() ** 0.5
        same = (exact.argmax(-1) == other.argmax(-1)).double().mean()
        print(
            f"    {kind:<9} KL {divergence.mean():.1e} (at most {divergence.max():.1e})   loss {change.mean():+.1e} "
            f"± {error:.1e}   same most likely token {same:.4f}",
            flush=True,
        )


@torch.no_grad()
def main() -> None:
    options = parser(__doc__)
    options.add_argument("run", type=Path, help="The folder of a run of `glass train`.")
    options.add_argument("--device", choices=KINDS, default="cpu", help="Where the kernels run. Default: cpu.")
    options.add_argument("--windows", type=int, default=128, help="Number of windows. Default: 128.")
    options.add_argument("--length", type=int, default=64, help="Tokens per window. Default: 64.")
    given = options.parse_args()
    model = load(str(given.run / "best"), device=given.device).float().eval()
    session = open_session(read_run((given.run / "run.toml").read_text(encoding="utf-8")))
    text = torch.from_numpy(np.asarray(session.data.val).astype(np.int64))
    starts = torch.linspace(0, len(text) - given.length - 1, given.windows).long()
    windows = torch.stack([text[s : s + given.length + 1] for s in starts.tolist()]).to(given.device)
    following = windows[:, 1:]
    if given.device == "cuda":
        compare(lambda kind: captured(model, windows, kind, 1), following, "one sequence")
        compare(lambda kind: captured(model, windows, kind, 16), following, "sixteen sequences")
        return
    compare(lambda kind: token_by_token(model, windows, kind, 1), following, "one sequence")
    compare(lambda kind: token_by_token(model, windows, kind, 16), following, "sixteen sequences")
    compare(lambda kind: at_once(model, windows, kind), following[:, -1:], "whole windows")


if __name__ == "__main__":
    main()
