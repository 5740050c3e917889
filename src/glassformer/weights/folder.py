"""Load models from folders: Hugging Face (`config.json`) or glassformer (`model.toml`, or `run.toml` of a run)."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassformer import pretrained
from glassformer.config import ConfigError, ModelConfig, from_toml
from glassformer.model import Model, build
from glassformer.weights import families, hub
from glassformer.weights.convert import IDENTITY, Move, read, shapes
from glassformer.weights.errors import PickledError, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.tensors import no_weights, open_folder, read_json

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOML, RUN = "model.toml", "run.toml"
ADAPTER = ("adapter_config.json", "adapter.toml")
"""Files that describe an adapter: peft's, and that of a training run."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Files of a tokenizer in transformers; they are copied from the folder from which a model was loaded.
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "source.spm"),
    *("qwen.tiktoken", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True)
class Origin:
    """The folder or file from which a model was loaded, stored as `model.origin`."""

    path: Path
    notes: tuple[str, ...] = field(default=())
    """Notes for the user: dropped tensors, settings that only affect training."""
    family: str = ""
    """Name of the Hugging Face family of the folder, which `save` prefers; empty for a glassformer folder."""
    adapter: Path | None = None
    """The folder of the adapter that was merged into the weights."""
    base: Path | None = None
    """With an adapter: the model into which it was merged."""

    def tokenizer(self) -> Any:
        """Return the `tokenizers.Tokenizer` that belongs to the model; None if there is none."""
        return _tokenizer(self.path) if self.path.exists() else None

    def chat_template(self) -> str | None:
        """Return the chat template that belongs to the model (Jinja); None if there is none."""
        return _chat_template(self.path) if self.path.exists() else None

    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the tokens that a chat template refers to, such as `bos_token`."""
        return _special_tokens(self.path) if self.path.exists() else {}


def resolve(name: str | Path) -> Path:
    """Return the folder of a path, of a bundled model or of a hub name; or a file that is a whole model.

    Raises:
        WeightsError: there is no such model.
    """
    path = Path(name).expanduser()
    if path.is_dir() and str(name):  # an empty name would mean the working directory
        return path
    if path.is_file():
        from glassformer.weights.formats.files import is_model_file

        if is_model_file(path):
            return path
    if str(name) in pretrained.FOLDERS and not path.is_file():
        return pretrained.FOLDERS[str(name)]
    try:
        return hub.find(name)
    except WeightsError as error:
        import difflib  # not needed unless there is an error

        if not (close := difflib.get_close_matches(str(name), pretrained.FOLDERS, n=1)):
            raise
        raise WeightsError(f"{str(error).rstrip('.')}; or do you mean the bundled model {close[0]}?") from None


def resolve_unless_preset(name: str) -> Path | None:
    """Return the folder that a name means to a command that takes presets too; None if it can only be a preset.

    `gpt2` is then the preset. Folders, bundled models and OWNER/MODEL of the hub mean what they mean to `resolve`.
    """
    is_folder = Path(name).expanduser().is_dir() or name in pretrained.FOLDERS
    return resolve(name) if is_folder or "/" in name else None


def load(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    require_finite: bool = False,
) -> Model:
    """Load a model in evaluation mode: a folder, a hub name such as `gpt2`, a GGUF file or a nanoGPT checkpoint.

    `adapter` is the folder of a LoRA or DoRA adapter of this model, from peft or from a training run. It is merged into
    the weights in float64, which are then rounded once. An adapter folder alone is loaded on the model that it names.

    The default `dtype` is that of the file; quantised weights become float32, or the dtype that config.json names. The
    weights exist only once in memory: the model is built on the meta device and takes over the tensors that are read.
    `require_finite` refuses weights that are NaN or infinite, with which all results would be NaN or infinite too.

    Raises:
        WeightsError: the model cannot be loaded. The message is one sentence.

    >>> gf.load("bard").config.n_layers
    6
    """
    place = None if adapter is None else resolve(adapter)
    config, state, origin = read_model(resolve(path), _dtype(dtype), device, adapter=place)
    model = build(config, device="meta")
    model.load_state_dict(state, strict=True, assign=True)
    if require_finite and (problem := non_finite(model)) is not None:
        raise WeightsError(f"{path}: {problem}: copy the weights again, or take an earlier checkpoint.")
    model.origin = origin  # type: ignore[assignment]
    return model.eval()


@torch.no_grad()
def non_finite(model: nn.Module) -> str | None:
    """Return a sentence about the first parameter that contains NaN or infinite values; None if there is none.

    A frozen parameter may contain infinities (a mask), but no NaN.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
            continue
        ends = torch.stack(torch.aminmax(parameter.float() if parameter.dtype.itemsize == 1 else parameter))
        if bool((ends.isfinite() if parameter.requires_grad else ~ends.isnan()).all()):
            continue
        wrong = int((~parameter.isfinite() if parameter.requires_grad else parameter.isnan()).sum())
        return f"{wrong:,} of the {parameter.numel():,} numbers in {name} are NaN or infinite"
    return None


