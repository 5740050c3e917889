"""Devices by name or from a file; what a file gets wrong is one sentence."""

import pytest

from glassformer.sizing.devices import DEVICES, device

RATES = """
products = 1e12
attention = 1e12
memory = 1e11
capacity = 16e9
peak = 2e12
link = 1e10
network = 1e9
per_machine = 2
latency = 1e-5
"""


def test_a_device_by_name():
    assert device("h200") is DEVICES["h200"]


def test_a_device_from_a_file_takes_its_name_and_leaves_the_rest_at_nothing(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RATES)
    found = device(str(path))
    assert (found.name, found.per_machine, found.overlap, found.gaps) == ("mine", 2, 0, 0)


def test_gathers_and_scatters_go_at_the_rate_of_sums_unless_they_were_measured(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RATES)
    assert (device(str(path)).gather, device(str(path)).scatter) == (1e10, 1e10)
    path.write_text(RATES + "scatter = 3e9")
    assert (device(str(path)).gather, device(str(path)).scatter) == (1e10, 3e9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("products = ", "cannot be read as TOML"),
        ("products = 1e12", "has no 'attention'"),
        (RATES + "colour = 3", "has an unknown 'colour'"),
        (RATES.replace("1e11", "'fast'"), "memory='fast' must be a number"),
        (RATES.replace("1e11", "-1"), "memory=-1 must be a number of at least 0"),
        (RATES.replace("1e11", "0"), "memory=0 would take for ever"),
        (RATES + "gather = 0", "gather=0 would take for ever"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        device(str(path))


def test_an_unknown_device_names_those_that_were_measured():
    with pytest.raises(ValueError, match=r"no rates were measured for 'h20'.*h200.*TOML"):
        device("h20")
    with pytest.raises(ValueError, match="cannot be read"):
        device("nowhere.toml")
