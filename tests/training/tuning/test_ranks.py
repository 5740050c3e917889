"""Fine-tuning on several ranks gives what one process gives."""

import json
from pathlib import Path

import pytest
import torch

import glassformer as gf
from glassformer.training import open_session, read_run, train
from tests.training.distributed.ranks import BOUND, curve, together
from tests.training.tiny import WORDS, corpus
from tests.training.tuning.models import character_model


def tuning_cases(folder: Path) -> dict[str, tuple[str, ...]]:
    """Fine-tuning by text, by conversations and by preferences, each with the changes to a run of 4 steps."""
    text = f'data.corpus="{corpus(folder)}"'
    words = " ".join(WORDS)
    asked = [{"prompt": words[i : i + 4 + i % 5], "completion": words[2 * i : 2 * i + 9]} for i in range(23)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "the red van"} for row in asked[:11]]
    for name, rows in (("asked", asked), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "turns.jinja").write_text("{% for m in messages %}{{ m.content }}. {% endfor %}")
    chat = (f'data.corpus="{folder / "asked.jsonl"}"', f'chat.template="{folder / "turns.jinja"}"')
    dpo = (f'data.corpus="{folder / "pairs.jsonl"}"', chat[1], "chat.loss=dpo", "optim.lr=1e-2")
    return {
        "lora-ddp": (text, "lora.rank=2", "optim.lr=1e-2"),
        "lora-fsdp": (text, "lora.rank=3", "optim.lr=1e-2", "loop.sample_every=2"),
        "dora-fsdp": (text, "lora.rank=2", "lora.dora=true", "lora.dropout=0.0", "loop.accumulate=2", "optim.lr=1e-2"),
        "both-fsdp": (*dpo, "lora.rank=2"),
        "dora-ddp": (text, "lora.rank=2", "lora.dora=true", "lora.quantize=nf4", "loop.accumulate=2"),
        "freeze-ddp": (text, 'optim.freeze=["embed", "norms"]', "optim.lr=1e-2"),
        "padding-ddp": (text, "optim.lr=1e-2", "optim.weight_decay=0.5"),
        "chat-ddp": (*chat, "optim.lr=1e-2"),
        "chat-fsdp": (*chat, "optim.lr=1e-2"),
        "dpo-ddp": dpo,
        "dpo-fsdp": dpo,
        "both-ddp": (*dpo, "lora.rank=2"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("lora-ddp", "lora-fsdp", "chat-fsdp", "dpo-ddp"),
        ("dora-ddp", "dora-fsdp", "freeze-ddp", "padding-ddp", "chat-ddp", "dpo-fsdp", "both-ddp", "both-fsdp"),
    ],
    ids=["some", "others"],
)
def test_fine_tuning_by_two_ranks_gives_the_curve_of_one_process(tmp_path, names):
    base = character_model(tmp_path / "base", max_len=32)
    small = ("loop.steps=4", "loop.batch=4", "loop.eval_every=2", "loop.eval_batches=9", "loop.log_every=1")
    small += ("machine.device=cpu", "machine.precision=float32", "machine.compile=no", "schedule.warmup=1")
    small += (
        "loop.sample_every=0",
        "model.dropout=0.0",
        f'start.model="{base}"',
        f'data.cache="{tmp_path / "tokens"}"',
    )
    cases = {name: changes for name, changes in tuning_cases(tmp_path).items() if name in names}
    assert len(cases) == len(names)
    jobs = []
    for name, changes in cases.items():
        out = (f'out="{tmp_path / name}"', f"machine.parallel={name.partition('-')[2]}")
        jobs.append({"resume": None, "changes": (*small, *changes, *out)})
    together(tmp_path, 2, jobs)
    for name, changes in cases.items():
        session = open_session(read_run("", (*small, *changes, f'out="{tmp_path / "one" / name}"')))
        train(session.run, session.data)
        found, expected = curve(tmp_path / name), curve(tmp_path / "one" / name)
        assert found.keys() == expected.keys() >= {1, 2, 3, 4, -2, -4}
        assert max(abs(found[i] - expected[i]) for i in found) <= BOUND, name
        assert expected[4] != expected[1]
        held = (gf.load(tmp_path / place / "last").state_dict() for place in (name, f"one/{name}"))
        for ours, theirs in zip(*(state.values() for state in held), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
