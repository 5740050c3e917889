"""`glass sample`: continue a prompt."""

import json as json_module
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli.common import InputError, Json, check_seed, refuse_nan, refuse_unused

if TYPE_CHECKING:
    from glassformer.generation import Sampling
    from glassformer.generation.speculate import Draft
    from glassformer.generation.text import Continuation
    from glassformer.model import Model


def sample(
    prompt: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(metavar="PROMPT", help="Text to continue; with --ids, token ids.")
    ],
    model: Annotated[
        str | None, tyro.conf.arg(help="A folder, or a hub name such as gpt2; none: the bundled bard.")
    ] = None,
    max_new_tokens: Annotated[int | None, tyro.conf.arg(help="64, or what the context holds.")] = None,
    temperature: Annotated[float, tyro.conf.arg(help="0 is greedy.")] = 0.8,
    top_k: int | None = 50,
    top_p: float = 0.95,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    beams: Annotated[int, tyro.conf.arg(help="More than 1: beam search, which does not sample.")] = 1,
    length_penalty: float = 1.0,
    seed: int = 0,
    stop: Annotated[tuple[str, ...], tyro.conf.arg(help="Texts that end the output.")] = (),
    ids: Annotated[bool, tyro.conf.arg(help="The prompt is token ids, and so is the output.")] = False,
    cache: bool = True,
    draft: Annotated[
        str | None, tyro.conf.arg(help="A smaller model's folder, or lookup: proposes tokens, which the model judges.")
    ] = None,
    draft_tokens: Annotated[int, tyro.conf.arg(help="How many it proposes at a time.")] = 4,
    dtype: Annotated[str | None, tyro.conf.arg(help="float32, bfloat16 or float16; the file's own by default.")] = None,
    json: Json = False,
) -> int:
    """Continue a prompt with a model, token by token."""
    check_seed(seed)
    _check_search(beams, length_penalty, draft, draft_tokens)
    from glassformer.generation.text import Continuation
    from glassformer.weights import load_tokenizer

    sampling = _sampling(beams, temperature, top_k, top_p, min_p, repetition_penalty)
    model = model or "bard"
    loaded = _load_to_sample(model, dtype)
    tokenizer = None if ids else load_tokenizer(model)
    job = Continuation(
        model=loaded,
        tokenizer=tokenizer,
        prompt=prompt,
        ids=ids,
        stop=stop,
        max_new_tokens=max_new_tokens,
        draft=None if draft is None else _read_draft(draft, dtype, model, tokenizer),
        draft_tokens=draft_tokens,
    )
    if json:
        result = job.run(sampling, beams, length_penalty, seed, cache)
        print(json_module.dumps(result))
    elif beams > 1:
        print(job.run(sampling, beams, length_penalty, seed, cache)["text"])
    else:
        for piece in job.pieces(sampling, seed, cache):
            print(piece, end="", flush=True)
        print()
    if not json:
        _tell_draft(job)
    return 0


def _check_search(beams: int, length_penalty: float, draft: str | None, draft_tokens: int) -> None:
    if beams < 1:
        raise InputError(f"--beams {beams} must be at least 1, which samples; 4 is a usual search.")
    if not math.isfinite(length_penalty):
        raise InputError(f"--length-penalty {length_penalty} must be a finite number; 1 is the usual one.")
    if beams == 1:
        given = {"length_penalty": length_penalty}
        refuse_unused("glass sample without --beams", given, (), {"length_penalty": 1.0})
    if draft is None:
        refuse_unused("glass sample without --draft", {"draft_tokens": draft_tokens}, (), {"draft_tokens": 4})


def _sampling(
    beams: int, temperature: float, top_k: int | None, top_p: float, min_p: float, penalty: float
) -> "Sampling":
    """A beam search leaves the sampling defaults unused; greedy and beams share the penalty."""
    from glassformer.generation import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    return Sampling(0.0, repetition_penalty=penalty) if beams > 1 else sampling


def _tell_draft(job: "Continuation") -> None:
    """What became of the proposals of a draft, where there was one."""
    if (was := job.acceptance) is not None:
        accepted = f"{was.accepted} of {was.proposed} proposed tokens accepted ({was.rate:.0%})"
        print(f"draft: {accepted}; {len(job.new)} tokens in {was.passes} passes of the model", file=sys.stderr)


def _load_to_sample(source: str, dtype: str | None) -> "Model":
    from glassformer.weights import load

    loaded = load(source, dtype=dtype)
    refuse_nan(loaded, source)
    if dtype is None and next(loaded.parameters()).dtype.itemsize == 2 and loaded.device.type == "cpu":
        loaded = loaded.float()  # half precisions are for storing and for accelerators: a CPU is slower in them
    return loaded


def _read_draft(source: str, dtype: str | None, model: str, tokenizer: Any) -> "Draft":
    """A draft whose ids mean what the model's mean."""
    from glassformer.model import DecoderLM
    from glassformer.weights import load_tokenizer

    if source == "lookup":
        return "lookup"
    draft = _load_to_sample(source, dtype)
    if not isinstance(draft, DecoderLM):
        raise InputError(f"the draft {source} is not a decoder-only model: give one, or `lookup`.")
    theirs = None if tokenizer is None else load_tokenizer(source)
    if theirs is not None:
        ours, known = tokenizer.get_vocab(), theirs.get_vocab()
        apart = sorted(token for token in ours.keys() | known.keys() if ours.get(token) != known.get(token))
        if apart:
            raise InputError(
                f"the ids of {apart[0]!r} are {known.get(apart[0], 'none')} in the draft {source} and "
                f"{ours.get(apart[0], 'none')} in the model {model}: they must share one vocabulary."
            )
    return draft
