"""Write docs/families.md: every Hugging Face family, tried on tiny random models.

    python -m tests.weights.page            logits, saving, GGUF, kernels: about three minutes on 2 cores
    python -m tests.weights.page --onnx     the ONNX export of each as well: about 20 minutes more
    python -m tests.weights.page --only gte --onnx gte      one family; the other rows of the page are kept

A cell is what this command saw. Without `--onnx`, that column is kept from the present page.
"""

import argparse
import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import transformers as hf

from glassformer import config as c
from glassformer.errors import GlassformerError
from glassformer.files import write_atomically
from glassformer.finding import Verdict
from glassformer.kernels.cpu.decode import stack
from glassformer.kernels.cuda.graph.parts import ALLOWED, ROUTED
from glassformer.kernels.registry import unsupported_fields
from glassformer.weights import load, save
from glassformer.weights.export import write_gguf_file, write_onnx_folder
from glassformer.weights.families import FAMILIES
from glassformer.weights.formats.gguf.architectures import ARCHITECTURES
from glassformer.weights.formats.unverified import UnverifiedError
from tests.weights import test_decoders, test_encoders, test_seq2seq
from tests.weights.tiny import batch, decoder_gap, logits_of, random_model, saved

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 53, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 6, "max_position_embeddings": 64}
LLAMA = {**SIZES, **HEADS, "num_key_value_heads": 2}
OTHERS: dict[str, Callable[[], tuple[type, object]]] = {
    "gpt2": lambda: (hf.GPT2LMHeadModel, hf.GPT2Config(**test_decoders.GPT)),
    "llama": lambda: (hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA)),
    "mistral": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**LLAMA, sliding_window=4)),
    "mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig(**LLAMA, num_local_experts=4)),
    "qwen2": lambda: (hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA)),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**LLAMA, head_dim=10)),
    "bert": lambda: (hf.BertForMaskedLM, hf.BertConfig(**SIZES, **HEADS, type_vocab_size=3)),
    "roberta": lambda: (hf.RobertaForMaskedLM, hf.RobertaConfig(**SIZES, **HEADS, type_vocab_size=3)),
    "distilbert": lambda: (
        hf.DistilBertForMaskedLM,
        hf.DistilBertConfig(vocab_size=97, dim=48, hidden_dim=53, n_layers=3, n_heads=6, max_position_embeddings=64),
    ),
    "t5": lambda: (hf.T5ForConditionalGeneration, hf.T5Config(**test_seq2seq.MT5)),
}
NEWER_TESTS = {"decoders": test_decoders, "encoders": test_encoders, "seq2seq": test_seq2seq}
OLDER_TESTS = {**dict.fromkeys(("mistral", "mixtral", "qwen2", "qwen3"), "llama"), "roberta": "bert"}
YES, NO = "yes", "no"
INTRODUCTION = """`gf.load` reads these {} model types of Hugging Face folders. Each was tried on a tiny random model:

* difference: of its logits to those of transformers in float32, the largest one relative to the largest logit (decoders
  padded on the left);
* saves: written with `format="hf"`, it loads in transformers as the same type with the same logits;
* GGUF: written as GGUF, llama.cpp computes the same logits; ONNX: exported, onnxruntime computes the same logits;
* CPU kernel: the compiled kernels compute it, or which config field they do not support (it then runs in torch);
* GPU kernel: the fused kernels of a captured CUDA graph compute every part of a decode step. `graph` with a config
  field: in the same graph, the modules of the engine compute the part that has this field. Encoders do not decode.

The tests in tests/weights cover both paddings, float64 and saving again. They also switch features off, one by one, and
expect the comparison to fail."""


class Row(NamedTuple):
    """One model type: what was seen."""

    type: str
    name: str
    difference: float
    saves: str
    gguf: str
    cpu: str
    gpu: str
    test: str


def references() -> Iterator[tuple[str, hf.PreTrainedModel, str]]:
    """Yield the first case of each model type: the type, a transformers model, and the file of its test."""
    seen = set()
    tables: list[tuple[ModuleType | None, str, str]] = [(None, case, OLDER_TESTS.get(case, case)) for case in OTHERS]
    tables += [(module, case, name) for name, module in NEWER_TESTS.items() for case in module.CASES]
    for table, case, test in tables:
        model = random_model(*OTHERS[case]()) if table is None else table.reference(case, torch.float32)
        kind = model.config.model_type
        if kind not in seen:
            seen.add(kind)
            yield kind, model, f"test_{test}.py"


