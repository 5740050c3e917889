"""How this package refuses: one sentence with the value, the rule and the remedy."""

from collections.abc import Iterable

from glassformer.errors import GlassformerError


class WeightsError(GlassformerError):
    """A folder that cannot be read or written. The message gives the value, the rule and the remedy."""


IN_OURS = "save with format='glass' (`glass convert --to glass`)"
"""The remedy for a model that no Hugging Face family can hold: our own folders hold every model."""


class PickledError(WeightsError):
    """Weights that are stored as a pickle, which is never opened."""


def pickled(what: object, by_transformers: bool = False) -> PickledError:
    """The error of a pickle, `what`, that was given for weights.

    `by_transformers`: transformers can load it, since it is a pytorch_model.bin with its config.json.
    """
    remedy = (
        "load the folder with transformers and call save_pretrained, which writes model.safetensors."
        if by_transformers
        else "in your own Python, read it with torch.load(file, weights_only=True) and write its tensors with "
        "safetensors.torch.save_file as model.safetensors, with the names and shapes that transformers uses for the "
        "architecture, into a folder with its config.json (importing nanoGPT checkpoints is not supported yet)."
    )
    return PickledError(f"{what}, and pickles are never loaded because opening one can run code: {remedy}")


def some(items: Iterable[object], limit: int = 5) -> str:
    """`3: a, b and c`, or the first `limit` of many with the count of the rest."""
    texts = [str(item) for item in items]
    shown = ", ".join(texts[:limit])
    return f"{len(texts)}: {shown}" + (f" and {len(texts) - limit} more" if len(texts) > limit else "")
