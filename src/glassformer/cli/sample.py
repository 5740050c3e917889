"""`glass sample`: continue a prompt."""

import contextlib
import gc
import json as json_module
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from glassformer.cli.common import (
    BUNDLED,
    Adapter,
    Device,
    InputError,
    Json,
    MinP,
    ModelSource,
    Precision,
    RepetitionPenalty,
    Seed,
    Temperature,
    Threads,
    TopK,
    TopP,
    fitted,
    option,
    set_threads,
)
from glassformer.config import choices

if TYPE_CHECKING:
    from glassformer.generation import Sampling
    from glassformer.generation.request import Draft
    from glassformer.generation.text import Continuation
    from glassformer.model import Model

STORED = ("float32", "bfloat16", "float16")
"""Precisions that are dtypes: the model is loaded in them."""

HELP = {
    "prompt": "Text to continue; with --ids, token ids such as '15 27 3'. Default: the text of --prompt-file.",
    "prompt_file": "Read the prompt from this UTF-8 file; `-` reads standard input. One final line break is removed. "
    "Default: PROMPT.",
    "max_new_tokens": "Largest number of tokens to generate. Default: 64, or what the context still holds.",
    "num_samples": "Number of continuations. Number i (from 0) is what --seed SEED+i gives alone.",
    "beams": "Number of beams. 1 samples; more search for the most likely text and do not sample.",
    "length_penalty": "Beam search divides a log-probability by length to this power: above 0 favours long text.",
    "stop": "Texts that end the output; they are not printed. Default: none.",
    "ids": "Read and print token ids instead of text.",
    "cache": "Keep keys and values of earlier tokens. Without, every step recomputes all tokens.",
    "draft": "Speculative decoding: folder of a smaller model that proposes tokens, or `lookup`, which copies from the "
    "text so far. Default: none.",
    "draft_tokens": "Number of tokens that the draft proposes at a time.",
    "engine": "Implementation. `native` is compiled kernels. `auto` uses them for 32 new tokens or more if they "
    "support the model and there is a compiler, and torch otherwise.",
}


def sample(
    prompt: Annotated[tyro.conf.Positional[str | None], option(HELP["prompt"], "PROMPT")] = None,
    prompt_file: Annotated[str | None, option(HELP["prompt_file"], "FILE")] = None,
    model: ModelSource = None,
    adapter: Adapter = None,
    max_new_tokens: Annotated[int | None, option(HELP["max_new_tokens"], "INT")] = None,
    num_samples: Annotated[int, option(HELP["num_samples"])] = 1,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    beams: Annotated[int, option(HELP["beams"])] = 1,
    length_penalty: Annotated[float, option(HELP["length_penalty"])] = 1.0,
    seed: Seed = 0,
    stop: Annotated[tuple[str, ...], option(HELP["stop"])] = (),
    ids: Annotated[bool, option(HELP["ids"])] = False,
    cache: Annotated[bool, option(HELP["cache"])] = True,
    draft: Annotated[str | None, option(HELP["draft"], "DIR|lookup")] = None,
    draft_tokens: Annotated[int, option(HELP["draft_tokens"])] = 4,
    engine: Annotated[choices.Engine, option(HELP["engine"])] = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
    threads: Threads = None,
    json: Json = False,
) -> int:
    """Continue a prompt with a model, token by token. Standard error names the implementation that ran."""
    text = _read_prompt(prompt, prompt_file)
    _check_search(beams, length_penalty, draft, draft_tokens)
    _check_samples(num_samples, seed, beams, temperature)
    source = model or BUNDLED
    with postponed_collection():
        loaded, tokenizer = _load(source, ids, precision, device, adapter, threads)
    from glassformer.generation.text import Continuation

    sampling = _sampling(beams, temperature, top_k, top_p, min_p, repetition_penalty)
    drafting = None if draft is None else _read_draft(draft, precision, device, source, tokenizer)
    job = Continuation(
        model=loaded, tokenizer=tokenizer, prompt=text, ids=ids, stop=stop, max_new_tokens=max_new_tokens,
        draft=drafting, draft_tokens=draft_tokens, engine=engine, precision=precision,
    )  # fmt: skip
    if json:
        results = [job.run(sampling, beams, length_penalty, seed + i, cache) for i in range(num_samples)]
        print(json_module.dumps({**results[0], "samples": results}))
        return 0
    for i in range(num_samples):
        _print_heading(i, num_samples, seed + i)
        if beams > 1:
            print(job.run(sampling, beams, length_penalty, seed, cache)["text"])
            break
        steps = job.start(sampling, seed + i, cache, whole_words=True)
        print(job.shown, end="", flush=True)
        for step in steps:
            print(job.add(step), end="", flush=True)
        print(job.rest())
        _report_draft(job)
    _report_engine(job)
    return 0


