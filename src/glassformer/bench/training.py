"""Training: our step and those of others, from the same weights on the same batches, losses compared.

Batches are made before timing starts. All use AdamW with the same settings and a constant learning rate, and clip the
norm of the gradient at 1. nanoGPT's optimizer also decays learned positions and ours does not; here neither does, so
that the losses are the same.
"""

import contextlib
import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer import config as c
from glassformer.bench.peers.base import Order
from glassformer.bench.plan import BenchError, Plan
from glassformer.config import presets
from glassformer.errors import plural

if TYPE_CHECKING:
    from glassformer.bench.subject import Subject

SEED = 0
LR, BETA2 = 1e-3, 0.99
MODEL_LR, MODEL_BETA2 = 3e-4, 0.95
"""Of `--model`: a large model diverges at the rate of the small ones."""
USED = 512
"""Ids that occur in the batches of `--model`: a model learns that within the run, whatever its vocabulary."""


@dataclass(frozen=True)
class Setting:
    """A model and a batch."""

    name: str
    config: c.ModelConfig
    batch: int
    context: int = 0
    """Tokens of a sequence; 0: the longest that the model has."""
    used: int = 0
    """Number of ids in the batches; 0: all of the vocabulary."""
    lr: float = LR
    beta2: float = BETA2
    loaded: bool = False
    """True if our step loads the weights of the folder, too; otherwise it draws them from the same seed."""

    def facts(self) -> dict[str, Any]:
        shape = {"context": self.context or self.config.max_len, "vocabulary": self.used or self.config.vocab_size}
        rates = {"lr": self.lr, "beta2": self.beta2, "loaded": self.loaded}
        return {"batch": self.batch, **shape, **rates, "model": c.to_dict(self.config)}


def settings() -> tuple[Setting, ...]:
    """nanoGPT's CPU setting of character Shakespeare, and the model of its GPU setting at batch 8."""
    return (
        Setting("4 layers, 128 wide, context 64, batch 12", presets.nano(), 12),
        Setting("6 layers, 384 wide, context 256, batch 8", presets.shakespeare(dropout=0.0), 8),
    )


def setting_of(plan: Plan, made: "Subject") -> Setting:
    """Return the setting of `--model`. The config is that of the folder, which all load: a format may add biases."""
    from glassformer.weights import load_config

    config = load_config(made.root / "hf")
    if not isinstance(config, c.DecoderConfig):
        raise BenchError(f"--model {plan.model_name} cannot be trained here: give a decoder.")
    context = min(plan.length_prompt, config.max_len or plan.length_prompt)
    shape = f"{plural(config.n_layers, 'layer')}, {config.d_model} wide"
    name = f"{made.label}, {shape}, context {context}, batch {plan.sequences}"
    used = min(USED, config.vocab_size)
    return Setting(name, config, plan.sequences, context, used, MODEL_LR, MODEL_BETA2, loaded=True)


def batch(order: Order, step: int) -> tuple[Any, Any]:
    """Return inputs and targets of a step: tokens from a skewed distribution, which a model can learn."""
    import torch

    facts = order.setting
    draw = torch.Generator().manual_seed(step)
    uniform = torch.rand(facts["batch"], facts["context"] + 1, generator=draw)
    ids = (uniform**3 * facts["vocabulary"]).long().to(order.device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def tokens_per_step(order: Order) -> int:
    """Return what one step counts as: its tokens, or 1 in nanoGPT's settings, which are published in steps."""
    facts = order.setting
    return int(facts["batch"] * facts["context"]) if facts.get("loaded") else 1


def run_of(order: Order) -> Any:
    """Return the run of our training step."""
    from glassformer.training.run import Loop, Optim, Run, Schedule
    from glassformer.training.sections import Loss, Start

    facts = order.setting
    return Run(
        model=c.from_dict(facts["model"]),
        start=Start(model=str(order.model)) if facts.get("loaded") else Start(),
        seed=SEED,
        optim=Optim(lr=facts["lr"], beta2=facts["beta2"], weight_decay=0.1),
        schedule=Schedule("constant", warmup=0),
        loss=Loss(balance=0.0),  # the others balance no experts either
        loop=Loop(steps=1_000_000, batch=facts["batch"], context=facts["context"]),
        machine=machine_of(order),
    )


def machine_of(order: Order) -> Any:
    """Return [machine] of our run. On a GPU the residual stream is in bfloat16 too, as our recipes set it."""
    from glassformer.training.run import Machine

    if order.device == "cpu":
        return Machine(device="cpu", precision=order.precision)  # type: ignore[arg-type]
    if order.precision == "float32":
        return Machine(device="cuda", precision="float32")
    products: Any = "float8" if order.precision == "float8" else "precision"
    return Machine(device="cuda", precision="bfloat16", stream="bfloat16", products=products)


class Ours:
    """`glassformer.training`'s own step on the model of the folder."""

    def __init__(self, order: Order):
        import torch

        from glassformer import __version__
        from glassformer.training.loop import prepare_state, stepper

        torch.set_num_threads(order.threads)
        self.version = __version__
        self.state = prepare_state(run_of(order))
        self._step = stepper(self.state)

    def step(self, inputs: Any, targets: Any) -> Any:
        """Take a step and return its loss: a number, or on a GPU a tensor that may not be computed yet."""
        from glassformer.training.objective import Batch

        return self._step(self.state, Batch(inputs, targets))["loss"]


def trainer(order: Order) -> Any:
    """Return the trainer of the contender that an order names."""
    if order.name == "nanogpt":
        from glassformer.bench.peers.nanogpt import Trainer

        return Trainer(order)
    if order.module == "hugging":
        from glassformer.bench.peers.hugging_training import Trainer as HuggingTrainer

        return HuggingTrainer(order)
    return Ours(order)


def first_steps_of_a_run(order: Order) -> tuple[str, list[float]]:
    """Train from fresh weights with `gf.train` until the given number of steps is done; return the version and losses.

    This is what `glass train` does: it prepares the text, writes the folder of the run, validates once, and steps.
    """
    # first of all, as for `glass train`: it imports torch with the garbage collector off
    from glassformer.training import open_session, train  # isort: split
    import torch

    from glassformer import __version__
    from glassformer.training.sections import Data, Loop, Loss, Start

    torch.set_num_threads(order.threads)
    losses: list[float] = []

    class Done(Exception):  # noqa: N818 (not an error)
        """The steps were taken."""

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            losses.append(event["loss"])
            if len(losses) == order.new:
                raise Done

    run = run_of(order)
    with tempfile.TemporaryDirectory() as folder:
        # as long as a run is by default: a run of hours compiles its step as a whole, which takes longer
        loop = dataclasses.replace(run.loop, log_every=1, steps=Loop.steps)
        data = Data(corpus=str(order.text), tokenizer=str(order.words))
        usual = {"start": Start(), "loss": Loss(), "data": data, "loop": loop, "out": str(Path(folder) / "run")}
        run = dataclasses.replace(run, **usual)
        session = open_session(run)
        with contextlib.suppress(Done):
            train(session.run, session.data, listen)
    return __version__, losses
