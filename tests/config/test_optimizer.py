"""The optimizer table is total, and the run file offers exactly the optimizers that the table is for."""

import fnmatch
import typing

import pytest
from hypothesis import given, settings

from glassformer.config.optimizer import TABLE, OptimizerKind, rule_for
from glassformer.model import build
from glassformer.training.run import Optim
from tests import variants
from tests.sampled import examples


@settings(max_examples=examples(60))
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_every_parameter_matches_exactly_one_row(config):
    for name, p in build(config, device="meta").named_parameters():
        rule = rule_for(name)
        assert sum(fnmatch.fnmatchcase(name, r.pattern) for r in TABLE) == 1
        assert not rule.decayed or p.dim() == 2, "vectors are not decayed"
        assert not rule.matrix or p.dim() == 2


def test_a_parameter_in_no_row_is_an_error():
    with pytest.raises(ValueError, match="mystery matches no row"):
        rule_for("mystery")


def test_the_run_file_reads_this_type():
    assert typing.get_type_hints(Optim)["kind"] == OptimizerKind
