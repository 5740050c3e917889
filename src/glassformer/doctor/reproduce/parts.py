"""Experiments with single parts of a model: norms, what softmax returns, initial sizes, shifted positions."""

from glassformer.doctor.probes.norms import norms_of
from glassformer.doctor.reproduce.experiment import APART, Experiment

PART = [
    "inputs = []",
    "hook = part.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach().clone()))",
]


def norm_axis(e: Experiment) -> list[str]:
    """Change one token of a norm's input: what it returns for the others must stay."""
    name = e.get("module", None)
    norm = next((n for n in norms_of(e.subject) if n.name == name), None)
    if norm is None or norm.channels_first:
        raise LookupError("the norm does not read (B,T,D)")
    last, others = ("[-1]", "[:-1]") if e.get("over", "time") == "batch" else ("[:, -1]", "[:, :-1]")
    return [
        f"part = model.get_submodule({name!r})",
        *PART,
        "logits(draw(3, 12, seed=1))",
        "hook.remove()",
        *(["part.train()"] if "train mode" in e.finding.why else []),
        "changed = inputs[0].clone()",
        f"changed{last} = changed{last}.flip(-1) * 1.7 + 0.3",
        "with torch.no_grad():",
        f"    a, b = part(inputs[0]){others}, part(changed){others}",
        APART,
        "bound = 1e-6 * float(a.square().mean().sqrt())  # a norm reads one token at a time",
    ]


def norm_formula(e: Experiment) -> list[str]:
    """What a norm returns for a vector of deviation 1e-3 over that for a large one, against the declared formula."""
    name, eps = e.get("module", None), e.finding.bound or e.get("eps", None)
    norm = next((n for n in norms_of(e.subject) if n.name == name), None)
    if norm is None or eps is None:
        raise LookupError("no norm is named, or no eps declared")
    lines = [
        "import copy",
        f"part = copy.deepcopy(model.get_submodule({name!r})).double()",
        f"z = torch.randn(1, 1, {norm.width}, generator=torch.Generator().manual_seed(3), dtype=torch.float64)",
        "z = (z - z.mean()) / z.std(unbiased=False)",
        "",
        "",
        "def gain(scale):",
        "    with torch.no_grad():",
        "        return (part(z * scale) - part(z * 0)) / z",
        "",
        "",
    ]
    if "unbiased" in e.finding.why:
        weight = next((n for n, p in norm.module.named_parameters() if p.numel() == norm.width and "bias" not in n), "")
        if not weight:
            raise LookupError("the norm has no weight to compare with")
        return [
            *lines,
            f"factor = float((gain(1e6) / part.{weight}.detach()).median())",
            f"measured, bound = abs(factor - 1), {0.1 / norm.width:.3g}  # dividing by D gives 1, by D - 1 less",
        ]
    return [
        *lines,
        "found = float((gain(1e-3) / gain(1e6)).median())",
        f"expected = 1e-3 / math.sqrt(1e-6 + {eps:g})  # of x / sqrt(var + eps)",
        'print(f"a vector of deviation 1e-3 is divided by {1e-3 / found:.4g}, declared is {1e-3 / expected:.4g}")',
        "measured, bound = abs(found - expected), 1e-3",
    ]


def init_deviation(e: Experiment) -> list[str]:
    """The standard deviation of a fresh matrix against the one that is declared or that its siblings have."""
    name, most = e.get("module", None), e.finding.bound
    names = {n for n, _ in e.subject.module.named_parameters()} if e.subject.module is not None else set()
    name = next((n for n in (name, f"{name}.weight") if n in names), None)
    if name is None or not most:
        raise LookupError("no matrix is named")
    return [
        f"deviation = float(dict(model.named_parameters())[{name!r}].detach().std())",
        f"measured, bound = deviation, {1.2 * most if e.finding.id.startswith('residual') else most:.4g}",
    ]


def growth(e: Experiment) -> list[str]:
    """The size of the residual stream after a block over that before it."""
    layer, most = e.get("layer", None), e.finding.bound
    names = [n for n in e.subject.blocks() if n.rpartition(".")[2] == str(layer)]
    if len(names) != 1 or not most or (e.finding.measured or 0) <= most:
        raise LookupError("no block is named, or it shrinks the stream")
    return [
        "sizes = []",
        "",
        "",
        "def keep(module, args, output):",
        "    output = output[0] if isinstance(output, tuple) else output",
        "    sizes.append(float((output.square().mean() / args[0].square().mean()).sqrt()))",
        "",
        "",
        f"model.get_submodule({names[0]!r}).register_forward_hook(keep)",
        "logits(draw(2, 24, seed=1))",
        f"measured, bound = sizes[0], {most:.4g}  # its initial weights explain at most this",
    ]


WEIGHTS = [
    "from torch.nn.attention import SDPBackend, sdpa_kernel",
    "from torch.utils._python_dispatch import TorchDispatchMode",
    "",
    "",
    "class Weights(TorchDispatchMode):",
    '    """Keeps what each softmax returns and over which axis, and whether a matmul reads it as it is."""',
    "",
    "    made, axes, read = [], [], []",
    "",
    "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):",
    '        name = str(func).split(".")[1]',
    '        if name in ("bmm", "mm", "baddbmm"):',
    "            given = [a.float().flatten().sort()[0] for a in args if isinstance(a, torch.Tensor)]",
    "            self.read += [i for i, w in enumerate(self.made) if any(torch.equal(w, g) for g in given)]",
    "        out = func(*args, **(kwargs or {}))",
    '        if name in ("_softmax", "_safe_softmax") and args[0].dim() > 2:',
    "            self.made.append(out.float().flatten().sort()[0])",
    "            self.axes.append(args[1] % args[0].dim() - args[0].dim())",
    "        return out",
    "",
    "",
    "with sdpa_kernel(SDPBackend.MATH), Weights():",
    "    logits(draw(2, 12, seed=1))",
]


def softmax_axis(e: Experiment) -> list[str]:
    return [
        *WEIGHTS,
        "measured, bound = sum(axis != -1 for axis in Weights.axes), 0  # softmaxes that do not run over the keys",
    ]


def weights_as_they_are(e: Experiment) -> list[str]:
    return [
        *WEIGHTS,
        "# attention weights that are changed before a matmul multiplies the values with them",
        "measured, bound = len(set(range(len(Weights.made))) - set(Weights.read)), 0",
    ]


def shifted(e: Experiment) -> list[str]:
    """All positions moved by the same number: a relative scheme gives the same logits, up to rounded angles."""
    name, offset = e.subject.interface.positions, e.get("offset", 5)
    if name is None or e.subject.kind == "seq2seq":
        raise LookupError("the model takes no positions")
    length = min(24, e.subject.limit)
    return [
        f"tokens, positions = draw(2, {length}, seed=12), torch.arange({length}).expand(2, -1)",
        f"a = logits(tokens, {name}=positions + {offset})",
        f"b = logits(tokens, {name}=positions)",
        APART,
        "bound = 1e-4 * float(b.square().mean().sqrt())  # rounded angles stay below",
    ]
