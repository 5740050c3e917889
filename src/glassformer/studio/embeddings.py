"""`/v1/embeddings` in OpenAI's format: one vector for each text, from an encoder.

The vector is the mean of the hidden states of all real tokens, or that of the first token (`pooling: cls`), with a
Euclidean norm of 1 (`normalize: false` leaves it as it is). `encoding_format: base64` is little-endian float32.
"""

import base64
from typing import Any

from glassformer.studio.errors import StudioError
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.schema import EmbeddingRequest


def embed(models: ModelStore, request: EmbeddingRequest) -> dict[str, Any]:
    """Return one embedding for each input, in order."""
    import torch

    from glassformer.generation import encode
    from glassformer.model import EncoderLM

    loaded = models.get(request.model)
    model: Any = loaded.model
    if not isinstance(model, EncoderLM):
        raise StudioError(f"{loaded.name} is not an encoder, and embeddings come from encoders: name another model.")
    width = loaded.config.d_model
    if request.dimensions not in (None, width):
        raise StudioError(f"dimensions={request.dimensions} is not the width of {loaded.name}, {width}: leave it out.")
    inputs = _inputs(loaded, request.input)
    states = encode(model, inputs)
    vectors = torch.stack([one[0] if request.pooling == "cls" else one.float().mean(0) for one in states]).float()
    if request.normalize:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    rows = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format or "float")}
        for index, vector in enumerate(vectors.cpu().numpy())
    ]
    count = sum(map(len, inputs))
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": rows, "model": request.model, "usage": usage}


def _inputs(loaded: LoadedModel, given: Any) -> list[list[int]]:
    """Return token ids of one text, several texts, one list of ids, or several."""
    rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    return [loaded.check_ids(loaded.encode(row) if isinstance(row, str) else row) for row in rows]


def _encoded(vector: Any, format: str) -> Any:
    return vector.tolist() if format == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
