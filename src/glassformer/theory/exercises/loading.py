"""The exercise about weights of another program: GPT-2's names and layout."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise
from glassformer.theory.exercises.model import attend, feed, gpt, norm, softmax

__all__ = ["attend", "feed", "norm", "softmax"]
NAMES = {
    "ln_1.weight": "gain_1",
    "ln_1.bias": "bias_1",
    "attn.c_proj.weight": "output",
    "attn.c_proj.bias": "output_bias",
    "ln_2.weight": "gain_2",
    "ln_2.bias": "bias_2",
    "mlp.c_fc.weight": "up",
    "mlp.c_fc.bias": "up_bias",
    "mlp.c_proj.weight": "down",
    "mlp.c_proj.bias": "down_bias",
}


def gpt2_logits(tokens: list[int], state: dict[str, Array], n_layers: int, n_heads: int) -> Array:
    """Return the logits of GPT-2, (T, V), from a state dict."""
    blocks: list[dict[str, Any]] = []
    for n in range(n_layers):
        block = {ours: state[f"h.{n}.{theirs}"] for theirs, ours in NAMES.items()}
        for name in ("output", "up", "down"):
            block[name] = block[name].T
        matrices = np.split(state[f"h.{n}.attn.c_attn.weight"], 3, axis=1)
        biases = np.split(state[f"h.{n}.attn.c_attn.bias"], 3)
        for name, matrix, bias in zip(["query", "key", "value"], matrices, biases, strict=True):
            block[name], block[name + "_bias"] = matrix.T, bias
        blocks.append(block)
    weights = {
        "tokens": state["wte.weight"],
        "positions": state["wpe.weight"],
        "blocks": blocks,
        "gain": state["ln_f.weight"],
        "bias": state["ln_f.bias"],
        "head": state["wte.weight"].T,
    }
    return gpt(tokens, weights, n_heads)


def _state(rng: np.random.Generator, V: int, N: int, D: int, layers: int) -> dict[str, Array]:
    """Return random tensors under GPT-2's names; standard deviation 0.3, so that every detail matters."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (V, D), "wpe.weight": (N, D)}
    for n in range(layers):
        for name, size in {
            "attn.c_attn": (D, 3 * D),
            "attn.c_proj": (D, D),
            "mlp.c_fc": (D, 4 * D),
            "mlp.c_proj": (4 * D, D),
        }.items():
            shapes |= {f"h.{n}.{name}.weight": size, f"h.{n}.{name}.bias": size[1:]}
        shapes |= {f"h.{n}.{name}": (D,) for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias")}
    shapes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
    gains = {name for name in shapes if ".ln_" in f".{name}" and name.endswith("weight")}
    return {name: (name in gains) + 0.3 * rng.normal(size=shape) for name, shape in shapes.items()}


def _loading_case(rng: np.random.Generator, T: int, V: int, D: int, n_heads: int, n_layers: int) -> Arguments:
    tokens = [int(t) for t in rng.integers(0, V, T)]
    return {"tokens": tokens, "state": _state(rng, V, 8, D, n_layers), "n_layers": n_layers, "n_heads": n_heads}


LOADING = exercise("gpt2-weights", solve=gpt2_logits, draw=_loading_case)
