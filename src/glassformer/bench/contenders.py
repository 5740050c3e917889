"""The table of contenders, and which of them are installed."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from glassformer import config as c
from glassformer.bench.plan import ALL, PRECISIONS, BenchError, Plan, unknown

GENERATING = ("decode", "prefill", "startup")
FIRST_STEPS = "first-steps"
"""The task of start-up with `--training`."""
TRAINING = ("train", FIRST_STEPS)


@dataclass(frozen=True)
class Contender:
    """One row of the table: the module, what it supports, and what it needs."""

    name: str
    module: str
    """Name of its module in `glassformer.bench.peers`."""
    precisions: tuple[str, ...]
    tasks: tuple[str, ...] = GENERATING
    packages: tuple[str, ...] = ()
    install: str = ""
    """How to install the packages, or which option names the checkout."""
    checkout: tuple[str, ...] = ()
    """Files that identify a checkout; empty for a package."""
    ours: bool = False
    only: tuple[str, ...] = ("decoder", "encoder", "seq2seq")
    """Kinds of models that its module here supports: gpt2, dense, bert, decoder, encoder, seq2seq."""
    devices: tuple[str, ...] = ("cpu",)
    converts: bool = False
    """True if its module has `prepare`, which writes a file in its own format."""
    samples: bool = False
    """True if its module can draw tokens with a temperature, top-k and top-p."""
    searches: bool = False
    """True if its module has beam search."""
    same_model: bool = True
    """False for another architecture with as many parameters, whose tokens cannot be compared."""


PLAIN = ("float32", "bfloat16")
OURS = PRECISIONS if importlib.util.find_spec("glassformer.kernels") else PLAIN
"""Our precisions. In a copy without kernels, generation runs in torch, which has these two."""
# fmt: off
BOTH = ("cpu", "cuda")
TABLE: tuple[Contender, ...] = (
    Contender("glassformer", "ours", OURS, (*GENERATING, "encode", *TRAINING), ours=True, devices=BOTH,
              samples=True, searches=True),
    Contender("glassformer-torch", "ours", PLAIN, (*GENERATING, "encode"), ours=True, devices=BOTH,
              samples=True, searches=True),
    Contender("transformers", "hugging", ("float32", "bfloat16"), (*GENERATING, "encode", *TRAINING),
              packages=("transformers",), install="pip install transformers", devices=BOTH, samples=True,
              searches=True),
    Contender("transformers-compiled", "hugging", ("float32", "bfloat16"), ("decode", "prefill", *TRAINING),
              packages=("transformers",), install="pip install transformers", only=("decoder",), devices=BOTH,
              samples=True),
    Contender("ctranslate2", "ctranslate", ("float32", "int8"), packages=("ctranslate2", "transformers"),
              install="pip install ctranslate2 transformers", converts=True, only=("decoder", "seq2seq"),
              searches=True),
    Contender("onnxruntime", "onnxrt", ("float32", "int8"), (*GENERATING, "encode"), packages=("onnxruntime", "onnx"),
              install="pip install onnxruntime onnx", only=("gpt2", "bert"), converts=True),
    Contender("llama.cpp", "llama", ("float32", "bfloat16", "int8", "int4"), packages=("llama_cpp", "gguf"),
              install="pip install llama-cpp-python gguf", only=("decoder",), converts=True, samples=True),
    Contender("nanogpt", "nanogpt", ("float32", "bfloat16"), (*GENERATING, *TRAINING),
              checkout=("model.py", "train.py"), install="give its checkout with --nanogpt PATH", only=("gpt2",),
              devices=BOTH),
    Contender("gpt-fast", "gptfast", ("bfloat16", "int8"), ("decode", "prefill"),
              checkout=("model.py", "generate.py"), install="give its checkout with --gpt-fast PATH", only=("dense",),
              same_model=False, devices=BOTH),
)
# fmt: on
NAMED = {contender.name: contender for contender in TABLE}


def choose(plan: Plan) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can run, ours first, and for each other requested one the reason why it cannot.

    An unknown name, or a path that is not a checkout, is refused; a peer that is not installed is not an error.
    """
    peers = [contender.name for contender in TABLE if not contender.ours]
    for name in plan.against:
        if name != ALL and name not in NAMED:
            raise BenchError(unknown(name, [ALL, *peers], "contender"))
    for name, path in plan.checkouts.items():
        require_checkout(NAMED[name], path)
    wanted = NAMED if ALL in plan.against else plan.against
    chosen: list[Contender] = []
    missing: dict[str, str] = {}
    task = FIRST_STEPS if plan.training else plan.task
    for contender in TABLE:
        if contender.name not in wanted and not _always(contender, plan):
            continue
        if task not in contender.tasks or (plan.task == "train" and not plan.model and contender.module == "hugging"):
            if contender.name in plan.against:
                missing[contender.name] = f"is not measured in {plan.task}"
            continue
        if plan.sampled and not contender.samples:
            missing[contender.name] = "it is measured here with the most likely tokens only"
            continue
        if plan.beams > 1 and not contender.searches:
            missing[contender.name] = "it is measured here without beam search"
            continue
        reason = absence(contender, plan)
        if reason is None:
            chosen.append(contender)
        else:
            missing[contender.name] = reason
    return chosen, missing


