import json
import shutil
import threading

import pytest
import torch

import glassformer as gf
from glassformer import sizing
from glassformer.studio import models as module
from glassformer.studio import openai
from glassformer.studio.api import snippets
from glassformer.studio.errors import NotFoundError, StudioError
from glassformer.studio.models import ModelStore
from tests import folders


def test_bundled_models_come_first_and_folders_by_their_names(model_folders):
    models = ModelStore(model_folders)
    assert list(models.entries()) == ["bard", "induction", "bard-chat", "tiny", "both", "pair", "table", "chatty"]


def test_folders_of_one_name_get_different_names_and_special_characters_are_replaced(tmp_path):
    for name in ("a/best", "b/best", "c/<script>"):
        (tmp_path / name).mkdir(parents=True)
    models = ModelStore([tmp_path / "a/best", tmp_path / "b/best", tmp_path / "c/<script>"])
    assert list(models.entries())[3:] == ["best", "best-2", "script"]


def write_run(folder, model, *steps):
    """A run of one checkpoint per step; best is the first of them, last the last."""
    for step in steps:
        shutil.copytree(model, folder / "checkpoints" / f"step-{step:08d}")
        (folder / "checkpoints" / f"step-{step:08d}" / "meta.json").write_text(json.dumps({"step": step}))
    for name, step in (("best", steps[0]), ("last", steps[-1])):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(f"checkpoints/step-{step:08d}")


def test_a_checkpoint_is_named_after_its_run_and_shows_its_step(model_folders, tmp_path):
    write_run(tmp_path / "runs" / "code", model_folders[0], 200, 1500)
    (tmp_path / "runs" / "latest").symlink_to("code")
    models = ModelStore(
        [tmp_path / "runs" / name for name in ("code/best", "code/checkpoints/step-00001500", "latest/last")]
    )
    rows = {row["name"]: row for row in models.describe(False) if not row["bundled"]}
    assert list(rows) == ["code/best", "code/step-00001500", "code/last"]
    assert [row["title"] for row in rows.values()] == ["step 200", "step 1,500", "step 1,500"]
    assert [row["step"] for row in rows.values()] == [200, 1500, 1500]
    assert models.get("code/best").name == "code/best"
    assert {model["id"] for model in openai.list_models(models)["data"]} >= set(rows)


def test_the_best_model_of_a_run_that_goes_on_is_read_anew_and_another_run_is_not_taken_for_it(model_folders, tmp_path):
    write_run(tmp_path / "code", model_folders[0], 200)
    write_run(tmp_path / "other", model_folders[1], 100)
    (tmp_path / "latest").symlink_to("code")
    models = ModelStore([tmp_path / "latest" / "best"])
    first = models.get("code/best")
    write_run(tmp_path / "code", model_folders[0], 300)
    assert models.get("code/best") is not first
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("other")
    assert models.get("code/best").config.kind == "decoder"
    assert models.describe(False)[-1]["step"] == 300


@pytest.mark.parametrize("name", ["../bard", "/etc/passwd", "bard/../bard", "BARD", "", "\0", "x" * 500, "gpt2"])
def test_only_names_on_the_shelf_are_known(models, name):
    """Not even a hub name: nothing is downloaded because a request says so."""
    with pytest.raises(NotFoundError, match="there is no model"):
        models.get(name)


def test_a_name_like_no_other_lists_the_models(models):
    with pytest.raises(NotFoundError, match=r"there is no model 'zzzz' here\. Models: bard, "):
        models.get("zzzz")


def test_a_model_is_the_one_that_load_gives(models, model_folders):
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(models.get("tiny").model(tokens), gf.load(model_folders[0])(tokens))
        assert torch.equal(models.get("bard").model(tokens), gf.load("bard").float()(tokens))


