"""A formula on the sheet has the value next to it, for every variant."""

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from glassformer.config import ModelConfig, presets
from glassformer.sizing import count_by_part, parameters
from glassformer.sizing.flops import flop_formulas, formula, letters, widths
from glassformer.sizing.formulas import parameter_formulas
from tests import variants
from tests.sampled import examples

CONFIGS = (
    variants.decoders | variants.encoders | variants.seq2seqs | st.sampled_from([p() for p in presets.ALL.values()])
)


@given(CONFIGS)
@settings(max_examples=examples(100))
def test_parameter_formulas_have_the_value_of_the_count(config: ModelConfig):
    counts = count_by_part(config)
    formulas = parameter_formulas(config)
    assert {part: formulas[part].total if part in formulas else 0 for part in counts} == counts


@given(variants.decoders | variants.encoders, st.integers(1, 7), st.integers(1, 50))
@settings(max_examples=examples(100))
def test_a_token_costs_two_flops_for_each_weight_of_the_matrices_that_it_uses(config: ModelConfig, batch, context):
    matrices = {name: shape for name, shape in parameters(config).items() if len(shape) == 2 and "norm" not in name}
    blocks = {name: shape for name, shape in matrices.items() if ".blocks." in name}
    assume(len({name.split(".")[2] for name in blocks}) == config.n_layers)  # layers do not share blocks
    used = Fraction(0)
    for name, shape in blocks.items():
        routed = config.layer_feedforward(int(name.split(".")[2]))
        share = Fraction(routed.n_active, routed.n_experts) if ".experts." in name else 1
        used += share * math.prod(shape)
    formulas = flop_formulas(config, batch, context, 0)
    assert formulas["projections"].total + formulas["feedforward"].total == 2 * batch * context * used


def test_numbers_evaluate_to_the_value():
    for part in parameter_formulas(presets.bert_large()).values():
        expression = part.numbers.replace(",", "").replace("·", "*").replace("²", "**2")
        assert eval(expression or "0") == part.value


def test_the_sheet_s_example():
    attention = parameter_formulas(presets.gpt2())["attention"]
    assert str(attention) == "4·D² + 4·D = 4·768² + 4·768 = 2,362,368 × 12 blocks"


def test_equal_terms_merge_and_empty_ones_vanish():
    made = formula({"D": 3, "F": 5}, [(1, "D F"), (0, "F"), (1, "D F"), (2, "D D")])
    assert (made.letters, made.numbers, made.value) == ("2·D·F + 2·D²", "2·3·5 + 2·3²", 48)
    assert str(formula({}, [])) == ""


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        (presets.gpt2, ("D", "D", "D", "D")),
        (presets.llama3_8b, ("D", "G K", "G K", "D")),
        (presets.qwen3_0_6b, ("H K", "G K", "G K", "H K")),
    ],
)
def test_widths_are_as_short_as_the_model_allows(preset, expected):
    assert widths(preset()) == expected


def test_letters_of_an_encoder_decoder():
    values = letters(presets.t5_small(n_encoder_layers=4), batch=2, context=3, source=5)
    assert (values["L"], values["Lₑ"], values["N"], values["Nₑ"]) == (6, 4, 6, 10)
