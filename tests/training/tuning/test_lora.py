"""Runs that train adapters: checkpoints, resuming, the base stays as it is, and what is refused."""

import json

import pytest
import torch

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.loop import prepare_state
from glassformer.training.tuning.lora import target_layers
from glassformer.weights import WeightsError
from tests.training.tuning.models import character_model, transformers_model
from tests.training.tuning.test_start import kill_at_6, session

LORA = ("lora.rank=3", "optim.lr=0.02", "loop.checkpoint_every=2")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return character_model(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize(
    "changes", [(), ("lora.dora=true", "lora.rs=true"), ("lora.quantize=nf4", 'lora.targets=["q", "up"]')]
)
def test_a_run_trains_adapters_and_nothing_else(base, tmp_path, changes):
    made = session(tmp_path, base, *LORA, *changes)
    before = gf.load(base).state_dict()
    events = []
    state = train(made.run, made.data, events.append)
    names = {path.name for path in (tmp_path / "run" / "last").iterdir()}
    assert {"adapter.toml", "adapter.safetensors"} <= names
    assert not names & {"model.toml", "model.safetensors"}
    assert events[0]["frozen"] == sum(p.numel() for p in gf.load(base).parameters())
    assert events[0]["trained"] == sum(p.numel() for n, p in state.model.named_parameters() if ".lora_" in n)
    assert all(".lora_" in name for name in state.optimizer.names.values())
    held = {name: t for name, t in state.model.state_dict().items() if ".lora_" not in name}
    assert all(torch.equal(held[name], before[name]) for name in held)
    assert "lora.quantize=nf4" in changes or held.keys() == before.keys()
    losses = [event["loss"] for event in events if event["event"] == "validation"]
    assert losses[-1] < losses[0]
    loaded = gf.load(tmp_path / "run" / "last")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(tokens), state.model.eval()(tokens), atol=1e-5)
    out = gf.save(loaded, tmp_path / "hf", format="glass")
    assert gf.load_tokenizer(out) is not None


def files(folder):
    return {
        name: (folder / name).read_bytes() for name in ("adapter.toml", "adapter.safetensors", "optimizer.safetensors")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [("lora.dora=true",), pytest.param(("lora.dropout=0.3", "optim.ema=0.9"), marks=pytest.mark.slow)]
)
def test_killed_and_resumed_equals_never_killed(base, tmp_path, changes):
    """kill -9 in another process, then resume here: the same bytes as a run in one go."""
    more = (*LORA, "loop.steps=8", *changes)
    whole = session(tmp_path, base, *more, name="whole")
    train(whole.run, whole.data)
    kill_at_6(tmp_path, base, *more)
    again = resume_session(str(tmp_path / "killed"))
    assert again.resume[0]["step"] == 4
    train(again.run, again.data, resume=again.resume)
    assert files(tmp_path / "whole" / "last") == files(tmp_path / "killed" / "last")


def test_a_base_that_changed_is_refused(tmp_path):
    folder = character_model(tmp_path / "model")
    made = session(tmp_path, folder, *LORA, "loop.steps=4")
    train(made.run, made.data)
    adapter = tmp_path / "run" / "best"
    changed = gf.load(folder)
    with torch.no_grad():
        changed.embed.tokens.weight.mul_(1.01)
    gf.save(changed, folder, format="glass", overwrite=True)
    with pytest.raises(WeightsError, match="was trained on other weights than those of"):
        gf.load(adapter)
    with pytest.raises(ConfigError, match="has other weights than the run was started from"):
        resume_session(str(tmp_path / "run"), ("loop.steps=6",))
    with pytest.raises(WeightsError, match="it belongs to another model"):
        gf.load(gf.save(gf.build("nano"), tmp_path / "nano", format="glass"), adapter=adapter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (('lora.targets=["head"]',), "'head', which is tied to the token table"),
        (('lora.targets=["lm_head", "q"]',), "'lm_head', which is tied to the token table"),
        (('lora.targets=["w"]',), "'w', which is no linear layer"),
        (('data.add_tokens=["<x>"]',), "[lora] trains adapters only"),
        (("model.max_len=32",), "needs new rows in the table of learned positions"),
    ],
)
def test_what_adapters_cannot_do(base, tmp_path, changes, message):
    with pytest.raises(ConfigError) as raised:
        session(tmp_path, base, *LORA, *changes)
    assert message in str(raised.value)


def test_experts_are_refused():
    config = gf.presets.get("nano", n_layers=1, d_model=16, n_heads=2, d_ff=16)
    expert = gf.config.Dense(d_ff=16)
    model = gf.build(gf.config.replace(config, feedforward=gf.config.MoE(n_experts=2, n_active=1, expert=expert)))
    from glassformer.training.tuning.section import Lora

    with pytest.raises(ConfigError, match="layers of experts, which cannot have adapters"):
        target_layers(model, Lora())
    assert target_layers(model, Lora(targets=("q", "v"))) == [f"decoder.blocks.0.attention.{x}" for x in "qv"]


@pytest.mark.slow
def test_the_result_goes_to_peft_and_back(tmp_path):
    """A run on GPT-2 whose adapter peft reads: its logits are those of our merged model."""
    peft = pytest.importorskip("peft")
    import warnings

    theirs, folder = transformers_model("gpt2", tmp_path / "gpt2")
    made = session(tmp_path, folder, *LORA, "loop.context=12")
    train(made.run, made.data)
    model = gf.load(tmp_path / "run" / "best")
    out = gf.save(model, tmp_path / "peft", format="peft")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(theirs, out).eval()
    tokens = torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        ours, wanted, before = model(tokens), again(tokens).logits, gf.load(folder)(tokens)
    assert float((ours - wanted).abs().max()) < 2e-6
    assert float((ours - before).abs().max()) > 1e-3
    assert gf.load(out).state_dict().keys() == model.state_dict().keys()
    changed = gf.load(folder)
    with torch.no_grad():
        changed.embed.tokens.weight.mul_(1.01)
    with pytest.raises(WeightsError, match="was trained on other weights"):
        gf.load(gf.save(changed, tmp_path / "changed"), adapter=out)


def test_optimizer_state_is_that_of_the_adapters(base, tmp_path):
    made = session(tmp_path, base, *LORA)
    state = prepare_state(made.run)
    total = sum(p.numel() for p in state.model.parameters())
    assert sum(p.numel() for p in state.parameters) < total / 3
    with pytest.raises(ConfigError, match=r"set lora\.dropout=0"):
        read_run("", (f'start.model="{base}"', "lora.dora=true", "lora.dropout=0.1"))


def test_a_run_can_start_from_an_adapter_folder(base, tmp_path):
    made = session(tmp_path, base, *LORA)
    train(made.run, made.data)
    second = session(tmp_path, tmp_path / "run" / "best", name="second")
    state = prepare_state(second.run)
    merged = gf.load(tmp_path / "run" / "best", dtype="float32").state_dict()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in state.model.state_dict().items())
    assert open_session(second.run).run == second.run
