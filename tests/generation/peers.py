"""Tiny random models of transformers, loaded by us from the folder they wrote."""

import functools
import tempfile

import torch
import transformers as tf

import glassformer as gf

SIZES = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_positions=64, n_embd=24, n_layer=2, n_head=3, **SIZES)),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(
            hidden_size=24,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            **SIZES,
        )
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(d_model=24, d_kv=5, d_ff=37, num_layers=2, num_heads=3, decoder_start_token_id=0, **SIZES)
    ),
}


@functools.cache
def pair(family: str):
    """(theirs, ours), the same weights."""
    torch.manual_seed(0)
    theirs = FAMILIES[family]().eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.25)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, gf.load(folder)


def generate(model, prompts, n, beams, length_penalty, eos, **more) -> list[list[int]]:
    """transformers' new tokens per row, cut after the first end."""
    width, encodes = max(map(len, prompts)), model.config.is_encoder_decoder
    padding = [[0] * (width - len(p)) for p in prompts]
    rows = [p + q if encodes else q + p for p, q in zip(prompts, padding, strict=True)]
    real = [[1] * len(p) + q if encodes else q + [1] * len(p) for p, q in zip(prompts, padding, strict=True)]
    out = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(real),
        max_new_tokens=n,
        do_sample=False,
        num_beams=beams,
        length_penalty=length_penalty,
        early_stopping=False,
        eos_token_id=eos,
        pad_token_id=0,
        **more,
    )
    new = out[:, 1 if encodes else width :].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), n) for row in new]
    return [row[:end] for row, end in zip(new, ends, strict=True)]
