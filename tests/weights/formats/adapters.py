"""Adapters that peft makes on tiny transformers models, with every tensor random."""

import warnings

import torch

from tests.training.tuning.models import transformers_model
from tests.weights.tiny import precision

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2": ["q_proj", "v_proj", "down_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
    "bert": ["query", "value", "dense"],
    "t5": ["q", "k", "v", "o", "wi", "wo"],
}
VARIANTS = {"lora": {}, "rs": {"use_rslora": True}, "dora": {"use_dora": True}}


def peft_model(kind, folder, **changes):
    """(peft model, folder of its base). Matrices A, B and magnitudes are random, so that forgetting one shows."""
    import peft

    base, _ = transformers_model(kind, folder)
    options = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[kind]} | changes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out of GPT-2 is set by peft itself
        model = peft.get_peft_model(base, peft.LoraConfig(**options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, folder


def saved(model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the base has no config on the hub to compare its vocabulary with
        model.save_pretrained(folder)
    return folder


def inputs(kind):
    tokens = torch.randint(4, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    return (tokens, tokens[:, :5]) if kind == "t5" else (tokens,)


def their_logits(kind, model):
    """Logits of a transformers or peft model, in the dtype of its parameters."""
    tokens = inputs(kind)
    given = {"input_ids": tokens[0], "decoder_input_ids": tokens[1]} if kind == "t5" else {"input_ids": tokens[0]}
    with precision(next(model.parameters()).dtype):
        return model(**given).logits
