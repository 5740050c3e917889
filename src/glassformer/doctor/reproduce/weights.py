"""Experiments with weights, losses and gradients."""

from glassformer.anatomy.record import storage_of
from glassformer.doctor.reproduce.calls import accessor
from glassformer.doctor.reproduce.experiment import Experiment
from glassformer.doctor.subject.interface import find_loss
from glassformer.doctor.subject.loss import LossCall, loss_call
from glassformer.doctor.subject.trace import trace_call


def tables(e: Experiment) -> list[str]:
    names = e.get("tables", None) or _table_and_head(e)
    if len(names) < 2 or "?" in names.values():
        raise LookupError("the table or the head was not seen")
    listed = ", ".join(repr(name) for name in names.values())
    return [
        f"parameters = dict(model.named_parameters(remove_duplicate=False))  # {', '.join(names)}",
        f"found = {{parameters[name].data_ptr() for name in ({listed})}}",
        "measured, bound = len(found), 1  # tensors that should be one",
    ]


def _table_and_head(e: Experiment) -> dict[str, str]:
    assert e.subject.module is not None
    if e.finding.evidence.get("after"):
        raise LookupError("tied at first")
    trace = trace_call(e.subject, e.subject.tokens(1, 4))
    assert trace.logits is not None
    size = trace.logits.shape[-1]
    names = {storage_of(p): n for n, p in e.subject.module.named_parameters()}
    table = next((names.get(s) for s, rows, _, _ in trace.lookups if rows == size), None)
    heads = [names.get(m.weight) for m in trace.linears if m.output.shape[-1] == size]
    return {k: v for k, v in (("table", table), ("head", heads[-1] if heads else None)) if v is not None}


def _loss(e: Experiment) -> tuple[LossCall, str]:
    call = loss_call(e.subject)
    if call is None:
        raise LookupError("the model reports no loss")
    if call.method:
        labels = f", {call.labels}=tokens" if call.needs_labels and call.labels else ""
        return call, f"model.loss({'source, ' if e.subject.kind == 'seq2seq' else ''}tokens{labels})"
    flags = "".join(f", {name}={value!r}" for name, value in e.subject.interface.flags.items())
    text = f"model({e.calls.first}, {call.labels}=tokens{flags})"
    output = e.subject.model(
        e.subject.source(2) if e.subject.kind == "seq2seq" else e.subject.tokens(2, 5),
        **{str(call.labels): e.subject.tokens(2, 5), **e.subject.interface.flags},
    )
    loss = find_loss(output)
    taken = accessor(output, loss, ("loss",))
    if taken is None:
        raise LookupError("its loss is not a field of what it returns")
    return call, text + taken


def shift(e: Experiment) -> list[str]:
    """The loss against cross-entropy at the accepted shift, and at others to compare with."""
    call, text = _loss(e)
    if e.subject.kind == "seq2seq" and not call.method:
        raise LookupError("the labels of an encoder-decoder are its target, which it shifts by itself")
    wanted = call.accepted[-1]
    return [
        "for p in model.parameters():",
        "    p.data.mul_(3) if p.dim() > 1 else None  # fresh weights give every target nearly the same loss",
        *(["source = draw(3, 11, seed=77)"] if e.subject.kind == "seq2seq" else []),
        "tokens = draw(3, 17, seed=1)",
        f"loss = float({text}.detach())",
        "scores = logits(tokens)",
        "own = {}",
        "for shift in (0, 1, 2):",
        "    a, b = scores[:, : 17 - shift].flatten(0, 1), tokens[:, shift:].flatten()",
        "    own[shift] = float(torch.nn.functional.cross_entropy(a, b))",
        'print(f"the loss is {loss:.5f}; cross-entropy of logits[t] with tokens[t + shift] is {own}")',
        f"# logits[t] should be compared with tokens[t + {wanted}]",
        f"measured, bound = abs(loss - own[{wanted}]), 1e-4 * own[{wanted}]",
    ]


