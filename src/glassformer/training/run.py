"""A run: everything that decides what training does, in frozen dataclasses that are one TOML file.

`read_run` resolves a TOML text (or nothing) plus `--set optim.lr=3e-4` changes into a RunConfig; the resolved run is
written into every checkpoint, so that a checkpoint says how it was made. Field docs are the strings under the fields.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from typing import Any, Literal

from glassformer.config import ConfigError, DecoderConfig, Dense, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
from glassformer.config import replace as replace_model
from glassformer.config.errors import nearest, require, require_choice, require_positive
from glassformer.config.schema import build, from_dict, to_dict
from glassformer.training.data import tasks

FORMAT = 1


@dataclass(frozen=True)
class Data:
    """Where tokens come from."""

    corpus: str = "shakespeare"
    """A text file, a folder of text files, `shakespeare`, `embedded`, or `task:NAME` (see tasks)."""
    tokenizer: str = "char"
    """`char`, `byte`, `bpe`, or the path of a tokenizer.json."""
    vocab_size: int | None = None
    """Of a BPE trained here."""
    validation: float = 0.1
    """Share of the text, at its end, kept for validation."""
    order: Literal["random", "epoch"] = "random"
    """random: windows anywhere, drawn anew each step; epoch: every window once, then reshuffled."""
    cache: str | None = None
    """Folder for the token files; None puts them in the user's cache."""

    def __post_init__(self) -> None:
        require(0 < self.validation < 1, f"data.validation={self.validation} must be between 0 and 1.")
        require_choice(self, "order", Literal["random", "epoch"])
        if self.vocab_size is not None:
            require_positive(self, "vocab_size")


@dataclass(frozen=True)
class Optim:
    """AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    """AdamW's peak learning rate."""
    muon_lr: float = 0.02
    """Muon's peak learning rate; its update is scaled by sqrt(max(1, rows/columns))."""
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    """Muon's."""
    weight_decay: float = 0.1
    """On matrices; vectors (biases, norms) and tables of positions are never decayed."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; None leaves it."""
    ema: float | None = None
    """Decay of an exponential average of the weights, which is then what is evaluated and saved as the model."""

    def __post_init__(self) -> None:
        require_choice(self, "kind", Literal["adamw", "muon"])
        for name in ("lr", "muon_lr"):
            require(getattr(self, name) > 0, f"optim.{name}={getattr(self, name)} must be positive.")
        for name in ("beta1", "beta2", "momentum"):
            require(0 <= getattr(self, name) < 1, f"optim.{name}={getattr(self, name)} must be in [0, 1).")
        require(self.weight_decay >= 0, f"optim.weight_decay={self.weight_decay} must be 0 or more.")
        require(self.clip is None or self.clip > 0, f"optim.clip={self.clip} must be positive, or none.")
        require(self.ema is None or 0 < self.ema < 1, f"optim.ema={self.ema} must be between 0 and 1, or none.")


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run, as a factor on its peak."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """wsd: warm up, stay, then decay linearly over the last `decay` share of the run."""
    warmup: int = 100
    floor: float = 0.1
    """Factor at the end."""
    decay: float = 0.2
    """wsd only: share of the steps spent decaying."""

    def __post_init__(self) -> None:
        require_choice(self, "kind", Literal["constant", "cosine", "wsd"])
        require(self.warmup >= 0, f"schedule.warmup={self.warmup} must be 0 or more.")
        require(0 <= self.floor <= 1, f"schedule.floor={self.floor} must be in [0, 1].")
        require(0 < self.decay <= 1, f"schedule.decay={self.decay} must be in (0, 1].")


@dataclass(frozen=True)
class Loss:
    """What is minimised."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)^2), which keeps logits from drifting."""
    balance: float = 0.01
    """Weight of the balance loss of a mixture of experts."""
    mask_rate: float = 0.15
    """Masked language model only: share of tokens to be guessed."""

    def __post_init__(self) -> None:
        require(0 <= self.label_smoothing < 1, f"loss.label_smoothing={self.label_smoothing} must be in [0, 1).")
        require(self.z_loss >= 0, f"loss.z_loss={self.z_loss} must be 0 or more.")
        require(self.balance >= 0, f"loss.balance={self.balance} must be 0 or more.")
        require(0 < self.mask_rate < 1, f"loss.mask_rate={self.mask_rate} must be between 0 and 1.")


@dataclass(frozen=True)
class Loop:
    """How long, how large, how often."""

    steps: int = 2000
    batch: int = 12
    """Sequences per step, over all ranks and accumulation steps together."""
    accumulate: int = 1
    """Parts a step's batch is computed in; the result does not depend on it."""
    context: int | None = None
    """Tokens per sequence; None is the model's max_len."""
    eval_every: int = 250
    eval_batches: int = 20
    """Batches per evaluation; the same ones each time."""
    sample_every: int = 500
    """Print a sample; 0 never."""
    log_every: int = 10
    checkpoint_every: int = 250
    keep: int = 2
    """How many of the newest checkpoints stay, beside the best."""
    tensorboard: bool = False
    """Also write RUN/tensorboard; needs the `logs` extra. log.jsonl is always written."""

    def __post_init__(self) -> None:
        require_positive(self, "steps", "batch", "accumulate", "eval_every", "eval_batches", "log_every", "keep")
        require_positive(self, "checkpoint_every")
        require(
            self.batch % self.accumulate == 0,
            f"loop.batch={self.batch} is not a multiple of loop.accumulate={self.accumulate}: parts must be equal.",
        )
        if self.context is not None:
            require_positive(self, "context")


