"""The sections of a run file: one frozen dataclass each. The string under a field is its documentation.

`glass train --fields` and docs/run_file.md are generated from these strings (see `fields`), so every field has one.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from glassformer.config.choices import (
    ChatFormat,
    ChatLoss,
    Device,
    Recompute,
    ScheduleKind,
    TooLong,
    TrainingPrecision,
    WindowOrder,
)
from glassformer.config.optimizer import OPTIMIZERS, OptimizerKind
from glassformer.errors import require, require_choice, require_positive
from glassformer.training.sinks import check_names

StreamDtype = Literal["float32", "bfloat16"]
Products = Literal["precision", "float8"]
Compile = Literal["auto", "yes", "no"]
Parallel = Literal["auto", "ddp", "fsdp"]


@dataclass(frozen=True)
class Start:
    """The model that a run starts from (fine-tuning). Without one, a run starts from fresh weights.

    [model] may then set only dropout, max_len and the base and scaling of rotary positions. Defaults change: optim.lr
    is 3e-5 (3e-4 with [lora]), optim.weight_decay 0.01, and the schedule constant after 10 warm-up steps.
    """

    model: str = ""
    """A model folder, a bundled model, a GGUF file or a Hugging Face hub name. A run records the resolved path."""
    sha256: str = ""
    """Hash of the weights of that model. A run records it; if it is set, a model with other weights is refused."""
    family: str = ""
    """Hugging Face family of that model, in which the result is saved. A run records it."""
    n_tokens: int = 0
    """Number of token ids in use. Rows of the token tables beyond them are not trained. A run records it; 0 trains all.
    """


@dataclass(frozen=True)
class Mix:
    """One more corpus of a run."""

    corpus: str
    """As data.corpus."""
    weight: float = 1.0
    """Sequences of this corpus for each sequence of data.corpus."""
    field: str = ""
    """As data.field, which is the default."""

    def __post_init__(self) -> None:
        require(self.weight > 0, f"data.mix.weight={self.weight} must be positive.")


@dataclass(frozen=True)
class Data:
    """The text to train on and how it becomes tokens."""

    corpus: str = "shakespeare"
    """A text, JSONL (.gz, .zst) or Parquet file, a folder or a pattern of them (`data/*.jsonl`), a folder of token
    files (docs/data.md), `shakespeare` (downloaded once), `embedded` (Python's manual, which needs no download), or
    `task:NAME` for a synthetic task (see [task])."""
    field: str = "text"
    """JSONL and Parquet only: the field of a row that holds its text. `a.b` is the field b of the object a."""
    tokenizer: str = "char"
    """`char` (one token per character), `byte`, `bpe` (trained on the corpus; needs vocab_size), or the path of a
    tokenizer.json. With [start], the default is `start`, the tokenizer of that model; another one is refused."""
    add_tokens: tuple[str, ...] = ()
    """With [start]: special tokens that are added to the tokenizer and to the tables of the model. A new row is the
    mean of the old rows plus noise of their standard deviation."""
    vocab_size: int | None = None
    """Number of tokens of a `bpe` tokenizer that is trained on the corpus."""
    validation: float = 0.1
    """Fraction that is kept for validation: the end of a text; of JSONL and Parquet, documents chosen by their hash."""
    order: WindowOrder = "random"
    """`random` draws windows anywhere in the text at each step; `epoch` reads every window once, then reshuffles."""
    cache: str | None = None
    """Folder for the token files. Default: the user's cache folder."""
    mix: tuple[Mix, ...] = ()
    """More corpora, as tables [[data.mix]]: corpus, weight (sequences for each one of data.corpus; 1) and field. All
    have the tokenizer of data.corpus."""
    sha256: str = ""
    """Hash of the tokens. A run records it; if it is set, other tokens are refused, and those that a growing corpus got
    later are left out."""

    def __post_init__(self) -> None:
        require(0 < self.validation < 1, f"data.validation={self.validation} must be between 0 and 1.")
        require_choice(self, "order", WindowOrder)
        require(
            all(self.add_tokens) and len(set(self.add_tokens)) == len(self.add_tokens),
            f"data.add_tokens={list(self.add_tokens)} must be different texts, none of them empty.",
        )
        if self.vocab_size is not None:
            require_positive(self, "vocab_size")


@dataclass(frozen=True)
class Chat:
    """Train on conversations: data.corpus is then a JSONL, JSON, Parquet or Arrow file, or a folder (docs/chat.md).

    A model without a chat template gets ChatML, whose two tokens are added to its vocabulary.
    """

    format: ChatFormat = "auto"
    """Format of the rows. `auto` recognises it by the keys of each row."""
    loss: ChatLoss = "assistant"
    """Tokens that are learned: those of every answer (`assistant`), of the last answer (`last`), or `all`. `dpo` learns
    from rows with `chosen` and `rejected` answers (direct preference optimization; see loss.beta)."""
    pack: bool = True
    """Put several conversations into one sequence. They do not attend to one another, and positions restart."""
    too_long: TooLong = "drop"
    """What to do with a conversation longer than the context: leave it out, cut its end off, or stop with an error."""
    template: str = ""
    """Path of a chat template (Jinja), or `chatml`, or `plain` (words and line breaks, no new tokens). Default: that of
    the model the run starts from, or else ChatML."""
    system: str = ""
    """System message for conversations that have none."""
    validation: str = ""
    """File or folder for validation. Default: the fraction data.validation of the rows, chosen by their content."""

    def __post_init__(self) -> None:
        require_choice(self, "format", ChatFormat)
        require_choice(self, "loss", ChatLoss)
        require_choice(self, "too_long", TooLong)


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    kind: OptimizerKind = field(
        default="adamw", metadata={"choices": {name: facts.description for name, facts in OPTIMIZERS.items()}}
    )
    """Which optimizer updates the parameters."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon. Its update is scaled by sqrt(max(1, rows/columns))."""
    beta1: float = 0.9
    """Decay of AdamW's average of the gradient."""
    beta2: float = 0.95
    """Decay of AdamW's average of the squared gradient."""
    momentum: float = 0.95
    """Momentum of Muon."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Vectors (biases, norms) and position tables are never decayed."""
    clip: float | None = 1.0
    """Largest allowed norm of the whole gradient; `none` does not clip."""
    ema: float | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and saved as the model."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by words of their names: `embed`, `head`, `norms`, `block.0-3` (these blocks of
    every stack), or a part of a name such as `attention.q`. A tied head is frozen with `embed`."""

    def __post_init__(self) -> None:
        require_choice(self, "kind", OptimizerKind)
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

    kind: ScheduleKind = "cosine"
    """What follows the warm-up: `constant`, `cosine` decay to the floor, or `wsd` (warm-up, stable, then linear decay
    over the last `decay` fraction of the run)."""
    warmup: int = 100
    """Steps of linear warm-up; must be fewer than loop.steps. If only loop.steps is set, a longer warm-up is shortened
    to a tenth of it."""
    floor: float = 0.1
    """Factor on the peak learning rate at the end of the run."""
    decay: float = 0.2
    """`wsd` only: fraction of the steps that the decay takes."""

    def __post_init__(self) -> None:
        require_choice(self, "kind", ScheduleKind)
        require(self.warmup >= 0, f"schedule.warmup={self.warmup} must be 0 or more.")
        require(0 <= self.floor <= 1, f"schedule.floor={self.floor} must be in [0, 1].")
        require(0 < self.decay <= 1, f"schedule.decay={self.decay} must be in (0, 1].")


@dataclass(frozen=True)
class Loss:
    """What is added to the cross-entropy."""

    label_smoothing: float = 0.0
    """Share of the target probability that is spread evenly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of mean(logsumexp(logits)^2), which keeps the logits from drifting."""
    balance: float = 0.01
    """Weight of the load-balancing loss of a mixture of experts."""
    beta: float = 0.1
    """Direct preference optimization only: the loss is -log sigmoid(beta * margin). A larger beta keeps the model
    closer to the one that it started from."""
    mask_rate: float = 0.15
    """Masked language model only: fraction of tokens to predict."""
    mask_token: int | None = None
    """Masked language model only: id of the token that replaces masked ones. Default: an id that is added to the
    vocabulary; with [start], the mask token of the tokenizer."""

    def __post_init__(self) -> None:
        require(0 <= self.label_smoothing < 1, f"loss.label_smoothing={self.label_smoothing} must be in [0, 1).")
        require(self.z_loss >= 0, f"loss.z_loss={self.z_loss} must be 0 or more.")
        require(self.balance >= 0, f"loss.balance={self.balance} must be 0 or more.")
        require(self.beta > 0, f"loss.beta={self.beta} must be positive.")
        require(0 < self.mask_rate < 1, f"loss.mask_rate={self.mask_rate} must be between 0 and 1.")


@dataclass(frozen=True)
class Loop:
    """The length of the run, the batch, and what happens every so many steps."""

    steps: int = 2000
    """Optimizer steps of the whole run."""
    batch: int = 12
    """Sequences per step, over all ranks and accumulation steps together."""
    accumulate: int = 1
    """Number of equal parts in which a step's batch is computed, to save memory. The result does not depend on it."""
    context: int | None = None
    """Tokens per sequence. Default: the model's max_len."""
    eval_every: int = 250
    """Steps between two validations. The first and the last step of a run are always followed by one."""
    eval_batches: int = 20
    """Batches per validation; the same ones each time."""
    sample_every: int = 500
    """Steps between two printed samples; 0 never samples."""
    log_every: int = 10
    """Steps between two entries of the training loss in log.jsonl."""
    checkpoint_every: int = 250
    """Steps between two checkpoints. A new best model and the last step are always saved."""
    keep: int = 2
    """Number of newest checkpoints that are kept, in addition to the best."""
    sinks: tuple[str, ...] = ()
    """Loggers that also receive the events: `tensorboard`, `wandb`, `mlflow`, or a class as package.module:Class.
    log.jsonl is always written (docs/loggers.md)."""

    def __post_init__(self) -> None:
        require_positive(self, "steps", "batch", "accumulate", "eval_every", "eval_batches", "log_every", "keep")
        require_positive(self, "checkpoint_every")
        require(self.sample_every >= 0, f"loop.sample_every={self.sample_every} must be 0 (never) or more.")
        require(
            self.batch % self.accumulate == 0,
            f"loop.batch={self.batch} is not a multiple of loop.accumulate={self.accumulate}: parts must be equal.",
        )
        if self.context is not None:
            require_positive(self, "context")
        if self.sinks:
            check_names(self.sinks)


