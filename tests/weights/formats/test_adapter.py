"""Adapter folders: on their base, of training runs and of peft; what is refused."""

import json

import pytest
import torch

import glassformer as gf
from glassformer.model import adapters
from glassformer.weights import WeightsError
from glassformer.weights.folder import load_chat_template, load_config, load_to_compute
from glassformer.weights.formats.adapter import hash_weights, save_peft
from tests.training.tuning.models import transformers_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(base, adapter): a tiny Llama, and an adapter of it that this package wrote."""
    root = tmp_path_factory.mktemp("adapter")
    _, base = transformers_model("llama", root / "base")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    model = gf.load(base)
    made = adapters.fresh_adapters(
        model, adapters.choose_layers(adapters.adaptable(model), ("q", "up")), 2, 4.0, False, False, 0
    )
    adapters.attach(model, {n: adapters.Adapter(a.A, torch.randn_like(a.B), a.scale) for n, a in made.items()})
    return base, gf.save(model, root / "peft", format="peft"), model


TOKENS = torch.tensor([[4, 5, 6, 7]])


@torch.no_grad()
def test_an_adapter_folder_is_loaded_on_its_base(folders):
    base, folder, trained = folders
    model = gf.load(folder)
    assert torch.allclose(model(TOKENS), trained(TOKENS), atol=1e-5)
    assert torch.equal(model(TOKENS), gf.load(base, adapter=folder)(TOKENS))
    assert not torch.allclose(model(TOKENS), gf.load(base)(TOKENS), atol=1e-2)
    assert load_config(folder) == gf.load(base).config
    assert gf.load_tokenizer(folder).to_str() == gf.load_tokenizer(base).to_str()
    assert load_chat_template(folder) == "{{ messages }}"
    assert model.origin.adapter == folder
    assert model.origin.base == base


@torch.no_grad()
def test_a_merged_model_is_rounded_once(folders):
    base, folder, trained = folders
    exact = {name: module.adapter().merge_exactly(module.base()) for name, module in trained.named_modules()
             if isinstance(module, adapters.AdaptedLinear)}  # fmt: skip
    half = gf.load(base, adapter=folder, dtype="bfloat16").state_dict()
    for name, wanted in exact.items():
        assert torch.equal(half[f"{name}.weight"], wanted.to(torch.bfloat16))


@torch.no_grad()
def test_a_base_in_half_precision_is_merged_in_float32_to_compute(folders, tmp_path):
    base, folder, _ = folders
    half = gf.save(gf.load(base, dtype="bfloat16"), tmp_path / "half")
    assert next(gf.load(half, adapter=folder).parameters()).dtype is torch.bfloat16
    model, wide = load_to_compute(half, adapter=folder), gf.load(half, dtype="float32", adapter=folder)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wide.parameters(), strict=True))


def test_saving_merges_adapters_that_are_still_separate(folders, tmp_path):
    base, folder, trained = folders
    out = gf.load(gf.save(trained, tmp_path / "hf")).state_dict()
    wanted = gf.load(base, adapter=folder).state_dict()
    assert all(torch.equal(out[name], wanted[name]) for name in wanted)


def test_what_is_refused(folders, tmp_path):
    base, folder, _ = folders
    with pytest.raises(WeightsError, match="is not an adapter folder"):
        gf.load(base, adapter=base)
    with pytest.raises(WeightsError, match="has no adapter: load one with"):
        gf.save(gf.load(base), tmp_path / "x", format="peft")
    with pytest.raises(WeightsError, match="only glassformer models"):
        save_peft(torch.nn.Linear(2, 2), tmp_path / "x")
    path = gf.save(gf.build("nano"), tmp_path / "nano", format="glass")
    with pytest.raises(WeightsError, match=r"there is no linear layer model\.layers\.0"):
        gf.load(path, adapter=folder)
    with pytest.raises(WeightsError, match="already holds a model"):
        gf.save(gf.load(folder), folder, format="peft")


def test_a_base_that_moved_is_named(folders, tmp_path):
    base, folder, _ = folders
    copy = gf.save(gf.load(folder), tmp_path / "copy", format="peft")
    data = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(data | {"base_model_name_or_path": "no/such/base/model"}))
    with pytest.raises(WeightsError, match="the base model no/such/base/model of the adapter"):
        gf.load(copy)
    (copy / "adapter_config.json").write_text(json.dumps(data | {"base_model_name_or_path": None}))
    with pytest.raises(WeightsError, match="does not name its base model"):
        gf.load(copy)
    gf.load(base, adapter=copy)


def test_the_hash_depends_on_values_not_on_the_dtype_of_the_file():
    state = gf.build("nano", dtype=torch.bfloat16).state_dict()
    assert hash_weights(state) == hash_weights({name: tensor.float() for name, tensor in state.items()})
    name = next(iter(state))
    assert hash_weights(state | {name: state[name] * 2}) != hash_weights(state)
