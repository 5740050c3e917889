"""Experiments with generate() show bugs and not their sound twins."""

import pytest

from tests.doctor.reproduce.scripts import shows_in

WARM = {"weights": "matrices x 6"}
CASES = [
    ("generate_keeps", "idioms.kept_caches.flagged", "decoder", "state_leak/generate", {"prompts": [7, 7]}),
    ("generate_drops_mask", "styles.translator.build", "seq2seq", "pad_leak/generate", {"side": "right"}),
]


@pytest.mark.parametrize(("bug", "build", "kind", "probe", "evidence"), CASES)
def test_the_script_shows_the_bug_and_not_its_twin(bug, build, kind, probe, evidence):
    assert shows_in(bug, f"tests.bugs.{build}", kind, probe, **evidence, **WARM)
