"""One sentence and exit code 2 for each mistake in `glass size`, `sample` and `convert`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import glassformer as gf
from tests.cli.asking import run


def truncated(folder: Path) -> Path:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def pickled(folder: Path) -> Path:
    torch.save({"x": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def nanogpt(folder: Path, name: str = "ckpt.pt") -> Path:
    """A folder of a nanoGPT run."""
    (folder.parent / "out").mkdir()
    torch.save({"model": {"w": torch.zeros(3)}}, folder.parent / "out" / name)
    return folder.parent / "out"


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def hf(folder: Path, **changes) -> Path:
    """The same model as a Hugging Face folder with a spoilt config.json."""
    target = folder.parent / "spoilt"
    gf.save(gf.load(folder), target, format="hf")
    data = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**data, **changes}))
    return target


def not_a_number(folder: Path) -> Path:
    model = gf.load(folder)
    with torch.no_grad():
        model.embed.tokens.weight[3, 1] = float("nan")
    gf.save(model, folder.parent / "nan", format="glass")
    return folder.parent / "nan"


def an_encoder(folder: Path) -> Path:
    gf.save(
        gf.build(gf.presets.bert_base(n_layers=1, d_model=8, n_heads=2, vocab_size=65)),
        folder.parent / "encoder",
        format="glass",
    )
    return folder.parent / "encoder"


def bad_toml(folder: Path) -> Path:
    (folder / "bad.toml").write_text("a = = 3")
    return folder / "bad.toml"


MISTAKES = {
    "an unknown character": (lambda f: ["sample", "ROMEO: ½"], "'½' (U+00BD), which is not one of the 65 tokens"),
    "no such folder": (lambda f: ["sample", "--model", f / "nowhere", "hi"], "nowhere"),
    "missing weights": (lambda f: ["sample", "--model", without(f, "model.safetensors"), "hi"], "safetensors"),
    "truncated weights": (lambda f: ["sample", "--model", truncated(f), "hi"], "model.safetensors"),
    "a pickle": (lambda f: ["sample", "--model", pickled(f), "hi"], "pickle"),
    "a nanoGPT checkpoint": (lambda f: ["sample", "--model", nanogpt(f) / "ckpt.pt", "hi"], "weights_only=True"),
    "its folder": (lambda f: ["sample", "--model", nanogpt(f), "hi"], "give the file itself"),
    "converting it": (lambda f: ["convert", nanogpt(f) / "ckpt.pt", f.parent / "x"], "ckpt.pt is a pickle"),
    "converting its folder": (lambda f: ["convert", nanogpt(f), f.parent / "x"], "give the file itself"),
    "unknown architecture": (lambda f: ["sample", "--model", hf(f, model_type="mamba"), "hi"], "mamba"),
    "heads not dividing": (lambda f: ["sample", "--model", hf(f, num_key_value_heads=3), "hi"], "3"),
    "vocabulary mismatch": (lambda f: ["sample", "--model", hf(f, vocab_size=299), "hi"], "299"),
    "ids out of range": (lambda f: ["sample", "--model", f, "--ids", "5 300"], "token id 300"),
    "not ids": (lambda f: ["sample", "--model", f, "--ids", "five"], "token ids"),
    "empty prompt": (lambda f: ["sample", "--model", f, ""], "empty"),
    "prompt too long": (lambda f: ["sample", "--model", f, "--ids", "1 " * 64], "fills the context of 64"),
    "no room": (lambda f: ["sample", "--model", f, "--ids", "1 " * 10, "--max-new-tokens", "99"], "54 new tokens"),
    "top-p of 0": (lambda f: ["sample", "--model", f, "hi", "--top-p", "0"], "top_p=0.0 must be in (0, 1]"),
    "top-p of 1.5": (lambda f: ["sample", "--model", f, "hi", "--top-p", "1.5"], "top_p=1.5"),
    "negative temperature": (lambda f: ["sample", "--model", f, "hi", "--temperature", "-1"], "temperature=-1.0"),
    "no such draft": (lambda f: ["sample", "--model", f, "hi", "--draft", f / "nowhere"], "nowhere"),
    "another vocabulary": (lambda f: ["sample", "hi", "--draft", f], "they must share one vocabulary"),
    "more ids": (lambda f: ["sample", "--ids", "5", "--draft", f], "the draft knows 300 tokens and the model 65"),
    "a draft of another kind": (lambda f: ["sample", "hi", "--draft", an_encoder(f)], "not a decoder-only model"),
    "no tokens proposed": (lambda f: ["sample", "hi", "--draft", "lookup", "--draft-tokens", "0"], "draft_tokens=0"),
    "beams and a draft": (lambda f: ["sample", "hi", "--draft", "lookup", "--beams", "2"], "cannot use a draft"),
    "no beams": (lambda f: ["sample", "--model", f, "hi", "--beams", "0"], "--beams 0 must be at least 1"),
    "weights that are NaN": (
        lambda f: ["sample", "--model", not_a_number(f), "--ids", "5 6"],
        "numbers in embed.tokens.weight are NaN or infinite: copy the weights again",
    ),
    "converting NaN": (lambda f: ["convert", not_a_number(f), f.parent / "x"], "embed.tokens.weight are NaN"),
    "unknown preset": (lambda f: ["size", "gtp2"], "gpt2"),
    "unreadable TOML": (lambda f: ["size", bad_toml(f)], "not readable TOML"),
    "no such file": (lambda f: ["size", "nowhere/model.toml"], "does not exist"),
    "jl without points": (lambda f: ["size", "jl"], "--points"),
    "jl with eps 2": (lambda f: ["size", "jl", "--points", "10", "--eps", "2"], "eps"),
    "chinchilla without budget": (lambda f: ["size", "chinchilla"], "flops"),
    "occupied target": (lambda f: ["convert", f, Path(__file__).parent], "not a model folder"),
    "negative top-k": (lambda f: ["sample", "--model", f, "hi", "--top-k", "-1"], "or 0 to keep all tokens"),
    "no prompt": (lambda f: ["sample", "--model", f], "give either PROMPT or --prompt-file"),
    "two prompts": (lambda f: ["sample", "hi", "--prompt-file", f / "tokenizer.json"], "PROMPT or --prompt-file"),
    "no prompt file": (lambda f: ["sample", "--prompt-file", f / "nowhere"], "nowhere cannot be read (No such file"),
    "a folder as prompt": (lambda f: ["sample", "--prompt-file", f], "cannot be read (Is a directory)"),
    "a prompt that is no text": (lambda f: ["sample", "--prompt-file", f / "model.safetensors"], "is not UTF-8 text"),
    "no samples": (lambda f: ["sample", "hi", "--num-samples", "0"], "--num-samples 0 must be"),
    "equal samples": (lambda f: ["sample", "hi", "--num-samples", "2", "--temperature", "0"], "the same text 2 times"),
    "equal searches": (lambda f: ["sample", "hi", "--num-samples", "3", "--beams", "2"], "the same text 3 times"),
    "the last seed": (lambda f: ["sample", "hi", "--num-samples", "2", "--seed", 2**63 - 1], "must be between 0 and"),
    "no threads": (lambda f: ["sample", "hi", "--threads", "0"], "--threads 0 must be"),
    "no GPU": (lambda f: ["sample", "hi", "--device", "cuda"], "no CUDA device is here"),
    "torch in int8": (lambda f: ["sample", "hi", "--engine", "torch", "--precision", "int8"], "needs the compiled"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_gets_one_sentence_and_exit_2(capsys, folder, tmp_path, mistake):
    own = shutil.copytree(folder, tmp_path / "tiny")
    arguments, words = MISTAKES[mistake]
    code, out, err = run(capsys, *arguments(own))
    assert code == 2
    assert out == ""
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1, err
