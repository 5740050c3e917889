from xml.etree import ElementTree

import pytest

import glassformer as gf
from glassformer.theory.claims.claim import plain
from glassformer.theory.claims.registry import load_all

QUICK = "rope-relative" if "rope-relative" in load_all() else next(iter(load_all()))
WITH_KNOB = next(id for id, claim in load_all().items() if claim.knobs and not claim.slow)


def test_all_claims_are_listed_in_order(client):
    response = client.get("/api/claims").json()
    assert [row["id"] for row in response] == list(load_all())
    assert all(row["sources"] and row["badge"] and row["chapter_title"] for row in response)


@pytest.mark.sample(20)
@pytest.mark.parametrize("id", list(load_all()))
def test_words_of_every_claim_come_in_pieces_of_text_and_wellformed_mathml(client, id):
    response = client.get(f"/api/claims/{id}").json()
    claim = load_all()[id]
    assert len(response["derivation"]) == len(claim.derivation)
    assert [e["id"] for e in response["errata"]] == [e.id for e in claim.errata]
    for piece in [
        *response["title"],
        *response["statement"],
        *response["control"],
        *(p for step in response["derivation"] for p in step),
    ]:
        if "mathml" in piece:
            ElementTree.fromstring(piece["mathml"])
        else:
            assert "$" not in piece["text"]


def test_a_claim_is_listed_with_its_sources_and_errata(client):
    """What the page's search looks through: `E32` and `Bishop 12.3` must be found."""
    rows = {row["id"]: row for row in client.get("/api/claims").json()}
    assert "kv-cache-exact" in [id for id, row in rows.items() if "E32" in row["errata"]]
    assert "Bishop 12.3" in rows["orthogonal-inputs-fixed-point"]["sources"]
    assert {"E01", "E02", "E03"} <= set(rows["orthogonal-inputs-fixed-point"]["errata"])


def test_running_a_claim_gives_the_finding_of_check(ask):
    events = ask.events(f"claims/{QUICK}/run", seed=3)
    wanted = plain(gf.check(QUICK, seed=3).to_dict())
    name, verdict = events[-1]
    assert name == "verdict"
    assert {key: verdict[key] for key in wanted} == wanted
    assert [data for name, data in events if name == "part"] == wanted["evidence"]["parts"]
    assert (verdict["expected"], verdict["crashed"]) == ("pass", False)


def test_the_verdict_is_then_listed(ask, client):
    ask.events(f"claims/{QUICK}/run")
    (row,) = [row for row in client.get("/api/claims").json() if row["id"] == QUICK]
    assert row["verdict"] == "pass"


def test_the_negative_control_fails(ask):
    verdict = ask.events(f"claims/{QUICK}/run", broken=True)[-1][1]
    assert (verdict["verdict"], verdict["expected"]) == ("fail", "fail")


def test_a_slow_claim_is_skipped_unless_asked_for(ask):
    slow = next((id for id, claim in load_all().items() if claim.slow), None)
    if slow is not None:
        assert ask.events(f"claims/{slow}/run")[-1][1]["verdict"] == "skip"


def test_knobs_stay_in_their_range(ask, client):
    knob = load_all()[WITH_KNOB].knobs[0]
    assert "outside its range" in ask.refused(f"claims/{WITH_KNOB}/run", knobs={knob.name: knob.high + 1})[1]
    assert "has no knob" in ask.refused(f"claims/{WITH_KNOB}/run", knobs={"nonsense": 1.0})[1]
    assert client.get(f"/api/claims/{WITH_KNOB}/figure.svg?{knob.name}=nan").status_code == 422
    assert client.get(f"/api/claims/{WITH_KNOB}/figure.svg?{knob.name}={knob.high + 1}").status_code == 400


def test_a_figure_is_an_svg_and_the_same_bytes_each_time(client):
    first = client.get(f"/api/claims/{WITH_KNOB}/figure.svg")
    assert first.headers["content-type"] == "image/svg+xml"
    assert ElementTree.fromstring(first.text).tag.endswith("svg")
    assert client.get(f"/api/claims/{WITH_KNOB}/figure.svg").text == first.text


def test_an_unknown_claim_is_404(client):
    for path in ("nonsense", "..%2f..%2fetc", "<script>"):
        assert client.get(f"/api/claims/{path}").status_code == 404
    assert client.post("/api/claims/nonsense/run", json={}).status_code == 404


def test_a_check_that_crashes_is_reported_as_a_crash(ask, monkeypatch):
    from glassformer.theory.claims import claim as module
    from glassformer.theory.claims.registry import find

    find(QUICK)

    def crash(lab):
        yield lab.exact("no parameters are added", True)
        raise ZeroDivisionError("by zero")

    monkeypatch.setitem(module.CHECKS, QUICK, crash)
    name, verdict = ask.events(f"claims/{QUICK}/run")[-1]
    assert (name, verdict["verdict"], verdict["crashed"]) == ("verdict", "fail", True)
    assert "ZeroDivisionError" in verdict["why"]
