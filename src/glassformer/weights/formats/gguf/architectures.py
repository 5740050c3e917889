"""The architectures of llama.cpp that models are written as and read from: one `Architecture` each.

To add one: list the keys of its metadata with the keys of config.json, the tensors whose names or layouts are not the
usual ones, and the values that llama.cpp assumes without a key. `write.py` and `read.py` use nothing else.
"""

from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.architecture import Architecture
from glassformer.weights.formats.gguf.dense import DENSE
from glassformer.weights.formats.gguf.latent import DEEPSEEK2
from glassformer.weights.formats.gguf.mixtures import MIXTURES

ARCHITECTURES = (*DENSE, *MIXTURES, DEEPSEEK2)
"""Every architecture. Those of families that are not read yet are used when they are."""
TYPES = frozenset(kind for architecture in ARCHITECTURES for kind in architecture.types)
"""The Hugging Face model types that can be written."""


def find(name: object) -> Architecture:
    """Return an architecture by the value of `general.architecture`."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise WeightsError(f"general.architecture={name!r} is not known: known are {known}.")


def for_type(model_type: str) -> Architecture:
    """Return the architecture as which a Hugging Face model type is written."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.types:
            return architecture
    known = ", ".join(kind for architecture in ARCHITECTURES for kind in architecture.types)
    raise WeightsError(f"a {model_type} model cannot be written as GGUF: known types are {known}; use --to hf.")
