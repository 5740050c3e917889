"""The size of a run before it starts: its vocabulary, and how its steps use memory.

`sheet(run)` is `size.size` with the values of the run as defaults. Training and this module ask the same function for
the precision. Values that only training can find out (the alphabet of a corpus that is not here) are assumed, and every
assumption is stated in the notes of the sheet.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassformer.model import DecoderLM, Model, Seq2Seq, build
from glassformer.model.device import Choice, choose_for_training
from glassformer.sizing import BYTES, Dtype, Optimizer, Sheet, StepOptions, size
from glassformer.sizing.step import CHUNK_BYTES, CHUNKED_FROM, FROZEN_ROWS, KERNEL_LOGIT, PLAIN_LOGIT, head_matrix
from glassformer.training import accelerate
from glassformer.training.data import corpus
from glassformer.training.data.reading import stream
from glassformer.training.data.source import read_manifest
from glassformer.training.data.tasks import TaskData
from glassformer.training.data.tokenizer import ByteTokenizer, train_tokenizer
from glassformer.training.data.tokenizer import load as load_tokenizer
from glassformer.training.objective import has_plain_head
from glassformer.training.run import Run
from glassformer.training.session import fit_vocabulary
from glassformer.training.tuning.freeze import freeze
from glassformer.training.tuning.lora import target_layers

SHAKESPEARE_CHARACTERS = 65
"""The alphabet of tiny Shakespeare, a file whose hash is known: sizing need not download it."""
CHUNK_COPIES = {"cuda": {4: 8.0, 2: float(KERNEL_LOGIT)}, "cpu": {4: 4.0, 2: 2.0}}
"""Bytes alive for each logit while a chunk of the loss is computed, by width of the logits."""
FROZEN = "frozen matmuls"
"""The kernel that keeps copies of frozen matrices."""


@dataclass(frozen=True)
class Forecast:
    """A run with the vocabulary it will train with, how its steps use memory, and what had to be assumed."""

    run: Run
    options: StepOptions
    notes: tuple[str, ...]


def forecast(run: Run) -> Forecast:
    """Return what can be known of a run without training. Nothing is downloaded."""
    vocabulary, why = count_vocabulary(run)
    notes = [why] if why else []
    if vocabulary is not None:
        if not why and vocabulary != run.model.vocab_size:
            notes.append(f"Vocabulary: {vocabulary:,}, as the tokenizer of {run.data.corpus} has it.")
        run = fit_vocabulary(run, vocabulary)
    choice = _choose_machine(run)
    cuda, half = choice.device == "cuda", choice.dtype is torch.bfloat16
    if run.machine.precision == "auto":
        notes.append(f"machine.precision='auto' is {'bfloat16' if half else 'float32'}: {choice.why}.")
    chunked = has_plain_head(run.model) and run.model.vocab_size >= CHUNKED_FROM
    head_bytes = CHUNK_BYTES * 4 // PLAIN_LOGIT if half and not cuda else CHUNK_BYTES
    options = StepOptions(
        matmuls="bfloat16" if half else None,
        residual=run.machine.stream if half else None,
        average=run.optim.ema is not None,
        accumulate=run.loop.accumulate,
        fused=True,
        head_bytes=head_bytes if chunked else None,
        chunk_copies=CHUNK_COPIES["cuda" if cuda else "cpu"][2 if half else 4],
        smoothing=run.loss.label_smoothing > 0,
        z_loss=run.loss.z_loss > 0,
        evaluation=run.loop.batch // run.loop.accumulate,
        recompute=run.machine.recompute,
        **_trained(run),
    )
    if FROZEN in _kernels(run, choice, options):
        options = dataclasses.replace(options, keeps_rounded=half)
        if chunked and (options.adapted or head_matrix(run.model) in options.frozen):
            head_bytes = min(head_bytes, 4 * FROZEN_ROWS * run.model.vocab_size)
            options = dataclasses.replace(options, head_bytes=head_bytes)
    if run.machine.products == "float8":
        notes.append("The float8 copies of weights and activations are not counted.")
    if cuda:
        notes.append("Memory is counted for eager PyTorch in one process; compiled steps on a GPU were not measured.")
    return Forecast(run, options, tuple(notes))


def _kernels(run: Run, choice: Choice, options: StepOptions) -> list[str]:
    """Return the names of the kernels that a run with frozen parameters uses, as far as they change its memory."""
    machine = run.machine
    if not (options.frozen or options.adapted) or machine.recompute != "no" or machine.parallel == "fsdp":
        return []
    request = {"device": torch.device(choice.device), "dtype": choice.dtype, "frozen": True}
    return accelerate.choose(run.model, **request, native=machine.compile == "auto", compiled=machine.compile == "yes")


def _trained(run: Run) -> dict[str, Any]:
    """Return the options of a run that freezes parameters or trains adapters."""
    if run.lora is None and not run.optim.freeze:
        return {}
    model = build(run.model, device="meta")
    if run.lora is None:
        return {"frozen": tuple(freeze(model, run.optim.freeze)), "first_trained": _first_trained(model)}
    quantized = run.lora.quantize == "nf4"
    layers = tuple(target_layers(model, run.lora))
    return {"adapted": layers, "rank": run.lora.rank, "dora": run.lora.dora, "quantized": quantized}


def _first_trained(model: Model) -> tuple[tuple[str, int], ...]:
    """Return the first trained block of the only stack, if everything before it is frozen (`StepOptions`)."""
    if isinstance(model, Seq2Seq):
        return ()
    stack = "decoder" if isinstance(model, DecoderLM) else "encoder"
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if any(name.startswith("embed.") or ".position." in name or ".score_bias." in name for name in trained):
        return ()
    blocks = [int(name.split(".")[2]) for name in trained if name.startswith(f"{stack}.blocks.")]
    return ((stack, min(blocks, default=model.config.n_layers)),)


def _choose_machine(run: Run) -> Choice:
    """Return what training chooses on this machine. A run for a GPU can be sized without one."""
    machine = run.machine
    if machine.device == "cuda" and not torch.cuda.is_available():
        half = machine.precision != "float32"
        why = "there is no GPU here, and recent GPUs train in bfloat16"
        return Choice("cuda", torch.bfloat16 if half else torch.float32, why)
    return choose_for_training(machine.device, machine.precision, run.model.d_model)


def count_vocabulary(run: Run) -> tuple[int | None, str]:
    """Return the number of token ids of the run's tokenizer, and a sentence where it is not certain.

    None: it cannot be known here, and the model keeps the vocabulary that the run file gives it.
    """
    data = run.data
    if run.task is not None:
        return TaskData(run.task).tokenizer.vocab_size, ""
    if (prepared := read_manifest(Path(data.corpus).expanduser())) is not None:
        return prepared.tokenizer["vocab_size"], ""
    match data.tokenizer:
        case "start":
            return None, ""  # the model brings its vocabulary
        case "byte":
            return ByteTokenizer().vocab_size, ""
        case "bpe":
            if data.vocab_size is None:
                return None, _kept(run, "data.vocab_size is not set")
            return data.vocab_size, f"Vocabulary: {data.vocab_size:,}, as data.vocab_size asks; a short text has fewer."
        case "char" if data.corpus == "shakespeare":
            return SHAKESPEARE_CHARACTERS, ""
        case "char":
            try:
                texts = stream(corpus.find(data.corpus).documents(), data.field)
                return train_tokenizer("char", texts).vocab_size, ""
            except corpus.DataError as error:
                return None, _kept(run, str(error).split(". ")[0].rstrip("."))
        case path:
            try:
                return load_tokenizer(path).vocab_size, ""
            except corpus.DataError as error:
                return None, _kept(run, str(error).rstrip("."))


def _kept(run: Run, reason: str) -> str:
    return f"Vocabulary: {run.model.vocab_size:,} is assumed, as the model is configured: {reason}."


def sheet(
    run: Run,
    batch: int | None = None,
    context: int | None = None,
    dtype: Dtype | None = None,
    optimizer: Optimizer | None = None,
    source: int | None = None,
    name: str = "the run",
) -> Sheet:
    """Return the sheet of a run. Arguments that are given replace the values of the run."""
    found = forecast(run)
    run, options, notes = found.run, found.options, list(found.notes)
    used = []
    if batch is None:
        batch = run.loop.batch
        used.append(f"batch {batch:,}" + (f" in {options.accumulate} parts" if options.accumulate > 1 else ""))
    elif batch % options.accumulate:
        raise ValueError(f"batch={batch} is not a multiple of loop.accumulate={options.accumulate}: parts are equal.")
    options = dataclasses.replace(options, evaluation=batch // options.accumulate)
    if context is None:
        context = run.context
        used.append(f"context {context:,}")
    if optimizer is None:
        optimizer = run.optim.kind
        used.append(f"optimizer {optimizer}" + (" with averaged weights (EMA)" if options.average else ""))
    if dtype is None:
        dtype = "float32"
        matmuls = f", matmuls {options.matmuls}, residual stream {options.residual}" if options.matmuls else ""
        used.append(f"weights float32{matmuls}")
    else:
        options = dataclasses.replace(options, matmuls=None, residual=None)
        notes = [note for note in notes if not note.startswith("machine.precision")]
    if options.adapted:
        used.append(f"adapters of rank {options.rank} on {len(options.adapted)} layers")
    elif options.frozen:
        used.append(f"{len(options.frozen)} parameters frozen")
    lines = ([f"From {name}: {', '.join(used)}."] if used else []) + notes
    assert dtype in BYTES
    return dataclasses.replace(size(run.model, batch, context, dtype, optimizer, source, options), notes=tuple(lines))
