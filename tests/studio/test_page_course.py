"""The view "Course": a sheet from its first problem to its last, with keyboard and feedback."""

import pytest

from glassformer.theory.course import Choice, course
from glassformer.theory.exercises import ALL, Exercise
from tests.studio.page import expect, fits, needs_browser, panel, selection

pytestmark = [needs_browser, pytest.mark.usefixtures("well_behaved")]
SHEET = "block"


@pytest.fixture
def page(browser, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_COURSE", str(tmp_path / "course.json"))

    def open_item(id, **given):
        page = browser.open(view="course", item=id, **given)
        ready(page, id)
        return page

    return open_item


def ready(page, id):
    page.locator(f'[data-panel="problem"][data-ready="{id}"]').wait_for()


def verdict(page):
    found = page.locator(".course-verdict [data-result]")
    found.wait_for()
    return found.get_attribute("data-result"), page.locator(".course-verdict").inner_text()


def choose(page, text):
    letter, _, number = text.partition(" ")
    page.locator(f'input[name="option"][value="{letter}"]').check()
    if number:
        page.locator(f'input[name="reason"][value="{number}"]').check()


def solve(page, item):
    """Give one known wrong answer, read its explanation, then the right one."""
    if isinstance(item, Exercise):
        page.get_by_role("button", name="Grade").click()
        page.locator('.course-verdict [data-result="wrong"]').wait_for()
        assert "returns None" in verdict(page)[1]
        page.get_by_label("Program: ", exact=False).fill(item.solution)
        page.get_by_role("button", name="Grade").click()
        page.locator('.course-verdict [data-result="right"]').wait_for()
        return
    task = item.task(0)
    for text, result in ((next(iter(task.wrong.values())), "wrong"), (task.reference, "right")):
        if isinstance(task.drawn.answer, Choice):
            choose(page, text)
            page.get_by_role("button", name="Check").click()
        else:
            page.get_by_label("Answer", exact=True).fill(text)
            page.get_by_label("Answer", exact=True).press("Enter")
        page.locator(f'.course-verdict [data-result="{result}"]').wait_for()
        explained = task.check(text).message.split("$")[0][:40]
        assert explained in verdict(page)[1] or result == "right"


def test_a_sheet_is_solved_from_its_first_item_to_its_last(page):
    items = course().sheet(SHEET)
    opened = page(items[0].id)
    solved = 0
    for item in items:
        opened.locator(f'.claim-list a[data-item="{item.id}"]').click()
        ready(opened, item.id)
        assert selection(opened)["item"] == item.id
        solve(opened, item)
        solved += 1
        expect(panel(opened, "course").get_by_role("status")).to_have_text(f"{solved} of {len(ids())} solved")
    assert opened.locator("[data-panel=course] progress").get_attribute("value") == str(solved)
    opened.reload()  # the progress is kept by the server
    expect(panel(opened, "course").get_by_role("status")).to_have_text(f"{solved} of {len(ids())} solved")


def ids():
    whole = course()
    return [*whole.problems, *whole.exercises]


def test_what_is_typed_is_shown_as_a_formula_and_hints_come_one_by_one(page):
    opened = page("orthogonal-distance")
    box = opened.get_by_label("Answer", exact=True)
    box.fill("sqrt(N)/(2")
    expect(opened.locator(".live")).to_contain_text("')' is missing")
    expect(box).to_have_attribute("aria-invalid", "true")
    box.fill("sqrt(N)/(2N)")
    opened.locator(".live math").wait_for()
    for count in (1, 2, 3):
        opened.get_by_role("button", name="Hint").click()
        expect(opened.locator(".course-hints li")).to_have_count(count)
    expect(opened.get_by_role("button", name="Hint")).to_be_disabled()
    before = opened.locator(".statement").inner_text()
    opened.get_by_role("button", name="New numbers").click()
    expect(opened.locator(".course-hints li")).to_have_count(0)
    assert opened.locator(".statement").inner_text() != before


@pytest.mark.slow
def test_solution_derivation_and_figure_are_folded_below(page):
    opened = page("rope-score")
    assert not opened.locator(".folded p").count()
    opened.get_by_text("Solution", exact=True).click()
    opened.locator(".erratum", has_text="E30").wait_for()
    opened.get_by_text("Smallest counterexample, as Python").click()
    expect(opened.locator(".erratum pre")).to_contain_text("holds")
    opened.get_by_text("Derivation and figure").click()
    opened.locator(".folded svg[role=img]").wait_for()
    assert opened.locator(".folded ol > li").count() > 1


def test_a_program_is_written_with_the_keyboard(page):
    opened = page("temperature")
    editor = opened.get_by_label("Program: ", exact=False)
    editor.focus()
    opened.keyboard.press("Control+A")
    opened.keyboard.type("import numpy as np\ndef temperature(logits, t):\nreturn logits")
    assert editor.input_value().endswith("(logits, t):\n    return logits")
    assert opened.locator(".py-keyword").all_inner_texts() == ["import", "as", "def", "return"]
    opened.keyboard.press("Tab")
    assert editor.input_value().endswith("logits    ")
    opened.keyboard.press("Escape")
    opened.keyboard.press("Tab")
    assert opened.evaluate("document.activeElement.textContent") == "Grade"
    opened.keyboard.press("Enter")
    assert verdict(opened)[0] == "wrong"


@pytest.mark.slow
def test_hints_of_a_program_come_one_by_one_and_are_kept(page):
    expected = ALL["temperature"].hints
    opened = page("temperature")
    button, shown = opened.get_by_role("button", name="Hint"), opened.locator(".course-hints li")
    expect(shown).to_have_count(0)
    for count in range(1, len(expected) + 1):
        expect(button).to_be_enabled()
        button.press("Enter")
        expect(shown).to_have_text(list(expected[:count]))
    expect(button).to_be_disabled()
    opened.get_by_role("button", name="Grade").click()  # a verdict does not hide them
    opened.locator('.course-verdict [data-result="wrong"]').wait_for()
    expect(shown).to_have_count(len(expected))
    opened.reload()  # they are kept by the server
    ready(opened, "temperature")
    expect(shown).to_have_text(list(expected))
    expect(button).to_be_disabled()
    expect(opened.get_by_role("button", name="New numbers")).to_be_hidden()


@pytest.mark.slow
def test_it_fits_a_phone(page):
    opened = page("tying-cycle", width=400)
    assert fits(opened, 400)
