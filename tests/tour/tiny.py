"""A tour that takes seconds: a small model and a short text."""

import functools

from glassformer.tour import tuning
from glassformer.tour.training import Plan

SMALL = ("model.n_layers=2", "model.d_model=32", "model.attention.n_heads=2", "model.max_len=32", "loop.batch=4")
SMALL = (*SMALL, "model.feedforward.d_ff=64", "loop.eval_batches=2")
POEM = "".join(f"{n} green bottles, hanging on the wall, and if one falls: {n - 1}.\n" for n in range(300, 0, -1))


def one_question(patch):
    """Let the bundled adapter answer one question instead of several: its answers take the time."""
    patch.setattr(tuning, "ask", functools.partial(tuning.ask, count=1))


def tiny_plan(folder, **changes):
    text = folder / "bottles.txt"
    text.write_text(POEM)
    run = (*SMALL, f"data.corpus={text}", f"data.cache={folder / 'tokens'}")
    return Plan(
        **{"minutes": 0.01, "out": folder / "tour", "changes": run, "cache_lengths": (4,), "tuning_steps": 3, **changes}
    )