def _always(contender: Contender, plan: Plan) -> bool:
    """Return whether a contender takes part although it was not named. Our eager engine takes long on a GPU."""
    return contender.ours and (plan.device == "cpu" or contender.name == "glassformer")


def require_checkout(contender: Contender, path: Path) -> None:
    """Raise BenchError if a path is not a checkout of the contender."""
    lacking = [name for name in contender.checkout if not (path / name).is_file()]
    if lacking:
        raise BenchError(
            f"{path} is not a checkout of {contender.name} (it has no {' and no '.join(lacking)}): give the folder "
            "that `git clone` created."
        )


def absence(contender: Contender, plan: Plan) -> str | None:
    """Return why a contender cannot run and how to install it; None if it can run."""
    if plan.device not in contender.devices:
        return "it is measured here on a CPU only"
    if contender.checkout:
        return None if contender.name in plan.checkouts else contender.install
    lacking = [name for name in contender.packages if importlib.util.find_spec(name) is None]
    return f"{' and '.join(lacking)} not installed ({contender.install})" if lacking else None


def kinds_of(config: c.ModelConfig) -> set[str]:
    """Return the kinds of a model, as in `Contender.only`."""
    kinds = {name for name, kind in c.MODEL_KINDS.items() if isinstance(config, kind)}
    if is_gpt2(config):
        kinds.add("gpt2")
    if is_bert(config):
        kinds.add("bert")
    if is_dense(config):
        kinds.add("dense")
    return kinds


def is_dense(config: c.ModelConfig) -> bool:
    """Return True if every layer of a decoder is attention and one dense feed-forward, which a Llama can match."""
    return (
        isinstance(config, c.DecoderConfig)
        and all(isinstance(config.layer_feedforward(layer), c.Dense | c.Gated) for layer in range(config.n_layers))
        and config.attention.latent is None
    )


def is_bert(config: c.ModelConfig) -> bool:
    """Return True if the converter that supports only BERT can write this model."""
    return (
        isinstance(config, c.EncoderConfig)
        and isinstance(config.position, c.Learned)
        and isinstance(config.norm, c.LayerNorm)
        and config.feedforward == c.Dense(config.d_ff, "gelu")
        and config.attention == c.Attention(config.n_heads)
        and config.placement == "post"
        and config.embedding == c.Embedding(n_segments=2, norm=True)
    )


def is_gpt2(config: c.ModelConfig) -> bool:
    """Return True if the converters that support only GPT-2 can write this model."""
    return (
        isinstance(config, c.DecoderConfig)
        and isinstance(config.position, c.Learned)
        and isinstance(config.norm, c.LayerNorm)
        and isinstance(config.feedforward, c.Dense)
        and config.feedforward.activation == "gelu_tanh"
        and config.d_ff == 4 * config.d_model
        and config.placement == "pre"
        and config.n_kv_heads == config.n_heads
        and config.head is not None
        and config.head.tied
    )