def test_a_model_is_loaded_once_however_many_ask(model_folders, monkeypatch):
    loads, gate = [], threading.Barrier(8)
    load = module._load
    monkeypatch.setattr(module, "_load", lambda *given: (loads.append(given), load(*given))[1])
    models = ModelStore(model_folders)

    def get():
        gate.wait()
        models.get("tiny")

    threads = [threading.Thread(target=get) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_the_one_used_longest_ago_goes_first(model_folders):
    models = ModelStore(model_folders, capacity=2)
    first = models.get("tiny")
    models.get("both")
    assert models.get("tiny") is first
    models.get("pair")
    assert models.get("tiny") is first
    assert len(models._loaded) == 2


def test_what_is_trained_here_joins_the_shelf_and_is_read_anew_when_it_moves(model_folders, tmp_path):
    link = tmp_path / "best"
    link.symlink_to(model_folders[0])
    models = ModelStore(trained=lambda: {"run-1": link})
    first = models.get("run-1")
    assert models.get("run-1") is first
    link.unlink()
    link.symlink_to(model_folders[1])
    assert models.get("run-1").config.kind == "encoder"


def test_a_fresh_copy_shares_nothing(models):
    one, other = models.get("tiny"), models.load_copy("tiny")
    assert one.model is not other.model
    assert one.model.embed.tokens.weight.data_ptr() != other.model.embed.tokens.weight.data_ptr()


def test_facts_are_those_of_the_config(models):
    facts = {row["name"]: row for row in models.describe(True)}["pair"]
    config = models.get("pair").config
    assert facts["parameters"] == sizing.count(config)
    assert (facts["kind"], facts["layers"], facts["encoder_layers"]) == ("seq2seq", 2, 2)
    assert (facts["heads"], facts["kv_heads"], facts["tokenizer"], facts["bundled"]) == (4, 2, False, False)


def test_a_hugging_face_folder_is_described_once_torch_is_there(tmp_path):
    from tests import folders

    folders.write(tmp_path / "hf", "hf")
    models = ModelStore([tmp_path / "hf"])
    assert models.describe(False)[-1]["layers"] is None
    assert models.describe(True)[-1]["layers"] == 2


def test_a_broken_folder_has_an_error_and_hides_no_other(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.toml").write_text("nonsense = [")
    rows = ModelStore([tmp_path / "bad"]).describe(True)
    assert "cannot be read" in rows[-1]["error"]
    assert rows[0]["layers"] == 6


def test_ids_are_checked_against_vocabulary_and_context(models):
    table = models.get("table")
    assert table.check_ids([0, 36]) == [0, 36]
    with pytest.raises(StudioError, match="outside the vocabulary of 37"):
        table.check_ids([37])
    with pytest.raises(StudioError, match="more than the context of 48"):
        table.check_ids([0] * 49)
    with pytest.raises(StudioError, match="no tokenizer"):
        table.encode("a")


def test_words_keep_their_blanks_and_unknown_ones_are_their_ids(models):
    bard, tiny = models.get("bard"), models.get("tiny")
    assert [bard.token_text(i) for i in bard.encode("a b\n")] == ["a", " ", "b", "\n"]
    assert models.get("table").token_text(3) == "#3"
    assert any(tiny.token_text(i) == f"#{i}" for i in range(256))  # half a character
    assert len(tiny.vocabulary()) == 300


def test_results_are_remembered_within_bounds(models):
    loaded, made = models.load_copy("table"), []
    for n in (1, 1, 2, 3, 1):
        loaded.cached(n, lambda n=n: made.append(n) or n, capacity=2)
    assert made == [1, 2, 3, 1]


@torch.no_grad()
def test_an_adapter_is_served_as_one_more_model(model_folders, tmp_path):
    base = model_folders[-1]
    adapter = folders.write_adapter(base, tmp_path / "adapter")
    models = ModelStore([base], adapters=[(adapter, base)])
    assert list(models.entries())[3:] == ["chatty", "adapter"]
    row = models.describe(True)[-1]
    assert (row["title"], row["tokenizer"], row["chat"]) == ("adapter on chatty", True, True)
    assert row["layers"] == models.describe(True)[-2]["layers"]
    tokens = torch.tensor([[1, 2, 3]])
    found = models.get("adapter")
    assert torch.equal(found.model(tokens), gf.load(base, adapter=adapter)(tokens))
    assert not torch.allclose(found.model(tokens), models.get("chatty").model(tokens), atol=1e-2)
    assert found.path == base  # where tokenizer and template are
    code = snippets.snippet(models, {"view": "next", "model": "adapter", "text": "the", "top_k": "5"})["python"]
    assert f"gf.load({str(base)!r}, adapter={str(adapter)!r}" in code
    assert f"load_tokenizer({str(base)!r})" in code


def test_an_adapter_alone_is_served_on_the_model_that_it_names(model_folders, tmp_path):
    adapter = folders.write_adapter(model_folders[-1], tmp_path / "adapter")
    models = ModelStore([adapter])
    assert (models.describe(True)[-1]["chat"], models.describe(False)[-1]["chat"]) == (True, False)
    assert models.get("adapter").tokenizer is not None
    shutil.move(adapter, tmp_path / "moved")
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (tmp_path / "moved" / "adapter_config.json").write_text(json.dumps(config))
    assert "gone" in ModelStore([tmp_path / "moved"]).describe(True)[-1]["error"]


def test_the_bundled_adapter_is_described_without_torch_and_can_chat(models):
    row = next(row for row in ModelStore().describe(False) if row["name"] == "bard-chat")
    assert (row["chat"], row["tokenizer"], row["layers"], row["bundled"]) == (True, True, 6, True)
    code = snippets.snippet(models, {"view": "next", "model": "bard-chat", "text": "the", "top_k": "5"})["python"]
    assert "gf.load('bard-chat', dtype=" in code
    assert "load_tokenizer('bard-chat')" in code
