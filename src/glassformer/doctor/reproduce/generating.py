"""Experiments with generate(): what it keeps between calls, and whether it drops the mask that it is given."""

from typing import Any

from torch import Tensor

from glassformer.doctor.probes.decoding import Generator
from glassformer.doctor.reproduce.experiment import APART, SAME, Experiment
from glassformer.doctor.reproduce.outside import padded_tokens


def _generate(e: Experiment) -> tuple[list[str], Generator]:
    """The function `generate(model, prompt, **given)` of a script, and how the model's own one is called."""
    generate = Generator(e.subject)
    if not generate.usable:
        raise LookupError("the model has no generate() with a number of new tokens")
    given: dict[str, Any] = {**generate.fixed, str(generate.count): 5, **generate.greedy()}
    out = e.subject.model.generate(e.subject.source(2), **given)
    take = ".sequences" if hasattr(out, "sequences") else "[0]" if isinstance(out, tuple) else ""
    if not take and not isinstance(out, Tensor):
        raise LookupError("generate() gives no tensor of tokens")
    arguments = "".join(f", {name}={value!r}" for name, value in given.items())
    return [
        "def generate(model, prompt, **given):",
        "    torch.manual_seed(0)",
        "    with torch.no_grad():",
        f"        return model.generate(prompt.clone(){arguments}, **given){take}",
        "",
        "",
    ], generate


def kept(e: Experiment) -> list[str]:
    """A prompt after another one, against a copy that has not seen the other; or logits before and after."""
    lines, _ = _generate(e)
    prompts = e.get("prompts", None)
    if prompts is None:
        return [
            *lines,
            "tokens = draw(2, 9, seed=3)",
            "a = logits(tokens)",
            "generate(model, draw(2, 7, seed=1))",
            "b = logits(tokens)",
            APART,
            SAME,
        ]
    first, second = (11, 11) if e.subject.kind == "seq2seq" else prompts
    return [
        "import copy",
        *lines,
        "fresh = copy.deepcopy(model)",
        f"first, second = draw(2, {first}, seed=1), draw(2, {second}, seed=2)",
        "expected = generate(fresh, second)",
        "generate(model, first)",
        "found = generate(model, second)  # the same prompt after another one",
        "print(expected.tolist(), found.tolist())",
        "same = found.shape == expected.shape and torch.equal(found, expected)",
        "measured, bound = 1 - same, 0  # 1 if the tokens are other ones",
    ]


def greedy(e: Experiment) -> list[str]:
    """Each new token against the largest of the model's own logits."""
    lines, generate = _generate(e)
    if e.subject.kind == "seq2seq" or generate.ends:
        raise LookupError("where its new tokens begin or end is not known here")
    cached = f", use_cache={e.get('use_cache', False)}" if "use_cache" in generate.names else ""
    length = min(e.get("prompt", 3), e.subject.limit - 6)
    return [
        *lines,
        f"prompt = draw(2, {length}, seed=1)",
        f"made = generate(model, prompt{cached})",
        f"made = made if torch.equal(made[:, :{length}], prompt) else torch.cat([prompt, made], 1)",
        "scores = logits(made[:, :-1])",
        "short = scores.amax(-1) - scores.gather(-1, made[:, 1:, None])[..., 0]",
        "# how far the logits of the chosen tokens lie below the largest",
        f"measured = float(short[:, {length - 1} :].max())",
        "bound = 1e-3 * float(scores.square().mean().sqrt())",
    ]


HEARD = [
    "class Heard(TorchFunctionMode):",
    '    """Keeps the logits of the last position that are computed meanwhile."""',
    "",
    "    def __init__(self):",
    "        super().__init__()",
    "        self.logits = []",
    "",
    "    def __torch_function__(self, func, types, args=(), kwargs=None):",
    "        out = func(*args, **(kwargs or {}))",
    "        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.dim() in (2, 3):",
    "            if (len(out), out.shape[-1]) == (2, V):",
    "                self.logits.append(out.detach().clone() if out.dim() == 2 else out[:, -1].detach().clone())",
    "        return out",
    "",
    "",
]


def padding_content(e: Experiment) -> list[str]:
    """The first logits inside generate() for two contents of the padding."""
    lines, generate = _generate(e)
    if generate.mask is None:
        raise LookupError("generate() takes no mask")
    if e.subject.kind == "seq2seq":
        padded = [
            "real = torch.arange(11) < torch.tensor([[8], [5]])  # 3 and 6 tokens of padding on the right",
            f"tokens = torch.where(real, draw(2, 11, seed=1), {e.pad})",
        ]
    else:
        padded = padded_tokens(e, str(e.get("side", "left")))[:2]
    return [
        "from torch.overrides import TorchFunctionMode",
        *lines,
        *HEARD,
        *padded,
        "contents = [torch.where(real, tokens, draw(2, tokens.shape[1], seed=seed)) for seed in (2, 3)]",
        "heard = []",
        "for prompt in contents:",
        "    with Heard() as mode:",
        f"        generate(model, prompt, {generate.mask}={e.calls.mask('real')})",
        "    heard.append(mode.logits)",
        "a, b = heard[0][0], heard[1][0]  # the logits that the first new token is taken from",
        APART,
        SAME,
    ]
