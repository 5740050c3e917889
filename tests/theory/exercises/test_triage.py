"""The broken generators: their faults are those that the tests name, and the repaired one is right."""

import numpy as np

from glassformer.theory.exercises import triage as module
from glassformer.theory.exercises.judge import diagnose, right

RNG = np.random.default_rng(9)


def test_the_faults_are_found_in_their_order():
    faults = [module.triage(**case.arguments) for case in module.TRIAGE.cases(RNG)]
    assert faults == [0, 1, 2, 3, 2, 2]
    broken = module._measurements(RNG, "MC")
    assert module.triage(**broken) == 1


def test_the_generator_is_one_pass_over_the_text():
    for case in module.REPAIR.cases(RNG):
        prompt, w, n = case.arguments.values()
        tokens, logits = module.generate(prompt, w, n)
        text = [*prompt, *tokens[:-1]]
        x = w["embed"][text] + w["position"][: len(text)]
        scores = (x @ w["query"]) @ (x @ w["key"]).T / np.sqrt(x.shape[1])
        p = module.softmax(np.where(np.tri(len(text), dtype=bool), scores, -np.inf))
        expected = (x + p @ (x @ w["value"])) @ w["head"]
        assert np.allclose(logits, expected[len(prompt) - 1 :], atol=1e-12)


def test_the_file_to_repair_has_three_bugs_and_a_partial_repair_names_the_rest():
    exercise = module.REPAIR
    names = {}
    exec(exercise.stub, names)
    cases = exercise.cases(np.random.default_rng(0))
    given = [tuple(map(np.asarray, names["generate"](*case.arguments.values()))) for case in cases]
    assert diagnose(exercise, cases, given)
    for left in exercise.broken:
        two = [mistake for mistake in exercise.broken if mistake is not left]
        found = diagnose(exercise, cases, [right(exercise, case, two) for case in cases])
        assert set(found) == {mistake.message for mistake in two}
