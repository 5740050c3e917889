"""Training on a CPU: our step and nanoGPT's, from the same weights on the same batches, losses compared.

Batches are made before timing starts. Both use AdamW with nanoGPT's settings and a constant learning rate. nanoGPT's
optimizer also decays learned positions and ours does not; here neither does, so that the losses are the same.
"""

from dataclasses import dataclass
from typing import Any

from glassformer import config as c
from glassformer.bench.peers.base import Order
from glassformer.config import presets

SEED = 0
LR = 1e-3


@dataclass(frozen=True)
class Setting:
    """A model and a batch."""

    name: str
    config: c.ModelConfig
    batch: int

    def facts(self) -> dict[str, Any]:
        shape = {"context": self.config.max_len, "vocabulary": self.config.vocab_size}
        return {"batch": self.batch, **shape, "model": c.to_dict(self.config)}


def settings() -> tuple[Setting, ...]:
    """nanoGPT's CPU setting of character Shakespeare, and the model of its GPU setting at batch 8."""
    return (
        Setting("4 layers, 128 wide, context 64, batch 12", presets.nano(), 12),
        Setting("6 layers, 384 wide, context 256, batch 8", presets.shakespeare(dropout=0.0), 8),
    )


def batch(order: Order, step: int) -> tuple[Any, Any]:
    """Return inputs and targets of a step: tokens from a skewed distribution, which a model can learn."""
    import torch

    facts = order.setting
    draw = torch.Generator().manual_seed(step)
    uniform = torch.rand(facts["batch"], facts["context"] + 1, generator=draw)
    ids = (uniform**3 * facts["vocabulary"]).long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Ours:
    """`glassformer.training`'s own step on the model of the folder."""

    def __init__(self, order: Order):
        import torch

        from glassformer import __version__
        from glassformer.training.loop import prepare_state, stepper
        from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

        torch.set_num_threads(order.threads)
        self.version = __version__
        self.state = prepare_state(
            Run(
                model=c.from_dict(order.setting["model"]),
                seed=SEED,
                optim=Optim(lr=LR, beta2=0.99),
                schedule=Schedule("constant", warmup=0),
                loop=Loop(steps=1_000_000, batch=order.setting["batch"]),
                machine=Machine(device="cpu", precision=order.precision),  # type: ignore[arg-type]
            )
        )
        self._step = stepper(self.state)

    def step(self, inputs: Any, targets: Any) -> float:
        from glassformer.training.objective import Batch

        return float(self._step(self.state, Batch(inputs, targets))["loss"])


def trainer(order: Order) -> Any:
    """Return the trainer of the contender that an order names."""
    if order.name == "nanogpt":
        from glassformer.bench.peers.nanogpt import Trainer

        return Trainer(order)
    return Ours(order)
