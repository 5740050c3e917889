import pytest

import glassformer as gf
from glassformer import config as c
from glassformer.chat.render import ChatError, load_renderer
from glassformer.chat.session import Chat, fit
from tests.chat import models
from tests.chat.styles import ANSWER, USER
from tests.cli.asking import has_compiler

GREEDY = gf.Sampling(0.0)
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.write(tmp_path_factory.mktemp("chat") / "model")


def talk(folder, **more):
    options = {"sampling": GREEDY, "max_new_tokens": 6} | more
    return Chat(gf.load(folder), gf.load_tokenizer(folder), load_renderer(folder), **options)


def fresh(chat, messages, seed=0, new=6):
    """The new tokens of a run of its own."""
    prompt, _ = fit(chat.prompts, messages, chat.model.config.max_len, new)
    return prompt, gf.generate(chat.model, [prompt], new, chat.sampling, seed=seed, stop=chat.stops).new[0]


@pytest.mark.parametrize("engine", ["torch", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("sampling", [GREEDY, gf.Sampling(0.9, top_p=0.9)])
def test_a_turn_over_the_kept_cache_equals_a_run_of_its_own(folder, sampling, engine):
    chat = talk(folder, sampling=sampling, seed=3, engine=engine)
    for number, text in enumerate(["the cat", "sat", "on the mat"]):
        prompt, wanted = fresh(chat, [*chat.messages, {"role": "user", "content": text}], seed=3 + number)
        answer = chat.ask(text)
        assert "".join(answer) == answer.text
        assert (answer.prompt, answer.new) == (prompt, wanted)
        assert answer.reused > 0 or number == 0
        assert answer.engine.engine == engine
    assert chat.undo()
    chat.system = "be brief"  # changes the beginning, so nothing of the cache can be used
    prompt, wanted = fresh(chat, [*chat.messages, {"role": "user", "content": "again"}], seed=6)
    answer = chat.ask("again")
    assert list(answer) is not None
    assert (answer.prompt, answer.new) == (prompt, wanted)


def test_an_interrupted_answer_stays_in_the_history_and_the_chat_goes_on(folder):
    chat = talk(folder)
    answer = chat.ask("the cat")
    first = next(answer)
    answer.end()
    assert answer.finished == "interrupted"
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    assert list(answer) == []
    _, wanted = fresh(chat, [*chat.messages, USER], seed=1)
    following = chat.ask(USER["content"])
    list(following)
    assert following.new == wanted


def test_a_pass_that_is_interrupted_does_not_leave_a_wrong_cache(folder, monkeypatch):
    chat = talk(folder)
    list(chat.ask("the cat"))
    block = chat.model.blocks[1]
    forward, calls = block.forward, []

    def interrupted(*given, **named):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*given, **named)

    monkeypatch.setattr(block, "forward", interrupted)
    answer = chat.ask("sat")
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    answer.end()
    monkeypatch.undo()
    _, wanted = fresh(chat, [*chat.messages, USER], seed=2)
    following = chat.ask(USER["content"])
    list(following)
    assert (following.reused, following.new) == (0, wanted)


def test_the_oldest_turns_are_left_out_and_the_system_message_stays(folder):
    chat = talk(folder, max_new_tokens=4)
    chat.system = "be"
    notes = []
    for number in range(6):
        answer = chat.ask(f"the cat {number}")
        list(answer)
        notes.append(answer.note())
        assert len(answer.prompt) + 4 <= 96
        text = chat.tokenizer.decode(answer.prompt, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nbe<|im_end|>")
        assert f"the cat {number}" in text
        assert text.count("<|im_start|>user") == (len(chat.messages) - 1 - answer.dropped) / 2
        assert answer.dropped % 2 == 0
    assert notes[0] is None
    assert "messages were left out, the oldest first" in notes[-1]
    assert len(chat.messages) == 13
    with pytest.raises(ChatError, match=r"the last message needs \d+ tokens and the context of this model holds 96"):
        chat.ask("the mat " * 60)


def test_an_answer_ends_at_the_end_token_of_the_template(folder, monkeypatch):
    chat = talk(folder, max_new_tokens=20)
    end = chat.tokenizer.token_to_id("<|im_end|>")
    assert chat.model.config.special.eos == ()
    assert chat.stops == [end]
    first = next(i for i in fresh(chat, [USER], new=20)[1] if i != end)
    monkeypatch.setattr(chat, "stops", [first])
    answer = chat.ask(USER["content"])
    assert "".join(answer) == chat.tokenizer.decode(answer.new[:-1])
    assert (answer.new[-1], answer.finished) == (first, "stop")


def test_a_model_without_a_template_continues_the_text(tmp_path):
    plain = models.write(tmp_path / "plain", style=None)
    chat = talk(plain)
    assert chat.renderer is None
    first = chat.ask("the cat")
    list(first)
    assert first.prompt == chat.tokenizer.encode("the cat").ids
    second = chat.ask("sat")
    assert chat.tokenizer.decode(second.prompt) == f"the cat{first.text}\nsat"


def test_what_cannot_chat_is_refused(tmp_path, folder):
    tokenizer = gf.load_tokenizer(folder)
    with pytest.raises(ChatError, match="needs a decoder-only model"):
        Chat(
            gf.build(
                c.EncoderConfig(
                    vocab_size=37,
                    d_model=24,
                    n_layers=1,
                    attention=c.Attention(n_heads=4),
                    feedforward=c.Dense(d_ff=20),
                    max_len=48,
                )
            ),
            tokenizer,
        )
    with pytest.raises(ChatError, match=r"no tokenizer.json"):
        Chat(gf.load(folder), None)
    with pytest.raises(ChatError, match="max_new_tokens=0"):
        talk(folder, max_new_tokens=0)
    with pytest.raises(ChatError, match="the message is empty"):
        talk(folder).ask("  ")


def test_system_reset_and_undo(folder):
    chat = talk(folder, messages=[USER, ANSWER])
    chat.system = "a"
    chat.system = "b"
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert chat.undo()
    assert not chat.undo()
    chat.messages += [USER, ANSWER]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "b"}]
    chat.system = ""
    chat.reset()
    assert chat.messages == []