def load_to_compute(
    path: str | Path,
    *,
    adapter: str | Path | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    require_finite: bool = False,
) -> Model:
    """Load a model in the dtype it is computed in: a CPU widens weights that are stored in 16 bits to float32.

    Half precisions are for storage and for accelerators. A `dtype` that is given is used.
    """
    if dtype is None and torch.device(device).type == "cpu" and (adapter is not None or is_adapter(resolve(path))):
        dtype = torch.float32  # an adapter is merged in float64 and rounded once, to the dtype of the computation
    model = load(path, adapter=adapter, dtype=dtype, device=device, require_finite=require_finite)
    stored = next(model.parameters()).dtype
    return model.float() if dtype is None and model.device.type == "cpu" and stored.itemsize == 2 else model


def read_model(
    place: Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    copy: bool = True,
    adapter: Path | None = None,
) -> tuple[ModelConfig, dict[str, Tensor], Origin]:
    """Return config, state dict and origin of a folder or file. `copy` is explained in `convert.read`."""
    if adapter is not None or is_adapter(place):
        from glassformer.weights.formats.adapter import read_adapted

        base, folder = (None, place) if adapter is None else (place, adapter)
        return read_adapted(base, folder, dtype, device)
    if place.is_dir():
        return read_folder(place, dtype, device, copy)
    from glassformer.weights.formats.files import read_file

    config, state, notes = read_file(place, dtype, device, copy)
    return config, state, Origin(place, tuple(notes))


def is_adapter(place: Path) -> bool:
    """Return whether a folder holds an adapter, and not a whole model."""
    return any((place / name).exists() for name in ADAPTER) and not any((place / name).exists() for name in WEIGHTS)


def load_config(path: str | Path) -> ModelConfig:
    """Load the config of a folder or file. The names of the tensors are used where the config is not enough."""
    folder = resolve(path)
    if is_adapter(folder):
        from glassformer.weights.formats.adapter import adapted_config

        return adapted_config(folder)
    if folder.is_file():
        from glassformer.weights.formats.files import config_of_file

        return config_of_file(folder)
    if (ours := _our_config(folder)) is not None:
        return ours
    try:
        return families.read_config(_source(folder))[1]
    except WeightsError as error:
        raise _at(folder, error) from None


