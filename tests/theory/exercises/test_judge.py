"""What the judge says about answers that no usual mistake explains."""

import numpy as np
import pytest

from glassformer.theory.exercises import find, judge
from glassformer.theory.exercises.judge import FormError, unpack


def array(values):
    values = np.asarray(values, float)
    return {"array": values.tolist(), "dtype": "float64", "shape": list(values.shape)}


def sentences_for(id, change):
    """Sentences about the right answers after a change."""
    exercise = find(id)
    cases = exercise.cases(np.random.default_rng(0))
    return judge.diagnose(exercise, cases, [change(judge.right(exercise, case)) for case in cases])


@pytest.mark.parametrize(
    ("id", "change", "sentence"),
    [
        ("sinusoidal", lambda a: (1.25 * a[0],), "your answer is 1.25 times the correct one"),
        ("sinusoidal", lambda a: (a[0] + 0.5,), "your answer is the correct one plus 0.5"),
        ("sinusoidal", lambda a: (a[0] + 1e-6 * np.sin(range(a[0].shape[1])),), "compute in float64"),
        ("sinusoidal", lambda a: (np.vstack([a[0][1:], a[0][:1] + 9]),), "each is one position too early"),
        ("layer-norm", lambda a: (np.full_like(a[0], np.nan),), "your result contains NaN"),
        ("multi-head", lambda a: (a[0].T,), "it is the transpose of the correct answer"),
        ("multi-head", lambda a: (a[0][:-1],), "`output` has the shape (5, 12), not (6, 12)"),
        ("attention", lambda a: (a[0], a[1] * 0.9), "the rows of your weights do not sum to 1"),
        ("causal-mask", lambda a: (np.full_like(a[0], 1 / a[0].shape[1]),), "which is a later position"),
        ("top-k", lambda a: (a[0] * 0.5,), "your probabilities sum to 0.5, not to 1"),
        ("gpt2-parameters", lambda a: (a[0] + 1,), "`count` is 124,439,809 and should be 124,439,808"),
    ],
)
def test_a_strange_answer_is_described(id, change, sentence):
    assert sentence in " / ".join(sentences_for(id, change))


def test_being_wrong_in_one_special_case_gives_its_hint():
    exercise = find("ngram")
    cases = exercise.cases(np.random.default_rng(0))
    given = [judge.right(exercise, case) for case in cases]
    given[4] = (np.asarray(-1.0),)  # the context that never occurs
    assert judge.diagnose(exercise, cases, given)[0] == cases[4].hint
    assert judge.wrong_cases(exercise, cases, given) == [4]


def test_rounding_is_forgiven_and_whole_numbers_are_not():
    exercise = find("sinusoidal")
    cases = exercise.cases(np.random.default_rng(0))
    near = [(judge.right(exercise, case)[0] + 1e-12,) for case in cases]
    assert judge.diagnose(exercise, cases, near) == []
    count = find("block-parameters")
    cases = count.cases(np.random.default_rng(0))
    assert judge.diagnose(count, cases, [(judge.right(count, case)[0] + 1,) for case in cases])


@pytest.mark.parametrize(
    ("id", "value", "sentence"),
    [
        ("rope", None, "it returns None"),
        ("rope", "yes", "`rotated` is a str"),
        ("rope", True, "`rotated` is a bool"),
        ("rope", {"type": "set"}, "`rotated` is a value of type set"),
        ("rope", {"list": [{"list": [1, 2]}, {"list": [1]}]}, "rows have different lengths"),
        ("attention", array([[1.0]]), "it returns one array of shape (1, 1): return 2 values, output, weights"),
        ("attention", {"tuple": [1, 2, 3]}, "it returns 3 values: return 2"),
        ("attention", 4.0, "it returns a float"),
    ],
)
def test_an_answer_of_the_wrong_form_is_named(id, value, sentence):
    with pytest.raises(FormError) as error:
        unpack(find(id), value)
    assert sentence in str(error.value)


def test_lists_scalars_and_tuples_are_answers_too():
    assert unpack(find("rope"), {"list": [{"list": [1, 2]}, {"tuple": [3, 4.5]}]})[0].tolist() == [[1, 2], [3, 4.5]]
    assert unpack(find("ngram"), 0.5)[0] == 0.5
    assert len(unpack(find("attention"), {"list": [array([[1.0]]), array([[1.0]])]})) == 2
