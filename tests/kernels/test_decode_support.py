"""Every config field, changed: a decode kernel refuses the change or computes what torch computes.

`CHANGES` lists at least one other value for every field of a decoder config, parts and variants included; a field
without one fails the test. The CPU kernel is compared with torch. The CUDA kernels are compared with torch in their own
tests; here the fields that they refuse are an explicit list.
"""

import dataclasses
import types
import typing

import pytest
import torch

from glassformer import config as c
from glassformer.generation.engine import Call
from glassformer.kernels import decode
from glassformer.kernels.cpu.decode import NativeDecoder
from glassformer.kernels.cpu.decode import stack as cpu
from glassformer.kernels.cuda.decode import pack as cuda
from glassformer.kernels.registry import any_value, config_fields
from glassformer.kernels.toolchain import cxx
from tests.variants import lively, tokens

BOUND = 3e-5
"""The accuracy of the CPU kernel in float32: difference of logits, divided by their largest magnitude."""
needs_compiler = pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler here")
BASE = c.DecoderConfig(
    vocab_size=31,
    d_model=64,
    n_layers=2,
    attention=c.Attention(n_heads=4, n_kv_heads=2, d_head=16),
    feedforward=c.Dense(d_ff=48),
    max_len=32,
)
DENSE, GATED, MOE = c.Dense(48), c.Gated(48), c.MoE(4, 2, c.Dense(48))
YARN = c.YarnScaling(factor=4.0, original_max_len=1024)
LLAMA3 = c.Llama3Scaling(factor=8.0, original_max_len=32)
LATENT = {"attention__n_kv_heads": None, "position": c.Rotary(fraction=0.5), "attention__latent": c.Latent(12, 8)}


def change(base: dict | None = None, **values) -> tuple[c.ModelConfig, list[c.ModelConfig]]:
    """A starting point, and the configs that differ from it in one field: a value for each."""
    start = c.replace(BASE, **(base or {}))
    ((name, listed),) = values.items()
    return start, [c.replace(start, **{name: value}) for value in listed]


def variant(name: str, part, **fields) -> dict:
    """The changes of every field of one variant of a part."""
    found = {}
    for field, values in fields.items():
        start = c.replace(BASE, **{name: part})
        dotted = name.replace("__", ".")
        changed = [c.replace(BASE, **{name: dataclasses.replace(part, **{field: value})}) for value in values]
        found[f"{dotted}={part.kind}.{field}"] = (start, changed)
    return found


def inside_moe(name: str, part, **fields) -> dict:
    """The changes of every field of a part of a mixture of six experts."""
    found = {}
    for field, values in fields.items():
        parts = [part, *(dataclasses.replace(part, **{field: value}) for value in values)]
        made = [c.replace(BASE, feedforward=dataclasses.replace(MOE, n_experts=6, **{name: one})) for one in parts]
        kind = f"={part.kind}" if hasattr(part, "kind") else ""
        found[f"feedforward=moe.{name}{kind}.{field}"] = (made[0], made[1:])
    return found


def inside_latent(inner: c.Norm | None = None, /, place: c.Position = LATENT["position"], **fields) -> dict:
    """The changes of every field of latent attention, or of its norm."""
    found, latent = {}, LATENT["attention__latent"]
    for field, values in fields.items():
        changed = inner or latent
        parts = [changed, *(dataclasses.replace(changed, **{field: value}) for value in values)]
        parts = parts if inner is None else [dataclasses.replace(latent, norm=one) for one in parts]
        start, *others = (c.replace(BASE, **LATENT | {"position": place, "attention__latent": one}) for one in parts)
        found[f"attention.latent.{f'norm={inner.kind}.' if inner else ''}{field}"] = (start, others)
    return found


