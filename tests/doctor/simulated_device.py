"""A second device that is simulated on the CPU, to test that probes move what they compute with.

torch lets Python code implement a device type. Tensors of the type "simulated" keep their numbers in a CPU tensor
(`values`), operations run there, and an operation that mixes them with tensors on the CPU raises as it does for CUDA.

    python -m tests.doctor.simulated_device        # examine tiny models on it; print findings that the CPU has not
"""

import collections
import importlib
import json
import sys
from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "simulated"
BY_STORAGE: "collections.OrderedDict[int, torch.Tensor]" = collections.OrderedDict()
"""Values by the identity of the storage: autograd keeps shallow copies, which lose the attribute `values`."""
KEPT = 5000
INDEXED = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
"""Operations whose indices may be on the CPU, as on CUDA."""


class Simulated(torch.Tensor):
    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Simulated":
        made = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
        made.__class__ = Simulated
        made.values_ = values
        key = made.untyped_storage()._cdata
        BY_STORAGE.pop(key, None)
        BY_STORAGE[key] = values
        if len(BY_STORAGE) > KEPT:
            BY_STORAGE.popitem(last=False)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> "Simulated":
        return Simulated(self.values_)

    @data.setter
    def data(self, new: "Simulated") -> None:
        torch.Tensor.data.__set__(self, new)
        self.values_ = new.values_


class Module:
    """What torch asks of a device type: here one device, without random state."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != NAME:
        return tensor
    return tensor.values_ if isinstance(tensor, Simulated) else BY_STORAGE[tensor.untyped_storage()._cdata]


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the values. Raises where a tensor with an axis is on the CPU."""
    name = op._schema.name
    if name == "aten::_copy_from":
        values_of(args[1]).copy_(values_of(args[0]))
        return args[1]
    if name == "aten::copy_":
        values_of(args[0]).copy_(values_of(args[1]))
        return args[0]
    if name == "aten::_to_copy":
        copied = values_of(args[0]).to(dtype=kwargs.get("dtype") or args[0].dtype, copy=True)
        target = kwargs.get("device") or args[0].device
        return Simulated(copied) if target.type == NAME else copied
    if name == "aten::_local_scalar_dense":
        return values_of(args[0]).item()

    def here(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return torch.device("cpu")
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != NAME and value.dim() and name not in INDEXED:
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} got one on the CPU")
        return values_of(value)

    given, named = tree_map(here, args), tree_map(here, kwargs)
    out = given[0].reshape(given[1]) if name in ("aten::view", "aten::_unsafe_view") else op(*given, **named)
    known = {id(values_of(t)): t for t in [*args, *kwargs.values()] if isinstance(t, torch.Tensor)}

    def away(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return known[id(value)] if id(value) in known else Simulated(value)

    return tree_map(away, out)


def register() -> list[Any]:
    """Make the device type known to torch, for good. Keep what is returned."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, Module())
    rest, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(run, "PrivateUse1")
    # these have an implementation for every device, in terms of metadata that the simulation does not keep
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"):
        namespace, _, short = full.partition("::")
        name, _, overload = short.partition(".")
        if namespace != "aten" or torch._C._dispatch_has_kernel_for_dispatch_key(full, "PrivateUse1"):
            continue
        op = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
        if op is not None and any("Tensor" in str(a.type) or a.name == "device" for a in op._schema.arguments):
            aten.impl(short, lambda *a, op=op, **k: run(op, *a, **k), "PrivateUse1")
    return [rest, aten]


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the values: a simulated tensor has none of its own."""
    return values_of(tensor).untyped_storage().data_ptr()


def alarms(model: torch.nn.Module) -> list[list[str]]:
    """What the quick examination of a sound model reports on the simulated device."""
    import glassformer as gf

    report = gf.diagnose(model, quick=True, device=NAME)
    assert report.counts["pass"] > 20
    return [[f.id, str(f.verdict), f.why] for f in report.findings if str(f.verdict) == "fail" or "Error" in f.why]


def unlike_cpu(model: torch.nn.Module) -> list[list[str]]:
    """Findings of the doctor whose verdict differs between the CPU and the simulated device."""
    import glassformer as gf

    def verdicts(device: str | None) -> dict[str, tuple[str, str]]:
        report = gf.diagnose(model, device=device)
        return {f.id: (str(f.verdict), f.why) for f in report.findings}

    cpu, away = verdicts(None), verdicts(NAME)
    ids = [id for id in {**cpu, **away} if cpu.get(id, ("missing",))[0] != away.get(id, ("missing",))[0]]
    return [[id, *cpu.get(id, ("missing", "")), *away.get(id, ("missing", ""))] for id in ids]


def models(n_layers: int) -> dict[str, torch.nn.Module]:
    """One tiny model of each kind."""
    import glassformer as gf

    sizes: dict[str, Any] = {"n_layers": n_layers, "d_model": 16, "n_heads": 2, "vocab_size": 31, "max_len": 64}
    configs = {
        "decoder": gf.presets.nano(**sizes),
        "rotary": gf.presets.llama_tiny(vocab_size=31, n_layers=n_layers),
        "encoder": gf.presets.bert_base(**sizes),
        "seq2seq": gf.presets.transformer_base(**sizes),
    }
    return {name: gf.build(config, seed=0) for name, config in configs.items()}


def main(names: list[str], quick: bool) -> None:
    kept = register()
    import glassformer as gf

    importlib.import_module("glassformer.doctor.diagnose")
    for name, module in list(sys.modules.items()):
        if name.startswith("glassformer.") and hasattr(module, "storage_of"):
            module.storage_of = storage_of  # type: ignore[attr-defined]
    for name in names:
        model = models(n_layers=1 if quick else 2)[name]
        same = gf.compare(model, model, devices=("cpu", NAME), names=("a", "b"))
        unlike = alarms(model) if quick else unlike_cpu(model)
        print(json.dumps({"unlike": unlike, "compare": same.to_dict()}), flush=True)
    assert kept


if __name__ == "__main__":
    main([n for n in sys.argv[1:] if n != "--quick"] or ["decoder"], quick="--quick" in sys.argv)
