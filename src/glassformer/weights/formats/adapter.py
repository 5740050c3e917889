"""Adapter folders: of peft, and of training runs. Both are merged into the weights of the model that they adapt.

The folder of a training run holds `adapter.safetensors`, with the names of our layers, and `adapter.toml`: the model
that was adapted ([base]: path, hash of its weights, family), how ([lora]), and the config ([model]).
"""

import hashlib
import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from glassformer.config import ConfigError, ModelConfig, from_dict
from glassformer.model import build
from glassformer.model.adapters import Adapter, adaptable, adapters_of, scale_of
from glassformer.model.nf4 import quantize
from glassformer.pretrained import portable_name
from glassformer.weights.errors import WeightsError, summarize
from glassformer.weights.folder import TOKENIZER_FILES, Origin, family_of, is_adapter, load_config, read_model, resolve
from glassformer.weights.formats import peft
from glassformer.weights.swap import staged
from glassformer.weights.target import check_target
from glassformer.weights.tensors import read_json, release_all

TOML, TENSORS = "adapter.toml", "adapter.safetensors"
SUFFIXES = {"A": ".lora_A", "B": ".lora_B", "magnitude": ".lora_magnitude"}


@dataclass(frozen=True)
class Contents:
    """What an adapter folder holds."""

    layers: dict[str, Adapter]
    replaced: dict[str, Tensor] = field(default_factory=dict)
    """Whole tensors that replace those of the model."""
    sha256: str = ""
    """Hash of the weights of the model that was adapted; empty if the folder does not name it."""
    quantized: bool = False
    """True if the adapters were trained on matrices in NF4."""
    config: ModelConfig | None = None
    """The config of the adapted model; None for that of the base."""


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, shapes and values (as float32) of all weights; the format of the file is no part."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).numpy().data)
        release_all()
    return digest.hexdigest()


def _base_name(folder: Path) -> str:
    """Return the name or path of the model that an adapter folder names as its base; empty if it names none."""
    own = (folder / TOML).exists()
    name = _table(folder)["base"].get("model") if own else read_json(folder / peft.CONFIG).get(peft.BASE)
    return name if isinstance(name, str) else ""


def base_of(folder: Path) -> Path:
    """Return the model that an adapter folder names as its base."""
    if not (name := _base_name(folder)):
        raise WeightsError(f"the adapter {folder} does not name its base model: load that model, and pass adapter=.")
    try:
        return resolve(name)
    except WeightsError as error:
        raise WeightsError(
            f"the base model {name} of the adapter {folder} cannot be found ({str(error).rstrip('.')}): load the base "
            "model from where it is now, and pass the adapter with adapter= (--adapter)."
        ) from None


def adapted_config(folder: Path) -> ModelConfig:
    """Return the config of the model of an adapter folder, with the adapter applied."""
    return _model(folder) if (folder / TOML).exists() else load_config(base_of(folder))


def _check_adapter(folder: Path) -> None:
    if not is_adapter(folder):
        raise WeightsError(f"{folder} is not an adapter folder: it needs {peft.CONFIG} or {TOML}, and no whole model.")


def check_fits(folder: Path, base: Path | None = None) -> None:
    """Raise WeightsError unless an adapter fits its base (None: the one that it names), whose weights are not read."""
    _check_adapter(folder)
    place = base_of(folder) if base is None else base
    if not is_adapter(place):
        read_adapter(folder, load_config(place), family_of(place))


def read_adapted(
    base: Path | None, folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[ModelConfig, dict[str, Tensor], Origin]:
    """Return config, state dict and origin of a model with an adapter merged into it: in float64, rounded once.

    `base` is the model; None for the one that the adapter names.
    """
    _check_adapter(folder)
    place = base_of(folder) if base is None else base
    config, state, origin = read_model(place)
    contents = read_adapter(folder, config, origin.family)
    if contents.sha256 and contents.sha256 != (found := hash_weights(state)):
        named = f" (its folder names {name})" if (name := _base_name(folder)) else ""
        raise WeightsError(
            f"the adapter {folder} was trained on other weights than those of {place} (SHA-256 "
            f"{contents.sha256[:12]}…, here {found[:12]}…): give those weights{named}."
        )
    for name, adapter in contents.layers.items():
        weight = state[f"{name}.weight"]
        exact = quantize(weight).dequantize() if contents.quantized else weight
        state[f"{name}.weight"] = adapter.merge_exactly(exact).to(dtype or weight.dtype)
    state |= contents.replaced
    like = dtype or next(iter(state.values())).dtype
    state = {name: tensor.to(device, dtype or like) for name, tensor in state.items()}
    own = folder if (folder / "tokenizer.json").exists() else place
    return contents.config or config, state, Origin(own, origin.notes, origin.family, folder, place)


def read_adapter(folder: Path, config: ModelConfig, family: str) -> Contents:
    """Return the adapters of a folder for a model of this config and Hugging Face family."""
    if (folder / TOML).exists():
        return _read_own(folder, config)
    found = peft.read_peft(folder, config, family)
    return Contents(found.layers, found.replaced, found.sha256)


def _table(folder: Path) -> dict[str, Any]:
    file = folder / TOML
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        if all(isinstance(data.get(name), dict) for name in ("base", "lora", "model")):
            return data
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}.") from None
    raise WeightsError(f"{file} lacks one of its tables [base], [lora] and [model]: it is damaged.")


