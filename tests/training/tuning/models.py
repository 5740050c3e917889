"""Tiny models to start from: a character model of ours, and folders that transformers writes."""

import json

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import glassformer as gf
from glassformer.training.data.tokenizer import CharTokenizer
from tests.training import tiny

CHARACTERS = "".join(sorted({*" .\n", *"".join(tiny.WORDS)}))
RUN = ("loop.steps=4", "loop.batch=2", "loop.eval_every=2", "loop.eval_batches=2", "loop.sample_every=0")
PLAIN = ("machine.device=cpu", "machine.precision=float32", "machine.compile=no", "schedule.warmup=1")


def character_model(folder, **changes):
    """A folder of our own format with the tokenizer of the tiny corpus; one row of its table has no token."""
    small = {"n_layers": 2, "d_model": 24, "n_heads": 3, "d_ff": 48, "max_len": 16, "dropout": 0.1}
    config = gf.presets.get("nano", **small | changes)
    config = gf.config.replace(config, vocab_size=len(CHARACTERS) + 1)
    tokenizer = Tokenizer.from_str(CharTokenizer(CHARACTERS).to_json())
    return gf.save(gf.build(config, seed=7), folder, format="glass", tokenizer=tokenizer)


def word_tokenizer(folder, vocab=61, special=("[PAD]", "[UNK]", "[MASK]", "<|endoftext|>")):
    """A tokenizer.json with the words of the tiny corpus, and a tokenizer_config.json."""
    names = [*special, *tiny.WORDS, ".", "\n"]
    vocabulary = {name: i for i, name in enumerate(names)}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    engine.add_special_tokens(list(special))
    engine.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"})
    )
    assert len(names) < vocab
    return folder


def transformers_model(kind, folder, **changes):
    """A tiny random transformers model of a kind, saved with a tokenizer, and the folder."""
    import transformers as t

    small = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 3}
    llama = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
    llama["max_position_embeddings"] = 32
    grouped = llama | {"num_key_value_heads": 1, "head_dim": 8}
    made = {
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=32, **small, **changes)
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped, **small, **changes)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**llama, num_key_value_heads=1, **small, **changes)),
        "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**grouped, **small, **changes)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**llama, **small, **changes)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=3,
                decoder_start_token_id=0, **small, **changes,
            )
        ),
        "opt": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                hidden_size=24, ffn_dim=40, num_hidden_layers=2, num_attention_heads=3, max_position_embeddings=32,
                word_embed_proj_dim=24, **small, **changes,
            )
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    model = made[kind]().eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    word_tokenizer(folder)
    return model, folder