CHANGES: dict[str, tuple[c.ModelConfig, list[c.ModelConfig]]] = {
    "vocab_size": change(vocab_size=[37]),
    "d_model": change(d_model=[72]),
    "n_layers": change(n_layers=[1, 3]),
    "max_len": change(max_len=[40]),
    "dropout": change(dropout=[0.3]),
    "init_std": change(init_std=[0.5]),
    "placement": change(placement=["post", "parallel", "parallel_two", "sandwich", "after"]),
    "first_norm": change(first_norm=[False]),
    "residual_scale": change(residual_scale=[0.5]),
    "layer_kinds": change(
        {"position": c.Rotary()},
        layer_kinds=[(c.LayerKind((1,), position=c.NoPosition()),), (c.LayerKind((1,), feedforward=GATED),)],
    ),
    "shared_blocks": change(shared_blocks=[(0, 0)]),
    "score_bias": change(score_bias=[c.T5Bias(buckets=8)]),
    "attention": change(attention=[c.Attention(n_heads=2, n_kv_heads=1, d_head=16)]),
    "attention.n_heads": change(attention__n_heads=[2, 6]),
    "attention.n_kv_heads": change(attention__n_kv_heads=[None, 1]),
    "attention.d_head": change(attention__d_head=[32, 8]),
    "attention.d_value": change(attention__d_value=[32]),
    "attention.scale": change(attention__scale=[0.9]),
    "attention.bias": change(attention__bias=[False]),
    "attention.out_bias": change(attention__out_bias=[False]),
    "attention.qk_norm": change(attention__qk_norm=[c.LayerNorm(), c.RMSNorm()]),
    **variant("attention__qk_norm", c.LayerNorm(bias=False), weight=[False]),
    **variant("attention__qk_norm", c.LayerNorm(), eps=[0.5], bias=[False], offset=[1.0]),
    **variant("attention__qk_norm", c.RMSNorm(), eps=[0.5], weight=[False], offset=[1.0]),
    "attention.qk_norm_over": change({"attention__qk_norm": c.RMSNorm()}, attention__qk_norm_over=["heads", "all"]),
    "attention.qk_norm_after_rotation": change(
        {"attention__qk_norm": c.LayerNorm(), "position": c.Rotary()}, attention__qk_norm_after_rotation=[True]
    ),
    "attention.clip": change(attention__clip=[0.3]),
    "attention.softcap": change(attention__softcap=[0.5]),
    "attention.sinks": change(attention__sinks=[True]),
    "attention.latent": change(LATENT | {"attention__latent": None}, attention__latent=[c.Latent(12, 8)]),
    **inside_latent(kv_rank=[40], q_rank=[24], norm=[c.LayerNorm()]),
    **inside_latent(place=c.NoPosition(), d_shared=[5]),
    **inside_latent(c.LayerNorm(bias=False), weight=[False]),
    **inside_latent(c.LayerNorm(), eps=[0.5], bias=[False], offset=[1.0]),
    **inside_latent(c.RMSNorm(), eps=[0.5], weight=[False], offset=[1.0]),
    "attention.window": change(attention__window=[3]),
    "attention.window_layers": change({"attention__window": 3}, attention__window_layers=[(1,)]),
    "feedforward": change(feedforward=[GATED, MOE, c.NoFeedForward()]),
    **variant(
        "feedforward",
        DENSE,
        d_ff=[56],
        activation=["relu", "gelu", "silu", "relu2", "tanh", "quick_gelu"],
        bias=[False],
    ),
    **variant("feedforward", GATED, d_ff=[56], activation=["relu", "gelu", "gelu_tanh", "relu2"], bias=[True]),
    **variant("feedforward", GATED, limit=[0.1], up_offset=[1.0], down_bias=[True]),
    **variant("feedforward", MOE, n_experts=[5], n_active=[1], normalize=[False], expert=[c.Gated(48)]),
    **variant("feedforward", MOE, router=[c.Router(score="sigmoid")], shared=[DENSE]),
    **variant("feedforward", c.MoE(4, 2, c.Dense(48), shared=c.Dense(48)), shared_gate=[True]),
    **inside_moe("expert", DENSE, d_ff=[56], activation=["silu"], bias=[False]),
    **inside_moe("expert", GATED, d_ff=[56], activation=["relu"], bias=[True], limit=[0.1]),
    **inside_moe("expert", GATED, up_offset=[1.0], down_bias=[True]),
    **inside_moe("shared", DENSE, d_ff=[56], activation=["silu"], bias=[False]),
    **inside_moe("shared", GATED, d_ff=[56], activation=["relu"], bias=[True], limit=[0.1]),
    **inside_moe("shared", GATED, up_offset=[1.0], down_bias=[True]),
    **inside_moe("router", c.Router(), score=["sigmoid"], bias=[True], scale=[2.5], correction=[True]),
    **inside_moe("router", c.Router(top_groups=1), groups=[2]),
    **inside_moe("router", c.Router("sigmoid", groups=2), top_groups=[2], group_score=["max"]),
    "norm": change(norm=[c.RMSNorm()]),
    **variant("norm", c.LayerNorm(bias=False), weight=[False]),
    **variant("norm", c.LayerNorm(), eps=[0.5], bias=[False], offset=[1.0]),
    **variant("norm", c.RMSNorm(), eps=[0.5], weight=[False], offset=[1.0]),
    "position": change(
        position=[c.NoPosition(), c.Sinusoidal(), c.Rotary(), c.Alibi(), c.T5Bias(buckets=8), c.QueryKeyPosition()]
    ),
    **variant("position", c.Learned(), offset=[2]),
    **variant("position", c.Sinusoidal(), base=[50.0], layout=["halves"], spacing=["inclusive"], offset=[2]),
    **variant("position", c.Alibi(), scale=[0.3]),
    # slopes of 16 heads, unlike those of 4, are not all powers of two: rounding changes them
    "position=alibi.rounded": change(
        {"attention__n_heads": 16, "position": c.Alibi()}, position=[c.Alibi(rounded=True)]
    ),
    **variant(
        "position",
        c.Rotary(),
        base=[50.0],
        pairing=["interleaved"],
        fraction=[0.5],
        scaling=[c.LinearScaling(3.0), c.NTKScaling(2.5), YARN, LLAMA3],
    ),
    **variant("position", c.T5Bias(buckets=8), buckets=[12], max_distance=[20]),
    **variant("position", c.QueryKeyPosition(), vectors=[c.Learned()]),
    "embedding": change(embedding=[c.Embedding(scale=3.0)]),
    "embedding.scale": change(embedding__scale=[3.0]),
    "embedding.n_segments": change(embedding__n_segments=[3]),
    "embedding.norm": change(embedding__norm=[True]),
    "embedding.width": change({"head__tied": False}, embedding__width=[24]),
    "embedding.project": change(
        {"head__tied": False, "embedding__width": 24, "position": c.Sinusoidal()},
        embedding__project=["before_positions"],
    ),
    "embedding.project_bias": change({"head__tied": False, "embedding__width": 24}, embedding__project_bias=[False]),
    "head": change(head=[None, c.Head(tied=False)]),
    "head.tied": change(head__tied=[False]),
    "head.bias": change(head__bias=[True]),
    "head.scale": change(head__scale=[0.25]),
    "head.transform": change(head__transform=["gelu"]),
    "head.width": change({"head__tied": False}, head__width=[24]),
    "head.transform_bias": change({"head__transform": "gelu"}, head__transform_bias=[False]),
    "head.softcap": change(head__softcap=[0.5]),
    "special": change(special=[c.Special(bos=1)]),
    "special.bos": change(special__bos=[1]),
    "special.eos": change(special__eos=[(2,)]),
    "special.pad": change(special__pad=[3]),
    "special.start": change(special__start=[4]),
    "special.forced_bos": change(special__forced_bos=[5]),
    "special.forced_eos": change(special__forced_eos=[6]),
    "special.suppressed": change(special__suppressed=[(7,)]),
}
LONG = c.LongScaling((1.5,) * 8, (4.0,) * 8, original_max_len=32)
SCALINGS = {"linear": c.LinearScaling(3.0), "ntk": c.NTKScaling(2.5), "yarn": YARN, "llama3": LLAMA3, "long": LONG}
SCALINGS["longer"] = dataclasses.replace(LONG, original_max_len=2)
"""Prompts of the tests are longer than that."""
OTHER = {
    "linear": {"factor": 6.0},
    "ntk": {"factor": 6.0},
    "yarn": {
        **{"factor": 8.0, "original_max_len": 64, "beta_fast": 4.0, "beta_slow": 0.1, "attention_factor": 2.0},
        "truncate": False,
    },
    "llama3": {"factor": 2.0, "original_max_len": 8, "low_freq_factor": 0.1, "high_freq_factor": 40.0},
    "long": {"short": (3.0,) * 8, "long": (2.0,) * 8, "original_max_len": 2, "attention_factor": 2.0},
}
for _kind, _values in OTHER.items():
    for _field, _value in _values.items():
        _part = SCALINGS["longer" if (_kind, _field) == ("long", "long") else _kind]
        CHANGES[f"position=rotary.scaling={_kind}.{_field}"] = (
            c.replace(BASE, position=c.Rotary(scaling=_part)),
            [c.replace(BASE, position=c.Rotary(scaling=dataclasses.replace(_part, **{_field: _value})))],
        )
