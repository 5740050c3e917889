"""Experiments that read what goes into softmax: dtype, mask constant, visible keys."""

from glassformer.doctor.probes.structure.recording import recorded
from glassformer.doctor.reproduce.experiment import Experiment
from glassformer.doctor.reproduce.outside import padded_tokens

SOFTMAXES = [
    "from torch.nn.attention import SDPBackend, sdpa_kernel",
    "from torch.utils._python_dispatch import TorchDispatchMode",
    "",
    "",
    "class Softmaxes(TorchDispatchMode):",
    '    """Keeps what goes into each softmax."""',
    "",
    "    seen = []",
    "",
    "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):",
    '        if "softmax" in str(func):',
    "            self.seen.append(args[0].clone())",
    "        return func(*args, **(kwargs or {}))",
    "",
    "",
]


def dtype(e: Experiment) -> list[str]:
    return [
        *SOFTMAXES,
        "with sdpa_kernel(SDPBackend.MATH), Softmaxes():",
        "    logits(draw(2, 12, seed=1))",
        "widths = [s.element_size() for s in Softmaxes.seen]",
        "own = max(p.element_size() for p in model.parameters())",
        "measured, bound = own - min(widths), 0  # bytes that the narrowest softmax input lacks",
    ]


def mask_constant(e: Experiment) -> list[str]:
    plain = ["tokens, given = draw(2, 12, seed=1), {}"]
    masked = padded_tokens(e, "left") if e.finding.id.endswith("padding") else plain
    return [
        *SOFTMAXES,
        *masked,
        "with sdpa_kernel(SDPBackend.MATH), Softmaxes():",
        "    logits(tokens, **given)",
        "lowest = [s.amin() for s in Softmaxes.seen if s.dim() > 2]",
        "measured, bound = float(max(lowest)), -1e6  # scores of masked keys; real scores of -1.1e5 occur",
    ]


def visible(e: Experiment) -> list[str]:
    """A key that a query should see is masked in some attention."""
    query, key = e.get("query", None), e.get("key", None)
    if query is None or key is None:
        raise LookupError("no query is known")
    return [
        *SOFTMAXES,
        f"tokens, query, key = draw(2, {e.subject.length(23)}, seed=1), {query}, {key}",
        "with sdpa_kernel(SDPBackend.MATH), Softmaxes():",
        "    logits(tokens)",
        "maps = [s for s in Softmaxes.seen if s.dim() > 2 and s.shape[-2] > query and s.shape[-1] > key]",
        "hidden = [bool((s[..., query, key] < s[..., query, :].amax(-1) - 5000).any()) for s in maps]",
        "measured, bound = sum(hidden), 0  # attentions in which the query cannot see the key",
    ]


def window(e: Experiment) -> list[str]:
    declared = e.get("declared", None)
    if declared is None or e.subject.kind != "decoder":
        raise LookupError("no window is declared")
    return [
        *SOFTMAXES,
        f"tokens = draw(1, {min(e.subject.limit, 2 * int(declared) + 8)}, seed=1)",
        "with sdpa_kernel(SDPBackend.MATH), Softmaxes():",
        "    logits(tokens)",
        "seen = [int((s > s.amax(-1, keepdim=True) - 5000).sum(-1).max()) for s in Softmaxes.seen if s.dim() > 2]",
        "# visible keys, more or fewer than the declared window",
        f"measured, bound = max(abs(n - {declared}) for n in seen), 0",
    ]


SUMS = [
    "from torch.utils._python_dispatch import TorchDispatchMode",
    "",
    "",
    "class Sums(TorchDispatchMode):",
    '    """For each sum of two streams: whether a matmul has read one of them, number by number."""',
    "",
    "    read, found = [], []",
    "",
    "    def __torch_dispatch__(self, func, types, args=(), kwargs=None):",
    '        name = str(func).split(".")[1]',
    "        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.shape[-1:] == (D,)]",
    '        if name in ("mm", "addmm", "bmm", "matmul", "linear"):',
    "            self.read += [t.reshape(-1, D).clone() for t in tensors if t.numel() == TOKENS * D]",
    '        if name.startswith("add") and name not in ("addmm", "addmv") and len(tensors) == 2 and self.read:',
    "            if all(t.numel() == TOKENS * D for t in tensors):",
    "                streams = [t.reshape(-1, D) for t in tensors]",
    "                self.found.append(any(torch.equal(t, r) for t in streams for r in self.read))",
    "        return func(*args, **(kwargs or {}))",
    "",
    "",
]


def starts(e: Experiment) -> list[str]:
    """Which sums start from what a matmul has read: all of them in post-norm layers, none in pre-norm layers."""
    blocks = recorded(e.subject).anatomy.blocks
    entering = next((b.entering for b in blocks if b.entering is not None), None)
    if entering is None or e.subject.kind != "decoder":
        raise LookupError("the residual stream was not found")
    return [
        *SUMS,
        f"D, TOKENS = {entering.shape[-1]}, 2 * 12  # width of the residual stream, number of tokens",
        "with Sums():",
        "    logits(draw(2, 12, seed=1))",
        "print(Sums.found)  # two sums in each layer",
        "later = Sums.found[2:]  # the first layer may read an embedding that is normed already",
        "measured, bound = min(later.count(True), later.count(False)), 0  # sums that differ from the others",
    ]
