"""gpt-fast from a checkout: compiled, its own architecture with as many parameters and random weights.

Rotary, RMSNorm and a gated feed-forward instead of GPT-2's parts: three matrices of 8/3 D rows hold what GPT-2's two of
4 D do, so as many weights are read per token. Its ids cannot be compared. It is made for bf16, and its attention does
not compile for a CPU in float32.
"""

import sys
import types
from typing import Any

from glassformer.bench.peers.base import Mark, Order, config_of, library


class Peer:
    def __init__(self, order: Order):
        import torch

        torch.set_num_threads(order.threads)
        self.version = "checkout"
        sys.path.insert(0, order.checkout)
        # tokens are ids here: what reads text need not be installed
        sys.modules["tokenizer"] = types.ModuleType("tokenizer")
        sys.modules["tokenizer"].get_tokenizer = None  # type: ignore[attr-defined]
        self.theirs: Any = library("generate")
        self.model = self._build(config_of(order))
        if order.precision == "int8":
            handler = library("quantize").WeightOnlyInt8QuantHandler(self.model)
            state = handler.create_quantized_state_dict()
            self.model = handler.convert_for_runtime()
            self.model.load_state_dict(state, assign=True)
        # as its --compile and --compile_prefill do
        self.theirs.decode_one_token = torch.compile(self.theirs.decode_one_token, fullgraph=True)
        self.theirs.prefill = torch.compile(self.theirs.prefill, fullgraph=True, dynamic=True)

    @staticmethod
    def _build(cfg: dict[str, Any]) -> Any:
        import torch

        theirs = library("model")
        shape = theirs.ModelArgs(
            block_size=cfg["n_positions"], vocab_size=cfg["vocab_size"], n_layer=cfg["n_layer"], n_head=cfg["n_head"],
            dim=cfg["n_embd"], intermediate_size=2 * cfg["n_inner"] // 3,
        )  # fmt: skip
        torch.manual_seed(0)
        model = theirs.Transformer(shape).to(torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, 0.0, 0.02)
        return model

    def generate(self, prompts: tuple[tuple[int, ...], ...], new: int, mark: Mark) -> list[list[int]]:
        import torch

        batch, prompt = len(prompts), torch.tensor(prompts[0], dtype=torch.int)  # it gives every row the same prompt
        if new == 1:  # its generate joins the tokens after the first, and there are none
            self.model.setup_caches(max_batch_size=batch, max_seq_length=len(prompt) + 1)
            with torch.no_grad():
                positions = torch.arange(len(prompt))
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
