"""gpt-fast from a checkout: compiled, its own architecture with as many parameters and random weights.

Rotary, RMSNorm and a gated feed-forward, whatever parts our model has. Widths, heads and key/value heads are ours. The
width of the feed-forward is chosen so that a layer has as many parameters (`shape`), so as many weights are read per
token. For a model of Llama's shape that is its own width; for GPT-2 it is two thirds of it, in three matrices instead
of two. Its ids cannot be compared. It is made for bf16, and its attention does not compile for a CPU in float32.
"""

import sys
import types
from typing import Any

from glassformer.bench.peers.base import Mark, Order, library
from glassformer.config import ModelConfig

STEP = 16
"""The feed-forward is a multiple of this, as kernels for tensor cores need."""


def shape(config: ModelConfig, length: int) -> dict[str, int]:
    """Return the arguments of its model with as many parameters per layer as ours, for sequences of this length."""
    heads = max(1, config.d_model // config.d_head)  # its heads always share the width of the model
    groups = min(config.n_kv_heads, heads)
    width = config.d_model // heads
    matrices = 3 if config.feedforward.kind == "gated" else 2
    ours = config.n_heads * (config.d_head + config.d_value) + config.n_kv_heads * (config.d_head + config.d_value)
    ours += matrices * config.d_ff
    hidden = (ours - 2 * config.d_model - 2 * groups * width) / 3
    return {
        "block_size": max(1024, length + 64), "vocab_size": config.vocab_size, "n_layer": config.n_layers,
        "n_head": heads, "n_local_heads": groups, "dim": config.d_model,
        "intermediate_size": max(STEP, round(hidden / STEP) * STEP),
    }  # fmt: skip


def modules(checkout: str) -> tuple[Any, Any]:
    """Return its modules `model` and `generate`."""
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    # tokens are ids here: what reads text need not be installed
    sys.modules["tokenizer"] = types.ModuleType("tokenizer")
    sys.modules["tokenizer"].get_tokenizer = None  # type: ignore[attr-defined]
    return library("model"), library("generate")


def build(theirs: Any, shape: dict[str, int], device: str) -> Any:
    """Return its model with random weights in bf16."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        model = theirs.Transformer(theirs.ModelArgs(**shape)).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.02)
    return model


class Peer:
    def __init__(self, order: Order):
        import torch

        from glassformer.weights import load_config

        torch.set_num_threads(order.threads)
        self.version, self.device = "checkout", order.device
        theirs, self.theirs = modules(order.checkout)
        self.model = build(theirs, shape(load_config(order.model), order.length), order.device)
        if order.precision == "int8":
            handler = library("quantize").WeightOnlyInt8QuantHandler(self.model)
            state = handler.create_quantized_state_dict()
            self.model = handler.convert_for_runtime()
            self.model.load_state_dict(state, assign=True)
            self.model.to(order.device)
        # as its --compile and --compile_prefill do
        mode = None if order.device == "cpu" else "reduce-overhead"
        self.theirs.decode_one_token = torch.compile(self.theirs.decode_one_token, mode=mode, fullgraph=True)
        if order.device == "cpu" or order.task == "prefill":
            self.theirs.prefill = torch.compile(self.theirs.prefill, fullgraph=True, dynamic=True)

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        import torch

        batch = len(prompts)  # it gives every sequence the same prompt
        prompt = torch.tensor(prompts[0], dtype=torch.int, device=self.device)
        if new == 1:  # its generate joins the tokens after the first, and there are none
            with torch.device(self.device):
                self.model.setup_caches(max_batch_size=batch, max_seq_length=len(prompt) + 1)
            with torch.no_grad():
                positions = torch.arange(len(prompt), device=self.device)
                token = self.theirs.prefill(self.model, prompt.repeat(batch, 1), positions, temperature=1.0, top_k=1)
            mark()
            first: list[list[int]] = token.view(batch, 1).tolist()
            return first
        made, _ = self.theirs.generate(
            self.model, prompt, new, batch_size=batch, interactive=False, draft_model=None,
            callback=lambda _: mark(), temperature=1.0, top_k=1,
        )  # fmt: skip
        rows: list[list[int]] = made[:, len(prompts[0]) :].tolist()
        return rows