NESTED = ("position=query_key.vectors=", "score_bias=")
"""Parts inside variants that every kernel refuses whole (checked below)."""
INVISIBLE = {"max_len", "dropout", "init_std", *(name for name in CHANGES if name.startswith("special"))}
"""Fields that do not change what a model computes from its weights."""


def names_of(part: type, prefix: str = "") -> typing.Iterator[str]:
    """The names of all fields of a config class, for every variant of every part."""
    hints = typing.get_type_hints(part)
    for field in dataclasses.fields(part):
        yield prefix + field.name
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        for option in options:
            if dataclasses.is_dataclass(option):
                kind = f"={option.kind}" if hasattr(option, "kind") else ""
                yield from names_of(option, f"{prefix}{field.name}{kind}.")


def test_every_field_of_the_config_has_a_change():
    wanted = {name for name in names_of(c.DecoderConfig) if not name.startswith(NESTED)}
    assert CHANGES.keys() == wanted


def value_of(config, name):
    """The value of a field that is written as `position=rotary.base`; a part that is absent has none."""
    for step in name.split("."):
        field, _, kind = step.partition("=")
        config = getattr(config, field, None)
        assert not kind or getattr(config, "kind", None) == kind, name
    return config


@pytest.mark.parametrize("name", CHANGES)
def test_the_changes_change_the_field_and_nothing_else(name):
    start, changed = CHANGES[name]
    assert changed
    path = ".".join(step.partition("=")[0] for step in name.split("."))
    for config in changed:
        assert value_of(config, name) != value_of(start, name)
        before, after = ({field: value for field, value, _ in config_fields(one)} for one in (start, config))
        common = before.keys() & after.keys()
        assert all(field == path or field.startswith(f"{path}.") for field in common if before[field] != after[field])


