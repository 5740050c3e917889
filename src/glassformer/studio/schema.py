"""What a request may say: pydantic models with the limits of the library and of the studio.

Types are strict (a number is no text), unknown fields are refused, and so are NaN and infinities. What only a model can
judge (a token outside its vocabulary, a layer it lacks) is refused later, by the library, in its own words.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glassformer.sizing import Dtype, Optimizer
from glassformer.studio.settings import LIMITS

WHOLE = 2**53
"""JavaScript's last safe integer."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=LIMITS.text_characters)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=LIMITS.tokens)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Index = Annotated[int, Field(ge=0, le=10_000)]


class Asked(BaseModel):
    """The base of all requests."""

    # validators are built when a request first needs them: the page does not wait for those of forty kinds
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True, defer_build=True)


class AboutModel(Asked):
    model: Name


class AboutText(AboutModel):
    """A model and what it reads: ids, or a text. An encoder-decoder's `target` is what its decoder reads; its own
    greedy answer when it is left out."""

    ids: Ids | None = None
    text: Text | None = None
    target: Ids | None = None

    @model_validator(mode="after")
    def one_of_them(self) -> Self:
        if (self.ids is None) == (self.text is None):
            raise ValueError("give either ids or text")
        return self


class Tokens(AboutText):
    """`target_text` is the decoder's text of an encoder-decoder; without it and `target`, its own answer is told."""

    target_text: Text | None = None


class Sampled(Asked):
    """The limits of `glassformer.generation.Sampling`."""

    temperature: Annotated[float, Field(ge=0, le=1000)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=WHOLE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0


class Next(AboutText, Sampled):
    count: Annotated[int, Field(ge=1, le=1000)] = 50


class Generate(AboutText, Sampled):
    max_new_tokens: Annotated[int, Field(ge=1, le=LIMITS.new_tokens)] = 64
    seed: Seed = 0
    cache: bool = True


class Beam(AboutText):
    beams: Annotated[int, Field(ge=2, le=LIMITS.beams)] = 3
    steps: Annotated[int, Field(ge=1, le=LIMITS.steps)] = 8


class OneTensor(AboutText):
    site: Name
    head: Index | None = None


class Cell(AboutText):
    site: Name
    index: Annotated[list[Index], Field(min_length=1, max_length=4)]


class Patterns(AboutText):
    layer: Index | None = None
    where: Literal["self", "cross", "encoder"] = "self"


class HeadScores(AboutModel):
    seed: Seed = 0


class Ablate(AboutText):
    heads: Annotated[list[Annotated[list[Index], Field(min_length=2, max_length=2)]], Field(max_length=2000)]
    mode: Literal["zero", "mean"] = "zero"
    top: Annotated[int, Field(ge=1, le=100)] = 10


class Lens(AboutText):
    top: Annotated[int, Field(ge=1, le=20)] = 5


class Attribution(AboutText):
    answer: TokenId | None = None
    wrong: TokenId | None = None
    position: Annotated[int, Field(ge=-LIMITS.tokens, le=LIMITS.tokens)] = -1


class Patch(AboutModel):
    clean: Ids | Text
    corrupt: Ids | Text
    answer: TokenId | None = None
    wrong: TokenId | None = None
    site: Literal["resid_pre", "attention.heads", "attention.out", "feedforward.out"] = "resid_pre"
    position: Annotated[int, Field(ge=-LIMITS.tokens, le=LIMITS.tokens)] = -1


class Positions(Asked):
    kind: Literal["sinusoidal", "learned", "rotary", "alibi", "t5"]
    width: Annotated[int, Field(ge=2, le=1024)] = 64
    base: Annotated[float, Field(gt=1, le=1e9)] = 10000.0
    length: Annotated[int, Field(ge=2, le=1024)] = 128
    offset: Annotated[int, Field(ge=-1023, le=1023)] = 0
    heads: Annotated[int, Field(ge=1, le=64)] = 8
    pair: Annotated[int, Field(ge=0, le=511)] = 0
    model: Name | None = None

    @model_validator(mode="after")
    def even(self) -> Self:
        if self.width % 2:
            raise ValueError(f"width={self.width} must be even: components stand in pairs")
        return self


class RunClaim(Asked):
    seed: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    broken: bool = False
    slow: bool = False
    knobs: Annotated[dict[Name, float], Field(max_length=20)] = {}


class Train(Asked):
    corpus: Name = "shakespeare"
    preset: Name = "nano"
    fields: Annotated[dict[Name, bool | int | float | str | None], Field(max_length=60)] = {}
    name: Annotated[str, Field(max_length=60)] = ""


class Doctor(AboutModel):
    quick: bool = True


class Size(Asked):
    preset: Name | None = None
    model: Name | None = None
    config: dict[str, Any] | None = None
    batch: Annotated[int, Field(ge=1, le=10**6)] = 1
    context: Annotated[int, Field(ge=1, le=10**7)] | None = None
    dtype: Dtype = "float32"
    optimizer: Optimizer = "adamw"

    @model_validator(mode="after")
    def one_of_them(self) -> Self:
        if sum(value is not None for value in (self.preset, self.model, self.config)) != 1:
            raise ValueError("give exactly one of preset, model and config")
        return self


class Completion(Asked):
    """OpenAI's completions. Fields that would change the answer and are not implemented accept their default only."""

    model: Name
    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1, max_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=LIMITS.new_tokens)] | None = 16
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Field(max_length=200)] | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None
    n: Literal[1] | None = 1
    best_of: Literal[1] | None = 1
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = False
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    suffix: Literal[""] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None


def explain(error: ValidationError) -> tuple[str, bool, str | None]:
    """One sentence for a refused body, whether it was no JSON at all, and the field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}.", True, None
    # of a union, the name of the branch that was tried follows the field
    field = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("constrained-", "list[", "str")))
    rule = message[:1].lower() + message[1:]
    return (f"{field}: {rule}." if field else f"{rule}."), False, field or None
