"""nanoGPT from a checkout: no cache, so every token recomputes what came before it; and its training step."""

import contextlib
import sys
from typing import Any

from glassformer.bench.peers.base import Mark, Order, arrays, config_of, library

_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def load(order: Order) -> Any:
    """nanoGPT's GPT with the model's weights: its linears hold (out, in), Hugging Face's Conv1D (in, out)."""
    import torch

    sys.path.insert(0, order.checkout)
    theirs = library("model")
    cfg, tensors = config_of(order), arrays(order)
    # biases of zero are left out, unless training would change them
    has_bias = bool(order.setting.get("loaded")) or any(
        value.any() for name, value in tensors.items() if name.endswith(".bias")
    )
    shape = theirs.GPTConfig(
        block_size=cfg["n_positions"], vocab_size=cfg["vocab_size"], n_layer=cfg["n_layer"], n_head=cfg["n_head"],
        n_embd=cfg["n_embd"], dropout=0.0, bias=has_bias,
    )  # fmt: skip
    model = theirs.GPT(shape)
    state = {}
    for name, value in tensors.items():
        if name.endswith(".bias") and not has_bias:
            continue
        state[f"transformer.{name}"] = torch.from_numpy(value.T.copy() if name.endswith(_TRANSPOSED) else value)
    state["lm_head.weight"] = state["transformer.wte.weight"]
    kept = {name for name in model.state_dict() if not name.endswith(".attn.bias")}  # old masks are buffers
    if kept != set(state):
        raise ValueError(f"nanoGPT has other tensors: {', '.join(sorted(kept ^ set(state))[:3])}")
    model.load_state_dict(state, strict=False)
    if cfg["activation_function"] != "gelu":  # its own is the exact GELU; GPT-2's is the approximate one
        for block in model.transformer.h:
            block.mlp.gelu = torch.nn.GELU(approximate="tanh")
    return model


class Peer:
    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        self.version, self.device = "checkout", order.device
        self.model = load(order).to(getattr(torch, order.precision)).eval().to(order.device)

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts, device=self.device)
        for _ in range(new):  # its generate keeps nothing between tokens: one by one is the same work
            ids = self.model.generate(ids, 1, top_k=1)
            mark()
        rows: list[list[int]] = ids[:, -new:].tolist()
        return rows


def training_step(model: Any, optimizer: Any, context: Any, inputs: Any, targets: Any) -> Any:
    """Take one step as nanoGPT's train.py does: autocast, backward, clip at 1, AdamW. Return the loss as a tensor."""
    import torch

    with context:
        _, loss = model(inputs, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


class Trainer:
    """Training steps of nanoGPT on the model of the folder; on a GPU compiled, as its README describes."""

    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        self.version, device = "checkout", order.device
        if device != "cpu":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as its train.py
        model = load(order).train().to(device)
        rate, beta = order.setting.get("lr", 1e-3), order.setting.get("beta2", 0.99)
        self.optimizer = model.configure_optimizers(0.1, rate, (0.9, beta), device)
        self._spare(model.transformer.wpe.weight)
        bf16 = order.precision == "bfloat16"
        self.context = torch.autocast(device, torch.bfloat16) if bf16 else contextlib.nullcontext()
        self.model = model if device == "cpu" else torch.compile(model)

    def _spare(self, table: Any) -> None:
        """Build AdamW without decay of learned positions, as ours, so that losses can be compared at every step."""
        decayed, spared = self.optimizer.param_groups
        decayed["params"] = [p for p in decayed["params"] if p is not table]
        spared["params"].append(table)

    def step(self, inputs: Any, targets: Any) -> Any:
        return training_step(self.model, self.optimizer, self.context, inputs, targets).detach()
