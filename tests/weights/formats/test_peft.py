"""Adapters of peft in both directions, for six families and three kinds of adapters; and what is refused."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

import glassformer as gf
from glassformer.model import adapters
from glassformer.weights import WeightsError
from glassformer.weights.formats import adapter as adapter_folder
from glassformer.weights.formats.peft import read_config
from tests.training.tuning.models import transformers_model
from tests.weights.formats.adapters import TARGETS, VARIANTS, inputs, peft_model, saved, their_logits

peft = pytest.importorskip("peft")
QUICK = {("gpt2", "lora"), ("gpt2", "dora"), ("llama", "rs"), ("llama", "dora"), ("bert", "lora"), ("t5", "dora")}
CASES = [
    pytest.param(kind, variant, marks=[] if (kind, variant) in QUICK else pytest.mark.slow)
    for kind in TARGETS
    for variant in VARIANTS
]


def gap(a, b):
    return float((a - b).abs().max())


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "variant"), CASES)
@torch.no_grad()
def test_folders_are_interchangeable(kind, variant, tmp_path):
    """Their folder read by us, ours read by them; tensors are equal bit for bit after the way there and back."""
    import transformers

    theirs, base = peft_model(kind, tmp_path / "base", **VARIANTS[variant])
    folder = saved(theirs, tmp_path / "adapter")
    model, plain = gf.load(base, adapter=folder), gf.load(base)
    wanted = their_logits(kind, theirs)
    bound = 1e-6 * max(1.0, float(wanted.abs().max()))
    assert gap(plain(*inputs(kind)), wanted) > 1e-2, "the adapter has an effect"
    assert gap(model(*inputs(kind)), wanted) < bound
    out = gf.save(model, tmp_path / "ours", format="peft")
    bare = {"bert": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}.get(kind, "AutoModelForCausalLM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(getattr(transformers, bare).from_pretrained(base).eval(), out).eval()
    assert gap(their_logits(kind, again), wanted) < bound
    ours, original = load_file(out / "adapter_model.safetensors"), load_file(folder / "adapter_model.safetensors")
    assert ours.keys() == original.keys()
    for name in ours:
        assert torch.equal(ours[name], original[name]), name


@torch.no_grad()
def test_three_adapters_become_one_of_three_times_the_rank(tmp_path):
    """q, k and v of GPT-2 with matrices A of their own: the written c_attn changes the logits in the same way."""
    _, base = transformers_model("gpt2", tmp_path / "base")
    for stabilised, name in ((False, "plain"), (True, "rs")):
        model = gf.load(base)
        targets = adapters.choose_layers(adapters.adaptable(model), ("q", "v", "up"))
        made = adapters.fresh_adapters(model, targets, 2, 4.0, stabilised, False, seed=1)
        made = {n: adapters.Adapter(a.A, torch.randn_like(a.B) / 5, a.scale, None, stabilised) for n, a in made.items()}
        adapters.attach(model, made)
        wanted = model(*inputs("gpt2"))
        out = gf.save(model, tmp_path / name, format="peft")
        data = json.loads((out / "adapter_config.json").read_text())
        assert data["use_rslora"] is stabilised
        assert {2, 4} == {data["r"], *data["rank_pattern"].values()}
        from transformers import GPT2LMHeadModel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            again = peft.PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(base).eval(), out).eval()
        assert gap(their_logits("gpt2", again), wanted) < 1e-6 * float(wanted.abs().max())


def in_double(adapter, seen):
    """Adapters that share A still do."""
    A = seen.setdefault(id(adapter.A), adapter.A.double())
    return adapters.Adapter(A, adapter.B.double(), adapter.scale, double(adapter.magnitude), adapter.stabilised)


def double(tensor):
    return None if tensor is None else tensor.double()


def step_of(parameters, loss):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)
    loss.backward()
    optimizer.step()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_one_step_of_adamw_equals_that_of_peft(kind, variant, tmp_path):
    theirs, base = peft_model(kind, tmp_path / "base", **VARIANTS[variant])
    folder = saved(theirs, tmp_path / "adapter")
    theirs = theirs.double()  # the first step of AdamW divides a gradient by its own size, however small it is
    model = gf.load(base, dtype="float64")
    seen = {}
    contents = adapter_folder.read_adapter(folder, model.config, model.origin.family)
    adapters.attach(model, {name: in_double(adapter, seen) for name, adapter in contents.layers.items()})
    step_of([p for p in model.parameters() if p.requires_grad], model(*inputs(kind)).square().mean())
    step_of([p for p in theirs.parameters() if p.requires_grad], their_logits(kind, theirs).square().mean())
    after = load_file(saved(theirs, tmp_path / "after") / "adapter_model.safetensors")
    before = load_file(folder / "adapter_model.safetensors")
    ours = load_file(gf.save(model, tmp_path / "ours", format="peft") / "adapter_model.safetensors")
    assert ours.keys() == after.keys()
    for name in ours:
        assert gap(ours[name], after[name]) < 1e-7, name
        assert gap(before[name], after[name]) > 1e-3, name
    bases = gf.load(base, dtype="float64").state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    assert bases.keys() == kept.keys()
    assert all(torch.equal(bases[name], kept[name]) for name in bases)


@torch.no_grad()
def test_wrong_arithmetic_is_noticed(tmp_path, monkeypatch):
    """A transposed B A, a missing square root and a norm over the wrong axis each exceed the bound above."""
    from glassformer.model.adapters import Adapter

    def error(variant, kind="gpt2"):
        folder = tmp_path / f"{variant}-{kind}-{len(list(tmp_path.iterdir()))}"
        model, base = peft_model(kind, folder / "base", **VARIANTS[variant])
        adapter = saved(model, folder / "adapter")
        return gap(gf.load(base, adapter=adapter)(*inputs(kind)), their_logits(kind, model))

    assert error("rs") < 1e-5
    monkeypatch.setattr("glassformer.weights.formats.peft.scale_of", lambda rank, alpha, stabilised: alpha / rank)
    assert error("rs") > 1e-3
    monkeypatch.undo()
    exact = Adapter.merge_exactly

    def transposed(self, weight):
        delta = self.scale * (self.B.double() @ self.A.double())
        return weight.double() + (delta.t() if delta.shape[0] == delta.shape[1] else delta)

    monkeypatch.setattr(Adapter, "merge_exactly", transposed)
    assert error("lora") > 1e-3

    def other_axis(self, weight):
        if weight.shape[0] != weight.shape[1]:
            return exact(self, weight)
        merged = weight.double() + self.scale * (self.B.double() @ self.A.double())
        return (self.magnitude.double() / merged.norm(dim=0))[:, None] * merged

    monkeypatch.setattr(Adapter, "merge_exactly", other_axis)
    assert error("dora") > 1e-3


@torch.no_grad()
def test_modules_to_save_replace_whole_tensors(tmp_path):
    model, base = peft_model("llama", tmp_path / "base", modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            parameter.mul_(1.5)
    folder = saved(model, tmp_path / "adapter")
    ours = gf.load(base, adapter=folder)
    assert gap(ours(*inputs("llama")), their_logits("llama", model)) < 1e-5
    with pytest.raises(WeightsError, match="also replaces whole tensors"):
        gf.save(ours, tmp_path / "out", format="peft")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "LOHA", "only LORA is supported"),
        ("bias", "all", "bias='all': only 'none' is supported"),
        ("init_lora_weights", "pissa", "init_lora_weights='pissa'"),
        ("lora_bias", True, "lora_bias=True, which is not supported"),
        ("trainable_token_indices", [1, 2], "trainable_token_indices"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("target_parameters", ["x"], "target_parameters"),
        ("use_qalora", True, "use_qalora"),
        ("alora_invocation_tokens", [5], "alora_invocation_tokens"),
        ("arrow_config", {"a": 1}, "arrow_config"),
        ("something_new", 3, "something_new=3, which is not supported"),
        ("r", 0, "r=0, which must be a positive number"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(tmp_path, key, value, message):
    data = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"], "bias": "none", "use_dora": False}
    (tmp_path / "adapter_config.json").write_text(json.dumps(data))
    assert read_config(tmp_path) == data
    (tmp_path / "adapter_config.json").write_text(json.dumps(data | {key: value}))
    with pytest.raises(WeightsError) as raised:
        read_config(tmp_path)
    assert message in str(raised.value)


def test_a_file_of_six_keys_is_enough(tmp_path):
    model, base = peft_model("llama", tmp_path / "base")
    folder = saved(model, tmp_path / "adapter")
    data = json.loads((folder / "adapter_config.json").read_text())
    six = ("peft_type", "r", "lora_alpha", "target_modules", "fan_in_fan_out", "base_model_name_or_path")
    (folder / "adapter_config.json").write_text(json.dumps({key: data[key] for key in six}))
    with torch.no_grad():
        assert gap(gf.load(base, adapter=folder)(*inputs("llama")), their_logits("llama", model)) < 1e-5


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    model, base = peft_model("llama", tmp_path / "base")
    folder = saved(model, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    path = "base_model.model.model.layers.0.self_attn.q_proj"

    def refused(changed, words):
        save_file(changed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(WeightsError) as raised:
            gf.load(base, adapter=folder)
        assert words in str(raised.value)

    refused(tensors | {f"{path}.lora_A.weight": torch.zeros(4, 25)}, "it belongs to another model")
    refused({n: t for n, t in tensors.items() if n != f"{path}.lora_B.weight"}, "it belongs to another model")
    more = {name.replace("layers.0", "layers.9"): tensor.clone() for name, tensor in tensors.items()}
    refused(tensors | more, "there is no linear layer model.layers.9")
    expert = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    refused(tensors | {expert: torch.zeros(4, 24)}, "adapters of experts are not supported")
    head = "base_model.model.lm_head.lora_A.weight"
    refused(tensors | {head: torch.zeros(4, 24)}, "adapts the output head lm_head")
    table = "base_model.model.model.embed_tokens.lora_embedding_A"
    refused(tensors | {table: torch.zeros(4, 61)}, "an adapter of an embedding")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no adapter_model\.safetensors"):
        gf.load(base, adapter=folder)
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="pickles are never loaded"):
        gf.load(base, adapter=folder)


def test_an_adapter_on_a_model_of_no_family_names_the_model_that_it_was_trained_on(tmp_path):
    """transformers has no name for the layers of such a model: the sentence is about the adapter all the same."""
    with pytest.raises(WeightsError) as raised:
        gf.load("induction", adapter="bard-chat")
    assert "does not fit this model (an attention-only model has no Hugging Face family)" in str(raised.value)
    assert str(raised.value).endswith("it belongs to another model, so give bard, the base that its folder names.")
    folder = saved(peft_model("llama", tmp_path / "base")[0], tmp_path / "adapter")
    data = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(data | {"base_model_name_or_path": None}))
    with pytest.raises(WeightsError, match="so give the model that it was trained on"):
        gf.load("bard", adapter=folder)


def test_a_tied_head_that_was_trained_is_refused(tmp_path):
    model, base = peft_model("gpt2", tmp_path / "base", modules_to_save=["lm_head"])
    with pytest.raises(WeightsError, match="the head of this model is tied to its token table"):
        gf.load(base, adapter=saved(model, tmp_path / "adapter"))
