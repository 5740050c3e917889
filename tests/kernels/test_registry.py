"""The allow-list: what a kernel does not list, it refuses."""

from glassformer import config as c
from glassformer.config import presets
from glassformer.kernels.registry import any_value, config_fields, unsupported_field

SIZES = (
    "vocab_size",
    "d_model",
    "n_layers",
    "max_len",
    "attention",
    "attention.n_heads",
    "feedforward.d_ff",
    "dropout",
)
ALLOWED = {
    **dict.fromkeys((*SIZES, "special.bos", "special.eos"), any_value),
    "feedforward": {"dense"},
    "feedforward.activation": {"gelu_tanh"},
}


def test_fields_of_parts_are_named_by_their_path():
    names = [name for name, _, _ in config_fields(presets.llama_tiny())]
    assert {"n_layers", "position", "position.base", "attention.n_kv_heads", "special.eos"} <= set(names)
    assert len(names) == len(set(names))


def test_a_listed_config_is_supported():
    assert unsupported_field(presets.gpt2(), ALLOWED) is None


def test_a_field_that_is_not_listed_must_have_its_default():
    config = c.replace(presets.gpt2(), attention=c.Attention(n_heads=12, scale=0.5))
    assert unsupported_field(config, ALLOWED) == "attention.scale=0.5 is not supported by the kernel"
    assert unsupported_field(config, {**ALLOWED, "attention.scale": any_value}) is None


def test_a_variant_and_its_fields_are_refused_by_name():
    config = c.replace(presets.gpt2(), position=c.Rotary(base=500.0))
    assert unsupported_field(config, ALLOWED) == "position='rotary' is not supported by the kernel"
    rotary = {**ALLOWED, "position": {"rotary"}}
    assert unsupported_field(config, rotary) == "position.base=500.0 is not supported by the kernel"
    assert unsupported_field(config, {**rotary, "position.base": lambda base: base > 0}) is None


def test_a_required_field_must_be_listed():
    allowed = {name: rule for name, rule in ALLOWED.items() if name != "d_model"}
    assert unsupported_field(presets.gpt2(), allowed) == "d_model=768 is not supported by the kernel"
