"""A pytest fixture: `glass_doctor(model)` fails the test with the doctor's words when the model is sick.

def test_my_model_is_healthy(glass_doctor):
    glass_doctor(MyModel(), vocab_size=97)
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from glassformer.doctor import Report


@pytest.fixture
def glass_doctor() -> "Callable[..., Report]":
    """Examine a model as `glassformer.diagnose` does; the report is returned when it is healthy."""

    def examine(model: Any, **given: Any) -> "Report":
        # torch is imported only by a test that asks for the doctor
        from glassformer.doctor import diagnose

        report = diagnose(model, **given)
        if not report.healthy:
            pytest.fail(report.text(), pytrace=False)
        return report

    return examine
