"""The course as the page asks for it: the outline, one item, what is typed, what is submitted."""

import pytest

from glassformer.theory.course import Problem, course

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def progress(tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))


def act(client, id, action, **given):
    return client.post(f"/api/course/{id}", json={"action": action, **given})


def test_the_outline_has_both_orders(client):
    outline = client.get("/api/course").json()
    whole = course()
    assert set(outline["items"]) == {*whole.problems, *whole.exercises}
    assert [group["name"] for group in outline["topic"]] == list(whole.by_topic())
    assert sum(len(group["ids"]) for group in outline["topic"]) == len(outline["items"])
    assert outline["source"][0]["ids"][0] == "weights-bound"


def test_every_item_can_be_shown(client):
    for item in (*course().problems.values(), course().exercises["attention"]):
        shown = client.get(f"/api/course/{item.id}").json()
        assert shown["title"] == item.title
        if isinstance(item, Problem):
            assert not any("$" in piece.get("text", "") for piece in shown["statement"])
            assert item.task(0).solution not in str(shown)
        else:
            assert shown["stub"] == item.stub


def test_answers_are_read_while_they_are_typed(client):
    read = act(client, "orthogonal-distance", "read", answer="sqrt(N)/(exp(C)").json()
    assert not read["readable"]
    assert "')' is missing" in read["message"]
    read = act(client, "orthogonal-distance", "read", answer="sqrt(N)/exp(C)").json()
    assert read["readable"]
    assert "<math" in read["formula"][0]["mathml"]
    assert act(client, "self-weight", "read", answer=" ").json() == {"readable": False, "message": ""}
    assert client.get("/api/course").json()["items"]["self-weight"]["solved"] is False


def test_answers_are_checked_and_progress_is_kept(client):
    task = course().find("self-weight").task(0)
    wrong = act(client, "self-weight", "check", answer="1").json()
    assert (wrong["result"], wrong["solved"]) == ("wrong", False)
    assert "exponential of 0 is 1" in wrong["message"][0]["text"]
    assert act(client, "self-weight", "check", answer=task.reference).json()["result"] == "right"
    assert client.get("/api/course").json()["items"]["self-weight"]["solved"] is True
    assert len(act(client, "self-weight", "hint").json()["hints"]) == 1
    assert len(act(client, "self-weight", "hint").json()["hints"]) == 2
    before = client.get("/api/course/self-weight").json()
    assert len(before["hints"]) == 2
    assert act(client, "self-weight", "new").json() == {"draw": 1}
    after = client.get("/api/course/self-weight").json()
    assert after["hints"] == []
    assert after["statement"] != before["statement"]


def test_solutions_show_errors_of_the_sources(client):
    found = act(client, "rope-score", "solution").json()
    assert [erratum["id"] for erratum in found["errata"]] == ["E30"]
    assert found["answer"] == course().find("rope-score").task(0).reference


def test_programs_are_graded(client):
    stub = course().exercises["temperature"].stub
    graded = act(client, "temperature", "grade", source=stub).json()
    assert graded["result"] == "wrong"
    assert "None" in graded["message"][0]["text"]


def test_a_studio_that_others_can_reach_runs_no_programs():
    from glassformer.studio import schema
    from glassformer.studio.api.course import act as direct
    from glassformer.studio.errors import StudioError

    body = schema.CourseAction(action="grade", source="def temperature(): ...")
    with pytest.raises(StudioError, match="only if the studio listens on this machine"):
        direct("temperature", body, is_local=False)


@pytest.mark.parametrize(
    ("id", "body", "status", "message"),
    [
        ("nothing", {"action": "read"}, 404, "there is no problem"),
        ("self-weight", {"action": "dance"}, 422, "action"),
        ("self-weight", {"action": "grade"}, 400, "no action grade"),
        ("attention", {"action": "check"}, 400, "no action check"),
        ("self-weight", {"action": "check", "answer": "1" * 3000}, 422, "answer"),
        ("self-weight", {"action": "check", "extra": 1}, 422, "extra"),
    ],
)
def test_wrong_requests(client, id, body, status, message):
    answer = client.post(f"/api/course/{id}", json=body)
    assert answer.status_code == status
    assert message in answer.json()["error"]
