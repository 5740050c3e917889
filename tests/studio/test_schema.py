import pytest
from pydantic import ValidationError

from glassformer.generation import Sampling
from glassformer.studio import schema


def refusal(kind, text):
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(text)
    return schema.explain(caught.value)


def test_an_error_names_the_field_its_value_and_the_rule():
    sentence, not_json, field = refusal(schema.Next, '{"model": "bard", "ids": [1], "top_p": 2}')
    assert sentence == "top_p=2: input should be less than or equal to 1."
    assert (not_json, field) == (False, "top_p")


def test_unknown_fields_wrong_types_and_nan_are_refused():
    assert "ids or text" in refusal(schema.Next, '{"model": "bard"}')[0]
    assert "extra" in refusal(schema.Next, '{"model": "bard", "text": "a", "colour": 1}')[0]
    assert "temperature" in refusal(schema.Next, '{"model": "bard", "text": "a", "temperature": "1"}')[0]
    assert "temperature" in refusal(schema.Next, '{"model": "bard", "text": "a", "temperature": NaN}')[0]
    assert "ids" in refusal(schema.Next, '{"model": "bard", "ids": [1.5]}')[0]
    assert "ids" in refusal(schema.Next, '{"model": "bard", "ids": [true]}')[0]


def test_invalid_json_is_reported_as_such():
    assert refusal(schema.Next, "{")[1]
    assert refusal(schema.Next, "[" * 100_000)[1]


@pytest.mark.parametrize("field", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize("value", [-1, 0, 1e-9, 0.5, 1, 1.0000001, 2, 999, 1e9])
def test_sampling_has_the_limits_of_the_library(field, value):
    """Whatever the schema lets through, `Sampling` accepts; and within 0 to 1000 it refuses nothing more."""
    value = int(value) if field == "top_k" else float(value)
    try:
        Sampling(**{field: value})
        library = True
    except ValueError:
        library = False
    try:
        schema.SamplingRequest(**{field: value})
        ours = True
    except ValidationError:
        ours = False
    assert ours == library or (field == "temperature" and value > 1000)


def test_width_of_positions_is_even():
    assert "even" in refusal(schema.Positions, '{"kind": "rotary", "width": 7}')[0]


def test_query_strings_are_converted_and_checked():
    query = schema.ChinchillaQuery.model_validate({"flops": "1e21"})
    assert query.flops == 1e21
    figure = schema.FigureQuery.model_validate({"seed": "3", "broken": "true", "width": "2.5"})
    assert (figure.seed, figure.broken, figure.knobs) == (3, True, {"width": 2.5})
    assert schema.RunEventsQuery.model_validate({"after": "120"}).after == 120
    for kind, given in (
        (schema.ChinchillaQuery, {"flops": "x"}), (schema.ChinchillaQuery, {"flop": "1"}),
        (schema.FigureQuery, {"width": "inf"}), (schema.FigureQuery, {"seed": "-1"}),
        (schema.RunEventsQuery, {"after": "-1"}), (schema.RunEventsQuery, {"after": "1.5"}),
        (schema.RunAction, {"action": "delete"}),
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            kind.model_validate(given)


def test_size_is_of_one_thing():
    assert "exactly one" in refusal(schema.Size, '{"preset": "gpt2", "model": "bard"}')[0]


def test_prompts_of_completions_are_text_ids_or_one_text():
    for prompt in ("a", [1, 2], ["a"]):
        schema.CompletionRequest(model="bard", prompt=prompt)
    with pytest.raises(ValidationError):
        schema.CompletionRequest(model="bard", prompt=["a", "b"])
