"""Run an ONNX folder with onnxruntime and compare it with our model."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glassformer.errors import install
from glassformer.finding import Finding
from glassformer.model import DecoderLM, EncoderLM, Seq2Seq

BOUND = 1e-4
"""Largest difference, relative to the largest output (at least 1). Measured: 2e-6."""
BATCH, LENGTH = 3, 20
CHUNKS = (7, 1, 1, 5, 6)
"""Lengths of the calls with which a decoder computes LENGTH tokens from an empty past."""


@torch.no_grad()
def compare_with_onnxruntime(folder: Path, model: DecoderLM | EncoderLM | Seq2Seq, seed: int = 0) -> list[Finding]:
    """Return what onnxruntime computes, compared with the model: padded batches, and chunks with a cache."""
    if find_spec("onnxruntime") is None:
        why = "onnxruntime is not installed, so the graph was not run."
        return [Finding.skip("onnxruntime-outputs", why, f"{install('export')} and convert again.")]
    generator = torch.Generator().manual_seed(seed)
    length = min(LENGTH, model.config.max_len or LENGTH)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, length), generator=generator)
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, : length // 4] = mask[2, : length // 2] = 0  # padded on the left
    match model:
        case DecoderLM():
            pairs = _decoder(folder, model, tokens, mask)
        case EncoderLM():
            pairs = _encoder(folder, model, tokens, mask.flip(1))
        case Seq2Seq():
            pairs = _seq2seq(folder, model, tokens, mask.flip(1))
    worst, largest, count = 0.0, 1.0, 0
    for ours, theirs in pairs:
        gap = (ours.double() - theirs.double()).abs()
        worst = max(worst, float(gap.max()) if gap.numel() else 0.0, float("inf") if not gap.isfinite().all() else 0.0)
        largest, count = max(largest, float(ours.abs().max())), count + gap.numel()
    remedy = "do not use the folder; report this, with the config of the model."
    why = f"float32 rounding, relative to the largest output {largest:.3g}; {BATCH} sequences, padded, in chunks"
    return [Finding.judge("onnxruntime-outputs", worst, BOUND * largest, why, remedy, outputs_compared=count)]


class Session:
    """A graph in onnxruntime."""

    def __init__(self, file: Path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value.shape for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(self, **inputs: Any) -> dict[str, Tensor]:
        """Return the outputs by name."""
        feed = {name: np.asarray(value) for name, value in inputs.items()}
        return {
            n: torch.from_numpy(np.array(v)) for n, v in zip(self.outputs, self.session.run(None, feed), strict=True)
        }

    def empty_past(self, batch: int, side: str = "") -> dict[str, Tensor]:
        """Return keys and values of no tokens."""
        shapes = {n: s for n, s in self.inputs.items() if n.startswith("past_key_values") and side in n}
        return {name: torch.zeros(batch, shape[1], 0, shape[3]) for name, shape in shapes.items()}


def next_past(outputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the keys and values of a call as the inputs of the next one."""
    return {n.replace("present", "past_key_values"): t for n, t in outputs.items() if n.startswith("present")}


def _decoder(folder: Path, model: DecoderLM, tokens: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    session = Session(folder / "model.onnx")
    hidden = model.encode(tokens, mask=mask.bool())
    ours = hidden if model.head is None else model.logits(hidden)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    past, start = session.empty_past(len(tokens)), 0
    for chunk in CHUNKS:
        end = min(start + chunk, tokens.shape[1])
        if start == end:
            break
        inputs = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end]}
        outputs = session.run(**inputs, position_ids=positions[:, start:end], **past)
        real = mask[:, start:end].bool()
        yield ours[:, start:end][real], outputs[session.outputs[0]][real]
        past, start = next_past(outputs), end


def _encoder(folder: Path, model: EncoderLM, tokens: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    session = Session(folder / "model.onnx")
    segments = None
    inputs = {"input_ids": tokens, "attention_mask": mask}
    if "token_type_ids" in session.inputs:
        segments = inputs["token_type_ids"] = (torch.arange(tokens.shape[1]) % 2).expand_as(tokens)
    hidden = model.encode(tokens, mask=mask.bool(), segments=segments)
    outputs = session.run(**inputs)
    real = mask.bool()
    yield (hidden if model.head is None else model.logits(hidden))[real], outputs[session.outputs[0]][real]
    if model.pooler is not None:
        yield model.pool(hidden), outputs["pooler_output"]
    one = {name: tensor[:1, :1] for name, tensor in inputs.items()}  # other sizes than those of the export
    hidden = model.encode(tokens[:1, :1], segments=None if segments is None else segments[:1, :1])
    yield (hidden if model.head is None else model.logits(hidden)), session.run(**one)[session.outputs[0]]


def _seq2seq(folder: Path, model: Seq2Seq, tokens: Tensor, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    encoder, decoder = (Session(folder / name) for name in ("encoder_model.onnx", "decoder_model.onnx"))
    memory = model.encode(tokens, mask.bool())
    target = tokens.flip(1)
    hidden = model.decode_hidden(target, memory, mask.bool())
    ours = hidden if model.head is None else model.logits(hidden)
    source = encoder.run(input_ids=tokens, attention_mask=mask)
    yield memory[mask.bool()], source["last_hidden_state"][mask.bool()]
    cross, past, start = next_past(source), decoder.empty_past(len(tokens), ".decoder."), 0
    for chunk in CHUNKS:
        end = min(start + chunk, target.shape[1])
        if start == end:
            break
        outputs = decoder.run(input_ids=target[:, start:end], encoder_attention_mask=mask, **past, **cross)
        yield ours[:, start:end], outputs[decoder.outputs[0]]
        past, start = next_past(outputs), end
