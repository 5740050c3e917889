"""Tables of an encoder-decoder that are declared as one."""

import pytest

from glassformer.doctor.probes.structure.recording import recorded
from glassformer.doctor.probes.structure.tables import declared_tying, shared_tables
from glassformer.finding import Verdict
from tests.doctor.probes.structure.cases import bugs_of, styled
from tests.doctor.probes.subjects import gpt2, t5


@pytest.mark.parametrize(("style", "bug"), bugs_of("weight_tying"))
def test_separate_tables_are_found(style, bug):
    finding = shared_tables(*styled(style, bug))
    assert finding.verdict is Verdict.FAIL
    assert finding.measured == (3 if bug == "all_separate" else 2)


def test_one_table_passes_and_decoders_are_not_examined():
    assert shared_tables(*styled("pair")).passed
    assert shared_tables(t5(), recorded(t5())).passed
    assert shared_tables(gpt2(), recorded(gpt2())).verdict is Verdict.SKIP


@pytest.mark.parametrize(
    "given",
    [
        {"share_embeddings": False, "tie_weights": True},
        {"share_embeddings": None, "tie_weights": None, "tie_head": True},
        {"share_embeddings": None, "tie_weights": None, "share_decoder_input_output_embed": True},
    ],
)
def test_tying_of_the_decoder_alone_is_a_design(given):
    assert shared_tables(*styled("pair", "tables_separate", **given)).verdict is Verdict.SKIP


@pytest.mark.parametrize("name", ["tie_word_embeddings", "share_all_embeddings", "share_encoder_decoder_embeddings"])
def test_the_usual_names_declare_one_table(name):
    assert declared_tying({name: True}) == name
    assert declared_tying({name: False}) is None


def test_a_class_that_lists_what_it_ties_declares_the_rest_separate(monkeypatch):
    subject, recording = styled("pair", "tables_separate")
    found = shared_tables(subject, recording)
    tables = found.evidence["tables"]
    monkeypatch.setattr(type(subject.module), "_tied_weights_keys", {tables["head"]: tables["target table"]}, False)
    assert tables["head"] == tables["target table"]
    assert shared_tables(subject, recording).verdict is Verdict.SKIP
    listed = {tables["head"]: tables["target table"], tables["source table"]: tables["target table"]}
    monkeypatch.setattr(type(subject.module), "_tied_weights_keys", listed, False)
    assert shared_tables(subject, recording).verdict is Verdict.FAIL
