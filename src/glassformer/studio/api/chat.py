"""The chat panel: the rendered prompt token by token, and the answer with the probability of each token."""

from typing import Any

from glassformer.studio import schema
from glassformer.studio.api.inputs import top_tokens
from glassformer.studio.chat import renderer_of
from glassformer.studio.events import Emit
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.openai import TextGeneration

ALTERNATIVES = 5
"""Most likely tokens that are sent with each token of an answer."""


def chat(models: ModelStore, request: schema.ChatPanel, emit: Emit) -> None:
    """Emit `prompt` with the rendered tokens, `tokens` for each piece of the answer, then `done`."""
    from glassformer.chat.formats import read_messages
    from glassformer.chat.session import fit

    loaded = models.get(request.model)
    renderer = renderer_of(loaded)
    messages = read_messages(request.messages, "messages", answers=False)
    prompt, dropped = fit(renderer, messages, loaded.config.max_len, request.max_new_tokens)
    special = {renderer.tokenizer.token_to_id(text) for text in renderer.special}
    pieces = [{"id": i, "piece": loaded.token_text(i), "special": i in special} for i in prompt]
    emit("prompt", {"tokens": pieces, "dropped": dropped})
    generation = TextGeneration(
        loaded,
        loaded.check_ids(prompt),
        request.max_new_tokens,
        request.temperature,
        request.top_p,
        request.seed,
        ends=tuple(renderer.ends),
        keep_steps=True,
    )
    text = ""
    for piece in generation.pieces():
        text += piece
        emit("tokens", {"text": piece, "tokens": _described(loaded, generation)})
    rest = _described(loaded, generation)
    emit("done", {"text": text, "ids": generation.new, "finish": generation.finish, "tokens": rest})


def _described(loaded: LoadedModel, generation: TextGeneration) -> list[dict[str, Any]]:
    """Return the new tokens with their probability under the model, and the most likely ones in their place."""
    found = []
    for step in generation.take_steps():
        p = float(step.logits.double().softmax(-1)[step.id])
        top = [{"piece": row["piece"], "p": row["p"]} for row in top_tokens(loaded, step.logits, ALTERNATIVES)]
        found.append({"id": step.id, "piece": loaded.token_text(step.id), "p": p, "top": top})
    return found