def _model(folder: Path) -> ModelConfig:
    try:
        return from_dict(_table(folder)["model"])
    except ConfigError as error:
        raise WeightsError(f"{folder / TOML}: {error}") from None


def _read_own(folder: Path, config: ModelConfig) -> Contents:
    data = _table(folder)
    lora, base, own = data["lora"], data["base"], _model(folder)
    try:
        stored = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder / TENSORS} cannot be read: {error}.") from None
    names = [name.removesuffix(SUFFIXES["A"]) for name in stored if name.endswith(SUFFIXES["A"])]
    rank = int(lora["rank"])
    stabilised = bool(lora.get("rs", False))
    scale = scale_of(rank, float(lora.get("alpha", 2 * rank)), stabilised)
    linear = adaptable(build(config, device="meta"))
    layers = {}
    for name in names:
        a, b, magnitude = (stored.get(name + suffix) for suffix in SUFFIXES.values())
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (a, b)]
        layer = linear.get(name)
        if a is None or b is None or layer is None or shapes != [(rank, layer.in_features), (layer.out_features, rank)]:
            wanted = "no such layer" if layer is None else f"({layer.out_features}, {layer.in_features})"
            reason = f"{name} has A and B of {shapes}, the layer is {wanted}"
            raise peft.other_base(folder, reason, base.get("model"))
        layers[name] = Adapter(a, b, scale, magnitude, stabilised)
    known = {name + suffix for name in names for suffix in SUFFIXES.values()}
    if unknown := sorted(set(stored) - known):
        raise WeightsError(f"{folder / TENSORS} has tensors that are not of an adapter ({summarize(unknown)}).")
    return Contents(layers, {}, str(base.get("sha256", "")), lora.get("quantize") == "nf4", own)


def save_peft(model: nn.Module, path: str | Path, overwrite: bool = False) -> Path:
    """Save the adapter of a model as a peft folder. It is read back and compared before it takes its place."""
    config, origin = getattr(model, "config", None), getattr(model, "origin", None)
    if not isinstance(config, ModelConfig):
        raise WeightsError(f"a {type(model).__name__} has no glassformer config: only glassformer models can be saved.")
    layers, base, family, sha256 = adapters_of(model), "", "", ""
    if isinstance(origin, Origin):
        family, base = origin.family, portable_name(origin.base or origin.path)
        if not layers and origin.adapter is not None:
            contents = read_adapter(origin.adapter, config, family)
            if contents.replaced:
                raise WeightsError(
                    f"the adapter {origin.adapter} also replaces whole tensors ({summarize(contents.replaced)}), which "
                    "cannot be written: copy its folder instead."
                )
            layers, sha256 = contents.layers, contents.sha256
    if not layers:
        raise WeightsError("the model has no adapter: load one with gf.load(MODEL, adapter=FOLDER), or train one.")
    target = check_target(path, overwrite)
    with staged(target, overwrite) as stage:
        on_cpu = {name: _on_cpu(adapter) for name, adapter in layers.items()}
        peft.write_peft(stage, on_cpu, config, family, base, sha256)
        _compare(peft.read_peft(stage, config, family).layers, on_cpu)
        for file in _own_files(origin):
            shutil.copyfile(file, stage / file.name)
        check_target(target, overwrite)
    return target


def _own_files(origin: object) -> list[Path]:
    """Return the files of the tokenizer and the chat template that an adapter has of its own."""
    if not isinstance(origin, Origin) or origin.adapter is None or origin.path != origin.adapter:
        return []
    return [file for name in TOKENIZER_FILES if (file := origin.path / name).is_file()]


def _on_cpu(adapter: Adapter) -> Adapter:
    magnitude = None if adapter.magnitude is None else adapter.magnitude.cpu()
    a, b = adapter.A.cpu().contiguous(), adapter.B.cpu().contiguous()
    return Adapter(a, b, adapter.scale, magnitude, adapter.stabilised)


def _compare(read: Mapping[str, Adapter], written: Mapping[str, Adapter]) -> None:
    """Raise WeightsError unless the adapters that were read back change the weights as those that were written."""
    for name, adapter in read.items():
        got = adapter.scale * (adapter.B.double() @ adapter.A.double())
        if name not in written:
            same = not got.any()  # a part of a fused matrix that has no adapter
        else:
            wanted = written[name]
            expected = wanted.scale * (wanted.B.double() @ wanted.A.double())
            same = torch.allclose(got, expected, rtol=1e-6, atol=1e-9 * max(1.0, float(expected.abs().max())))
        if not same:
            raise WeightsError(f"the adapter of {name} reads back differently: nothing was written.")
    if missing := sorted(set(written) - set(read)):
        raise WeightsError(f"adapters of {summarize(missing)} do not read back: nothing was written.")