def _print_heading(i: int, count: int, seed: int) -> None:
    """Print which of several samples follows."""
    if count > 1:
        print(f"{'' if i == 0 else chr(10)}--- sample {i + 1} of {count}, seed {seed} ---")


def _report_engine(job: "Continuation") -> None:
    """Print which implementation ran, and why."""
    assert job.implementation is not None
    print(fitted(f"engine: {job.implementation.text()}", sys.stderr), file=sys.stderr)


def _report_draft(job: "Continuation") -> None:
    """Print how many proposals of the draft were accepted, if there was one."""
    if (acceptance := job.acceptance) is not None:
        accepted = f"{acceptance.accepted} of {acceptance.proposed} proposed tokens accepted ({acceptance.rate:.0%})"
        passes = f"{len(job.new)} tokens in {acceptance.passes} passes of the model"
        print(fitted(f"draft: {accepted}; {passes}", sys.stderr), file=sys.stderr)


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if (prompt is None) == (file is None):
        raise InputError('give either PROMPT or --prompt-file, one of them: glass sample "Once upon a time".')
    if prompt is not None:
        return prompt
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(str(file)).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"--prompt-file {file} cannot be read ({error.strerror}): give a text file.") from None
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"--prompt-file {file} is not UTF-8 text (byte {error.start}): convert it.") from None


def _check_search(beams: int, length_penalty: float, draft: str | None, draft_tokens: int) -> None:
    if beams < 1:
        raise InputError(f"--beams {beams} must be at least 1, which samples; 4 is a usual search.")
    if not math.isfinite(length_penalty):
        raise InputError(f"--length-penalty {length_penalty} must be a finite number; 1 is the usual one.")
    if beams == 1 and length_penalty != 1:
        raise InputError("glass sample without --beams has no use for --length-penalty: leave it out.")
    if draft is None and draft_tokens != 4:
        raise InputError("glass sample without --draft has no use for --draft-tokens: leave it out.")


def _check_samples(count: int, seed: int, beams: int, temperature: float) -> None:
    if count < 1:
        raise InputError(f"--num-samples {count} must be a whole number of at least 1.")
    if not 0 <= seed <= 2**63 - count:
        raise InputError(f"--seed {seed} must be between 0 and 2^63 - 1, and so must the seed of the last sample.")
    if count > 1 and (beams > 1 or temperature == 0):
        how = f"--beams {beams}" if beams > 1 else "--temperature 0"
        raise InputError(f"--num-samples {count} with {how} would give the same text {count} times: leave one out.")


def _sampling(beams: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float) -> "Sampling":
    """A beam search leaves the sampling defaults unused; greedy and beams share the penalty."""
    from glassformer.generation import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    return Sampling(0.0, repetition_penalty=penalty) if beams > 1 else sampling


def _load(
    source: str, ids: bool, precision: str, device: str, adapter: str | None, threads: int | None
) -> tuple[Any, Any]:
    """Return the model, and its tokenizer unless the prompt is given as ids."""
    from glassformer.weights import load_tokenizer

    if threads is not None:
        set_threads(threads)
    loaded = load_to_sample(source, precision, device, adapter)
    return loaded, None if ids else load_tokenizer(source)


def load_to_sample(source: str, precision: str, device: str, adapter: str | None = None) -> "Model":
    """The model on its device, in the dtype it is computed in: `generate` would otherwise keep a second copy."""
    from glassformer.model.device import choose_device
    from glassformer.weights import load, load_to_compute

    chosen = choose_device(device)
    if precision == "auto":
        return load_to_compute(source, adapter=adapter, device=chosen, require_finite=True)
    dtype = precision if precision in STORED else None
    return load(source, adapter=adapter, dtype=dtype, device=chosen, require_finite=True)


def _read_draft(source: str, precision: str, device: str, model: str, tokenizer: Any) -> "Draft":
    """A draft whose ids mean what the model's mean."""
    from glassformer.model import DecoderLM
    from glassformer.weights import load_tokenizer

    if source == "lookup":
        return "lookup"
    draft = load_to_sample(source, precision, device)
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


@contextlib.contextmanager
def postponed_collection() -> Iterator[None]:
    """Switch Python's garbage collector off; what was made meanwhile is never looked at again.

    After torch is imported, one pass over all objects takes 0.07 s. Two of them were a tenth of a short command, and
    modules do not become garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
