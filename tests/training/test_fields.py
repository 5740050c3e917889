"""The list of fields has every field that a run file can hold, each with what a reader needs."""

import dataclasses
import tomllib

import pytest

from glassformer.config import ConfigError, to_dict
from glassformer.config.optimizer import OPTIMIZERS
from glassformer.training.data.tasks import TASKS
from glassformer.training.fields import INTRODUCTION, fields_to_dict, run_file_page, sections
from glassformer.training.run import SECTIONS, read_run, run_to_dict


def names(data: dict, where: str = "") -> set[str]:
    found = set()
    for key, value in data.items():
        found |= names(value, f"{where}{key}.") if isinstance(value, dict) else {f"{where}{key}"}
    return found


def listed():
    return [field for section in sections() for field in section.fields]


@pytest.mark.sample(2)
@pytest.mark.parametrize("preset", ["nano", "llama_tiny", "moe_tiny", "t5_small", "bert_base"])
def test_every_field_of_a_resolved_run_is_listed(preset):
    """Nested parts that are documented once, such as the expert of a mixture, are found by their own names."""
    run = read_run("", (f"model.preset={preset}", "loop.context=8", "data.corpus=embedded"))
    known = {field.name for field in listed()} | {"format"}
    leaves = {name.rpartition(".")[2] for name in known}
    for name in names(run_to_dict(run)):
        assert name in known or (name.count(".") >= 2 and name.rpartition(".")[2] in leaves | {"kind"}), name


def test_every_field_and_every_section_is_documented():
    assert [field.name for field in listed() if not field.doc] == []
    assert [section.heading for section in sections() if not section.doc] == []
    assert {f"task.{field.name}" for task in TASKS.values() for field in dataclasses.fields(task)} <= {
        f.name for f in listed()
    }


def test_the_defaults_are_those_of_a_run():
    run = read_run()
    stated = {field.name: field.default for field in listed()}
    for name, kind in SECTIONS.items():
        for key, value in to_dict(getattr(run, name) or kind()).items():
            text = stated[f"{name}.{key}"]
            assert tomllib.loads(f"x = {text}")["x"] == value, f"{kind.__name__}.{key}"


def test_choices_are_those_that_are_accepted():
    found = {field.name: field for field in listed()}
    assert found["schedule.kind"].choices == ("constant", "cosine", "wsd")
    for choice in found["schedule.kind"].choices:
        assert read_run("", (f"schedule.kind={choice}",)).schedule.kind == choice
    with pytest.raises(ConfigError):
        read_run("", ("schedule.kind=linear",))
    assert "rotary" in found["model.position"].choices


def test_the_optimizers_are_described_where_they_are_declared():
    (kind,) = (field for field in listed() if field.name == "optim.kind")
    assert set(kind.choices) == set(OPTIMIZERS)
    for name, facts in OPTIMIZERS.items():
        assert f"`{name}`: {facts.description}" in kind.doc


def test_the_page_has_every_field_and_its_example_is_a_run():
    page = run_file_page()
    assert all(f"- `{field.name}` (" in page for field in listed())
    assert not any(line.endswith(" ") for line in page.splitlines())
    example = INTRODUCTION.partition("```toml\n")[2].partition("```")[0]
    assert read_run(example).model.n_layers == 6
    assert len(fields_to_dict()["sections"]) == len(sections())
