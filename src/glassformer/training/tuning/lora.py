"""Adapters of a run: which layers get one, and the tensors and files of its checkpoints."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from glassformer.config import ConfigError, Learned, to_dict, to_toml
from glassformer.errors import nearest
from glassformer.model import Model, build
from glassformer.model.adapters import Adapter, adaptable, attach, choose_layers, fresh_adapters
from glassformer.pretrained import portable_name
from glassformer.training.run import Run
from glassformer.training.tuning.section import Lora


def add_adapters(model: Model, run: Run) -> list[str]:
    """Freeze the model and give it fresh adapters, as [lora] says; return the names of the adapted layers."""
    assert run.lora is not None
    adapters = _fresh(model, run)
    attach(model, adapters, run.lora.dropout, run.lora.quantize == "nf4")
    return list(adapters)


def _fresh(model: Model, run: Run, weights: Mapping[str, Tensor] | None = None) -> dict[str, Adapter]:
    lora = run.lora
    assert lora is not None
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    names = target_layers(model, lora)
    return fresh_adapters(model, names, lora.rank, alpha, lora.rs, lora.dora, run.seed, weights)


def adapter_values(run: Run, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of fresh adapters by name, for a model with these weights: those that `add_adapters` gives."""
    for name, adapter in _fresh(build(run.model, device="meta"), run, weights).items():
        yield f"{name}.lora_A", adapter.A
        yield f"{name}.lora_B", adapter.B
        if adapter.magnitude is not None:
            yield f"{name}.lora_magnitude", adapter.magnitude


def target_layers(model: Model, lora: Lora) -> list[str]:
    """Return the layers that lora.targets means. Refuse targets that mean none, experts, and the output head."""
    known = adaptable(model)
    head = model.config.head
    for target in () if isinstance(lora.targets, str) else lora.targets:
        if target in ("head", "lm_head", "embed", "embed.tokens"):
            why = "is tied to the token table" if head is not None and head.tied else "is not a layer of a block"
            raise ConfigError(f"lora.targets has {target!r}, which {why} and cannot have an adapter: leave it out.")
        if not choose_layers(known, (target,)):
            words = {".".join(name.split(".")[-n:]) for name in known for n in (1, 2)}
            raise ConfigError(f"lora.targets has {target!r}, which is no linear layer.{nearest(target, words)}")
    chosen = choose_layers(known, "linear" if isinstance(lora.targets, str) else lora.targets)
    if experts := [name for name in chosen if ".experts." in name]:
        raise ConfigError(
            f"lora.targets means {experts[0]} and other layers of experts, which cannot have adapters: name the layers "
            "of attention, such as lora.targets=['q', 'k', 'v', 'o']."
        )
    return chosen


def check_lora(new_tokens: Sequence[str]) -> None:
    """Refuse what would change weights of the model that no checkpoint of adapters holds: rows of new tokens."""
    if new_tokens:
        raise ConfigError(
            f"data.add_tokens={list(new_tokens)} needs trained embeddings, and [lora] trains adapters only: leave out "
            "[lora], or the tokens."
        )


def check_positions(run: Run, max_len: int | None) -> None:
    """Refuse a longer table of positions, whose rows [lora] would neither train nor save."""
    if isinstance(run.model.position, Learned) and run.model.max_len != max_len:
        raise ConfigError(
            f"model.max_len={run.model.max_len} needs new rows in the table of learned positions, and [lora] trains "
            "adapters only: leave out [lora], or model.max_len."
        )


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the adapters of a checkpoint. Raise RuntimeError if they are not those of the model."""
    missing = set(adapter_tensors(model)) ^ set(tensors)
    if missing:
        raise RuntimeError(f"the adapters differ in {min(missing)}")
    model.load_state_dict(dict(tensors), strict=False)


def describe_adapter(run: Run) -> str:
    """Return adapter.toml: the model that was adapted, how, and the config."""
    assert run.lora is not None
    base = {"model": portable_name(run.start.model), "sha256": run.start.sha256, "family": run.start.family}
    return to_toml({"base": base, "lora": to_dict(run.lora), "model": to_dict(run.model)})