@dataclass(frozen=True)
class Checkpoint:
    """How checkpoints are written. loop.checkpoint_every and loop.keep say when, and how many are kept."""

    background: bool = False
    """Write checkpoints in a thread while training goes on. It takes memory for one copy of what is written."""
    first: bool = False
    """Write fresh weights before the first step as well, as step 0. A model of [start] always is."""


@dataclass(frozen=True)
class Machine:
    """Where and how the run computes. Nothing here changes the result beyond rounding."""

    device: Device = "auto"
    """`auto` takes a CUDA GPU if there is one."""
    precision: TrainingPrecision = "auto"
    """dtype of the matmuls. `bfloat16` keeps weights and optimizer state in float32; `auto` takes bfloat16 where it
    is faster."""
    stream: StreamDtype = "float32"
    """dtype of the residual stream when matmuls are in bfloat16. `bfloat16` moves half the bytes between matmuls."""
    products: Products = "precision"
    """`float8`: the matmuls of dense feed-forwards, of the projections of self-attention and of a large head run in
    8 bits during training steps, on a GPU that supports it. `precision`: in the dtype above."""
    compile: Compile = "auto"
    """`yes` uses torch.compile. `auto` uses it on a GPU, unless this package's kernels replace it (pre-norm decoders in
    bfloat16 on one GPU), and on a CPU these kernels if there is a C++ compiler."""
    parallel: Parallel = "auto"
    """How several processes under torchrun share the work; `auto` is `ddp`."""
    replicate: int = 1
    """With `fsdp`: copies of the sharded model (HSDP). Each is sharded over ranks / replicate ranks, such as those of
    one host, so that only gradients travel between hosts."""
    tensor: int = 1
    """With `fsdp`: ranks that divide heads, hidden units and vocabulary (tensor parallelism), within one host. Between
    these parts they divide the positions (sequence parallelism)."""
    context: int = 1
    """With `fsdp`: ranks that divide each sequence (context parallelism), for contexts that one device cannot hold."""
    gather: StreamDtype = "float32"
    """With `fsdp` and precision = "bfloat16": dtype in which weights are gathered. `bfloat16` moves half the bytes;
    weights are still stored and updated, and gradients summed over ranks, in float32. The residual stream is then in
    bfloat16."""
    recompute: Recompute = "no"
    """Activations that are computed again in the backward pass instead of being saved: none, all but the results of
    matmuls and attention (`selective`), or all but the inputs of blocks (`full`). It saves memory; without kernels."""
    timeout: float = 300.0
    """Seconds that a process under torchrun waits for the others in a step before it reports which one is missing."""

    def __post_init__(self) -> None:
        require_choice(self, "device", Device)
        require_choice(self, "precision", TrainingPrecision)
        require_choice(self, "stream", StreamDtype)
        require_choice(self, "products", Products)
        require(
            self.products != "float8" or self.precision == "bfloat16",
            f"machine.products='float8' needs machine.precision='bfloat16', not {self.precision!r}: all other matmuls "
            "are computed in bfloat16.",
        )
        require(
            self.products != "float8" or self.device != "cpu",
            "machine.products='float8' needs a CUDA GPU, not machine.device='cpu': use machine.products='precision'.",
        )
        require_choice(self, "compile", Compile)
        require_choice(self, "parallel", Parallel)
        require_choice(self, "recompute", Recompute)
        require_choice(self, "gather", StreamDtype)
        divided = ("replicate", "tensor", "context")
        require_positive(self, *divided)
        needs = [name for name in divided if getattr(self, name) > 1 and self.parallel != "fsdp"]
        require(not needs, f"machine.{' and machine.'.join(needs)} needs machine.parallel='fsdp'.")
        wide = self.gather == "float32" or (self.parallel == "fsdp" and self.precision == "bfloat16")
        require(wide, "machine.gather='bfloat16' needs machine.parallel='fsdp' and machine.precision='bfloat16'.")
        both = self.recompute != "no" and self.products == "float8"
        require(not both, "machine.recompute and machine.products='float8' cannot be combined: leave one out.")
        require(self.timeout > 0, f"machine.timeout={self.timeout} must be positive, in seconds.")


