"""Tiny random models saved by transformers, with a tokenizer, and texts to compare lm_eval's own model with ours."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests import folders

WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "log", "naïve", "café", "猫が", "座った"]
FAMILIES = ("gpt2", "llama", "qwen2")


def require_harness() -> None:
    """Skip a test where lm_eval is not installed."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install '.[eval]'")


def run_offline(patch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let lm_eval read local data files only, and write its copies of them to `cache`, not to the user's folder."""
    require_harness()
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install '.[eval]'")
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def config(family: str) -> Any:
    import transformers

    shared = {"vocab_size": 310, "bos_token_id": 300, "eos_token_id": 301, "pad_token_id": 301}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.1}  # fmt: skip
    match family:
        case "gpt2":
            return transformers.GPT2Config(
                n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, **shared
            )
        case "llama":
            return transformers.LlamaConfig(**sizes, **shared)
        case _:
            return transformers.Qwen2Config(**sizes, **shared)


def write(folder: Path, family: str) -> Path:
    """A folder as transformers writes it. Llama's tokenizer puts the beginning of text before every text."""
    import torch
    import transformers
    from tokenizers import processors

    torch.manual_seed(0)
    made = folders.tokenizer(300)
    made.add_special_tokens(["<s>", "</s>"])
    if family == "llama":
        start = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    names = {"eos_token": "</s>"} if family == "qwen2" else {"bos_token": "<s>", "eos_token": "</s>"}
    transformers.AutoModelForCausalLM.from_config(config(family)).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    return folder


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def task_files(folder: Path) -> Path:
    """A folder of local tasks: multiple choice, rolling log-likelihood, and generation."""
    draw = random.Random(1)
    rows = [
        {"question": text(draw, 4), "choices": [text(draw, 1 + i % 3), text(draw, 2), text(draw, 1)], "gold": i % 3,
         "text": text(draw, 60), "target": text(draw, 1)} for i in range(12)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shared = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\ntest_split: test\n"
    )
    (folder / "tasks").mkdir()
    (folder / "tasks" / "choice.yaml").write_text(
        f'task: choice\noutput_type: multiple_choice\n{shared}doc_to_text: "{{{{question}}}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\nmetric_list:\n'
        "  - metric: acc\n  - metric: acc_norm\n  - metric: acc_bytes\n"
    )
    (folder / "tasks" / "rolling.yaml").write_text(
        f'task: rolling\noutput_type: loglikelihood_rolling\n{shared}doc_to_text: ""\ndoc_to_target: "{{{{text}}}}"\n'
        "metric_list:\n  - metric: bits_per_byte\n  - metric: byte_perplexity\n"
    )
    (folder / "tasks" / "generate.yaml").write_text(
        f'task: generate\noutput_type: generate_until\n{shared}doc_to_text: "{{{{question}}}}"\n'
        'doc_to_target: "{{target}}"\ngeneration_kwargs:\n  until: ["\\n"]\n  max_gen_toks: 5\n'
        "metric_list:\n  - metric: exact_match\n"
    )
    return folder / "tasks"
