"""One function loads folders and files, with their config, tokenizer and chat template."""

import pytest
import torch

import glassformer as gf
from glassformer.weights import WeightsError, load_chat_template, load_config
from glassformer.weights.folder import Origin
from glassformer.weights.formats.gguf import check
from tests.weights.formats.gguf.models import bpe, llama, random


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The same model as folders and as a file, all with a tokenizer and a chat template."""
    monkeypatch.setattr(check, "is_installed", lambda: False)
    model, tokenizer = random(llama(vocab_size=300)), bpe(300)
    first = gf.save(model, tmp_path / "hf", tokenizer=tokenizer)
    (first / "chat_template.jinja").write_text("{{ messages }}")
    loaded = gf.load(first)
    glass = gf.save(loaded, tmp_path / "glass", format="glass")
    return first, glass, gf.save(loaded, tmp_path / "m.gguf", format="gguf")


def test_every_place_gives_the_same(places):
    tokens = torch.arange(3, 20)[None]
    first = gf.load(places[0])
    for place in places:
        model = gf.load(place)
        assert torch.equal(model(tokens), first(tokens))
        assert load_config(place).d_model == model.config.d_model
        assert load_chat_template(place) == model.origin.chat_template() == "{{ messages }}"
        ids = gf.load_tokenizer(place).encode("the cat").ids
        assert ids == model.origin.tokenizer().encode("the cat").ids == bpe(300).encode("the cat").ids
        assert (
            gf.generate(model, "the cat", max_new_tokens=3).new == gf.generate(first, "the cat", max_new_tokens=3).new
        )


def test_dtype_and_device(places):
    for place in places:
        assert {p.dtype for p in gf.load(place, dtype=torch.float64).parameters()} == {torch.float64}
        assert {p.device.type for p in gf.load(place, device="meta").parameters()} == {"meta"}
        with pytest.raises(WeightsError, match="int3"):
            gf.load(place, dtype="int3")


def test_a_place_that_is_gone_has_no_tokenizer(tmp_path):
    origin = Origin(tmp_path / "gone")
    assert (origin.tokenizer(), origin.chat_template()) == (None, None)
