"""Generate a text with a model during training, to show what it has learned so far."""

from typing import TYPE_CHECKING, Any

from glassformer.generation import Sampling, generate
from glassformer.generation.request import Engine
from glassformer.model import EncoderLM, Model, Seq2Seq
from glassformer.training import checkpoint

if TYPE_CHECKING:
    from glassformer.training.data.source import Source
    from glassformer.training.loop import TrainState

DEFAULT = Sampling(temperature=0.8, top_k=50)


def can_sample(model: Model) -> bool:
    """Return False for encoders, which do not generate, and for a context that cannot hold a second token."""
    return not isinstance(model, EncoderLM) and (model.config.max_len is None or model.config.max_len > 1)


def sample_text(
    model: Model,
    tokenizer: Any,
    prompt: str = "\n",
    sampling: Sampling | None = DEFAULT,
    *,
    length: int = 120,
    beams: int = 1,
    seed: int = 0,
    engine: Engine = "auto",
) -> str:
    """Return the prompt and up to `length` more tokens, as far as the context allows.

    A prompt that the tokenizer cannot encode is replaced with token 0. An encoder-decoder returns its output only.
    """
    try:
        ids = tokenizer.encode(prompt).tolist() or [0]
    except ValueError:
        ids = [0]
    room = (model.config.max_len or 10**9) - len(ids)
    out = generate(model, [ids], max(1, min(length, room)), sampling, beams=beams, seed=seed, engine=engine)
    shown = out.new[0] if isinstance(model, Seq2Seq) else out[0]
    return tokenizer.decode([i for i in shown if i < tokenizer.vocab_size])


def sample_state(state: "TrainState", data: "Source") -> str:
    """Return a text sampled from the current model. The random state of the run does not change."""
    state.settle()
    held = checkpoint.random_state(state.device)
    model = state.group.whole_model(state.model)
    engine: Engine = "auto" if state.run.lora is None else "torch"  # the kernels know no adapters
    text = ""
    if model is not None and state.group.is_main:
        text = sample_text(model, data.tokenizer, engine=engine).strip("\n")
    checkpoint.set_random_state(held, state.device)
    return text
