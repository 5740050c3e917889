"""The numbers in README.md and in the introductions of the documentation are those of their sources."""

import re
import tomllib

import pytest

from glassformer.doctor.report import TITLES
from glassformer.theory import exercises
from glassformer.theory.claims import ALL
from glassformer.theory.course.registry import built_in
from glassformer.weights.families import FAMILIES
from tests.docs.blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def number(pattern, text=README):
    """Return the numbers of the only place that has this pattern."""
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found if isinstance(found, str) else tuple(found)


def rows(text, heading):
    """Return the cells of each row of the table whose first line begins with a heading."""
    lines = text[text.index(heading) :].splitlines()[2:]
    end = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def row(text, beginning):
    """Return the cells of the only row of a table that begins with these words."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def ratios(beginning):
    """Return the ratios, which are printed in bold, of the rows of docs/benchmarks.md that begin with these cells."""
    lines = [line for line in page("benchmarks.md").splitlines() if line.startswith(beginning)]
    found = [re.findall(r"\*\*(\d+\.\d+)\*\*", line) for line in lines]
    assert found, beginning
    return [float(one) for (one,) in found]


def test_the_number_of_claims():
    assert number(r"theory as (\d+) claims") == str(len(ALL))
    assert f"[{len(ALL)} claims]" in page("comparison.md")


def test_the_number_of_bugs():
    pages = [path for path in (ROOT / "docs" / "diagnoses").glob("*.md") if path.stem != "index"]
    assert number(r"knows \[(\d+) bugs\]") == str(len(TITLES)) == str(len(pages))
    assert f"[{len(TITLES)} diagnoses]" in page("comparison.md")


def test_the_number_of_architectures():
    listed = [cells[0].strip("`") for cells in rows(page("families.md"), "| type |")]
    stated = {number(r"saves (\d+) Hugging Face"), number(r"logits of (\d+) model types"),
              number(r"reads these (\d+) model types", page("families.md"))}  # fmt: skip
    assert stated == {str(len(listed))}
    assert set(listed) <= {kind for family in FAMILIES for kind in family.types}


def test_the_number_of_defects():
    found = page("findings.md")
    classes = {cells[0] for cells in rows(found, "| class |")}
    _, defects = number(r"(\d+) classes examined, (\d+) with defects")
    assert defects == str(len(classes)) == number(r"\d+ in (\d+) classes", found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # a class of transformers
def test_the_number_of_examined_classes():
    pytest.importorskip("transformers")
    from glassformer.bench.developer.doctor_sweep import class_names

    assert number(r"(\d+) classes examined") == str(len(class_names()))


def test_the_version_of_transformers():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformers==(\d+\.\d+)", pins, re.MULTILINE)
    assert set(re.findall(r"transformers (\d+\.\d+)", README)) == {version}


def test_the_accuracy():
    stated = number(r"to (\S+), gradients to (\S+) \|")
    cells = row(page("variants.md"), "model = NumPy reference")[1], row(page("variants.md"), "autograd = hand")[1]
    assert stated == tuple(re.findall(r"≤ (\S+)", " ".join(cells)))


def test_the_speed_of_training():
    stated = number(r"on an H200: (\S+) times as fast in bf16, (\S+) with fp8")
    measured = (*ratios("| `gpt2` | GPU, batch 64, T 1024, bf16 |"), *ratios("| `gpt2` without biases |"))
    assert stated == tuple(f"{ratio:.2f}" for ratio in measured)


def test_the_speed_of_fine_tuning():
    stated = number(r"Qwen3-0\.6B shape on an H200: (\S+) times as fast")
    assert stated == f"{ratios('| `qwen3_0_6b`, LoRA rank 16 |')[0]:.2f}"


def test_the_speed_of_generating():
    low, high = number(r"two CPU cores: (\S+) to (\S+) times as fast")
    alone = [ratios(f"| `gpt2` | {precision} |")[0] for precision in ("float32", "bfloat16", "int8")]
    assert (low, high) == (f"{min(alone):.1f}", f"{max(alone):.1f}")
    one, many = number(r"one sequence: (\S+) times as fast, batch 64: (\S+) \|")
    assert (one, many) == tuple(f"{ratios(f'| `llama3_2_1b` | {batch} |')[0]:.2f}" for batch in (1, 64))


def test_the_numbers_of_the_course():
    assert number(r"(\d+) pen-and-paper problems", page("course.md")) == str(len(built_in()))
    assert f"The {len(built_in())} problems" in page("tutorials/teach.md")
    listed = set(re.findall(r"`([\w-]+)`", "".join(cells[1] for cells in rows(page("exercises.md"), "| topic |"))))
    assert listed == set(exercises.ALL)


def test_the_numbers_of_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    mistakes = sum(len(exercise.mistakes) for exercise in exercises.ALL.values())
    assert number(r"(\d+) graded coding exercises with (\d+)", text) == (str(len(exercises.ALL)), str(mistakes))
    assert number(r"(\d+) problems with drawn numbers", text) == str(len(built_in()))
    assert number(r"(\d+) diagnoses for any", text) == str(len(TITLES))
    assert number(r"(\d+) Hugging Face model types", text) == number(r"saves (\d+) Hugging Face")
    assert number(r"(\d+) claims with derivations", text) == str(len(ALL))
    listed = {re.match(r"\[(E\d+)", cells[0])[1] for cells in rows(page("errata.md"), "| | source |")}  # E35a is of E35
    assert number(r"(\d+) errata", text) == number(r"^(\d+) errors in published", page("errata.md")) == str(len(listed))


def test_the_version_and_the_citation():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
