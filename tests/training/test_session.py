"""From a run to one that can start: vocabulary fitted, data found, resumes checked."""

import pytest

from glassformer.training import checkpoint, open_session, read_run, resume_session, train
from glassformer.training.data.corpus import DataError
from tests.training import tiny


@pytest.mark.parametrize(("preset", "extra"), [("nano", 0), ("bert_base", 1), ("transformer_base", 1)])
def test_the_vocabulary_is_the_tokenizers(tmp_path, preset, extra):
    more = ("model.n_encoder_layers=1",) if preset == "transformer_base" else ()
    session = tiny.session(tmp_path, f"model.preset={preset}", *more)
    assert session.run.model.vocab_size == session.data.tokenizer.vocab_size + extra
    if preset == "transformer_base":
        assert session.run.model.special.start == session.data.tokenizer.vocab_size


def test_data_errors_come_through(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError):
        open_session(read_run("", (f'data.corpus="{empty}"', f'data.cache="{tmp_path / "t"}"')))
    short = tmp_path / "short.txt"
    short.write_text("abcdefgh" * 20)
    with pytest.raises(DataError, match="validation"):
        open_session(read_run("", (f'data.corpus="{short}"', f'data.cache="{tmp_path / "t"}"')))
    binary = tmp_path / "binary.txt"
    binary.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(DataError):
        open_session(read_run("", (f'data.corpus="{binary}"', f'data.cache="{tmp_path / "t"}"')))


def test_a_finished_run_can_be_extended_but_not_refitted(tmp_path):
    session = tiny.session(tmp_path)
    train(session.run, session.data)
    with pytest.raises(checkpoint.CheckpointError, match="20 of 20 steps"):
        resume_session(session.run.out)
    with pytest.raises(checkpoint.CheckpointError, match="keeps its model and data"):
        resume_session(session.run.out, ("loop.steps=25", "model.dropout=0.5"))
    longer = resume_session(session.run.out, ("loop.steps=25",))
    state = train(longer.run, longer.data, resume=longer.resume)
    assert state.step == 25


def test_a_resumed_run_has_the_tokens_that_it_began_with(tmp_path):
    session = tiny.session(tmp_path, "loop.steps=6")
    train(session.run, session.data)
    (tmp_path / "corpus.txt").write_text("quite another text, with x, y and z! " * 400)
    longer = resume_session(session.run.out, ("loop.steps=9",))
    assert longer.data.digest == session.data.digest == longer.run.data.sha256
    with pytest.raises(checkpoint.CheckpointError, match="changed since"):  # asked for: the text of now
        resume_session(session.run.out, ("loop.steps=9", "data.sha256=''"))
    (tmp_path / "tokens" / "manifest.json").unlink()
    with pytest.raises(DataError, match="no longer begins with the tokens that the run has recorded"):
        resume_session(session.run.out, ("loop.steps=9",))


def test_an_epoch_of_an_older_version_is_not_continued(tmp_path, monkeypatch):
    """Its windows had another order. A checkpoint of that version has no hash of its tokens."""
    monkeypatch.setattr("glassformer.training.session._recorded", lambda run, data: run)
    session = tiny.session(tmp_path, "loop.steps=6", "data.order=epoch")
    train(session.run, session.data)
    with pytest.raises(checkpoint.CheckpointError, match="epochs had another order"):
        resume_session(session.run.out, ("loop.steps=9",))
    random = tiny.session(tmp_path, "loop.steps=6", name="random")
    train(random.run, random.data)
    assert resume_session(random.run.out, ("loop.steps=9",)).data.digest == random.data.digest


def test_a_run_that_was_moved_continues_where_it_is_now(tmp_path):
    session = tiny.session(tmp_path, "loop.steps=6")
    train(session.run, session.data)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "latest").symlink_to("moved")
    longer = resume_session(str(tmp_path / "latest"), ("loop.steps=7",))
    assert longer.run.out == str(tmp_path / "moved")
    train(longer.run, longer.data, resume=longer.resume)
    assert not (tmp_path / "run").exists()
    assert checkpoint.read(tmp_path / "moved")[1]["step"] == 7


def test_a_resumed_run_does_not_continue_inside_another_run(tmp_path):
    for name in ("run", "other"):
        session = tiny.session(tmp_path, "loop.steps=6", name=name)
        train(session.run, session.data)
    with pytest.raises(checkpoint.CheckpointError, match="already holds another run"):
        resume_session(str(tmp_path / "run"), ("loop.steps=7", f'out="{tmp_path / "other"}"'))
