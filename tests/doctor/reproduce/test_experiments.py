"""Which experiment belongs to which finding."""

from glassformer.doctor.causes import RANK
from glassformer.doctor.reproduce import outside
from glassformer.doctor.reproduce.experiments import EXPERIMENTS, experiment_for


def test_the_longest_name_that_fits_is_taken():
    assert experiment_for("causal_leak/future-token") is outside.future
    assert experiment_for("causal_leak/below-entropy") is None
    assert experiment_for("pad_leak/content-left") is outside.padding_content
    assert experiment_for("attn_scale/ratio") is None


def test_every_experiment_belongs_to_a_diagnosis():
    assert {name.split("/")[0] for name in EXPERIMENTS} <= set(RANK)
