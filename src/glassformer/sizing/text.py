"""The size sheet as text: aligned columns, formulas with their numbers substituted, shares, and readable units."""

from glassformer.config import EncoderConfig, ModelConfig, MoE, Seq2SeqConfig
from glassformer.config.optimizer import OPTIMIZERS
from glassformer.sizing.flops import flop_formulas
from glassformer.sizing.formulas import parameter_formulas
from glassformer.sizing.layout import with_note, wrap
from glassformer.sizing.sheet import Sheet
from glassformer.sizing.step import BYTES

NAMES = {
    "feedforward": "feed-forward",
    "projections": "q, k, v, o",
    "scores": "scores q·k",
    "mix": "pattern·v",
    "cross_projections": "cross q, k, v, o",
    "cross_scores": "cross scores, pattern·v",
}

Row = tuple[str, str, str, str]
"""Name, exact number, rounded number or share, formula or note."""


def render(sheet: Sheet, width: int | None = None) -> str:
    """Return the sheet as text: parameters, FLOPs, memory, compute-optimal training.

    A formula that does not fit into `width` goes on the line after its numbers.
    """
    sections = _sections(sheet)
    rows = [row for _, section in sections for row in section]
    name, exact, human = (max(len(row[i]) for row in rows) for i in (0, 1, 2))
    lines = [wrap(line, width) for line in _title(sheet)]
    lines += [wrap(note, width) for note in _notes(sheet)]
    lines.append("")
    for heading, section in sections:
        lines.append(heading)
        for a, b, c, formula in section:
            lines.append(with_note(f"  {a:<{name}}  {b:>{exact}}  {c:>{human}}", formula, width))
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def display(sheet: Sheet) -> str:
    """Return the sheet as an HTML fragment for a notebook."""
    from glassformer.pages.display import render as fill

    title, subtitle = _title(sheet)
    return fill("display_sheet.html", title=title, subtitle=subtitle, notes=_notes(sheet), sections=_sections(sheet))


def _sections(sheet: Sheet) -> list[tuple[str, list[Row]]]:
    """Return the headings and rows of the sheet."""
    training = [] if sheet.training is None else [_training(sheet)]
    return [_parameters(sheet), _operations(sheet), _inference(sheet), *training, _chinchilla(sheet)]


def _notes(sheet: Sheet) -> list[str]:
    return [*([f"Note: {sheet.note}"] if sheet.note else []), *sheet.notes]


def _title(sheet: Sheet) -> tuple[str, str]:
    cfg = sheet.config
    layers = f"L = {cfg.n_layers}"
    if isinstance(cfg, Seq2SeqConfig):
        layers = f"Lₑ = {cfg.n_encoder_layers}, L = {cfg.n_layers}"
    heads = f"H = {cfg.n_heads}" + (f", G = {cfg.n_kv_heads}" if cfg.n_kv_heads != cfg.n_heads else "")
    width = f"D = {cfg.d_model:,}, {heads}, K = {cfg.d_head}"
    if cfg.d_value != cfg.d_head:
        width += f", U = {cfg.d_value}"
    source = f", S = {sheet.source:,} source tokens" if sheet.source else ""
    return (
        f"{_kind(cfg)}: {layers}, {width}, F = {cfg.d_ff:,}, V = {cfg.vocab_size:,}",
        f"for B = {sheet.batch:,} sequence{'s' * (sheet.batch > 1)} of T = {sheet.context:,} tokens{source}, "
        f"{sheet.dtype}, optimizer {sheet.optimizer}",
    )


def _kind(config: ModelConfig) -> str:
    if isinstance(config, Seq2SeqConfig):
        return "encoder-decoder"
    return "encoder" if isinstance(config, EncoderConfig) else "decoder"


def _parameters(sheet: Sheet) -> tuple[str, list[Row]]:
    formulas, total = parameter_formulas(sheet.config), sheet.parameters
    rows = []
    for part, n in sheet.parts.items():
        text = str(formulas[part]) if part in formulas else ""
        if part == "head" and sheet.config.head is not None and sheet.config.head.tied:
            text = f"{text} (matrix shared with the embedding)" if n else "tied: the matrix of the embedding"
        if n or text:
            rows.append((NAMES.get(part, part), f"{n:,}", f"{n / total:.1%}", text))
    rows.append(("total", f"{total:,}", quantity(total), ""))
    ff = sheet.config.feedforward
    if isinstance(ff, MoE):
        note = f"{ff.n_active} of {ff.n_experts} experts per token"
        rows.append(("active", f"{sheet.active:,}", quantity(sheet.active), note))
    return "PARAMETERS", rows


