"""The model that all contenders run: seeded random weights in the Hugging Face layout, written once and cached."""

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer import config as c
from glassformer.bench.plan import BYTES, BenchError, Plan
from glassformer.config import presets
from glassformer.files import cache_folder, write_atomically
from glassformer.sizing import active
from glassformer.weights import load, load_config, resolve_unless_preset, save

FORMAT = 2
"""Increase it when the recipe below changes: models of an older format are not used from the cache."""
GAIN = 3.0
"""Factor on the matrices of the blocks. At GPT-2's own initial scale a tied model repeats its last token for ever, and
any two implementations agree on that. At 3, a hundred tokens are almost all different, and the best logit leads by
0.1."""
DONE = "tokenizer_config.json"
WORDS = 300_000
"""Tokens of the text that start-up with `--training` trains on."""


@dataclass(frozen=True)
class Subject:
    """A model folder: `root/hf`, and conversions next to it."""

    root: Path
    config: c.ModelConfig
    label: str

    def weight_bytes(self, precision: str) -> float:
        """Return the bytes of weights read per token: without learned positions, experts that are not active and, if
        untied, the embedding."""
        numbers = active(self.config)
        if isinstance(self.config.position, c.Learned):
            numbers -= (self.config.max_len or 0) * self.config.d_model
        if self.config.head is None or not self.config.head.tied:
            numbers -= self.config.vocab_size * self.config.d_model
        return numbers * BYTES[precision]

    def prompts(self, rows: int, length: int, seed: int) -> tuple[tuple[int, ...], ...]:
        draw = random.Random(seed)
        return tuple(tuple(draw.randrange(self.config.vocab_size) for _ in range(length)) for _ in range(rows))

    def texts(self, rows: int, longest: int, seed: int) -> tuple[tuple[int, ...], ...]:
        """Texts of unequal length, from a quarter of the longest to the longest, which the first one has."""
        draw = random.Random(seed)
        lengths = [longest, *(draw.randint(max(1, longest // 4), longest) for _ in range(rows - 1))]
        return tuple(self.prompts(1, length, seed + i)[0] for i, length in enumerate(lengths))


def model_folder(keep: Path | None) -> Path:
    """Return the folder in which models and conversions are kept."""
    folder = (keep or cache_folder() / "bench").expanduser().resolve()
    if folder.exists() and not folder.is_dir():
        raise BenchError(f"--keep {folder} is a file: give a folder.")
    return folder


def subject(plan: Plan) -> Subject:
    """Return the model of a plan: from a folder, or a preset with seeded weights."""
    path = resolve_unless_preset(plan.model_name)
    if path is not None and plan.layers:
        raise BenchError(
            f"--layers {plan.layers} changes a preset, and --model {plan.model} is a folder: leave it out."
        )
    config = _preset(plan) if path is None else load_config(path)
    _check(plan, config)
    if path is None:
        # weights that are only rounded afterwards need half the space, and all contenders round them alike
        rounded = plan.device == "cuda" and not plan.trains and "float32" not in plan.chosen_precisions
        dtype = "bfloat16" if rounded else "float32"
        return write(model_folder(plan.keep), config, plan.model_name, plan.seed, not plan.trains, dtype)
    stamps = [[file.name, file.stat().st_mtime_ns, file.stat().st_size] for file in sorted(path.glob("*.safetensors"))]
    root = model_folder(plan.keep) / f"{path.resolve().name}-{digest(str(path.resolve()), stamps)}"
    if not (root / "hf" / DONE).exists():
        _store(load(path, dtype="float32"), root)
    return Subject(root, config, plan.model)


def _check(plan: Plan, config: c.ModelConfig) -> None:
    if isinstance(config, c.EncoderConfig) != (plan.task == "encode"):
        wanted = "an encoder" if plan.task == "encode" else "a model that generates text"
        raise BenchError(f"--model {plan.model_name} cannot {plan.task}: give {wanted}.")
    if config.max_len is None:
        return
    if plan.trains:
        if plan.prompt > config.max_len:  # the default is shortened to what the model has
            raise BenchError(
                f"sequences of {plan.prompt} tokens exceed the model's context of {config.max_len}: give a "
                "smaller --prompt."
            )
    elif plan.length_prompt + (plan.task != "encode") * plan.length_new > config.max_len:
        raise BenchError(
            f"a prompt of {plan.length_prompt} and {plan.length_new} new tokens exceed the model's context of "
            f"{config.max_len}: give a smaller --prompt or --new."
        )


def _preset(plan: Plan) -> c.ModelConfig:
    changes: dict[str, Any] = {"n_layers": plan.layers} if plan.layers else {}
    if plan.layers and isinstance(presets.get(plan.model_name), c.Seq2SeqConfig):
        changes["n_encoder_layers"] = plan.layers
    return c.replace(presets.get(plan.model_name, **changes), dropout=0.0)


def write(
    folder: Path, config: c.ModelConfig, label: str, seed: int, perturbed: bool = True, dtype: str = "float32"
) -> Subject:
    """Write a preset with seeded weights: `perturbed` to generate varied tokens, or as training starts."""
    import torch

    from glassformer.model import build

    facts = (c.to_dict(config), seed, perturbed, *([] if dtype == "float32" else [dtype]))
    root = folder / f"{label}-{digest(*facts)}"
    if not (root / "hf" / DONE).exists():
        model = build(config, seed=seed, dtype=getattr(torch, dtype))
        if perturbed:
            _perturb(model, seed)
        _store(model, root)
    return Subject(root, config, label)


def write_words(text: Path, tokenizer: Path, used: int, vocabulary: int, seed: int) -> None:
    """Write a text of words `t0`, `t1`, … below `used`, and a tokenizer with a vocabulary of such words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    draw = random.Random(seed)
    words = (f"t{int(draw.random() ** 3 * used)}" for _ in range(WORDS))
    whole = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    whole.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    write_atomically(text, " ".join(words).encode())
    write_atomically(tokenizer, whole.to_str().encode())


def digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *facts], sort_keys=True, default=str).encode()).hexdigest()[:12]


def _perturb(model: Any, seed: int) -> None:
    """Scale the blocks up, and make biases nonzero and norms different from one, so that a wrong conversion shows."""
    import torch

    draw = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".blocks." in name and parameter.dim() == 2:
                parameter.mul_(GAIN)
            elif parameter.dim() == 1:
                spread = 0.02 if name.endswith(".bias") else 0.1
                parameter.add_(spread * torch.randn(parameter.shape, generator=draw).to(parameter.dtype))


def _store(model: Any, root: Path) -> None:
    """Write the Hugging Face folder with an artificial tokenizer, which some converters require."""
    from tokenizers import Tokenizer, models

    root.mkdir(parents=True, exist_ok=True)
    size = model.config.vocab_size
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))
    save(model, root / "hf", format="hf", tokenizer=words, overwrite=True)
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    special |= {"bos_token": f"t{size - 1}", "eos_token": f"t{size - 1}", "pad_token": "t0"}
    write_atomically(root / "hf" / DONE, json.dumps(special).encode())