def examine(kind: str, model: hf.PreTrainedModel, test: str, folder: Path) -> Row:
    """Try one family."""
    source = saved(model, folder / "in")
    ours = load(source)
    if ours.config.kind == "decoder":
        difference = decoder_gap(model, source, "left", torch.float32) / float(
            logits_of(model, "left", torch.float32).abs().max()
        )
    elif ours.config.kind == "encoder":
        difference = test_encoders.difference(model, ours, "right")
    else:
        difference = test_seq2seq.difference(model, ours, "right")
    save(ours, folder / "out", format="hf")
    again = type(model).from_pretrained(folder / "out", experts_implementation="eager").eval()
    saves = YES if again.config.model_type == kind and same(model, again) else NO
    on_cpu = reason(stack.unsupported_config(ours.config))
    exported = gguf(kind, ours, folder)
    return Row(kind, type(model).__name__, difference, saves, exported, on_cpu, on_gpu(ours.config), test)


@torch.no_grad()
def same(one, two) -> bool:
    tokens = batch("none")[0]
    given = {"decoder_input_ids": tokens[:, :7]} if one.config.is_encoder_decoder else {}
    a, b = (model(input_ids=tokens, **given).logits for model in (one, two))
    return float((a - b).abs().max()) <= 1e-4 * float(a.abs().max())


def reason(refused: str | None) -> str:
    field = None if refused is None else refused.partition("=")[0]
    return YES if field is None else NO if " " in field else f"no: {field}"


def on_gpu(config: c.ModelConfig) -> str:
    """What the fused kernels of a captured graph compute; the sizes of the tiny model do not count."""
    if config.kind == "encoder":
        return NO
    if config.kind == "seq2seq":
        return "graph"
    refused = {}
    for layer in range(config.n_layers):
        position, feedforward = config.layer_position(layer), config.layer_feedforward(layer)
        flat = dataclasses.replace(config, position=position, feedforward=feedforward, layer_kinds=())
        refused |= {name: None for name, _ in unsupported_fields(flat, ALLOWED) if not name.startswith(ROUTED)}
    outer = [name for name in refused if not any(name.startswith(f"{other}.") for other in refused)]
    return f"graph: {', '.join(outer)}" if outer else YES


def gguf(kind: str, model, folder: Path) -> str:
    try:
        _, findings, _ = write_gguf_file(model, folder / "model.gguf", "f32")
    except UnverifiedError:  # the tables must refuse what llama.cpp cannot load or computes otherwise
        raise
    except GlassformerError:
        known = any(kind in architecture.types for architecture in ARCHITECTURES)
        return "not with these settings" if known else NO
    run = [f for f in findings if f.id.startswith("llama.cpp") and f.verdict is Verdict.PASS]
    return YES if run else "written"


def onnx(model, folder: Path) -> str:
    try:
        _, findings, _ = write_onnx_folder(model, folder / "onnx")
    except GlassformerError as error:
        print(error, file=sys.stderr)
        return NO
    return YES if findings and all(f.verdict is Verdict.PASS for f in findings) else NO


def former_onnx() -> dict[str, str]:
    """The ONNX column of the present page."""
    if not PAGE.exists():
        return {}
    rows = re.findall(r"^\| `(\w[\w-]*)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {kind: cells.split("|")[4].strip() for kind, cells in rows}


def line(row: Row, exported: str) -> str:
    """The line of the page for one family."""
    cells = (row.name, f"{row.difference:.0e}", row.saves, row.gguf, exported, row.cpu, row.gpu, row.test)
    return f"| `{row.type}` | " + " | ".join(cells) + " |"


def former_lines() -> dict[str, str]:
    """The lines of the present page."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return {found[1]: found[0] for found in re.finditer(r"^\| `(\w[\w-]*)` \|.*\|$", text, re.M)}


def page(rows: list[str]) -> str:
    aliases = {family.name: [t for t in family.types if t != family.name] for family in FAMILIES}
    lines = [
        "# Families of models",
        "",
        f"<!-- Written by `python -m tests.weights.page` with transformers {hf.__version__}. -->",
        "",
        INTRODUCTION.format(len(rows)),
        "",
        "| type | class | difference | saves | GGUF | ONNX | CPU kernel | GPU kernel | test |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += rows
    named = [f"`{name}` also reads {', '.join(f'`{t}`' for t in types)}" for name, types in aliases.items() if types]
    lines += ["", "Other names of the same architectures: " + "; ".join(named) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--onnx", nargs="*", metavar="TYPE", help="Export these types to ONNX, too. Default: all.")
    options.add_argument("--only", nargs="+", metavar="TYPE", help="Try these types only, and keep the other rows.")
    given = options.parse_args()
    kept, lines, rows = former_onnx(), former_lines(), []
    for kind, model, test in references():
        if given.only and kind not in given.only and kind in lines:
            rows.append(lines[kind])
            continue
        with tempfile.TemporaryDirectory() as name:
            row = examine(kind, model, test, Path(name))
            wanted = given.onnx is not None and (not given.onnx or kind in given.onnx)
            exported = onnx(load(Path(name) / "in"), Path(name)) if wanted else kept.get(kind, "not tried")
        rows.append(line(row, exported))
        print(row, exported, flush=True)
    write_atomically(PAGE, page(rows).encode())


if __name__ == "__main__":
    main()
