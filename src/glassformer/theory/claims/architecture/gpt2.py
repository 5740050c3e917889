"""GPT-2 from its published layout: the model against the oracle, and which mistakes a bound of 1e-4 does not detect."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model import DecoderLM
from glassformer.model.layers import ACTIVATIONS, LayerNorm
from glassformer.reference import forward
from glassformer.reference.arrays import Array, Params
from glassformer.shapes import Float, Int
from glassformer.theory.claims.claim import Kind, Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import decoder, full_mask, model_with
from glassformer.weights import load

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 2, 48, 4, 97, 32
STDS, SEEDS, LENGTHS = (0.02, 0.2), 3, (1, 16, CONTEXT)
BOUND = 1e-4
REAL = "GLASSFORMER_GPT2"
"""Environment variable that names a folder with GPT-2's released weights."""
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
    "n_positions": CONTEXT, "vocab_size": VOCABULARY, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
Published = dict[str, Array]
"""Tensors by GPT-2's own names: matrices are (in, out); queries, keys and values are concatenated."""


def published(seed: int, std: float) -> Published:
    """Random numbers in the published layout; norm weights around 1, no bias 0."""
    rng = np.random.default_rng([seed, round(1000 * std)])
    D, F = WIDTH, 4 * WIDTH
    sizes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, D), "wpe.weight": (CONTEXT, D)}
    for i in range(LAYERS):
        for name, size in (
            ("attn.c_attn", (D, 3 * D)),
            ("attn.c_proj", (D, D)),
            ("mlp.c_fc", (D, F)),
            ("mlp.c_proj", (F, D)),
        ):
            sizes |= {f"h.{i}.{name}.weight": size, f"h.{i}.{name}.bias": size[1:]}
        sizes |= {f"h.{i}.{norm}.{part}": (D,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    sizes |= {"ln_f.weight": (D,), "ln_f.bias": (D,)}
    made = {name: std * rng.standard_normal(size) for name, size in sizes.items()}
    return {name: 1 + value if "ln_" in name and name.endswith("weight") else value for name, value in made.items()}


def engine(tensors: Published, dtype: torch.dtype = torch.float64, **changes: Any) -> DecoderLM:
    """Load a folder with these tensors with the package's own reader; `changes` apply to its config.json."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {f"transformer.{n}": np.ascontiguousarray(v) for n, v in tensors.items()}, Path(folder, "model.safetensors")
        )
        Path(folder, "config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
        model = load(folder, dtype=dtype)
    assert isinstance(model, DecoderLM)
    return model.eval()


def oracle_params(tensors: Published, n_layers: int = LAYERS) -> Params:
    """Return the same tensors under the oracle's names, (out, in), with q, k and v separate, without the reader."""
    params = {
        "embed.tokens.weight": tensors["wte.weight"], "decoder.position.weight": tensors["wpe.weight"],
        "decoder.norm.weight": tensors["ln_f.weight"], "decoder.norm.bias": tensors["ln_f.bias"],
    }  # fmt: skip
    for i in range(n_layers):
        old, new = f"h.{i}.", f"decoder.blocks.{i}."
        for part in ("weight", "bias"):
            joined = np.split(tensors[f"{old}attn.c_attn.{part}"], 3, axis=-1)
            params |= {f"{new}attention.{x}.{part}": value.T for x, value in zip("qkv", joined, strict=True)}
            for theirs, ours in (
                ("attn.c_proj", "attention.o"),
                ("mlp.c_fc", "feedforward.up"),
                ("mlp.c_proj", "feedforward.down"),
            ):
                params[f"{new}{ours}.{part}"] = tensors[f"{old}{theirs}.{part}"].T
            params[f"{new}norm_attention.{part}"] = tensors[f"{old}ln_1.{part}"]
            params[f"{new}norm_feedforward.{part}"] = tensors[f"{old}ln_2.{part}"]
    return params


def reference_config() -> c.DecoderConfig:
    """GPT-2 as published: tanh-GELU, LayerNorm with eps 1e-5, pre-norm, learned positions, tied head."""
    return c.DecoderConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, n_layers=LAYERS, attention=c.Attention(HEADS),
        feedforward=c.Dense(4 * WIDTH, "gelu_tanh"), norm=c.LayerNorm(1e-5), max_len=CONTEXT,
    )  # fmt: skip


def text(seed: int, length: int) -> Int[Tensor, "B T"]:
    return torch.from_numpy(np.random.default_rng([seed, length]).integers(0, VOCABULARY, size=(2, length)))


def gap(logits: Float[Tensor, "B T V"], expected: Array) -> float:
    return max_difference(logits.detach().double().numpy(), expected)


class UnbiasedNorm(LayerNorm):
    """The variance divided by D - 1."""

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        centred = x - x.mean(-1, keepdim=True)
        out = centred / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.factor()
        return out if self.bias is None else out + self.bias


Mutant = Callable[[Published, Tensor, int], Tensor]
"""Tensors, tokens and a seed to the logits of an engine that is wrong in one way."""


def _changed(**changes: Any) -> Mutant:
    """Another config over the same parameters."""

    def run(tensors: Published, tokens: Tensor, seed: int) -> Tensor:
        config = c.replace(reference_config(), **changes)
        params = oracle_params(tensors)
        if changes.get("placement") == "post":
            params = {name: value for name, value in params.items() if not name.startswith("decoder.norm.")}
        if "head" in changes:
            params["head.weight"] = published(seed + 100, float(tensors["wte.weight"].std()))["wte.weight"]
        out: Tensor = model_with(config, params)(tokens)
        return out

    return run


def _unbiased(tensors: Published, tokens: Tensor, seed: int) -> Tensor:
    model = engine(tensors)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.__class__ = UnbiasedNorm
    out: Tensor = model(tokens)
    return out


def _without_final_norm(tensors: Published, tokens: Tensor, seed: int) -> Tensor:
    model = engine(tensors)
    model.decoder.norm = None
    out: Tensor = model(tokens)
    return out


def _misread(change: Callable[[str, Array], Array]) -> Mutant:
    def run(tensors: Published, tokens: Tensor, seed: int) -> Tensor:
        out: Tensor = engine({name: change(name, value) for name, value in tensors.items()})(tokens)
        return out

    return run


def _transposed(name: str, value: Array) -> Array:
    return value.T if name.endswith("attn.c_proj.weight") else value


def _keys_first(name: str, value: Array) -> Array:
    if ".c_attn." not in name:
        return value
    q, k, v = np.split(value, 3, axis=-1)
    return np.concatenate([k, q, v], axis=-1)


MUTANTS: dict[str, Mutant] = {
    "eps 1e-6": _changed(norm=c.LayerNorm(1e-6)),
    "erf-GELU": _changed(feedforward=c.Dense(4 * WIDTH, "gelu")),
    "unbiased variance": _unbiased,
    "no 1/sqrt(K)": _changed(attention=c.Attention(HEADS, scale=1.0)),
    "no mask": lambda tensors, tokens, seed: engine(tensors)(tokens, mask=full_mask(tokens)),
    "positions from 1": lambda tensors, tokens, seed: engine(tensors)(
        tokens, positions=torch.arange(1, tokens.shape[1] + 1)[None]
    ),
    "no final norm": _without_final_norm,
    "untied head": _changed(head=c.Head(tied=False)),
    "post-norm": _changed(placement="post"),
    "transposed matrix": _misread(_transposed),
    "keys before queries": _misread(_keys_first),
}


@lru_cache(maxsize=4)
@torch.no_grad()
def sensitivities(std: float, first_seed: int) -> dict[str, float]:
    """Return for each mutant the largest difference of its logits from the oracle's, minimised over several seeds."""
    found: dict[str, list[float]] = {name: [] for name in MUTANTS}
    for seed in range(first_seed, first_seed + SEEDS):
        tensors, tokens = published(seed, std), text(seed, 16)
        expected = forward(reference_config(), oracle_params(tensors), tokens.numpy())
        for name, mutant in MUTANTS.items():
            found[name].append(gap(mutant(tensors, tokens, seed), expected))
    return {name: min(values) for name, values in found.items()}


@claim("gpt2-logits-match")
def gpt2_logits_match(lab: Lab) -> Iterator[Finding]:
    changes = {"activation_function": "gelu"} if lab.broken else {}
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, BOUND)):
        worst = 0.0
        for std in STDS:
            for seed in range(lab.seed, lab.seed + SEEDS):
                tensors = published(seed, std)
                model, params = engine(tensors, dtype, **changes), oracle_params(tensors)
                for length in LENGTHS:
                    tokens = text(seed, length)
                    with torch.no_grad():
                        worst = max(worst, gap(model(tokens), forward(reference_config(), params, tokens.numpy())))
        name = str(dtype).removeprefix("torch.")
        yield lab.numerical(f"engine against oracle, {name}", worst, bound, stds=STDS, seeds=SEEDS, lengths=LENGTHS)
    found = sensitivities(0.2, lab.seed)
    missed = [name for name, value in found.items() if value <= BOUND]
    shown = {name: float(f"{value:.3g}") for name, value in found.items()}
    yield lab.exhaustive("mistakes undetected at std 0.2", len(missed), len(MUTANTS), differences=shown)
    yield from _what_passes(lab)
    yield _released(lab)


