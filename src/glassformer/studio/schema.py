"""Request bodies and query strings as pydantic models, with the limits of the library and of the studio.

In JSON bodies types are strict (a number is not accepted as a string). Unknown fields, NaN and infinities are refused
everywhere. What depends on the model (a token id outside its vocabulary, a missing layer) is checked later, by the
library, which raises its own error.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from glassformer.sizing import Dtype, Optimizer
from glassformer.studio.settings import LIMITS

MAX_SAFE_INTEGER = 2**53
"""Largest integer that JavaScript represents exactly."""
MAX_BLOCKS, MAX_CONFIG_NUMBER = 1000, 10**7
"""Sizing counts parameter by parameter: larger configs are mistakes or attacks."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=LIMITS.text_characters)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=LIMITS.tokens)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Index = Annotated[int, Field(ge=0, le=10_000)]
Stop = Annotated[str, Field(max_length=200)] | Annotated[list[str], Field(max_length=4)]


def not_supported(value: Any) -> Any:
    """Refuse every value of a field that would change the text and is not implemented, but for its default."""
    if value:
        raise ValueError("this field is not supported, so leave it out")
    return value


Zero = Annotated[float, AfterValidator(not_supported)]
NoBias = Annotated[dict[str, float], AfterValidator(not_supported)]
NewTokens = Annotated[int, Field(ge=1, le=LIMITS.new_tokens)]


class ApiRequest(BaseModel):
    """Base class of all JSON bodies."""

    # Validators are built on first use, so that start-up does not wait for forty of them.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, defer_build=True)


class ModelRequest(ApiRequest):
    model: Name


class Query(ApiRequest):
    """Base class of all query strings: values are strings and are converted."""

    model_config = ConfigDict(strict=False)


class TextRequest(ModelRequest):
    """A model and its input: token ids or text.

    `target` is the input of the decoder of an encoder-decoder. Default: what the model itself generates greedily.
    """

    ids: Ids | None = None
    text: Text | None = None
    target: Ids | None = None

    @model_validator(mode="after")
    def has_exactly_one(self) -> Self:
        if (self.ids is None) == (self.text is None):
            raise ValueError("give either ids or text")
        return self


class Tokens(TextRequest):
    """`target_text` is the decoder's input of an encoder-decoder as text, instead of `target`."""

    target_text: Text | None = None


class SamplingRequest(ApiRequest):
    """Sampling parameters, with the limits of `glassformer.generation.Sampling`."""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0

    def sampling(self) -> dict[str, Any]:
        """Return the arguments of `Sampling`: the fields above."""
        return {name: getattr(self, name) for name in SamplingRequest.__annotations__}


class Next(TextRequest, SamplingRequest):
    count: Annotated[int, Field(ge=1, le=1000)] = 50


class Generate(TextRequest, SamplingRequest):
    max_new_tokens: Annotated[int, Field(ge=1, le=LIMITS.new_tokens)] = 64
    seed: Seed = 0
    cache: bool = True


class Beam(TextRequest):
    beams: Annotated[int, Field(ge=2, le=LIMITS.beams)] = 3
    steps: Annotated[int, Field(ge=1, le=LIMITS.steps)] = 8


class TensorRequest(TextRequest):
    site: Name
    head: Index | None = None


class Cell(TextRequest):
    site: Name
    index: Annotated[list[Index], Field(min_length=1, max_length=4)]


class Patterns(TextRequest):
    layer: Index | None = None
    where: Literal["self", "cross", "encoder"] = "self"


class HeadScores(ModelRequest):
    seed: Seed = 0


class Ablate(TextRequest):
    heads: Annotated[list[Annotated[list[Index], Field(min_length=2, max_length=2)]], Field(max_length=2000)]
    mode: Literal["zero", "mean"] = "zero"
    top: Annotated[int, Field(ge=1, le=100)] = 10


class Lens(TextRequest):
    top: Annotated[int, Field(ge=1, le=20)] = 5


class Attribution(TextRequest):
    answer: TokenId | None = None
    wrong: TokenId | None = None
    position: Annotated[int, Field(ge=-LIMITS.tokens, le=LIMITS.tokens)] = -1


class Patch(ModelRequest):
    clean: Ids | Text
    corrupt: Ids | Text
    answer: TokenId | None = None
    wrong: TokenId | None = None
    site: Literal["resid_pre", "attention.heads", "attention.out", "feedforward.out"] = "resid_pre"
    position: Annotated[int, Field(ge=-LIMITS.tokens, le=LIMITS.tokens)] = -1


class Positions(ApiRequest):
    """`pair` is the index of one (cosine, sine) pair of components."""

    kind: Literal["sinusoidal", "learned", "rotary", "alibi", "t5"]
    width: Annotated[int, Field(ge=2, le=1024)] = 64
    base: Annotated[float, Field(gt=1, le=1e9)] = 10000.0
    length: Annotated[int, Field(ge=2, le=1024)] = 128
    offset: Annotated[int, Field(ge=-1023, le=1023)] = 0
    heads: Annotated[int, Field(ge=1, le=64)] = 8
    pair: Annotated[int, Field(ge=0, le=511)] = 0
    model: Name | None = None

    @model_validator(mode="after")
    def has_even_width(self) -> Self:
        if self.width % 2:
            raise ValueError(f"width={self.width} must be even: components form pairs")
        return self


