"""The view "Theory": every claim is listed and found, shown in full, run live, and turned by its negative control."""

import pytest

import glassformer as gf
from glassformer.theory.claims import TITLES
from tests.studio.page import fits, needs_browser, panel, run_python, selection

pytestmark = [needs_browser, pytest.mark.usefixtures("well_behaved")]
CLAIM = "softmax-row-stochastic"  # it has a knob, a figure and an erratum, and is quick
OTHER = "rope-relative"


@pytest.fixture(scope="module")
def page(browser):
    return browser.open(view="theory", claim=CLAIM)


def choose(page, id):
    page.locator(f".claim-list a[data-claim={id}]").click()
    page.locator(".claim-words code", has_text=id).wait_for()
    drawn(page, id)


def drawn(page, id, knobs=""):
    page.locator(f".claim-figure[data-ready='claims/{id}/figure.svg?{knobs}'] svg").wait_for()


def run(page, id, how):
    """What the table of evidence says once the claim has run: (verdict, id, numbers) of each part."""
    page.locator(f'[data-panel=claim][data-ready="{id} {how}"]').wait_for()
    row = "(r) => [r.dataset.verdict, r.querySelector('.finding-id').textContent, r.cells[2].textContent]"
    return page.locator("[data-panel=claim] .findings tbody tr").evaluate_all(f"rows => rows.map({row})")


def expected(finding):
    return [[part["verdict"], part["id"]] for part in finding.evidence["parts"]]


def test_every_claim_is_listed_under_its_chapter_and_the_search_narrows(page):
    drawn(page, CLAIM)
    links = page.locator(".claim-list a")
    assert links.evaluate_all("all => all.map((a) => a.dataset.claim)") == list(gf.claims.ALL)
    chapters = list(dict.fromkeys(TITLES[claim.chapter] for claim in gf.claims.ALL.values()))
    assert page.locator(".claim-list h3").all_inner_texts() == chapters
    errata = len({erratum.id.rstrip("ab") for claim in gf.claims.ALL.values() for erratum in claim.errata})
    count = len(gf.claims.ALL)
    page.get_by_text(f"{count} of {count} claims, {errata} errata in their sources").wait_for()
    page.get_by_label("Search the claims").fill("rope proved")
    page.get_by_text(f"1 of {count} claims").wait_for()
    assert links.count() == 1
    named = [id for id, claim in gf.claims.ALL.items() if any("E32" in source.errata for source in claim.sources)]
    for wanted, ids in (("E32", named), ("Bishop 12.3", ["orthogonal-inputs-fixed-point"])):
        page.get_by_label("Search the claims").fill(wanted)
        page.get_by_text(f"{len(ids)} of {count} claims").wait_for()
        assert links.evaluate_all("all => all.map((a) => a.dataset.claim)") == ids
    page.get_by_label("Search the claims").fill("<b>nothing</b>")
    page.get_by_text(f"0 of {count} claims").wait_for()
    page.get_by_label("Search the claims").fill("")
    page.get_by_text(f"{count} of {count} claims").wait_for()


def test_a_claim_is_shown_in_full_with_formulas_figure_and_errata(page):
    choose(page, OTHER)
    assert selection(page)["claim"] == OTHER
    claim = gf.claims.ALL[OTHER]
    shown = panel(page, "claim")
    assert shown.locator(".claim-rest ol > li").count() == len(claim.derivation)
    assert shown.locator(".statement math").count() == claim.statement.count("$") // 2
    assert "$" not in shown.locator(".claim-words").inner_text()
    for erratum in claim.errata:
        code = shown.locator(".erratum", has_text=erratum.id).locator("pre")
        assert code.text_content() == erratum.example.strip()
    cites = page.locator("#inspector .source h3").all_inner_texts()
    assert cites == [source.cite for source in claim.sources]
    page.go_back()
    drawn(page, CLAIM)


@pytest.mark.slow
def test_a_claim_runs_live_its_control_fails_and_its_knob_changes_the_figure(page):
    choose(page, CLAIM)
    page.get_by_role("button", name="Run", exact=True).click()
    rows = run(page, CLAIM, "whole")
    found = gf.check(CLAIM, slow=False)
    assert [row[:2] for row in rows] == expected(found)
    first = found.evidence["parts"][0]
    assert float(rows[0][2].split()[0].replace("−", "-")) == pytest.approx(first["measured"], rel=1e-2)
    assert panel(page, "claim").locator(".verdict-line .verdict").get_attribute("data-verdict") == "pass"
    assert "pass" in page.locator(f".claim-list a[data-claim={CLAIM}]").inner_text()

    page.get_by_label("negative control").check()  # runs at once
    rows = run(page, CLAIM, "broken")
    assert [row[:2] for row in rows] == expected(gf.check(CLAIM, slow=False, broken=True))
    assert panel(page, "claim").locator(".verdict-line").inner_text().startswith("✓The negative control fails")

    knob = gf.claims.ALL[CLAIM].knobs[0]
    before = page.locator(".claim-figure svg").inner_html()
    slider = page.get_by_label(knob.label)
    slider.evaluate("(node, v) => { node.value = v; node.dispatchEvent(new Event('input')); }", knob.high)
    drawn(page, CLAIM, f"{knob.name}={knob.high:g}")
    assert page.locator(".claim-figure svg").inner_html() != before
    page.locator("[data-panel=claim][data-ready]").wait_for()
    result = run_python(page, "claim")
    assert not result.passed  # the lines carry the control and the knob
    page.get_by_label("negative control").uncheck()
    run(page, CLAIM, "whole")


@pytest.mark.slow
def test_nothing_is_wider_than_the_window_at_either_width(page):
    for width, theme in ((400, "dark"), (1280, "light")):
        page.emulate_media(color_scheme=theme)
        page.set_viewport_size({"width": width, "height": 900})
        assert fits(page, width)
