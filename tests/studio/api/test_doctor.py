import pytest

from glassformer.studio.api.doctor import leak_matrix


def test_a_healthy_model_is_reported_healthy_and_is_not_changed(ask, models):
    before = {name: value.clone() for name, value in models.get("table").model.state_dict().items()}
    events = ask.events("doctor", model="table", quick=True)
    names = [name for name, _ in events]
    assert names[-1] == "done"
    assert names.index("finding") > names.index("progress")
    last = len(names) - 1 - names[::-1].index("progress")
    assert names[:last].count("finding") > 5  # they come while probes still run
    done = events[-1][1]
    assert done["healthy"], done["text"]
    leak = done["leak"]
    assert all(leak[t][s] == 0 for t in range(len(leak)) for s in range(t + 1, len(leak)))
    assert max(map(max, leak)) > 0
    after = models.get("table").model.state_dict()
    assert all((before[name] == after[name]).all() for name in before)
    assert not models.get("table").model.training
    findings = [data for name, data in events if name == "finding"]
    assert {"modes", "causality"} <= {data["family"] for data in findings}
    assert any(f["id"].startswith("causal_leak") and f["verdict"] == "pass" for f in findings)


def test_a_leaking_model_is_found(models, ask, monkeypatch):
    """A negative control: without its causal mask, the same model is sick and the matrix shows the future."""
    load_copy = type(models).load_copy

    def broken(self, name):
        loaded = load_copy(self, name)
        loaded.model.decoder.causal = False
        return loaded

    monkeypatch.setattr(type(models), "load_copy", broken)
    events = ask.events("doctor", model="table", quick=True)
    done = events[-1][1]
    assert not done["healthy"]
    assert next(data["id"] for name, data in events if name == "diagnosis") == "causal_leak"
    assert done["leak"][0][5] > 0


def test_an_encoder_has_no_leak_matrix(models):
    assert leak_matrix(models.get("both").model) is None


def test_an_unknown_model_is_404(ask):
    assert ask.refused("doctor", model="unknown")[0] == 404


@pytest.mark.parametrize("body", [{"model": "bard", "quick": "yes"}, {"model": 3}, {}])
def test_wrong_types_are_422(ask, body):
    assert ask.refused("doctor", **body)[0] == 422
