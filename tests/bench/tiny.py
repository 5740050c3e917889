"""A tiny GPT-2 and the order of a contender that runs it."""

from pathlib import Path

import torch

import glassformer as gf
from glassformer import config as c
from glassformer.bench import subject
from glassformer.bench.peers.base import SAMPLING, Order
from glassformer.generation import distribution

VOCAB, CONTEXT = 61, 48


def config(**changes):
    made = gf.presets.gpt2(
        vocab_size=VOCAB, d_model=64, n_layers=2, attention=c.Attention(4), feedforward=c.Dense(256, "gelu_tanh"),
        max_len=CONTEXT, dropout=0.0, init_std=0.08,
    )  # fmt: skip
    return c.replace(made, **changes)


def write(folder: Path, **changes) -> subject.Subject:
    return subject.write(folder, config(**changes), "tiny", seed=0)


def write_encoder(folder: Path) -> subject.Subject:
    made = gf.presets.minilm_l6(vocab_size=VOCAB, d_model=64, n_heads=4, d_ff=128, n_layers=2, max_len=CONTEXT)
    return subject.write(folder, c.replace(made, dropout=0.0), "tiny-encoder", seed=0)


def write_seq2seq(folder: Path) -> subject.Subject:
    made = gf.presets.t5_small(vocab_size=VOCAB, d_model=64, n_heads=4, d_ff=128, n_layers=2, n_encoder_layers=2)
    return subject.write(folder, c.replace(made, dropout=0.0, init_std=0.2), "tiny-seq2seq", seed=0)


def write_bart(folder: Path) -> subject.Subject:
    made = gf.presets.bart_base(vocab_size=VOCAB, d_model=64, n_heads=4, d_ff=128, n_layers=2, n_encoder_layers=2)
    return subject.write(folder, c.replace(made, dropout=0.0, init_std=0.3), "tiny-bart", seed=0)


def order(made: subject.Subject, name: str, module: str, precision: str = "float32", task: str = "decode", **more):
    prompts = made.prompts(more.pop("rows", 2), more.pop("length", 6), seed=0)
    return Order(name, module, task, precision, str(made.root), 1, prompts, more.pop("new", 8), **more)


def engine_ids(made: subject.Subject, given: Order) -> list[list[int]]:
    """What the plain engine says."""
    return gf.generate(gf.load(made.root / "hf"), given.prompts, given.new, stop=[], engine="torch").new


def check_draws(made: subject.Subject, given: Order, found: list[list[int]]) -> None:
    """Check that the tokens of a peer are draws from the nucleus of the same model, and not the most likely ones."""
    model, drawn, unlikely = gf.load(made.root / "hf"), 0, 0
    for prompt, new in zip(given.prompts, found, strict=True):
        assert len(new) == given.new
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *new]]))[0, len(prompt) - 1 : -1]
        p = distribution(logits, gf.Sampling(**SAMPLING))
        probabilities = p[torch.arange(len(new)), torch.tensor(new)]
        assert (probabilities > 0).all()
        drawn += len(new)
        unlikely += int((probabilities < p.amax(-1)).sum())
    assert unlikely > drawn / 4


def nothing():
    """A mark that no test reads."""
