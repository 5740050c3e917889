"""nanoGPT checkpoints compute here what nanoGPT computes; anything but tensors and plain values is refused."""

import dataclasses
import math
import os

import pytest
import torch
import torch.nn.functional as F

import glassformer as gf
from glassformer.cli import main
from glassformer.weights import WeightsError, load_config

ARGUMENTS = {"n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 16, "bias": True, "vocab_size": 31, "dropout": 0.1}


def tensors(seed=0, **changes):
    """The state dict of nanoGPT's model, random. A tied head is stored twice."""
    args = ARGUMENTS | changes
    generator = torch.Generator().manual_seed(seed)
    D, V, T = args["n_embd"], args["vocab_size"], args["block_size"]
    layers = {"ln_1": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "ln_2": (D,)}
    layers |= {"mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}
    shapes = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (T, D)}
    for i in range(args["n_layer"]):
        for name, shape in layers.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
            if args["bias"]:
                shapes[f"transformer.h.{i}.{name}.bias"] = shape[:1]
    shapes["transformer.ln_f.weight"] = (D,)
    if args["bias"]:
        shapes["transformer.ln_f.bias"] = (D,)
    out = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        out[name] = noise + 1 if "ln_" in name and name.endswith("weight") else noise
    return out | {"lm_head.weight": out["transformer.wte.weight"]}


def nanogpt(state, args, tokens):
    """The arithmetic of nanoGPT's model.py, written from its description."""
    H, D = args["n_head"], args["n_embd"]

    def layer(name, x):
        return F.linear(x, state[name + ".weight"], state.get(name + ".bias"))

    def norm(name, x):
        return F.layer_norm(x, (D,), state[name + ".weight"], state.get(name + ".bias"), 1e-5)

    T = tokens.shape[1]
    x = state["transformer.wte.weight"][tokens] + state["transformer.wpe.weight"][:T]
    for i in range(args["n_layer"]):
        name = f"transformer.h.{i}."
        q, k, v = layer(name + "attn.c_attn", norm(name + "ln_1", x)).split(D, dim=2)
        q, k, v = (t.unflatten(2, (H, D // H)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(D // H)
        scores = scores.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + layer(name + "attn.c_proj", y)
        x = x + layer(name + "mlp.c_proj", F.gelu(layer(name + "mlp.c_fc", norm(name + "ln_2", x))))
    return norm("transformer.ln_f", x) @ state["lm_head.weight"].T


def checkpoint(path, model=None, **changes):
    """What nanoGPT's train.py saves."""
    model = tensors() if model is None else model
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-3}]}
    content = {"model": model, "optimizer": optimizer, "model_args": ARGUMENTS, "iter_num": 7}
    content |= {"best_val_loss": torch.tensor(1.5), "config": {"out_dir": "out", "learning_rate": 6e-4}}
    torch.save(content | changes, path)
    return path


def refusal(path, call=gf.load):
    with pytest.raises(WeightsError) as refused:
        call(path)
    assert "\n" not in str(refused.value)
    assert str(path) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_logits_equal_those_of_nanogpt(tmp_path, bias, prefix):
    args, state = ARGUMENTS | {"bias": bias}, tensors(bias=bias)
    mask = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    stored = {prefix + name: tensor for name, tensor in (state | mask).items()}
    model = gf.load(checkpoint(tmp_path / "ckpt.pt", stored, model_args=args))
    tokens = torch.randint(31, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens) - nanogpt(state, args, tokens)).abs().max() <= 1e-5
    assert model.config.attention.bias == bias
    assert load_config(tmp_path / "ckpt.pt") == model.config
    assert (model.config.max_len, model.config.dropout, model.training) == (16, 0.1, False)
    assert gf.load_tokenizer(tmp_path / "ckpt.pt") is None


def test_it_is_saved_in_every_format(tmp_path):
    path = checkpoint(tmp_path / "ckpt.pt")
    model = gf.load(path)
    os.truncate(path, 0)  # the model does not depend on its file
    tokens = torch.arange(12)[None]
    back = gf.load(gf.save(model, tmp_path / "glass", format="glass"))
    assert torch.equal(back(tokens), model(tokens))
    gf.save(model, tmp_path / "hf")
    assert (gf.load(tmp_path / "hf")(tokens) - model(tokens)).abs().max() <= 1e-6


def test_dtype(tmp_path):
    path = checkpoint(tmp_path / "ckpt.pt")
    assert {p.dtype for p in gf.load(path, dtype="bfloat16").parameters()} == {torch.bfloat16}


@dataclasses.dataclass
class Settings:
    out_dir: str = "out"


class Malicious:
    def __reduce__(self):
        return (os.system, ("touch hacked",))


def test_objects_are_refused_by_name_and_no_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = refusal(checkpoint(tmp_path / "ckpt.pt", config=Settings()))
    assert "test_nanogpt.Settings" in text
    assert "neither tensors nor plain values" in text
    assert "system" in refusal(checkpoint(tmp_path / "ckpt.pt", config=Malicious()))
    assert not (tmp_path / "hacked").exists()


def test_broken_and_other_files(tmp_path):
    path = checkpoint(tmp_path / "ckpt.pt")
    data = path.read_bytes()
    for kept in (0, 10, 1000, len(data) - 50):
        path.write_bytes(data[:kept])
        assert "is a pickle" in refusal(path)  # without its directory it is not a zip archive
    changed = bytearray(data)
    changed[100:140] = b"x" * 40
    path.write_bytes(changed)
    assert "truncated or corrupt" in refusal(path)
    torch.save({"state_dict": tensors()}, path)
    assert "is a pickle, and pickles are never loaded" in refusal(path)
    torch.save([1, 2], path)
    assert "is a pickle" in refusal(path)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"n_layer": None}, "n_layer=None"),
        ({"n_head": 5}, "n_heads=5"),
        ({"vocab_size": 30}, "wte.weight is [31, 24], expected [30, 24]"),
        ({"n_layer": 3}, "lack tensors that model_args requires"),
        ({"n_layer": 1}, "does not have (12: transformer.h.1"),
        ({"bias": "yes"}, "bias='yes'"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(tmp_path, args, word):
    assert word in refusal(checkpoint(tmp_path / "ckpt.pt", model_args=ARGUMENTS | args))


def test_values_that_are_not_tensors(tmp_path):
    assert "not tensors (1: x)" in refusal(checkpoint(tmp_path / "ckpt.pt", tensors() | {"x": 3}))


def test_a_head_that_is_not_tied_is_refused(tmp_path):
    state = tensors()
    assert "must be equal" in refusal(checkpoint(tmp_path / "c.pt", state | {"lm_head.weight": torch.zeros(31, 24)}))


def test_the_command(tmp_path, capsys):
    path = checkpoint(tmp_path / "ckpt.pt")
    assert main(["convert", str(path), str(tmp_path / "out"), "--to", "glass"]) == 0
    assert "same-logits" in capsys.readouterr().out
