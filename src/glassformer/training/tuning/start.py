"""The model that a run starts from: its config and defaults, its hash, and its weights, extended where the run asks.

`fill_in` runs when a run file is read, `check` before training, and `load_start` when the model of the run is made.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine
from torch import Tensor

from glassformer.chat.template import CHATML_TOKENS
from glassformer.config import ConfigError, EncoderConfig, Learned, ModelConfig, Rotary, from_dict, to_dict
from glassformer.errors import listing, plural
from glassformer.files import in_writable_cache, model_name
from glassformer.model import Model, build
from glassformer.training.data.tokenizer import Tokenizer
from glassformer.training.run import Run
from glassformer.training.sections import Start
from glassformer.training.tuning.extend import extend_state
from glassformer.training.tuning.freeze import matches
from glassformer.training.tuning.lora import check_lora, check_positions, target_layers
from glassformer.training.tuning.tokens import extended, mask_token, new_tokens, own_tokenizer, same_tokenizer
from glassformer.weights import WeightsError, load_chat_template, resolve, save
from glassformer.weights.folder import Origin, load_config, read_model
from glassformer.weights.formats.adapter import hash_weights

CHANGEABLE = ("dropout", "max_len", "position")
"""Fields of [model] that a run with [start] may set; of the position, base and scaling."""
LONGEST = 1024
"""Default tokens per sequence of a model with a longer context, or with none."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-5, "weight_decay": 0.01},
    "schedule": {"kind": "constant", "warmup": 10},
    "data": {"tokenizer": "start"},
}
DPO_RATE = 1e-6
"""Default learning rate of direct preference optimization; ten times that with adapters."""
LORA_RATE = 3e-4
"""Default learning rate of adapters: about ten times that of all weights."""


def fill_in(data: dict[str, Any], start: Start) -> dict[str, Any]:
    """Return the tables of a run with the config of the model it starts from, and the defaults of fine-tuning.

    A whole [model], as a run records it, is returned as it is: `check` compares it with the model of the folder.
    """
    changes = data.get("model", {})
    if not isinstance(changes, dict) or "kind" in changes:
        return data
    place = _place(start.model)
    if _table(data, "chat").get("loss") == "dpo":
        changes = {"dropout": 0.0} | changes  # the reference has none: with dropout the first loss would not be ln 2
    config = changed(load_config(place), changes)
    out = dict(data)
    for name, values in (DEFAULTS | _defaults_of(config, data)).items():
        out[name] = values | _table(data, name)
    if "chat" in data:
        out["data"]["add_tokens"] = chat_tokens(place, data, out["data"].get("add_tokens", ()))
    for name, values in _tokens(config, place, out).items():
        if name == "model":
            config = dataclasses.replace(config, **values)
        else:
            out[name] = _table(out, name) | values
    out["start"] = {**data["start"], "model": str(place)}
    out["model"] = to_dict(config)
    return out


def _place(name: str) -> Path:
    try:
        return resolve(name).resolve()
    except WeightsError as error:
        raise ConfigError(f"start.model={name!r} cannot be used: {error}") from None


