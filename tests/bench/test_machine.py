"""The facts a figure belongs to."""

import json

from glassformer.bench import machine


def test_facts_are_plain_and_complete():
    facts = json.loads(json.dumps(machine.facts()))
    assert facts["cores"] >= 1
    assert facts["processor"]
    assert {"glassformer", "python", "torch"} <= facts["versions"].keys()
    assert set(facts["flags"]) <= set(machine.FLAGS)


def test_a_system_without_cpuinfo_has_no_flags(monkeypatch):
    monkeypatch.setattr(machine, "cpu_info", dict)
    assert machine.facts()["flags"] == []
