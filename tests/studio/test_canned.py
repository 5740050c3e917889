import json

import numpy as np

from glassformer.studio import canned, schema
from glassformer.studio.canned import Canned
from glassformer.studio.wire import MEDIA_TYPE, decode


def alike(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-4 * max(1.0, abs(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def test_what_is_kept_is_what_would_be_computed_now():
    """Stale files fail here: write them anew with `python -m glassformer.studio.canned`."""
    made = canned.answers()
    index = Canned().index
    assert index["prompts"] == canned.PROMPTS
    assert index["answers"] == [row for row, _ in made.values()]
    for file, (row, data) in made.items():
        held = (canned.FOLDER / file).read_bytes()
        if row["type"] == MEDIA_TYPE:
            (arrays, meta), (kept, kept_meta) = decode(data), decode(held)
            assert meta == kept_meta
            assert all(np.allclose(arrays[n], kept[n], atol=5e-3, equal_nan=True) for n in arrays)
        else:
            assert alike(json.loads(data), json.loads(held)), file


def test_an_answer_is_found_by_what_was_asked_however_it_was_written():
    held = Canned()
    asked = schema.Tokens.model_validate_json('{"text": "H7KQ2M8XB7KQ2", "model": "induction", "target": null}')
    data, kind = held.find("tokens", asked, False)
    assert kind == "application/json"
    assert len(json.loads(data)["ids"]) == 13
    assert held.find("tokens", schema.Tokens(model="induction", text="x"), False) is None
    assert held.find("lens", asked, False) is None


def test_a_folder_without_answers_has_none(tmp_path):
    held = Canned(tmp_path)
    assert held.index == {}
    assert held.find("tokens", schema.Tokens(model="bard", text="x"), False) is None
    (tmp_path / "index.json").write_text("[")
    assert Canned(tmp_path).index == {}


def test_they_are_written_whole_and_old_ones_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(canned, "answers", lambda: {"a.json": ({"file": "a.json"}, b"{}")})
    (tmp_path / "old.json").write_text("{}")
    assert canned.write(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "index.json"]
