"""Compare a GGUF file with our model: logits, greedy tokens and the tokens of texts, as llama.cpp computes them."""

from pathlib import Path
from typing import Any

import torch

from glassformer.config import ModelConfig, MoE
from glassformer.finding import Finding
from glassformer.model import DecoderLM
from glassformer.weights.formats.gguf.llama import is_installed, run_llama

LENGTH, NEW = 24, 12
TEXTS = (
    "To be, or not to be: that is the question.",
    "Hello, world! It's 12345.67 today; don't they'll we've",
    "  two  spaces,\ttabs\n\n\nand blank lines \n end ",
    "naïve café — “quotes” 你好 🙂 ½",
    "def f(x):\n    return x**2  # CamelCase snake_case HTTP2",
)
# Relative to the largest logit, measured on random models of every architecture, with a margin. float32: 1e-6 with
# SiLU and up to 1.5e-3 with GELU, which llama.cpp takes from a table in float16. With other types it also rounds
# activations: to the type of the weights (1e-3 in f16, 9e-3 in bf16), or to 8 bits in blocks of 32 (3e-2). A wrong
# layout or a wrong rotation gives about 1.
BOUNDS = {"f32": 1e-4, "f16": 5e-3, "bf16": 3e-2}
GELU, QUANTISED = 5e-3, 0.25
WHY = "rounding of activations in llama.cpp, measured on random models of every architecture"


@torch.no_grad()
def compare_with_llama(file: Path, model: DecoderLM, quantization: str, tokenizer: Any, seed: int = 0) -> list[Finding]:
    """Return what llama.cpp computes from a file, compared with a model that has the weights of the file."""
    if not is_installed():
        why = "llama-cpp-python is not installed, so the file was not run by llama.cpp."
        return [Finding.skip("llama.cpp-logits", why, "run pip install llama-cpp-python and convert again.")]
    config = model.config
    new = min(NEW, max(1, (config.max_len or 64) // 2))
    length = min(LENGTH, (config.max_len or 64) - new)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (max(length, 1),), generator=generator).tolist()
    texts = [text for text in TEXTS if tokenizer is not None and _encode(tokenizer, text) is not None]
    answer = run_llama(file, tokens, new, texts)
    if "error" in answer:
        return [
            Finding.judge(
                *("llama.cpp-logits", float("nan"), 0.0, f"llama.cpp could not run the file: {answer['error']}"),
                "report this, with the config of the model.",
            )
        ]
    return [*_logits(model, tokens, answer, quantization), *_tokens(tokenizer, texts, answer["ids"])]


def relative_bound(config: ModelConfig, quantization: str) -> float:
    """Return the largest difference of logits that is rounding, relative to the largest logit."""
    feedforward = config.feedforward
    expert = feedforward.expert if isinstance(feedforward, MoE) else feedforward
    is_gelu = "gelu" in getattr(expert, "activation", "")
    return max(BOUNDS.get(quantization, QUANTISED), GELU if is_gelu else 0.0)


def _logits(model: DecoderLM, tokens: list[int], answer: dict[str, Any], quantization: str) -> list[Finding]:
    ours = model(torch.tensor([tokens + answer["greedy"]])).double()[0]
    theirs = torch.from_numpy(answer["logits"]).double()
    scale = float(ours.abs().max())
    bound = relative_bound(model.config, quantization) * scale
    gaps = (ours[: len(tokens)] - theirs).abs().amax(1)
    remedy = "do not use the file; report this, with the config of the model."
    why = f"{WHY}, relative to the largest logit {scale:.3g}"
    if isinstance(model.config.feedforward, MoE) and quantization != "f32":
        # with rounding, a router may choose another expert for a token, and its logits are then others
        why, bound = f"median over tokens, because experts may differ; {why}", QUANTISED * scale
        return [Finding.judge("llama.cpp-logits", float(gaps.median()), bound, why, remedy)]
    findings = [Finding.judge("llama.cpp-logits", float(gaps.max()), bound, why, remedy)]
    # the logit of each of its tokens, below our best one: 0 if it is our token too
    after = ours[len(tokens) - 1 : -1]
    chosen = after.gather(1, torch.tensor(answer["greedy"])[:, None])[:, 0]
    lost = float((after.max(1).values - chosen).max())
    same = sum(int(row.argmax()) == token for row, token in zip(after, answer["greedy"], strict=True))
    why = f"{same} of {len(answer['greedy'])} greedy tokens are the same" + (
        "" if same == len(answer["greedy"]) else ", the others a tie within twice the bound"
    )
    return [*findings, Finding.judge("llama.cpp-greedy", lost, 2 * bound, why, remedy)]


def _tokens(tokenizer: Any, texts: list[str], ids: list[list[int]]) -> list[Finding]:
    if not texts:
        return []
    wrong = [text for text, found in zip(texts, ids, strict=True) if _encode(tokenizer, text) != found]
    return [
        Finding.judge(
            "llama.cpp-tokens",
            len(wrong),
            0,
            f"texts that llama.cpp encodes differently, of {len(texts)}",
            "use --to hf; the splitting rule of this tokenizer is not the one that was recognised.",
            texts=wrong,
        )
    ]


def _encode(tokenizer: Any, text: str) -> list[int] | None:
    try:
        return list(tokenizer.encode(text).ids)
    except Exception:  # a vocabulary of characters does not have every one
        return None
