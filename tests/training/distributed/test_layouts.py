"""Every layout of ranks computes what one process does: losses of 20 steps, and the gradients of the first.

PYTHONPATH=src:. python -m tests.training.distributed.test_layouts 4    # prints the table of docs/ranks.md
"""

import sys
import tempfile
from pathlib import Path

import pytest

from glassformer.training import resume_session, train
from tests.training.distributed.ranks import alone, curve, gradient_error, job, together
from tests.training.tiny import corpus

LOSSES, GRADIENTS = 1e-5, 1e-6
"""Largest differences to one process, in float32."""
WIDE = ("model.n_layers=2", "model.d_model=32", "model.n_heads=8", "model.n_kv_heads=4", "model.max_len=16")
MODELS = {
    # learned positions, biases, a dense feed-forward, a tied head
    "gpt2": ("model.n_heads=4", "model.d_model=32", "optim.ema=0.9", "optim.clip=0.1", "loop.accumulate=3"),
    # grouped heads, rotary positions, a norm per head, a gated feed-forward, an untied head
    "llama": (
        *("model.preset=llama_tiny", *WIDE, "model.d_ff=48", "model.attention.qk_norm={kind='rms_norm'}"),
        *("model.head.tied=false", "loss.label_smoothing=0.1", "loss.z_loss=1e-3"),
    ),
    "experts": ("model.preset=moe_tiny", *WIDE, "loss.balance=0.0"),
    # a window in one layer, attention sinks, capped scores and logits, norms on both sides of each sublayer
    "windows": (
        *("model.preset=llama_tiny", *WIDE, "model.d_ff=48", "model.attention.window=5"),
        *("model.attention.window_layers=[1]", "model.attention.sinks=true", "model.attention.softcap=20.0"),
        *("model.head.softcap=15.0", "model.placement=sandwich"),
    ),
    # no causal mask, norms after each sum, a transform and a bias in the head
    "encoder": ("model.preset=bert_base", "model.vocab_size=50", "model.dropout=0.0", *WIDE[:3]),
    # one norm for both sublayers, windows in all layers
    "parallel": ("model.preset=llama_tiny", *WIDE, "model.d_ff=48", "model.placement=parallel",
                 "model.attention.window=6"),
}  # fmt: skip
LAYOUTS = {
    2: {
        "tensor 2": ("machine.tensor=2",),
        "context 2": ("machine.context=2",),
    },
    4: {
        "ddp 4": ("machine.parallel=ddp",),
        "fsdp 4": (),
        "replicate 2 x shard 2": ("machine.replicate=2",),
        "tensor 4": ("machine.tensor=4",),
        "shard 2 x tensor 2": ("machine.tensor=2",),
        "replicate 2 x tensor 2": ("machine.tensor=2", "machine.replicate=2"),
        "context 4": ("machine.context=4", "loop.context=16"),
        "shard 2 x context 2": ("machine.context=2",),
        "context 2 x tensor 2": ("machine.context=2", "machine.tensor=2"),
        "the same, recomputed": ("machine.context=2", "machine.tensor=2", "machine.recompute=full"),
    },
    8: {
        "shard 2 x context 2 x tensor 2": ("machine.context=2", "machine.tensor=2"),
        "replicate 2 x context 2 x tensor 2": ("machine.context=2", "machine.tensor=2", "machine.replicate=2"),
        "tensor 4 x context 2": ("machine.context=2", "machine.tensor=4"),
    },
}
AT_ONCE = 12
"""Runs in one launch."""
SHORT = {"tensor 2": ("gpt2", "llama"), "context 2": ("llama", "windows")}
"""A short version. The default suite has two of its runs in test_sharding.py."""


def batched(jobs: list[dict], size: int) -> list[list[dict]]:
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]


def compare(folder: Path, ranks: int, models: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the largest differences of losses and of first gradients to one process, by layout and model."""
    corpus(folder)
    common = ("loop.batch=24" if ranks == 8 else "loop.batch=12", "loop.keep=9")
    names = [(layout, model) for layout, chosen in models.items() for model in chosen]
    jobs = {
        name: job(folder, f"{name[1]}-{number}", *MODELS[name[1]], *common, "machine.parallel=fsdp", *changes)
        for number, name in enumerate(names)
        for changes in [LAYOUTS[ranks][name[0]]]
    }
    for some in batched(list(jobs.values()), AT_ONCE):
        assert together(folder, ranks, some, seconds=1200) == [""] * len(some)
    expected = {model: alone(folder, model, *MODELS[model], *common) for model in {model for _, model in names}}
    out = {}
    for number, (layout, model) in enumerate(names):
        found = curve(folder / f"{model}-{number}")
        assert found.keys() == expected[model].keys()
        losses = max(abs(found[step] - expected[model][step]) for step in found)
        out[layout, model] = (losses, gradient_error(folder / f"{model}-{number}", folder / model))
    return out


@pytest.mark.slow
def test_two_ranks_that_divide_blocks_or_sequences_compute_what_one_process_does(tmp_path):
    for name, (losses, gradients) in compare(tmp_path, 2, SHORT).items():
        assert losses <= LOSSES, name
        assert gradients <= GRADIENTS, name
    for number, model in enumerate(model for chosen in SHORT.values() for model in chosen):
        drawn = [tmp_path / run / "checkpoints" / "step-00000000" for run in (f"{model}-{number}", model)]
        first, second = ((folder / "model.safetensors").read_bytes() for folder in drawn)
        assert first == second, model
    session = resume_session(str(tmp_path / "gpt2-0" / "checkpoints" / "step-00000010"), (f'out="{tmp_path / "on"}"',))
    train(session.run, session.data, resume=session.resume)
    found, expected = curve(tmp_path / "on"), curve(tmp_path / "gpt2")
    assert max(abs(found[step] - expected[step]) for step in range(11, 21)) <= LOSSES


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_layout_computes_what_one_process_does(tmp_path, ranks):
    models = tuple(MODELS) if ranks < 8 else ("llama", "experts")
    for name, (losses, gradients) in compare(tmp_path, ranks, dict.fromkeys(LAYOUTS[ranks], models)).items():
        assert losses <= LOSSES, name
        assert gradients <= GRADIENTS, name


def main() -> None:
    models = tuple(MODELS) if len(sys.argv) < 3 else tuple(sys.argv[2].split(","))
    print("| ranks | " + " | ".join(models) + " |\n|---|" + "---|" * len(models))
    for ranks in map(int, sys.argv[1].split(",")):
        with tempfile.TemporaryDirectory() as name:
            found = compare(Path(name), ranks, dict.fromkeys(LAYOUTS[ranks], models))
        for layout in LAYOUTS[ranks]:
            cells = [f"{found[layout, model][0]:.0e}, {found[layout, model][1]:.0e}" for model in models]
            print(f"| {layout} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
