"""A tiny chat model: the tokens and a template of `styles`, random weights, a context of 96 tokens."""

from pathlib import Path

import glassformer as gf
from glassformer import config as c
from tests.chat.styles import STYLES, tokenizer

NAMED = '{"bos_token": "<s>", "eos_token": "</s>"}'


def write(folder: Path, style: str | None = "generation", max_len: int | None = 96, **changes) -> Path:
    """Write the model; without a style it has no template."""
    made = tokenizer()
    size = made.get_vocab_size()
    config = gf.presets.llama_tiny(vocab_size=size, n_layers=2, max_len=max_len, head=c.Head(tied=False), **changes)
    gf.save(gf.build(c.replace(config, init_std=0.4)), folder, format="glass", tokenizer=made)
    if style is not None:
        (folder / "chat_template.jinja").write_text(STYLES[style], encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(NAMED, encoding="utf-8")
    return folder
