"""Errors of this package. Each message is one sentence with the value, the rule and the remedy."""

from collections.abc import Iterable

from glassformer.errors import GlassformerError


class WeightsError(GlassformerError):
    """A model folder cannot be read or written."""


SAVE_AS_GLASS = "save with format='glass' (`glass convert --to glass`)"
"""Remedy for a model that no Hugging Face family can represent: the glass format can store every model."""


class PickledError(WeightsError):
    """The weights are stored as a pickle, which is never opened."""


def pickled(what: object, by_transformers: bool = False) -> PickledError:
    """Return the error for a pickle that was given instead of safetensors. `what` is the beginning of the sentence.

    `by_transformers` is True if transformers can load it: it is a pytorch_model.bin with its config.json.
    """
    remedy = (
        "load the folder with transformers and call save_pretrained, which writes model.safetensors."
        if by_transformers
        else "in your own Python, read it with torch.load(file, weights_only=True) and write its tensors with "
        "safetensors.torch.save_file as model.safetensors, with the names and shapes that transformers uses for the "
        "architecture, into a folder with its config.json."
    )
    return PickledError(f"{what}, and pickles are never loaded because opening one can run code: {remedy}")


def summarize(items: Iterable[object], limit: int = 5) -> str:
    """Return the number of items and the first ones: `2: a, b`, or `7: a, b, c, d, e and 2 more`."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    return f"{len(texts)}: {shown}" + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
