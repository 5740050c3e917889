"""Ranks that do not have the same run, data, checkpoint or code stop before anything is built."""

import dataclasses

import pytest

from glassformer.training.distributed.start import difference, identity
from tests.training import tiny
from tests.training.distributed.ranks import job, together
from tests.training.tiny import corpus


@pytest.mark.slow
def test_ranks_that_differ_are_refused_in_one_sentence(tmp_path):
    corpus(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "corpus.txt").write_text((tmp_path / "corpus.txt").read_text().replace("cat", "act"))
    short = ("loop.steps=2", "schedule.warmup=0", "loop.checkpoint_every=1", "loop.keep=9")
    elsewhere = (f'data.corpus="{other / "corpus.txt"}"', f'data.cache="{other / "tokens"}"')
    differ = {
        "data.corpus is": {"second": elsewhere},
        "optim.lr is 0.001 on rank 0 and 0.002 on rank 1": {"second": ["optim.lr=2e-3"]},
        "model.d_model is 24 on rank 0 and 48 on rank 1": {"second": ["model.d_model=48"]},
        "data.tokenizer is 'char' on rank 0 and 'byte'": {
            "second": ["data.tokenizer=byte", f'data.cache="{other / "bytes"}"']
        },
        "the version of glassformer is": {"version": "0.0.1"},
    }
    jobs = [job(tmp_path, "first", *short)]
    jobs += [job(tmp_path, f"run{number}", *short) | extra for number, extra in enumerate(differ.values())]
    held = [str(tmp_path / "first" / "checkpoints" / f"step-0000000{step}") for step in (0, 1)]
    jobs.append({"resume": held, "changes": ["loop.steps=3", f'out="{tmp_path / "resumed"}"']})
    jobs.append(job(tmp_path, "last", *short, *elsewhere[1:]))
    first, *said, checkpoint, last = together(tmp_path, 2, jobs)
    assert (first, last) == ("", "")
    for words, sentence in zip(differ, said, strict=True):
        assert words in sentence
        assert sentence.startswith("ranks must train the same run, but ")
        assert sentence.endswith("give all of them the same run file, data and version.")
    assert "the checkpoint is 'step 0," in checkpoint
    assert "'step 1," in checkpoint
    assert not (tmp_path / "run0").exists()


def test_every_part_of_a_run_is_compared(tmp_path):
    session = tiny.session(tmp_path)
    mine = identity(session.run, session.data, None)
    assert difference([mine, dict(mine)]) is None
    for name in ("the token files", "the source code of glassformer", "tokenizer.json", "seed", "optim.lr", "out"):
        sentence = difference([mine, dict(mine), mine | {name: "another", "host": "far"}])
        assert sentence is not None
        assert f"{name} is {mine[name]!r} on rank 0 and 'another' on rank 2 (far)" in sentence
    other = dataclasses.replace(session.run, data=dataclasses.replace(session.run.data, cache="elsewhere"))
    assert difference([mine, identity(other, session.data, None)]) is None
    shards = tuple(shard | {"sha256": "another"} for shard in session.data.manifest.shards)
    manifest = dataclasses.replace(session.data.manifest, shards=shards)
    changed = identity(session.run, dataclasses.replace(session.data, manifest=manifest), None)
    assert "the token files" in (difference([mine, changed]) or "")
    many = difference([mine, dict.fromkeys(mine, "x")])
    assert f"and {len(mine) - 4} more differences" in (many or "")