@dataclass(frozen=True)
class Probe:
    """Measurements during training, written to log.jsonl as `probe` events. They need `every`."""

    every: int = 0
    """Steps between two measurements, the first one before training; 0 never measures."""
    norms: bool = True
    """Euclidean norm of all weights together, and of each part."""
    accuracy: bool = True
    """Share of correctly predicted targets in a training batch and in the validation batches."""
    heads: bool = False
    """Induction and previous-token score of every head, on random repeated tokens."""

    def __post_init__(self) -> None:
        require(self.every >= 0, f"probe.every={self.every} must be 0 (never) or more.")


def rename_former(data: dict[str, Any]) -> None:
    """Give fields of older run files their present names: loop.tensorboard is a name in loop.sinks."""
    loop = data.get("loop")
    if isinstance(loop, dict) and isinstance(loop.get("tensorboard"), bool):
        data["loop"] = loop = dict(loop)
        if loop.pop("tensorboard"):
            loop["sinks"] = [*loop.get("sinks", []), "tensorboard"]


def shortened(schedule: Schedule, steps: int, note: Callable[[str], None] | None) -> Schedule:
    """Return a schedule whose warm-up fits a number of steps that takes precedence over the warm-up.

    A value on the command line takes precedence over the run file, which takes precedence over the default. `Run`
    refuses two values of equal precedence that contradict each other.
    """
    if schedule.warmup < steps:
        return schedule
    shorter = dataclasses.replace(schedule, warmup=steps // 10)
    if note is not None:
        note(
            f"schedule.warmup is shortened from {schedule.warmup:,} to {shorter.warmup:,}, a tenth of "
            f"loop.steps={steps}; set schedule.warmup to choose another length."
        )
    return shorter
