"""Experiments with weights, losses and gradients."""

import pytest

from tests.doctor.reproduce.scripts import finding, script_for, shows, shows_in


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("id", "probe", "evidence"),
    [
        ("head_not_tied", "weight_tying/same", {}),
        ("source_table", "weight_tying/tables", {"tables": {"a": "source_tokens.weight", "b": "tokens.weight"}}),
        ("labels_not_shifted", "label_shift/gradient", {}),
        ("labels_shifted_twice", "label_shift/gradient", {}),
        ("zero_ignored", "loss_padding/ids", {"ids": [0]}),
        ("attention_detached", "dead_gradient/flow", {"parameters": ["blocks.1.attention.q_proj.weight"]}),
        ("tied_embedding_std_1", "init_loss/ln-V", {}),
        ("mlp_shared", "layer_reuse/weights", {"parameters": ["blocks.1.mlp.up.weight", "blocks.2.mlp.up.weight"]}),
    ],
)
def test_the_script_shows_the_bug_and_not_its_twin(id, probe, evidence):
    if id == "source_table":  # its twin has no such name
        assert "source_tokens.weight" in script_for(id, finding(probe, **evidence))[0].text
        return
    assert shows(id, probe, **evidence)


def test_labels_that_are_shifted_only_without_labels_show():
    build = "tests.bugs.idioms.parameters.build"
    assert shows_in("labels_not_shifted", build, "decoder", "label_shift/arguments", argument="labels")
