"""Model folders for tests of the command line: a tiny decoder with a byte-level tokenizer, written by ourselves."""

from pathlib import Path

import torch

import glassformer as gf
from glassformer import config as c
from glassformer.model import adapters

TEXT = "the cat sat on the mat. the dog sat on the log. äöü naïve café 猫が座った。\n" * 4


def tokenizer(vocab_size: int = 300):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def write(folder: Path, format: str = "glass", with_tokenizer: bool = True, **changes) -> Path:
    """A random model of 300 tokens, context 64, in `folder`."""
    config = gf.presets.llama_tiny(vocab_size=300, n_layers=2, max_len=64, head=c.Head(tied=False), **changes)
    model = gf.build(c.replace(config, init_std=0.4))
    gf.save(model, folder, format=format, tokenizer=tokenizer() if with_tokenizer else None)
    return folder


def write_adapter(base: Path, folder: Path) -> Path:
    """A peft folder for the model in `base`, whose adapters change its logits much."""
    model = gf.load(base)
    names = adapters.choose_layers(adapters.adaptable(model), ("q", "v", "up"))
    made = adapters.fresh_adapters(model, names, 2, 4.0, False, False, 0)
    draw = torch.Generator().manual_seed(0)
    random = {n: torch.randn(a.B.shape, generator=draw) for n, a in made.items()}
    adapters.attach(model, {n: adapters.Adapter(a.A, random[n], a.scale) for n, a in made.items()})
    return gf.save(model, folder, format="peft")
