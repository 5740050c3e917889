"""A recording knows the weights of a matmul, all names of a parameter, and what depends on attention."""

import pytest
import torch

from glassformer.doctor.probes import Unsupported, subject_of
from glassformer.doctor.probes.structure.recording import recorded
from tests.doctor.probes.structure.cases import styled


def test_shared_parameters_keep_all_their_names():
    _, recording = styled("nano", "layers_multiplied")
    names = [n for n in recording.names.values() if len(n) > 1]
    assert ["transformer.h.0.ln_1.weight", "transformer.h.1.ln_1.weight", "transformer.h.2.ln_1.weight"] in names
    _, recording = styled("nano")
    assert all(len(n) == 1 for n in recording.names.values())


def test_what_depends_on_attention_is_distinguished_from_what_does_not():
    _, recording = styled("functional")
    embedded = next(n for n in recording.graph.nodes if n.op == "embedding")
    assert embedded.index not in recording.after_attention
    assert recording.graph.nodes[-1].index in recording.after_attention


def test_weights_are_found_in_every_style_and_blocks_too():
    for style in ("nano", "hugging", "functional", "contracted"):
        _, recording = styled(style)
        linears = [n for n in recording.graph.nodes if n.is_linear]
        assert all(recording.weight(n) is not None for n in linears), style
        assert len(recording.anatomy.blocks) == 3


def test_a_callable_has_no_weights_to_record():
    def logits(idx: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(idx, 23).float()

    with pytest.raises(Unsupported, match="not a module"):
        recorded(subject_of(logits, vocab_size=23))