def call(config: c.ModelConfig, device: str = "cpu", **changes) -> Call:
    return Call(config, torch.float32, torch.device(device), **changes)


@torch.no_grad()
def by_torch(config: c.ModelConfig) -> torch.Tensor:
    return lively(config)[0].float()(tokens(2, 9, vocab=31))


@torch.no_grad()
def by_kernel(config: c.ModelConfig) -> torch.Tensor:
    """Logits of three tokens that are read at once, and of six that are read one by one."""
    ids, model = tokens(2, 9, vocab=31), lively(config)[0].float()
    native = NativeDecoder(model, 2, 9)
    first = native.read(ids[:, :3].tolist())
    return torch.stack([first, *(native.step(ids[:, t]) for t in range(3, 9))], 1)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(name: str) -> None:
    """Each changed config is refused by the CPU kernel, or computed as torch computes it."""
    kernel = decode.DECODE_KERNELS[0]
    for config in CHANGES[name][1]:
        if kernel.supports(call(config)) is None:
            assert difference(by_kernel(config), by_torch(config)[:, 2:]) < BOUND, f"{name}: {config}"


NOT_STARTED = (*("position=query_key.", "embedding.project", "head.transform_bias"),)
"""Changes whose starting point has a part that the kernels refuse whole."""


@needs_compiler
def test_the_cpu_kernel_supports_the_starting_points():
    for name, (start, _) in CHANGES.items():
        refused = decode.supported_on_cpu(call(start))
        assert (refused is not None) == name.startswith(NOT_STARTED), name
    assert difference(by_kernel(BASE), by_torch(BASE)[:, 2:]) < BOUND


@pytest.mark.sample(40)
@needs_compiler
@pytest.mark.parametrize("name", CHANGES)
def test_the_cpu_kernel_refuses_a_change_or_computes_it(name):
    check(name)


@pytest.mark.sample(33)
@pytest.mark.parametrize("name", [name for name in CHANGES if name not in INVISIBLE])
def test_a_change_is_visible_in_the_logits(name):
    """A kernel that ignored the field would be found out: torch's own logits change by more than the bound."""
    start, changed = CHANGES[name]
    for config in changed:
        if config.head is not None and start.vocab_size == config.vocab_size:
            one, two = by_torch(start), by_torch(config)
            assert difference(one, two) > 3 * BOUND, name


