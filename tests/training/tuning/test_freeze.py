"""Names of `optim.freeze`."""

import pytest

import glassformer as gf
from glassformer.config import ConfigError
from glassformer.training.optimizers import Optimizer
from glassformer.training.sections import Optim
from glassformer.training.tuning.freeze import freeze

NANO = gf.presets.get("nano", n_layers=3, d_model=16, n_heads=2, d_ff=16)


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ("embed", lambda name: not name.startswith("embed.")),
        ("block.0-1", lambda name: ".blocks.0." not in name and ".blocks.1." not in name),
        ("blocks.2", lambda name: ".blocks.2." not in name),
        ("norms", lambda name: "norm" not in name),
        ("attention.q", lambda name: ".attention.q." not in name),
        ("decoder.blocks.1.feedforward", lambda name: "blocks.1.feedforward" not in name),
    ],
)
def test_a_choice_freezes_what_it_names(choice, kept):
    model = gf.build(NANO)
    names = freeze(model, (choice,))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names
    assert trained == {name for name, _ in model.named_parameters() if kept(name)}
    assert set(Optimizer(model, Optim()).names.values()) == trained


def test_a_choice_that_names_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'attention.w', which no parameter matches"):
        freeze(gf.build(NANO), ("attention.w",))
    with pytest.raises(ConfigError, match="which no parameter matches"):
        freeze(gf.build(NANO), ("block.3",))
    with pytest.raises(ConfigError, match="freezes every parameter"):
        freeze(gf.build(NANO), ("embed", "decoder"))