def _operations(sheet: Sheet) -> tuple[str, list[Row]]:
    work = sheet.flops
    total = work.total_forward
    formulas = flop_formulas(sheet.config, sheet.batch, sheet.context, sheet.source)
    rows = [(NAMES.get(p, p), f"{n:,}", f"{n / total:.1%}", str(formulas[p])) for p, n in work.forward.items() if n]
    rows += [
        _flops("forward", total, "with all T·S scores computed"),
        _flops("backward", work.total_backward, "2 × forward: each matmul has two gradients"),
        _flops("training", work.training, "forward + backward"),
    ]
    if work.needed != work.forward:
        note = "with a kernel that skips masked scores"
        rows.append(_flops("training, masked", work.training_needed, note))
    rule = f"6·active parameters·tokens = 6·{sheet.active:,}·{sheet.batch * sheet.context:,}"
    if sheet.source:
        rule = "6·(encoder parameters·Nₑ + other parameters·N)"
    rows.append(_flops("rule of thumb", work.rule, f"{rule}; {work.rule / work.training:.0%} of the count"))
    if sheet.decode:
        note = f"with {sheet.context:,} tokens in the KV cache"
        rows.append(_flops("one decoded token", sum(sheet.decode.values()), note))
    return "FLOPs (matmuls; a multiply-add counts as 2)", rows


def _inference(sheet: Sheet) -> tuple[str, list[Row]]:
    cfg, memory = sheet.config, sheet.inference
    width = BYTES[sheet.dtype]
    rows = [_bytes("weights", memory.weights, f"parameters·bytes = {sheet.parameters:,}·{width:g}")]
    number = 2 if sheet.dtype.startswith("int") else width
    if memory.cache:
        values = f"{cfg.n_layers}·{cfg.n_kv_heads}·({cfg.d_head} + {cfg.d_value})·{number:g}"
        rows.append(_bytes("KV cache per token", memory.cache_per_token, f"L·G·(K + U)·bytes = {values}"))
        window = cfg.attention.window
        limit = f", of which a windowed layer keeps {window:,}" if window is not None and window < sheet.context else ""
        rows.append(_bytes("KV cache", memory.cache, f"B·T = {sheet.batch:,}·{sheet.context:,} tokens{limit}"))
    if memory.cross_cache:
        note = f"B·S = {sheet.batch:,}·{sheet.source:,} source tokens"
        rows.append(_bytes("cross-attention cache", memory.cross_cache, note))
    rows.append(_bytes("peak, prefill", memory.prefill_peak, "one forward pass with the logits of all tokens"))
    if memory.decode_peak:
        rows.append(_bytes("peak, decode", memory.decode_peak, "one decoded token with a full KV cache"))
    return "MEMORY, INFERENCE (bytes)", rows


def _training(sheet: Sheet) -> tuple[str, list[Row]]:
    memory = sheet.training
    assert memory is not None
    moments = {
        "loss": "at the loss: logits, log-softmax and their gradients",
        "backward": "in the backward pass of the blocks",
        "embedding": "when the gradients of the token embedding are added",
        "step": "in the optimizer step",
        "evaluation": f"in evaluation: logits of {sheet.options.evaluation or 0:,} sequences at once",
    }
    factor = memory.optimizer / memory.weights
    kept = next((facts.state for name, facts in OPTIMIZERS.items() if name == sheet.optimizer), "")
    states = f"{factor:.3g} × weights ({kept})" if factor else "no state"
    rows = [
        _bytes("weights", memory.weights, ""),
        _bytes("optimizer", memory.optimizer, states),
        _bytes("averaged weights", memory.average, "exponential moving average (EMA) of the weights"),
        _bytes("cast weights", memory.copies, f"the matrices of the blocks in {sheet.options.matmuls}"),
        _bytes("saved activations", memory.saved, "saved by the forward for the backward pass"),
        _bytes("gradients", memory.gradients, "as large as the weights, at the end of the backward pass"),
        _bytes("peak", memory.peak, moments[memory.moment]),
    ]
    rows = [row for row in rows if row[1] != "0" or row[0] == "optimizer"]
    return "MEMORY, TRAINING (bytes)", rows


def _chinchilla(sheet: Sheet) -> tuple[str, list[Row]]:
    rows = []
    for a in sheet.chinchilla.allocations:
        note = f"{a.ratio:.0f} tokens per parameter, {flop_unit(a.flops)}, predicted loss {a.loss:.3f}"
        rows.append((a.method, f"{a.tokens:,.0f}", quantity(a.tokens), note))
    return f"COMPUTE-OPTIMAL TRAINING TOKENS for {quantity(sheet.active)} parameters", rows


def _bytes(name: str, n: int, note: str) -> Row:
    return name, f"{n:,}", byte_unit(n), note


def _flops(name: str, n: int, note: str) -> Row:
    return name, f"{n:,}", flop_unit(n), note


def quantity(n: float) -> str:
    """Format a count with four significant digits: 124.4 M."""
    return _scaled(n, 1000, ("", " k", " M", " B", " T"))


def flop_unit(n: float) -> str:
    """Format a number of FLOPs with four significant digits: 291.6 GFLOP."""
    return _scaled(n, 1000, (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP", " EFLOP", " ZFLOP", " YFLOP"))


def byte_unit(n: float) -> str:
    """Format a number of bytes with four significant digits: 474.7 MiB."""
    return _scaled(n, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(n: float, base: int, units: tuple[str, ...]) -> str:
    step = 0
    while n >= base and step < len(units) - 1:
        n, step = n / base, step + 1
    return f"{n:.4g}{units[step]}"