def arguments(e: Experiment) -> list[str]:
    """The loss with an argument that must not change it, against the loss without."""
    call, name = loss_call(e.subject), e.get("argument", None)
    if call is None or not call.method or name is None:
        raise LookupError("no argument of loss() is known")
    given = "tokens" if name == call.labels else e.calls.mask("torch.ones_like(tokens, dtype=torch.bool)")
    seq2seq = e.subject.kind == "seq2seq"
    first = "source, tokens" if seq2seq else "tokens"
    return [
        "for p in model.parameters():",
        "    p.data.mul_(3) if p.dim() > 1 else None  # fresh weights give every target nearly the same loss",
        *(["source = draw(3, 11, seed=77)"] if seq2seq else []),
        "tokens = draw(3, 17, seed=1)",
        f"alone = float(model.loss({first}).detach())",
        f"given = float(model.loss({first}, {name}={given}).detach())",
        f'print(f"the loss is {{alone:.5f}}, with {name}= for the same targets {{given:.5f}}")',
        "measured, bound = abs(given - alone), 1e-4 * alone",
    ]


def ids(e: Experiment) -> list[str]:
    call, text = _loss(e)
    del call
    some = e.get("ids", [])[:3]
    if not some:
        raise LookupError("no id is known")
    return [
        "tokens = draw(1, 17, seed=1)",
        f"tokens[0, 3:6] = {some[0]}  # an id that should be learned",
        "heard = []",
        "hook = model.register_forward_hook(lambda m, args, out: heard.append(out))",
        f"loss = {text}",
        "hook.remove()",
        f"scores = heard[0]{e.calls.take}",
        "(gradient,) = torch.autograd.grad(loss, [scores])",
        "counted = (gradient[0].abs().amax(-1) > 0).sum()  # positions that count in the loss",
        "measured, bound = 17 - 1 - int(counted), 0  # all but the last position should count",
    ]


def gradients(e: Experiment) -> list[str]:
    names = e.get("parameters", [])[:8]
    if not names:
        raise LookupError("no parameter is named")
    rows = e.get("rows", None)
    part = f"[{rows[0]} : {rows[1] + 1}]" if isinstance(rows, list) and len(rows) == 2 else ""
    return [
        f"names = {names}",
        "with torch.no_grad():  # a weight of zero would hide what is behind it",
        "    for p in model.parameters():",
        "        p.add_(0.02 * torch.randn(p.shape))",
        f"tokens = draw(3, {min(24, e.subject.limit)}, seed=1)",
        *(["source = draw(3, 11, seed=77)"] if e.subject.kind == "seq2seq" else []),
        f"scores = model({e.calls.first}{e.calls.arguments()}){e.calls.take}",
        "(scores * torch.randn(scores.shape)).sum().backward()",
        "parameters = dict(model.named_parameters())",
        "dead = [n for n in names if parameters[n].grad is None or not parameters[n].grad" + part + ".any()]",
        "measured, bound = len(dead), 0  # parameters without any gradient",
        "print(dead)",
    ]


def first_loss(e: Experiment) -> list[str]:
    return [
        "tokens, targets = draw(4, 24, seed=1), draw(4, 24, seed=2)",
        "loss = float(torch.nn.functional.cross_entropy(logits(tokens).flatten(0, 1), targets.flatten()))",
        "measured, bound = abs(loss - math.log(V)), 1.5  # nats from ln V, where random weights start",
    ]


def shared(e: Experiment) -> list[str]:
    names = e.get("parameters", [])[:8]
    if len(names) < 2:
        raise LookupError("no two names")
    return [
        "parameters = dict(model.named_parameters(remove_duplicate=False))",
        f"names = {names}",
        "# how many names of layers share a tensor with another",
        "measured, bound = len(names) - len({id(parameters[n]) for n in names}), 0",
    ]