@dataclass(frozen=True)
class Machine:
    """Where and how it runs. Nothing here changes what is computed, beyond rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """bfloat16 computes products in bf16 and keeps weights and optimiser in float32."""
    stream: Literal["float32", "bfloat16"] = "float32"
    """Type of the residual stream when products are in bfloat16; bfloat16 moves half the bytes between products."""
    products: Literal["precision", "float8"] = "precision"
    """float8: those of dense feed-forwards, self-attention's projections and a large head, on a GPU that has them, in
    training steps alone."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """yes: by torch.compile; auto: on a GPU, and on a CPU kernels of our own, where there is a C++ compiler."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """Under torchrun with several processes; auto is ddp."""

    def __post_init__(self) -> None:
        require_choice(self, "device", Literal["auto", "cpu", "cuda"])
        require_choice(self, "precision", Literal["auto", "float32", "bfloat16"])
        require_choice(self, "stream", Literal["float32", "bfloat16"])
        require_choice(self, "products", Literal["precision", "float8"])
        require(
            self.products != "float8" or self.precision == "bfloat16",
            f"machine.products='float8' needs machine.precision='bfloat16', not {self.precision!r}: what is not such a "
            "product is computed in bfloat16.",
        )
        require(
            self.products != "float8" or self.device != "cpu",
            "machine.products='float8' needs a CUDA GPU, not machine.device='cpu': use machine.products='precision'.",
        )
        require_choice(self, "compile", Literal["auto", "yes", "no"])
        require_choice(self, "parallel", Literal["auto", "ddp", "fsdp"])


@dataclass(frozen=True)
class Probe:
    """What is measured on the way and written into log.jsonl as `probe` events. Without `every`, nothing is."""

    every: int = 0
    """Steps between measurements, the first before training; 0 never."""
    norms: bool = True
    """Euclidean norm of all weights, and of each part."""
    accuracy: bool = True
    """Share of targets predicted right, of a batch trained on and of the validation batches."""
    heads: bool = False
    """Induction and previous-token score of every head, on random repeated tokens."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"probe.every={self.every} must be 0 (never) or more.")


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig
    data: Data = Data()
    task: tasks.Repeat | tasks.Copy | tasks.Markov | tasks.ModularAddition | None = None
    """Parameters of the synthetic task that data.corpus names."""
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    loop: Loop = Loop()
    machine: Machine = Machine()
    probe: Probe = Probe()
    seed: int = 0
    out: str = "runs/latest"
    """Folder of the run: checkpoints, log, resolved run.toml."""

    def __post_init__(self) -> None:
        limit = self.model.max_len
        require(self.context > 0, "loop.context is not set and the model has no max_len: give one of them.")
        require(
            limit is None or self.context <= limit,
            f"loop.context={self.context} exceeds the model's max_len={limit}: shorten it, or raise max_len.",
        )
        self._check_task()
        self._check_products()
        require(self.model.head is not None, "a model without a head predicts nothing: set model.head.")
        require(
            self.schedule.warmup < self.loop.steps,
            f"schedule.warmup={self.schedule.warmup} leaves nothing of loop.steps={self.loop.steps}: shorten it.",
        )

    def _check_task(self) -> None:
        kind = tasks.named(self.data.corpus)
        if self.task is None:
            require(kind is None, f"data.corpus={self.data.corpus!r} needs its task: make the run with read_run.")
            return
        require(
            kind is type(self.task),
            f"[task] is of {self.task.kind}, but data.corpus={self.data.corpus!r}: name it 'task:{self.task.kind}'.",
        )
        require(
            self.objective == "next",
            f"a task asks for next tokens, which a model of kind {to_dict(self.model)['kind']!r} does not predict: use "
            "a decoder.",
        )
        self.task.check(self.context)

    def _check_products(self) -> None:
        """Products in 8 bits are written for one shape of feed-forward, and for dimensions that a GPU can take."""
        feedforward = self.model.feedforward
        if self.machine.products != "float8":
            return
        if not isinstance(feedforward, Dense):
            raise ConfigError(
                f"machine.products='float8' is for a dense feed-forward, and the model's is {feedforward.kind!r}: use "
                "machine.products='precision'."
            )
        for name, size in (("d_model", self.model.d_model), ("feedforward.d_ff", feedforward.d_ff)):
            require(
                size % 16 == 0,
                f"model.{name}={size} is not a multiple of 16, as machine.products='float8' needs: change it, or use "
                "machine.products='precision'.",
            )

    @property
    def context(self) -> int:
        """Tokens per sequence: given, fixed by the task, or the model's max_len."""
        fixed = self.task.context if isinstance(self.task, tasks.ModularAddition) else None
        return self.loop.context or fixed or self.model.max_len or 0

    @property
    def objective(self) -> str:
        """Decided by the architecture: next token, masked language model, or sequence to sequence."""
        kinds = {DecoderConfig: "next", EncoderConfig: "masked", Seq2SeqConfig: "seq2seq"}
        return kinds[type(self.model)]