def _table(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    held = data.get(name, {})
    if not isinstance(held, dict):
        raise ConfigError(f"{name} must be a table.")
    return held


def _defaults_of(config: ModelConfig, data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    defaults: dict[str, dict[str, Any]] = {}
    if "lora" in data:
        defaults["optim"] = DEFAULTS["optim"] | {"lr": LORA_RATE}
    if _table(data, "chat").get("loss") == "dpo":
        defaults["optim"] = DEFAULTS["optim"] | {"lr": DPO_RATE * (10 if "lora" in data else 1)}
    if config.max_len is None or config.max_len > LONGEST:
        defaults["loop"] = {"context": LONGEST}
    return defaults


def changed(config: ModelConfig, changes: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a model with the few fields changed that do not contradict its weights."""
    for key in changes:
        if key not in CHANGEABLE:
            raise ConfigError(
                f"model.{key}={changes[key]!r} contradicts start.model, which brings its own: with [start], [model] "
                "may set only dropout, max_len and model.position (base and scaling)."
            )
    fields = to_dict(config)
    position = changes.get("position", {})
    if not isinstance(position, dict) or set(position) - {"kind", "base", "scaling"}:
        raise ConfigError(f"model.position={position!r} may set only base and scaling with [start].")
    if position and not isinstance(config.position, Rotary):
        raise ConfigError(
            f"model.position={position!r} scales rotary positions, and start.model has {config.position.title}: leave "
            "it out."
        )
    new = from_dict(fields | dict(changes) | {"position": fields["position"] | position})
    _check_length(config, new)
    return new


def _check_length(old: ModelConfig, new: ModelConfig) -> None:
    if old.max_len is None or (new.max_len is not None and new.max_len >= old.max_len):
        return
    raise ConfigError(
        f"model.max_len={new.max_len} is less than the {old.max_len} of start.model: leave it out, and set "
        "loop.context for shorter sequences."
    )


def _tokens(config: ModelConfig, place: Path, data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the tokenizer decides: the tokenizer of the run, the size of the vocabulary, the mask token."""
    given = data["data"].get("tokenizer", "start")
    own = own_tokenizer(place)
    if own is None:
        if given == "start":
            raise ConfigError(
                f"start.model={str(place)!r} has no tokenizer: set data.tokenizer to the tokenizer.json that it was "
                "trained with."
            )
        return {}
    if given != "start" and not same_tokenizer(given, own):
        raise ConfigError(
            f"data.tokenizer={given!r} is another tokenizer than that of start.model, whose weights know only their "
            "own token ids: leave it out."
        )
    found: dict[str, dict[str, Any]] = {"data": {"tokenizer": "start"}}
    if added := data["data"].get("add_tokens"):
        own = extended(own, tuple(added))
        found["model"] = {"vocab_size": max(config.vocab_size, own.vocab_size)}
    if isinstance(config, EncoderConfig) and "mask_token" not in _table(data, "loss"):
        found["loss"] = {"mask_token": mask_token(own, config)}
    return found


def chat_tokens(place: Path, data: Mapping[str, Any], added: Sequence[str]) -> list[str]:
    """Return the tokens that a run on conversations adds: those of ChatML, if the model has no template and no such
    tokens."""
    own = own_tokenizer(place)
    named = _table(data, "chat").get("template")
    if own is None or named not in (None, "", "chatml") or (not named and load_chat_template(place) is not None):
        return list(added)
    known = Engine.from_str(own.to_json()).get_vocab(with_added_tokens=True)
    missing = [token for token in CHATML_TOKENS if token not in (*known, *added)]
    if missing and "lora" in data:
        raise ConfigError(
            f"ChatML, the template for {model_name(place)}, needs the tokens {' and '.join(missing)}, whose embeddings "
            "[lora] does not train: set chat.template to plain or to a file, or leave out [lora]."
        )
    return [*added, *missing]


def check(run: Run) -> tuple[Run, list[str]]:
    """Return the run with the hash and the family of the model it starts from, and notes on how it extends that model.

    Raise ConfigError if the model was changed since the run recorded its hash.
    """
    place = _place(run.start.model)
    if run.lora is not None and run.data.add_tokens and (own := own_tokenizer(place)) is not None:
        check_lora(new_tokens(own, run.data.add_tokens))
    config, state, origin = read_model(place, copy=False)
    found = hash_weights(state)
    if run.start.sha256 not in ("", found):
        raise ConfigError(
            f"{place} has other weights than the run was started from (SHA-256 {found[:12]}…, recorded "
            f"{run.start.sha256[:12]}…): give the original model, or remove start.sha256 to start from this one."
        )
    wanted, held = to_dict(run.model), to_dict(config)
    fits = {*CHANGEABLE, *(["vocab_size"] if run.data.add_tokens else []), *(["special"] if run.chat else [])}
    for key in [*wanted, *held]:
        if key not in fits and wanted.get(key) != held.get(key):
            raise ConfigError(f"model.{key}={wanted.get(key)!r} is not that of start.model, {held.get(key)!r}.")
    if run.lora is not None:
        check_positions(run, config.max_len)
        target_layers(build(run.model, device="meta"), run.lora)
    start = dataclasses.replace(
        run.start, model=str(place), sha256=found, family=origin.family, n_tokens=run.start.n_tokens or used_ids(run)
    )
    return dataclasses.replace(run, start=start), describe(run, config)


def start_tokenizer(run: Run) -> Tokenizer | None:
    """Return the tokenizer of the model that a run starts from, with added tokens; None if data.tokenizer names it."""
    if run.data.tokenizer != "start":
        return None
    own = own_tokenizer(_place(run.start.model))
    if own is None:
        raise ConfigError(f"{run.start.model} has no tokenizer any more: set data.tokenizer.")
    return extended(own, run.data.add_tokens) if run.data.add_tokens else own


def load_start(run: Run, device: str | torch.device) -> Model:
    """Return the model that the run starts from, in float32, with longer tables where the run asks for them."""
    model = build(run.model, device="meta")
    model.load_state_dict(start_state(run, torch.float32), strict=True, assign=True)
    return model.to(device)


def start_state(run: Run, dtype: torch.dtype | None, copy: bool = True) -> dict[str, Tensor]:
    """Return the weights that a run starts from. `copy` is explained in `weights.convert.read`."""
    config, state, _ = read_model(_place(run.start.model), dtype, copy=copy)
    return extend_state(state, config, run.model, _known_ids(run, config), run.seed)


def _known_ids(run: Run, config: ModelConfig) -> int:
    """Return the number of token ids that the model of [start] was trained with."""
    if not run.data.add_tokens:
        return config.vocab_size
    own = own_tokenizer(_place(run.start.model))
    assert own is not None  # `_tokens` refuses data.add_tokens without one
    new = new_tokens(own, run.data.add_tokens)
    return min(own.vocab_size, config.vocab_size) if new else config.vocab_size


def used_ids(run: Run) -> int:
    """Return the number of ids that the tokenizer or the config uses. Without a tokenizer of the model, it is all."""
    tokenizer, config = start_tokenizer(run), run.model
    if tokenizer is None:
        return config.vocab_size
    special = config.special
    used = [special.bos, special.start, special.pad, special.forced_bos, run.loss.mask_token, *special.eos]
    return max([tokenizer.vocab_size, *(token + 1 for token in used if token is not None)])


def describe(run: Run, config: ModelConfig) -> list[str]:
    """Return a sentence for each way in which the run extends the model of [start], whose config this is."""
    notes = []
    old, new = config.max_len, run.model.max_len
    if old is not None and new is not None and new > old:
        if isinstance(config.position, Learned):
            notes.append(f"the position table grows from {old:,} to {new:,} rows, which are interpolated")
        elif isinstance(config.position, Rotary) and run.model.position == config.position:
            notes.append(
                f"max_len grows from {old:,} to {new:,} with unchanged rotary positions: set model.position.scaling or "
                "model.position.base to interpolate"
            )
    tied = config.head is not None and config.head.tied
    if tied and any(matches(choice, "embed.tokens.weight") for choice in run.optim.freeze):
        notes.append("the head is tied to the token table, so optim.freeze freezes both")
    if run.data.add_tokens:
        own = own_tokenizer(_place(run.start.model))
        fresh = [] if own is None else new_tokens(own, run.data.add_tokens)
        rows = run.model.vocab_size - config.vocab_size
        if fresh:
            notes.append(f"{plural(len(fresh), 'token')} added, for which the tables grow by {rows} rows")
        if marked := [repr(token) for token in run.data.add_tokens if token not in fresh]:
            notes.append(f"{listing(marked, 'and')} of the vocabulary becomes a special token and keeps its id")
    return notes


def stored(model: Model) -> str:
    """Return the path of a model: that of its files if they hold the same weights, or else of a copy in the cache."""
    origin, digest = getattr(model, "origin", None), hash_weights(model.state_dict())
    if isinstance(origin, Origin) and origin.path.exists():
        config, state, _ = read_model(origin.path, copy=False)
        if config == model.config and hash_weights(state) == digest:
            return str(origin.path)
    folder = in_writable_cache(f"models/{digest[:16]}")
    if not folder.exists():
        save(model, folder, format="glass")
    return str(folder)
