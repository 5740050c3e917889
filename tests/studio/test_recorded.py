import json

import numpy as np

from glassformer.studio import recorded, schema
from glassformer.studio.encoding import MEDIA_TYPE
from glassformer.studio.recorded import RecordedResponses
from tests.studio.serving import decode


def alike(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-4 * max(1.0, abs(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def test_recorded_responses_are_those_that_would_be_computed_now():
    """Outdated files fail here: update them with `python -m glassformer.studio.recorded`."""
    made = recorded.responses()
    index = RecordedResponses().index
    assert index["prompts"] == recorded.PROMPTS
    assert index["responses"] == [row for row, _ in made.values()]
    for file, (row, data) in made.items():
        held = (recorded.FOLDER / file).read_bytes()
        if row["type"] == MEDIA_TYPE:
            (arrays, meta), (kept, kept_meta) = decode(data), decode(held)
            assert meta == kept_meta
            assert all(np.allclose(arrays[n], kept[n], atol=5e-3, equal_nan=True) for n in arrays)
        else:
            assert alike(json.loads(data), json.loads(held)), file


def test_a_response_is_found_however_its_request_was_written():
    responses = RecordedResponses()
    request = schema.Tokens.model_validate_json('{"text": "H7KQ2M8XB7KQ2", "model": "induction", "target": null}')
    data, kind = responses.find("tokens", request, False)
    assert kind == "application/json"
    assert len(json.loads(data)["ids"]) == 13
    assert responses.find("tokens", schema.Tokens(model="induction", text="x"), False) is None
    assert responses.find("lens", request, False) is None


def test_a_folder_without_responses_has_none(tmp_path):
    responses = RecordedResponses(tmp_path)
    assert responses.index == {}
    assert responses.find("tokens", schema.Tokens(model="bard", text="x"), False) is None
    (tmp_path / "index.json").write_text("[")
    assert RecordedResponses(tmp_path).index == {}


def test_all_responses_are_written_and_old_ones_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded, "responses", lambda: {"a.json": ({"file": "a.json"}, b"{}")})
    (tmp_path / "old.json").write_text("{}")
    assert recorded.write(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "index.json"]