class CourseAction(ApiRequest):
    """What the page does with one problem (`answer`) or one coding exercise (`source`)."""

    action: Literal["read", "check", "hint", "new", "solution", "grade"]
    answer: Annotated[str, Field(max_length=2000)] = ""
    source: Annotated[str, Field(max_length=LIMITS.text_characters)] = ""


class RunClaim(ApiRequest):
    seed: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    broken: bool = False
    slow: bool = False
    knobs: Annotated[dict[Name, float], Field(max_length=20)] = {}


class FigureQuery(Query):
    """`seed`, `broken`, and the claim's knobs by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    seed: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    broken: bool = False

    @property
    def knobs(self) -> dict[str, float]:
        return dict(self.__pydantic_extra__)


class Train(ApiRequest):
    corpus: Name = "shakespeare"
    preset: Name = "nano"
    fields: Annotated[dict[Name, bool | int | float | str | None], Field(max_length=60)] = {}
    name: Annotated[str, Field(max_length=60)] = ""


class RunAction(Query):
    """What to do with a training run."""

    action: Literal["pause", "resume", "stop"]


class RunEventsQuery(Query):
    """`after` is the id of the last event that the client has received."""

    after: Annotated[int, Field(ge=0, lt=10**15)] = 0


class Doctor(ModelRequest):
    quick: bool = True


def check_config_numbers(value: Any) -> Any:
    """Refuse numbers and lists that are too large, at any depth of a config."""
    if isinstance(value, dict | list):
        if isinstance(value, list) and len(value) > MAX_BLOCKS:
            raise ValueError(f"a list of {len(value)} values is too long: use at most {MAX_BLOCKS}")
        for item in value.values() if isinstance(value, dict) else value:
            check_config_numbers(item)
    elif isinstance(value, int) and abs(value) > MAX_CONFIG_NUMBER:
        raise ValueError(f"{str(value)[:30]} is too large: use at most {MAX_CONFIG_NUMBER:,}")
    return value


class Size(ApiRequest):
    preset: Name | None = None
    model: Name | None = None
    config: Annotated[dict[str, Any], AfterValidator(check_config_numbers)] | None = None
    batch: Annotated[int, Field(ge=1, le=10**6)] = 1
    context: Annotated[int, Field(ge=1, le=10**7)] | None = None
    dtype: Dtype = "float32"
    optimizer: Optimizer = "adamw"

    @model_validator(mode="after")
    def has_exactly_one(self) -> Self:
        if sum(value is not None for value in (self.preset, self.model, self.config)) != 1:
            raise ValueError("give exactly one of preset, model and config")
        return self


class ChinchillaQuery(Query):
    """One of flops, params and tokens; `ratio` is tokens per parameter."""

    flops: Annotated[float, Field(gt=0, le=1e40)] | None = None
    params: Annotated[float, Field(gt=0, le=1e40)] | None = None
    tokens: Annotated[float, Field(gt=0, le=1e40)] | None = None
    ratio: Annotated[float, Field(gt=0, le=1e40)] | None = None


class CompletionRequest(ApiRequest):
    """OpenAI's completions. A field that is not implemented and would change the text accepts only its default."""

    model: Name
    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1, max_length=1)]
    max_tokens: NewTokens | None = 16
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    n: Literal[1] | None = 1
    best_of: Literal[1] | None = 1
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = False
    presence_penalty: Zero | None = 0.0
    frequency_penalty: Zero | None = 0.0
    logit_bias: NoBias | None = None
    suffix: Literal[""] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None


class ResponseFormat(ApiRequest):
    type: Literal["text"]


class ChatRequest(ApiRequest):
    """OpenAI's chat completions. A field that is not implemented and would change the text accepts only its default."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=2000)]
    max_completion_tokens: NewTokens | None = None
    max_tokens: NewTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    n: Annotated[int, Field(ge=1, le=8)] | None = 1
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    presence_penalty: Zero | None = 0.0
    frequency_penalty: Zero | None = 0.0
    logit_bias: NoBias | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="after")
    def has_consistent_fields(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self


class ChatPanel(ApiRequest):
    """A conversation of the chat panel."""

    model: Name
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=2000)]
    max_new_tokens: NewTokens = 256
    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed = 0


class EmbeddingRequest(ApiRequest):
    """OpenAI's embeddings; `pooling` and `normalize` are ours."""

    model: Name
    input: (
        Annotated[str, Field(min_length=1, max_length=LIMITS.text_characters)]
        | Ids
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=256)]
        | Annotated[list[Ids], Field(min_length=1, max_length=256)]
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling: Literal["mean", "cls"] = "mean"
    normalize: bool = True
    user: Annotated[str, Field(max_length=1000)] | None = None


def explain(error: ValidationError) -> tuple[str, bool, str | None]:
    """Return one sentence for an invalid body, whether it was not JSON at all, and the name of the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}.", True, None
    # In the location of an error, pydantic adds the name of the union's branch after the field.
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained-", "list[", "str")))
    rule = message[:1].lower() + message[1:]
    value = first["input"]
    shown = f"={value!r}"[:60] if isinstance(value, bool | int | float | str) else ""
    return (f"{field}{shown}: {rule}." if field else f"{rule}."), False, field or None