def _what_passes(lab: Lab) -> Iterator[Finding]:
    """The limits of a bound of 1e-4 on one input."""
    found = sensitivities(0.02, lab.seed)
    shown = {name: float(f"{value:.3g}") for name, value in found.items()}
    yield lab.numerical("erf-GELU at std 0.02", found["erf-GELU"], BOUND, differences=shown)
    x = torch.linspace(0, 6, 600_001, dtype=torch.float64)
    apart = (ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_tanh"](x)).abs()
    at = float(x[apart.argmax()])
    yield lab.numerical("the two GELUs", float(apart.max()), 4.735e-4, low=4.725e-4)
    yield lab.numerical("the two GELUs part most at", at, 2.6995, low=2.6985)
    model, tokens = decoder(1, lab.seed, position=c.Learned(), max_len=8), torch.arange(6)[None]
    with torch.no_grad():
        moved = (model(tokens) - model(tokens, mask=full_mask(tokens))).abs().amax(-1)[0]
    yield lab.numerical("no mask, one layer, last position", float(moved[-1]), 1e-12, first=float(moved[0]))


def _released(lab: Lab) -> Finding:
    """Check GPT-2's released weights, if a folder with them is given."""
    folder = os.environ.get(REAL)
    if not folder:
        why = "no folder with the released weights is given"
        return lab.skipped("released weights", Kind.NUMERICAL, why, f"set {REAL} to a folder with GPT-2's files")
    model = load(folder, dtype=torch.float32)
    held = load_file(Path(folder, "model.safetensors"))
    tensors = {name.removeprefix("transformer."): value.astype(np.float64) for name, value in held.items()}
    tokens = torch.tensor([[464, 2068, 7586, 21831, 18045, 625, 262, 16931]]) % model.config.vocab_size
    expected = forward(model.config, oracle_params(tensors, model.config.n_layers), tokens.numpy())
    with torch.no_grad():
        found = gap(model(tokens), expected)
    size = float(np.abs(expected).max())
    return lab.numerical("released weights", found / max(1.0, size), BOUND, logits=size, difference=found)


@figure("gpt2-logits-match", "How far each mistake moves the logits (least of three seeds)", height=3.8)
def draw_sensitivities(lab: Lab, fig: Figure) -> None:
    ax = fig.canvas.subplots()
    order = sorted(MUTANTS, key=lambda name: sensitivities(0.2, lab.seed)[name])
    for shift, std in enumerate(STDS):
        found = sensitivities(std, lab.seed)
        ax.barh(
            np.arange(len(order)) + 0.2 - 0.4 * shift,
            [found[n] for n in order],
            0.38,
            color=COLOURS[shift],
            label=f"weights of std {std}",
        )
    ax.axvline(BOUND, color="black", linestyle=":", linewidth=1)
    ax.text(BOUND * 1.15, -0.75, "1e-4", fontsize=8, va="center")
    ax.set_yticks(range(len(order)), order)
    ax.set(xscale="log", xlabel="largest difference of a logit", ylim=(-1.1, len(order) - 0.4))
    ax.legend(loc="lower right")
