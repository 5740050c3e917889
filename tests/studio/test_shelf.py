import threading

import pytest
import torch

import glassformer as gf
from glassformer import sizing
from glassformer.studio import shelf as module
from glassformer.studio.errors import StudioError, UnknownError
from glassformer.studio.shelf import Shelf


def test_bundled_models_come_first_and_folders_by_their_names(model_folders):
    shelf = Shelf(model_folders)
    assert list(shelf.entries()) == ["bard", "induction", "tiny", "both", "pair", "table"]


def test_folders_of_one_name_are_told_apart_and_strange_names_made_plain(tmp_path):
    for name in ("a/best", "b/best", "c/<script>"):
        (tmp_path / name).mkdir(parents=True)
    shelf = Shelf([tmp_path / "a/best", tmp_path / "b/best", tmp_path / "c/<script>"])
    assert list(shelf.entries())[2:] == ["best", "best-2", "script"]


@pytest.mark.parametrize("name", ["../bard", "/etc/passwd", "bard/../bard", "BARD", "", "\0", "x" * 500, "gpt2"])
def test_only_names_on_the_shelf_are_known(shelf, name):
    """Not even a hub name: nothing is downloaded because a request says so."""
    with pytest.raises(UnknownError, match="there is no model"):
        shelf.get(name)


def test_a_name_like_no_other_lists_the_models(shelf):
    with pytest.raises(UnknownError, match=r"there is no model 'zzzz' here\. Models: bard, "):
        shelf.get("zzzz")


def test_a_model_is_the_one_that_load_gives(shelf, model_folders):
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(shelf.get("tiny").model(tokens), gf.load(model_folders[0])(tokens))
        assert torch.equal(shelf.get("bard").model(tokens), gf.load("bard").float()(tokens))


def test_a_model_is_loaded_once_however_many_ask(model_folders, monkeypatch):
    loads, gate = [], threading.Barrier(8)
    load = module._load
    monkeypatch.setattr(module, "_load", lambda *given: (loads.append(given), load(*given))[1])
    shelf = Shelf(model_folders)

    def get():
        gate.wait()
        shelf.get("tiny")

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_the_one_used_longest_ago_goes_first(model_folders):
    shelf = Shelf(model_folders, keep=2)
    first = shelf.get("tiny")
    shelf.get("both")
    assert shelf.get("tiny") is first
    shelf.get("pair")
    assert shelf.get("tiny") is first
    assert len(shelf._loaded) == 2


def test_what_is_trained_here_joins_the_shelf_and_is_read_anew_when_it_moves(model_folders, tmp_path):
    link = tmp_path / "best"
    link.symlink_to(model_folders[0])
    shelf = Shelf(more=lambda: {"run-1": link})
    first = shelf.get("run-1")
    assert shelf.get("run-1") is first
    link.unlink()
    link.symlink_to(model_folders[1])
    assert shelf.get("run-1").config.kind == "encoder"


def test_a_fresh_copy_shares_nothing(shelf):
    one, other = shelf.get("tiny"), shelf.fresh("tiny")
    assert one.model is not other.model
    assert one.model.embed.tokens.weight.data_ptr() != other.model.embed.tokens.weight.data_ptr()


def test_facts_are_those_of_the_config(shelf):
    facts = {row["name"]: row for row in shelf.describe(True)}["pair"]
    config = shelf.get("pair").config
    assert facts["parameters"] == sizing.count(config)
    assert (facts["kind"], facts["layers"], facts["encoder_layers"]) == ("seq2seq", 2, 2)
    assert (facts["heads"], facts["kv_heads"], facts["tokenizer"], facts["bundled"]) == (4, 2, False, False)


def test_a_hugging_face_folder_is_described_once_torch_is_there(tmp_path):
    from tests import folders

    folders.write(tmp_path / "hf", "hf")
    shelf = Shelf([tmp_path / "hf"])
    assert shelf.describe(False)[-1]["layers"] is None
    assert shelf.describe(True)[-1]["layers"] == 2


def test_a_broken_folder_says_so_and_hides_no_other(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.toml").write_text("nonsense = [")
    rows = Shelf([tmp_path / "bad"]).describe(True)
    assert "cannot be read" in rows[-1]["error"]
    assert rows[0]["layers"] == 6


def test_ids_are_checked_against_vocabulary_and_context(shelf):
    table = shelf.get("table")
    assert table.checked([0, 36]) == [0, 36]
    with pytest.raises(StudioError, match="outside the vocabulary of 37"):
        table.checked([37])
    with pytest.raises(StudioError, match="more than the context of 48"):
        table.checked([0] * 49)
    with pytest.raises(StudioError, match="no tokenizer"):
        table.encode("a")


def test_words_keep_their_blanks_and_unknown_ones_are_their_ids(shelf):
    bard, tiny = shelf.get("bard"), shelf.get("tiny")
    assert [bard.say(i) for i in bard.encode("a b\n")] == ["a", " ", "b", "\n"]
    assert shelf.get("table").say(3) == "#3"
    assert any(tiny.say(i) == f"#{i}" for i in range(256))  # half a character
    assert len(tiny.pieces()) == 300


def test_results_are_remembered_within_bounds(shelf):
    loaded, made = shelf.fresh("table"), []
    for n in (1, 1, 2, 3, 1):
        loaded.remember(n, lambda n=n: made.append(n) or n, most=2)
    assert made == [1, 2, 3, 1]
