"""Training with transformers: float32 weights, autocast to bfloat16, AdamW, the norm of the gradient clipped at 1.

The compiled contender compiles the forward pass and the loss together. Experts are computed by grouped matmuls where
the installed version has them.
"""

import contextlib
from typing import Any

from glassformer.bench.peers.base import Order, config_of
from glassformer.bench.peers.hugging import quiet_package

POSITIONS = ("wpe", "position_embeddings", "embed_positions")
"""Names of tables of learned positions, which our optimizer does not decay either."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a config that say how many experts a model has."""


def load(order: Order) -> tuple[Any, str]:
    """Return the model with float32 weights, and the version of the package with what was chosen for experts."""
    import torch

    package = quiet_package()
    version, kind = str(package.__version__), package.AutoModelForCausalLM
    if any(config_of(order).get(name) for name in EXPERTS):
        # a version that does not know the option, or the implementation, refuses it
        with contextlib.suppress(TypeError, ValueError, ImportError):
            model = kind.from_pretrained(order.model, dtype=torch.float32, experts_implementation="grouped_mm")
            return model, f"{version}, grouped_mm"
    return kind.from_pretrained(order.model, dtype=torch.float32), version


class Trainer:
    """Training steps of transformers on the model of the folder."""

    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        if order.device != "cpu":
            torch.set_float32_matmul_precision("high")
        model, self.version = load(order)
        self.model, self.device = model.train().to(order.device), order.device
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            groups(self.model), lr=order.setting["lr"], betas=(0.9, order.setting["beta2"]), fused=True
        )
        self.low = order.precision != "float32"
        self.loss = torch.compile(self._loss) if order.name == "transformers-compiled" else self._loss

    def _loss(self, inputs: Any, targets: Any) -> Any:
        import torch

        logits = self.model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def step(self, inputs: Any, targets: Any) -> Any:
        import torch

        with torch.autocast(self.device, torch.bfloat16) if self.low else contextlib.nullcontext():
            loss = self.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def groups(model: Any) -> list[dict[str, Any]]:
    """Return the parameters in two groups: matrices and tables decay, norms, biases and learned positions do not."""
    named = dict(model.named_parameters())
    decayed = {n for n, p in named.items() if p.dim() >= 2 and not any(part in n for part in POSITIONS)}
    return [
        {"params": [p for n, p in named.items() if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if n not in decayed], "weight_decay": 0.0},
    ]
