"""A model as a GGUF file for llama.cpp, every matrix in the same precision, and no tokenizer."""

from pathlib import Path

from glassformer.bench.peers.base import library
from glassformer.model import Model
from glassformer.weights.formats.gguf.vocabulary import write_vocabulary
from glassformer.weights.formats.gguf.write import describe, write_tensors

KINDS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}


def write(path: Path, model: Model, precision: str) -> None:
    """Write the file at `path`. Matrices in the precision, everything else (norms, biases, positions) in float32.

    The export of `weights` keeps the output matrix in 8 bits where the others have 4. Here it has 4 too, as ours does.
    """
    described = describe(model.config, model.state_dict())
    vocabulary = write_vocabulary(None, model.config.vocab_size, model.config.special, None)
    gguf = library("gguf")
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[KINDS[precision]]][0]

    def kind_of(name: str, shape: tuple[int, ...], exact: bool) -> str:
        return "F32" if len(shape) == 1 or exact or shape[-1] % block else KINDS[precision]

    write_tensors(described, path, kind_of, vocabulary, "bench")
