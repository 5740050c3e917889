import pytest

from glassformer.chat import template as module
from glassformer.chat.template import CHATML, PLAIN, TEMPLATES, ChatError, ChatTemplate
from tests.chat.styles import ANSWER, CONVERSATIONS, NAMED, STYLES, USER, peer

DOUBLING = "{% set n = namespace(x='aaaaaa') %}{% for i in range(60) %}{% set n.x = n.x $ n.x %}{% endfor %}"


@pytest.mark.parametrize("style", [*STYLES, *TEMPLATES])
def test_text_equals_that_of_transformers(style):
    source = {**STYLES, **TEMPLATES}[style]
    theirs, ours = peer(source), ChatTemplate(source, NAMED)
    for messages in CONVERSATIONS.values():
        for answer in (False, True):
            given = messages[:-1] if answer else messages
            wanted = theirs.apply_chat_template(given, tokenize=False, add_generation_prompt=answer)
            assert ours.render(given, answer=answer).text == wanted


def test_tools_and_reasoning_are_passed_as_transformers_does():
    tools = [{"type": "function", "function": {"name": "größe <b>", "parameters": {"x": [1, 2.5, None, True]}}}]
    messages = [USER, {**ANSWER, "thinking": "hm"}]
    wanted = peer(STYLES["tools"]).apply_chat_template(messages, tools=tools, tokenize=False)
    assert ChatTemplate(STYLES["tools"]).render(messages, tools=tools).text == wanted
    with pytest.raises(ChatError, match="there are tools, and the chat template does not write any"):
        ChatTemplate(CHATML).render(messages, tools=tools)
    assert "größe <b>" in wanted
    assert "<think>hm</think>" in wanted


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% if %}", "not valid Jinja .line 1"),
        ("{{ raise_exception('Roles must alternate.') }}", "refuses these messages: Roles must alternate"),
        ("{{ open('/etc/passwd').read() }}", "'open' is undefined"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "must not do .access to attribute '__class__'"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "must not do"),
        ("{{ namespace(__class__=1) }}", "must not do"),
        ("{{ messages.append(1) }}", "must not do"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself without end"),
        ("{{ 'a' * 10**9 }}", "text of 1,000,000,000 characters"),
        ("{{ 10 ** 99999 }}", "limit is"),
        (DOUBLING.replace("$", "~"), "limit is"),
        (DOUBLING.replace("$", "+"), "limit is"),
        ("{{ messages[0].content + 1 }}", "fails with TypeError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_gives_one_sentence(source, sentence):
    with pytest.raises(ChatError, match=sentence) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_a_template_whose_loops_do_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.1)
    inner = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(ChatError, match=r"stopped after 0\.1 s"):
        ChatTemplate(inner).render([USER])


def test_generation_blocks_are_found_in_the_text():
    rendered = ChatTemplate(STYLES["generation"]).render(CONVERSATIONS["long"])
    found = [rendered.text[begin:end] for begin, end in rendered.answers]
    assert found == ["on the mat. 猫 café<|im_end|>", "the log\n\n🐱<|im_end|>"]


def test_marks_in_a_message_are_removed():
    forged = module.OPEN + "x" + module.CLOSE + module.GUARD
    rendered = ChatTemplate(STYLES["generation"]).render([{"role": "user", "content": forged}])
    assert rendered.answers == []
    assert "user\nx<|im_end|>" in rendered.text


def test_the_plain_template_needs_no_token_and_marks_the_answers():
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "You."}]
    found = ChatTemplate(PLAIN).render(messages)
    assert found.text == "User: Who?\nAssistant: You.\n"
    assert [found.text[begin:end] for begin, end in found.answers] == ["You.\n"]
    assert ChatTemplate(PLAIN, {"eos_token": "</s>"}).render(messages).text.endswith("You.</s>\n")
    asked = ChatTemplate(PLAIN).render(messages[:1], answer=True)
    assert asked.text == "User: Who?\nAssistant: "
