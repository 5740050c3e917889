"""A corpus made on the spot and runs over it that take seconds."""

import random
from pathlib import Path

from glassformer.training import Session, open_session, read_run

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog", "ate", "hat", "of", "man", "red", "van"]
SMALL = (
    "model.n_layers=2",
    "model.d_model=24",
    "model.n_heads=3",
    "model.d_ff=48",
    "model.max_len=16",
    "loop.steps=20",
    "loop.batch=6",
    "loop.eval_every=5",
    "loop.eval_batches=2",
    "loop.checkpoint_every=5",
    "loop.sample_every=0",
    "schedule.warmup=3",
    "machine.device=cpu",
    "machine.precision=float32",
)


def corpus(folder: Path, words: int = 3000) -> Path:
    """Random sentences: about 12,000 characters, 17 different ones."""
    draw = random.Random(0)
    text = " ".join(draw.choice(WORDS) for _ in range(words))
    path = folder / "corpus.txt"
    path.write_text(text.replace(" the", ".\nthe"), encoding="utf-8")
    return path


def session(folder: Path, *changes: str, name: str = "run") -> Session:
    where = (f'data.corpus="{corpus(folder)}"', f'data.cache="{folder / "tokens"}"', f'out="{folder / name}"')
    return open_session(read_run("", (*SMALL, *where, *changes)))
