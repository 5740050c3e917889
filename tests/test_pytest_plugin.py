"""The fixture, known to pytest by installation, examines, reports, and fails with the doctor's words."""

import importlib.metadata
import subprocess
import sys

import pytest


def test_a_healthy_model_gives_its_report(glass_doctor):
    from tests.doctor.probes.subjects import Copycat

    assert glass_doctor(Copycat(), quick=True).healthy


def test_a_sick_model_fails_the_test_in_words(glass_doctor):
    from tests.bugs.zoo import ZOO

    model = next(b for b in ZOO if b.id == "no_causal_mask").build()
    with pytest.raises(pytest.fail.Exception, match="causal_leak"):
        glass_doctor(model, quick=True)


def test_pytest_finds_the_plugin_by_installation():
    (plugin,) = importlib.metadata.entry_points(group="pytest11", name="glassformer")
    assert plugin.load().glass_doctor


def test_the_plugin_does_not_import_torch():
    code = "import sys, glassformer.pytest_plugin; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