SECTIONS: dict[str, type] = {
    "data": Data,
    "optim": Optim,
    "schedule": Schedule,
    "loss": Loss,
    "loop": Loop,
    "machine": Machine,
    "probe": Probe,
}


def read_run(text: str = "", changes: tuple[str, ...] = (), source: str = "the run") -> RunConfig:
    """A run from TOML text and `section.field=value` changes.

    [model] is a whole config, or `preset = "nano"` with fields to change (`n_layers = 2`, `attention__bias = false`).
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not readable TOML: {error}.") from None
    data.setdefault("model", {"preset": "nano"})
    for change in changes:
        _apply_change(data, change)
    known = {*SECTIONS, "model", "task", "seed", "out", "format"}
    for key in data:
        if key not in known:
            raise ConfigError(f"{source}: {key} is not a part of a run.{nearest(key, known)}")
    parts: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = data.get(name, {})
        require(isinstance(section, dict), f"{source}: {name} must be a table.")
        parts[name] = build(kind, section, name)
    parts["task"] = _read_task(parts["data"].corpus, data.get("task"), source)
    for name, kind in (("seed", int), ("out", str)):
        if name in data:
            require(
                type(data[name]) is kind,
                f"{source}: {name}={data[name]!r} must be {'a whole number' if kind is int else 'text'}.",
            )
            parts[name] = data[name]
    return RunConfig(model=_read_model(data["model"]), **parts)


def _read_task(corpus: str, given: Any, source: str) -> tasks.Task | None:
    kind = tasks.named(corpus)
    if kind is None:
        require(
            given is None,
            f"{source}: [task] is for a synthetic task, but data.corpus={corpus!r} is none: name one, such as "
            "data.corpus='task:repeat', or leave [task] out.",
        )
        return None
    section = {} if given is None else given
    require(isinstance(section, dict), f"{source}: task must be a table.")
    require(
        section.get("kind", kind.kind) == kind.kind,
        f"{source}: task.kind={section.get('kind')!r}, but data.corpus={corpus!r}: leave task.kind out.",
    )
    return build(kind, section, "task")


def _read_model(data: Any) -> ModelConfig:
    require(isinstance(data, dict), "model must be a table.")
    if "preset" not in data:
        return from_dict(data)
    changes = {key: None if value == "none" else value for key, value in data.items() if key != "preset"}
    plain, tables = {}, {}  # what a preset is asked for, and what changes the kind of a part
    for key, value in changes.items():
        if not isinstance(value, dict):
            plain[key] = value
        elif "kind" in value or any(isinstance(inner, dict) for inner in value.values()):
            tables[key] = value
        else:
            plain |= {f"{key}__{name}": inner for name, inner in value.items()}
    made = presets.get(data["preset"], **plain)
    return from_dict(_merge(to_dict(made), tables)) if tables else made


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, unless their kind changes: then the new one stands alone."""
    out = dict(base)
    for key, value in changes.items():
        held = out.get(key)
        if isinstance(held, dict) and isinstance(value, dict) and value.get("kind") in (None, held.get("kind")):
            out[key] = _merge(held, value)
        else:
            out[key] = value
    return out


def _apply_change(data: dict[str, Any], change: str) -> None:
    """`optim.lr=3e-4`: the value is read as TOML, and as plain text when it is none."""
    key, equals, text = change.partition("=")
    require(bool(equals) and bool(key.strip()), f"--set {change!r} must read section.field=value.")
    try:
        value = tomllib.loads(f"x = {text.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *path, last = key.strip().split(".")
    table = data
    for name in path:
        table = table.setdefault(name, {})
        require(isinstance(table, dict), f"--set {change!r}: {name} is not a table.")
    table[last] = value


def run_to_dict(run: RunConfig) -> dict[str, Any]:
    """The whole run as a nested dict, for TOML and JSON."""
    out: dict[str, Any] = {"format": FORMAT, "seed": run.seed, "out": run.out}
    for name in SECTIONS:
        out[name] = to_dict(getattr(run, name))
    if run.task is not None:
        out["task"] = to_dict(run.task)
    out["model"] = to_dict(run.model)
    return out


def with_model(run: RunConfig, **changes: Any) -> RunConfig:
    """The run with some model fields changed: the vocabulary is known only once the tokenizer is."""
    return dataclasses.replace(run, model=replace_model(run.model, **changes))
