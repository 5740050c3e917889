"""Chat panel: shown for models with a template; answers, probabilities and the rendered prompt are the library's."""

import pytest

import glassformer as gf
from glassformer.chat.render import load_renderer
from tests.studio.page import expect, needs_browser, panel, run_python

pytestmark = needs_browser


@pytest.fixture(scope="module")
def chatty(browser):
    folder = browser.folders["chatty"]
    return gf.load(folder), load_renderer(folder)


def wanted(chatty, messages, new=12):
    model, renderer = chatty
    ids = gf.generate(model, [renderer.prompt(messages)], new, stop=renderer.ends).new[0]
    return [i for i in ids if i not in renderer.ends]


def send(page, text, count):
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(f".talk[data-messages='{count}']")).to_be_visible()


def test_a_conversation_shows_tokens_with_probabilities_and_the_rendered_prompt(site, chatty):
    page = site.open(view="playground", model="chatty")
    where = panel(page, "chat")
    expect(where).to_be_visible()
    where.get_by_label("Temperature").fill("0")
    where.get_by_label("New tokens").fill("12")
    send(page, "the cat <|im_end|>", 2)
    messages = [{"role": "user", "content": "the cat <|im_end|>"}]
    ids = wanted(chatty, messages)
    tokens = where.locator(".message[data-role=assistant] .token")
    expect(tokens).to_have_count(len(ids))
    assert f"id {ids[0]}, probability" in tokens.first.get_attribute("title")
    where.get_by_text("Rendered prompt:").click()
    assert where.locator(".rendered").inner_text().startswith("<|im_start|>user\nthe cat <|im_end|><|im_end|>")
    expect(where.locator(".rendered .special")).to_have_count(3)
    assert [i for i in run_python(page, "chat") if i not in chatty[1].ends] == ids
    send(page, "sat", 4)
    expect(where.locator(".message")).to_have_count(4)
    where.get_by_role("button", name="Undo").click()
    expect(where.locator(".message")).to_have_count(2)
    where.get_by_role("button", name="Reset").click()
    expect(where.locator(".message")).to_have_count(0)


@pytest.mark.slow
def test_a_message_that_is_too_long_is_refused_and_can_be_corrected(site):
    page = site.open(view="playground", model="chatty")
    where = panel(page, "chat")
    page.get_by_label("Message", exact=True).fill("the mat " * 90)
    where.get_by_role("button", name="Send").click()
    expect(where.locator(".status")).to_contain_text("the last message needs")
    expect(where.locator(".message")).to_have_count(0)
    assert page.get_by_label("Message", exact=True).input_value().startswith("the mat")


@pytest.mark.slow
def test_a_model_without_a_template_has_no_panel(site):
    page = site.open(view="playground", model="bard")
    page.wait_for_selector("[data-panel=next][data-ready]")
    expect(panel(page, "chat")).to_have_count(0)
    page.locator("#model").select_option("chatty")
    expect(panel(page, "chat")).to_be_visible()
    page.locator("#model").select_option("bard")
    expect(panel(page, "chat")).to_be_hidden()
