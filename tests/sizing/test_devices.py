"""Devices by name or from a file; what a file gets wrong is one sentence."""

import pytest

from glassformer.sizing.devices import DEVICES, device

RATES = """
matmuls = 1e12
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


def test_a_file_with_the_former_name_of_the_matmul_rate_is_read(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RATES.replace("matmuls", "products"))
    assert device(str(path)).matmuls == 1e12


def test_gathers_and_scatters_go_at_the_rate_of_sums_unless_they_were_measured(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RATES)
    assert (device(str(path)).gather, device(str(path)).scatter) == (1e10, 1e10)
    path.write_text(RATES + "scatter = 3e9")
    assert (device(str(path)).gather, device(str(path)).scatter) == (1e10, 3e9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("matmuls = ", "cannot be read as TOML"),
        ("matmuls = 1e12", "has no 'attention'"),
        (RATES + "colour = 3", "has an unknown 'colour'"),
        (RATES.replace("1e11", "'fast'"), "memory='fast' must be a number"),
        (RATES.replace("1e11", "-1"), "memory=-1 must be a number of at least 0"),
        (RATES.replace("1e11", "0"), "memory=0 would make every step"),
        (RATES + "gather = 0", "gather=0 would make every step"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        device(str(path))


def test_an_unknown_device_names_those_spelled_like_it():
    with pytest.raises(ValueError, match=r"'h20' is not a known device\. Did you mean .*h200.*TOML"):
        device("h20")
    with pytest.raises(ValueError, match=r"'zzzz' is not a known device\. Use one of a100-40gb, .*TOML"):
        device("zzzz")
    with pytest.raises(ValueError, match="cannot be read"):
        device("nowhere.toml")


def test_spelling_of_a_device_does_not_matter():
    assert device("A100_80GB") is DEVICES["a100-80gb"]


def test_the_devices_people_rent_are_there():
    wanted = {"a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200", "b200", "l4", "rtx4090", "rtx5090", "mi300x"}
    assert wanted <= DEVICES.keys()


@pytest.mark.parametrize("name", DEVICES)
def test_rates_stay_below_the_data_sheet(name):
    found = DEVICES[name]
    sheet = found.sheet
    assert found.attention < found.matmuls < sheet.peak == found.peak
    assert found.memory < sheet.bandwidth
    assert found.link < sheet.link / 2
    assert found.capacity <= sheet.gigabytes * 2**30
    assert found.measured == (name == "h200")
    assert "assumed" in found.source
    assert sheet.document


def test_unmeasured_devices_reach_the_shares_that_the_h200_reached():
    measured = DEVICES["h200"]
    for found in DEVICES.values():
        assert found.matmuls / found.peak == pytest.approx(measured.matmuls / measured.peak)
        assert found.memory / found.sheet.bandwidth == pytest.approx(measured.memory / measured.sheet.bandwidth)


def test_no_device_comes_with_a_price(tmp_path):
    assert all(found.price is None for found in DEVICES.values())
    path = tmp_path / "mine.toml"
    path.write_text(RATES)
    assert device(str(path)).price is None
    path.write_text(RATES + "price = 2.5")
    assert device(str(path)).price == 2.5
