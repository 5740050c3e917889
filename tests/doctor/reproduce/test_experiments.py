"""Which experiment belongs to which finding."""

import pytest

import glassformer as gf
from glassformer.doctor.causes import RANK
from glassformer.doctor.reproduce import outside, reproduce
from glassformer.doctor.reproduce.experiments import EXPERIMENTS, REASONS, experiment_for, why_not
from tests.bugs.zoo import ZOO
from tests.doctor.reproduce.scripts import exit_code


def test_the_longest_name_that_fits_is_taken():
    assert experiment_for("causal_leak/future-token") is outside.future
    assert experiment_for("causal_leak/below-entropy") is None
    assert experiment_for("pad_leak/content-left") is outside.padding_content
    assert experiment_for("attn_scale/ratio") is None


def test_every_experiment_belongs_to_a_diagnosis():
    assert {name.split("/")[0] for name in EXPERIMENTS} <= set(RANK)


def test_every_diagnosis_has_an_experiment_or_a_reason_why_not():
    shown = {name.split("/")[0] for name, write in EXPERIMENTS.items() if write is not None}
    assert shown | set(REASONS) == set(RANK)
    assert not shown & set(REASONS)
    assert REASONS["attn_scale"] in why_not("attn_scale")
    assert "on this model" in why_not("causal_leak")


SHOWN = sorted({name.split("/")[0] for name, write in EXPERIMENTS.items() if write is not None})


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_the_report_on_a_planted_bug_gives_a_script_that_shows_it(name):
    for bug in (b for b in ZOO if b.diagnosis == name and b.reference is None):
        report = gf.diagnose(bug.build(), kind=bug.kind, expect=dict(bug.expect))
        source = f"from tests.bugs.zoo import by_id\n\nmodel = by_id({bug.id!r}).build()"
        scripts = reproduce(report, bug.build(), source, expect=dict(bug.expect))
        mine = [s for s in scripts if s.finding.id.startswith(name)]
        if mine and exit_code(mine[0]):
            return
    pytest.fail(f"no planted {name} gives a script that shows it")