REFUSED = {
    *("feedforward", "feedforward=dense.activation", "feedforward=gated.limit", "feedforward=gated.up_offset"),
    *("position", "score_bias", "layer_kinds", "shared_blocks", "placement", "first_norm", "residual_scale"),
    *(f"attention.{field}" for field in ("clip", "softcap", "sinks", "latent")),
    *(f"norm={kind}_norm.{field}" for kind in ("layer", "rms") for field in ("weight", "offset")),
    *("head", "head.transform", "head.width", "head.softcap", "embedding.n_segments", "embedding.width"),
}
REFUSED_ON_CPU = {
    *("position", "position=alibi.rounded"),
    *("head", "head.transform", "head.width", "embedding.n_segments", "embedding.width"),
}
REFUSED_ON_CUDA = REFUSED | {
    "feedforward=gated.down_bias",
    "attention.d_head",
    "attention.d_value",
    "attention.qk_norm",
    "embedding.norm",
}
"""Fields of which the kernels refuse a listed value, apart from the fields of variants that they refuse whole."""


@pytest.mark.parametrize(
    ("supports", "device", "refused"),
    [
        (decode.supported_on_cpu, "cpu", REFUSED_ON_CPU),
        (decode.supported_by_batch, "cuda", REFUSED_ON_CUDA),
        (decode.supported_by_persistent, "cuda", REFUSED_ON_CUDA),
    ],
)
def test_the_refused_fields_are_these(supports, device, refused, monkeypatch):
    monkeypatch.setattr(cxx, "compiler", lambda: "c++")
    monkeypatch.setattr(decode.nvrtc, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("glassformer.kernels.cuda.decode.decoder.unsupported_device", lambda *_: None)
    found = set()
    for name, (start, changed) in CHANGES.items():
        if supports(call(start, device)) is None and any(supports(call(config, device)) for config in changed):
            found.add(name)
    assert found == refused


PLANTED = {
    "segments are allowed": ("embedding.n_segments", any_value, "embedding.n_segments"),
    "a transform is allowed": ("head.transform", any_value, "head.transform"),
    "every position is allowed": ("position", any_value, "position"),
}


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_field_that_is_allowed_and_not_implemented_is_caught(fault, monkeypatch):
    field, rule, name = PLANTED[fault]
    check(name)
    monkeypatch.setitem(cpu.ALLOWED, field, rule)
    with pytest.raises(AssertionError, match=name):
        check(name)


@needs_compiler
@pytest.mark.parametrize("name", ["norm=layer_norm.eps", "attention.qk_norm=rms_norm.eps"])
def test_a_field_that_the_kernel_ignores_is_caught(name, monkeypatch):
    honest = cpu.norm

    def ignoring(store, module):
        made = honest(store, module)
        made.eps = 1e-5
        return made

    monkeypatch.setattr(cpu, "norm", ignoring)
    with pytest.raises(AssertionError, match=name.replace("=", ".")):
        check(name)


def test_a_field_that_the_cuda_kernels_should_not_allow_is_caught(monkeypatch):
    monkeypatch.setitem(cuda.ALLOWED, "attention.qk_norm", any_value)
    with pytest.raises(AssertionError):
        test_the_refused_fields_are_these(decode.supported_by_persistent, "cuda", REFUSED_ON_CUDA, monkeypatch)


def test_a_new_field_is_refused_until_a_kernel_lists_it(monkeypatch):
    for module in (cpu, cuda):
        monkeypatch.delitem(module.ALLOWED, "attention.scale")
        assert "attention.scale=0.9" in module.unsupported_config(c.replace(BASE, attention__scale=0.9))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequences": 2}, "one sequence"),
        ({"beams": 2}, "beam search"),
        ({"has_draft": True}, "a draft"),
        ({"precision": "int8"}, "float32 and bfloat16"),
        ({"cache": None}, "a cache of their own"),
    ],
)
def test_conditions_of_the_persistent_kernel(changes, words):
    assert words in decode.supported_by_persistent(call(BASE, "cuda", **changes))


def test_each_entry_names_its_test():
    from tests.test_architecture import ROOT

    assert len({kernel.name for kernel in decode.DECODE_KERNELS}) == len(decode.DECODE_KERNELS)
    assert all((ROOT / kernel.test).exists() for kernel in decode.DECODE_KERNELS)