def family_of(path: str | Path) -> str:
    """Return the name of the Hugging Face family of a folder; empty for a file, or if a folder of ours has none."""
    folder = resolve(path)
    if folder.is_file():
        return ""
    return families.read_config(_source(folder))[0].name if _our_config(folder) is None else _family_of(folder)


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a folder or file as a `tokenizers.Tokenizer`; return None if there is none.

    >>> gf.load_tokenizer("bard").get_vocab_size()
    65
    """
    return _tokenizer(resolve(path))


def load_chat_template(path: str | Path) -> str | None:
    """Load the chat template of a folder or file (Jinja); return None if there is none."""
    return _chat_template(resolve(path))


def load_special_tokens(path: str | Path) -> dict[str, str]:
    """Load the texts of named tokens of a folder or file, such as `bos_token`, for its chat template."""
    return _special_tokens(resolve(path))


def _tokenizer(place: Path) -> Any:
    if place.is_file():
        from glassformer.weights.formats.files import tokenizer_of_file

        return tokenizer_of_file(place)
    file = place / TOKENIZER
    if not file.exists() and is_adapter(place):
        from glassformer.weights.formats.adapter import base_of

        return _tokenizer(base_of(place))
    if not file.exists():
        from glassformer.weights.tokenizer.folder import read_tokenizer

        return read_tokenizer(place)
    from tokenizers import Tokenizer  # loading a model does not need it

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise WeightsError(
            f"{file} is not a tokenizer that `tokenizers` can read ({error}): replace it, or pass token ids."
        ) from None
    _check_size(tokenizer, file)
    return tokenizer


def _check_size(tokenizer: Any, file: Path) -> None:
    """Refuse a tokenizer with more tokens than its model. Added tokens may exceed it, as in Gemma 3: few use them."""
    ours, theirs = file.parent / TOML, file.parent / CONFIG
    if ours.exists():
        config = _our_config(file.parent)
        size = None if config is None else config.vocab_size
    else:
        size = read_json(theirs).get("vocab_size") if theirs.exists() else None
    known = tokenizer.get_vocab_size(with_added_tokens=False)
    if isinstance(size, int) and known > size:
        raise WeightsError(
            f"{file} has {known} tokens, but the model has {size}: they do not belong together; use the tokenizer that "
            "the model was trained with."
        )


def _chat_template(place: Path) -> str | None:
    if place.is_file():
        from glassformer.weights.formats.files import chat_template_of_file

        return chat_template_of_file(place)
    from glassformer.weights.tokenizer.folder import read_chat_template

    if is_adapter(place) and read_chat_template(place) is None:
        from glassformer.weights.formats.adapter import base_of

        return _chat_template(base_of(place))
    return read_chat_template(place)


def _special_tokens(place: Path) -> dict[str, str]:
    if place.is_file():
        from glassformer.weights.formats.files import special_tokens_of_file

        return special_tokens_of_file(place)
    from glassformer.weights.tokenizer.folder import read_special_tokens

    if is_adapter(place) and not (place / "tokenizer_config.json").exists():
        from glassformer.weights.formats.adapter import base_of

        return _special_tokens(base_of(place))
    return read_special_tokens(place)


def read_folder(
    folder: Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu", copy: bool = True
) -> tuple[ModelConfig, dict[str, Tensor], Origin]:
    """Return config, state dict and origin of a folder. `copy` is explained in `convert.read`."""
    if (config := _our_config(folder)) is not None:
        return _read_ours(folder, config, dtype, device, copy)
    try:
        source = _source(folder, dtype)
        if source.tensors is None:
            raise no_weights(folder)
        family, config, state = families.from_hf(source, dtype, device, copy)
    except WeightsError as error:
        raise _at(folder, error) from None
    return config, state, Origin(folder, tuple(source.notes), family.name)


def _at(folder: Path, error: WeightsError) -> WeightsError:
    return error if str(folder) in str(error) else WeightsError(f"{folder}: {error}")


def _our_config(folder: Path) -> ModelConfig | None:
    for name in (TOML, RUN):
        file = folder / name
        if file.exists():
            try:
                return from_toml(file.read_text(encoding="utf-8"), str(file))
            except ConfigError as error:
                raise WeightsError(f"{file}: {error}" if str(file) not in str(error) else str(error)) from None
            except (OSError, UnicodeDecodeError) as error:
                raise WeightsError(f"{file} cannot be read: {error}.") from None
    return None


def _read_ours(
    folder: Path, config: ModelConfig, dtype: torch.dtype | None, device: str | torch.device, copy: bool
) -> tuple[ModelConfig, dict[str, Tensor], Origin]:
    """Read a glassformer folder. Names are the same on both sides; presence and shape of every tensor are checked."""
    tensors = open_folder(folder)
    if tensors is None:
        raise no_weights(folder)
    moves = [Move(name, (name,), IDENTITY, (), True, shape, (shape,)) for name, shape in shapes(config).items()]
    try:
        state, notes = read(tensors, moves, (), (), "", dtype, device, copy)
    except WeightsError as error:
        raise WeightsError(f"{folder}: {str(error).replace(CONFIG, TOML)}") from None
    return config, state, Origin(folder, tuple(notes), _family_of(folder))


def _family_of(folder: Path) -> str:
    """Return the Hugging Face family of the model that a training run started from; empty if there is none."""
    if not (folder / RUN).exists():
        return ""
    try:
        start = tomllib.loads((folder / RUN).read_text(encoding="utf-8")).get("start")
    except (OSError, ValueError):
        return ""
    return str(start.get("family", "")) if isinstance(start, dict) else ""


def _source(folder: Path, dtype: torch.dtype | None = None) -> Source:
    config, generation = folder / CONFIG, folder / GENERATION
    if not config.exists():
        error = no_weights(folder)
        if isinstance(error, PickledError):
            raise error
        if files := sorted(folder.glob("*.gguf")):
            raise WeightsError(f"{folder} has no {CONFIG}, but GGUF files: give {files[0]}, which is a whole model.")
        raise WeightsError(f"{folder} has neither {CONFIG} nor {TOML}, so it is not a model folder: add one of them.")
    data, tensors = read_json(config), open_folder(folder)
    if data.get("quantization_config") is not None:
        from glassformer.weights.quantized import dequantize

        tensors = dequantize(tensors, data, dtype)
        data.pop("quantization_config")
    return Source(data, tensors, read_json(generation) if generation.exists() else {})


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if not isinstance(dtype, str):
        return dtype
    known = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise WeightsError(f"dtype={dtype!r} is not known: use one of {', '.join(known)}.")
    return known[dtype]
