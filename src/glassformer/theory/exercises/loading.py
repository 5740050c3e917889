"""The exercise about weights of another program: GPT-2's names and layout."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake
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


def _loading_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, V: int, D: int, heads: int, layers: int) -> Case:
        tokens = [int(t) for t in rng.integers(0, V, T)]
        return Case(
            label, {"tokens": tokens, "state": _state(rng, V, 8, D, layers), "n_layers": layers, "n_heads": heads}
        )

    return [
        made("2 layers, width 12, 3 heads", 6, 13, 12, 3, 2),
        made("3 layers, width 8, 2 heads", 8, 9, 8, 2, 3),
        made("one token", 1, 5, 6, 2, 1),
    ]


TABLE = "\n".join(f"  {theirs:<20}{ours}" for theirs, ours in NAMES.items())
LOADING = Exercise(
    id="gpt2-weights",
    title="Weights of GPT-2 through a table of names",
    problem=f"""\
Load a state dict with GPT-2's names into your own model. `gpt(tokens, weights, n_heads)` is given; its matrices are
stored output by input and applied as x @ w.T. GPT-2 stores them input by output, and applies them as x @ w.

  wte.weight, wpe.weight           token and position embeddings; the head is tied to wte.weight
  ln_f.weight, ln_f.bias           gain and bias of the final norm
  h.N.attn.c_attn.weight (D, 3D)   queries, keys and values of layer N side by side
  h.N.attn.c_attn.bias (3D)        and their biases

The other names of layer N, after the prefix "h.N.", and the keys of a block of `gpt`:

{TABLE}

The three parts of c_attn become "query", "key" and "value", with "query_bias", "key_bias" and "value_bias". The head
of `gpt` is applied as x @ weights["head"], so it is (D, V).

Return the logits (T, V). They must agree to 1e-7 with weights of standard deviation 0.3: with the small weights of a
new model a bound of 1e-4 would hide mistakes.""",
    solve=gpt2_logits,
    cases=_loading_cases,
    returns=("logits",),
    mistakes=(
        Mistake(
            "you do not transpose attn.c_proj.weight: it is square, so the shape does not show it",
            {'("output", "up", "down")': '("up", "down")'},
        ),
        Mistake(
            "you do not transpose queries, keys and values: their matrices are square, so the shape does not show it",
            {"= matrix.T, bias": "= matrix, bias"},
        ),
        Mistake(
            "you take the parts of c_attn in the wrong order: queries, keys, values",
            {'["query", "key", "value"]': '["key", "query", "value"]'},
        ),
        Mistake(
            "you take the values of c_attn for queries: the order is queries, keys, values",
            {'["query", "key", "value"]': '["value", "key", "query"]'},
        ),
        Mistake(
            "you swap the two norms of a block: ln_1 comes before attention, ln_2 before the feed-forward layer",
            {
                "blocks.append(block)": (
                    'block["gain_1"], block["gain_2"] = block["gain_2"], block["gain_1"]\n'
                    '        block["bias_1"], block["bias_2"] = block["bias_2"], block["bias_1"]\n'
                    "        blocks.append(block)"
                )
            },
        ),
        Mistake(
            "you use the weights of the first layer in every layer",
            {'{n}.{theirs}"]': '0.{theirs}"]', "{n}.attn": "0.attn"},
        ),
        Mistake(
            "you leave out the biases of c_attn: split them as you split the matrix",
            {"= matrix.T, bias": "= matrix.T, 0 * bias"},
        ),
        Mistake(
            "you forget the final norm's parameters: they are ln_f.weight and ln_f.bias",
            {'state["ln_f.weight"]': '1 + 0 * state["ln_f.weight"]', 'state["ln_f.bias"]': '0 * state["ln_f.bias"]'},
        ),
    ),
    claims=("gpt2-logits-match", "weight-tying-saving"),
    sources=("Ch. 13 ex. 19",),
    given=("norm", "attend", "feed", "gpt"),
)
