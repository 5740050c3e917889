"""Bytes of a model at work: the peak of live tensors in a training step, a prefill and a decoded token.

A training step is `F.cross_entropy(model(tokens).flatten(0, 1), targets).backward()`, then the optimizer's step, then
`zero_grad(set_to_none=True)`: logits are nobody's variable, every tensor has the one dtype given, gradients do not
outlive their step. The peak is the highest of four moments: the loss, the backward pass of each block from the last to
the first, the embedding's gradient, the optimizer's temporaries. What autograd keeps is in `activations`; what a moment
adds to it is said here beside each term. All of it describes the engine run eagerly on the CPU; memory outside torch's
allocator (the interpreter, code, oneDNN's scratch) is not included.
"""

import math
from dataclasses import dataclass

from glassformer.config import Dense, EncoderConfig, Gated, ModelConfig, MoE, NoFeedForward, RMSNorm
from glassformer.sizing.activations import (
    Pass,
    saved_by_attention,
    saved_by_block,
    saved_by_entry,
    saved_by_exit,
    saved_by_feedforward,
    saved_by_head,
    saved_by_norm,
)
from glassformer.sizing.flops import lengths
from glassformer.sizing.parameters import PARTS, count, parameters, part_of, stacks
from glassformer.sizing.step import BYTES, StepOptions, check_optimizer, state_bytes, temporaries


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes in a training step; `peak` is what has to fit."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """Kept by autograd between forward and backward, log-softmax included."""
    peak: int
    moment: str
    """Where the peak lies: `loss`, `backward`, `embedding`, `step` or `evaluation`."""
    average: int = 0
    """The exponential moving average of the weights."""
    copies: int = 0
    """Weights cast to the dtype of the matmuls, kept from the forward to the backward pass under autocast."""

    @property
    def transient(self) -> int:
        """The peak beyond weights, optimizer and saved activations: gradients so far and temporaries."""
        return self.peak - self.weights - self.optimizer - self.average - self.copies - self.saved


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes without gradients."""

    weights: int
    cache_per_token: int
    """Keys and values of one more token of one sequence while every window still grows: sum over layers of G·(K+U)."""
    cache: int
    """Keys and values of all tokens, a layer with a window holding at most W."""
    cross_cache: int
    """Keys and values of the source, in an encoder-decoder."""
    prefill_peak: int
    """One forward over all tokens, its keys and values kept (an encoder keeps none)."""
    decode_peak: int
    """One token with the cache full: in buffers made to measure (`static`), or, when a window binds, in one that
    forgets (`windowed`) and so holds a layer's keys and values twice while it moves on. 0 for an encoder."""
    growth: int
    """What a cache that grows by concatenation adds to decode_peak: the largest layer's keys and values once more."""


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    return math.ceil(count(config) * BYTES[check_dtype(dtype)])


def check_dtype(dtype: str) -> str:
    if dtype not in BYTES:
        raise ValueError(f"dtype={dtype!r} is not known. Use one of {', '.join(BYTES)}.")
    return dtype


def training_memory(
    config: ModelConfig,
    batch: int = 1,
    context: int | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    source: int | None = None,
    options: StepOptions = StepOptions(),
) -> TrainingMemory:
    """Peak of a training step over `batch` sequences; see the module for what a step is, and `step` for `options`."""
    if check_dtype(dtype).startswith("int"):
        raise ValueError(f"dtype={dtype!r} cannot be trained: gradients need a floating-point type such as bfloat16.")
    kind = check_optimizer(optimizer)
    T, S = lengths(config, context, source)
    w, matmul = int(BYTES[dtype]), int(BYTES[options.matmuls or dtype])
    residual = int(BYTES[options.residual or dtype])
    runs = _runs(config, batch // options.accumulate, T, S, matmul, training=True, residual=residual)
    shapes = parameters(config)
    sizes = {name: math.prod(shape) * w for name, shape in shapes.items()}
    weights = sum(sizes.values())
    cast = {} if matmul == w else _cast(shapes, matmul)
    moments = _moments(config, runs, sizes, cast, options)
    if kind != "none":
        moments["step"] = weights + temporaries(shapes, w, kind, options.fused)
    if options.evaluation is not None:
        moments["evaluation"] = weights + _evaluation(
            config, _runs(config, options.evaluation, T, S, matmul, training=False, residual=residual)
        )
    moment = max(moments, key=lambda name: moments[name])
    saved = sum(_saved(run, n) for run, n in runs.values())
    if options.head_bytes is None:
        saved += saved_by_head(next(reversed(runs.values()))[0])
    held = state_bytes(sizes, kind), weights if options.average else 0
    peak = weights + sum(held) + moments[moment]
    return TrainingMemory(weights, weights, held[0], saved, peak, moment, held[1], sum(cast.values()))


def inference_memory(
    config: ModelConfig, batch: int = 1, context: int | None = None, dtype: str = "float32", source: int | None = None
) -> InferenceMemory:
    """Peaks of a forward pass over `context` tokens and of one more token after it."""
    T, S = lengths(config, context, source)
    weights = weight_bytes(config, dtype)
    w = 2 if dtype.startswith("int") else int(BYTES[dtype])
    per_layer = config.n_kv_heads * (config.d_head + config.d_value) * w
    windows = [config.window(layer) for layer in range(config.n_layers)]
    decodes = not isinstance(config, EncoderConfig)
    held = [batch * min(T, W or T) * per_layer for W in windows] if decodes else [0]
    cross = batch * S * config.n_layers * per_layer
    moving = (
        max((n for n, W in zip(held, windows, strict=True) if W is not None and W < T), default=0) if decodes else 0
    )
    runs = _runs(config, batch, T, S, w, training=False)
    return InferenceMemory(
        weights=weights,
        cache_per_token=len(windows) * per_layer if decodes else 0,
        cache=sum(held),
        cross_cache=cross,
        prefill_peak=weights + _prefill(config, runs, sum(held), cross),
        decode_peak=weights + sum(held) + moving + cross + _decode(config, batch, max(T, S), w) if decodes else 0,
        growth=max(held) - moving,
    )


def _runs(
    config: ModelConfig, batch: int, T: int, S: int, width: int, training: bool, residual: int = 0
) -> dict[str, tuple[Pass, int]]:
    """Stack name to (its pass, its number of blocks), in the order the data goes."""
    runs = {}
    for stack, n_blocks in stacks(config).items():
        causal = stack == "decoder"
        length = S if S and not causal else T
        memory = S if causal else 0
        runs[stack] = (Pass(config, batch, length, width, causal, memory, training, residual), n_blocks)
    return runs


def _saved(run: Pass, n_blocks: int) -> int:
    return saved_by_entry(run) + sum(saved_by_block(run, i) for i in range(n_blocks)) + saved_by_exit(run)


# Training


def _cast(shapes: dict[str, tuple[int, ...]], width: int) -> dict[str, int]:
    """Bytes of each weight that autocast casts: the matrices of the blocks."""
    return {name: math.prod(shape) * width for name, shape in shapes.items() if len(shape) == 2 and ".blocks." in name}


def _loss(config: ModelConfig, last: Pass, table: int, options: StepOptions) -> int:
    """Bytes of head and loss beyond everything saved before them."""
    if config.head is None:
        return 0
    numbers = last.tokens * config.vocab_size
    if options.head_bytes is None:
        # log-softmax, its gradient and that of the logits; or the logits' gradient, the head's and the stream's
        logits = numbers * (last.width if options.matmuls is None else last.exact)
        smoothing = logits * options.smoothing
        return smoothing + max(3 * logits, numbers * last.width + table + last.stream)
    rows = min(last.tokens, 2 ** int(math.log2(max(1, options.head_bytes // (4 * config.vocab_size)))))
    several = table if last.tokens > rows else 0
    copy = config.vocab_size * config.d_model * last.width if options.matmuls is not None else 0
    made = config.vocab_size * config.d_model * last.width  # the gradient of the head's weight, of one chunk
    chunk = rows * config.vocab_size
    first = copy + several + last.stream + int(chunk * options.chunk_copies)
    second = copy + several + last.stream + chunk * last.width + made + table
    return max(first, second, 2 * last.stream + 3 * table)


def _evaluation(config: ModelConfig, runs: dict[str, tuple[Pass, int]]) -> int:
    """Bytes beyond weights, optimizer and gradients while a batch of evaluation runs: logits are not chunked."""
    last = next(reversed(runs.values()))[0]
    numbers = last.tokens * config.vocab_size if config.head is not None else 0
    widened = numbers * last.exact if last.exact != last.width else 0
    return _prefill(config, runs, 0, 0, loss=widened + numbers * last.exact)  # logits in float32, and log-softmax


def _moments(
    config: ModelConfig,
    runs: dict[str, tuple[Pass, int]],
    sizes: dict[str, int],
    cast: dict[str, int],
    options: StepOptions,
) -> dict[str, int]:
    """Bytes beyond weights and optimizer state at each moment of forward and backward that can be the highest."""
    last = next(reversed(runs.values()))[0]
    table = sizes["embed.tokens.weight"]
    tied = config.head is not None and config.head.tied
    left = sum(_saved(run, n) for run, n in runs.values()) + sum(cast.values())
    head = 0
    if config.head is not None and options.head_bytes is None:
        logits = last.tokens * config.vocab_size * last.width
        head = saved_by_head(last) - logits  # without the log-softmax, counted with the loss
    # gradients that earlier parts of the batch left: those computed now are added to them
    waiting = sum(sizes.values()) if options.accumulate > 1 else 0
    moments = {"loss": left + head + waiting + _loss(config, last, table, options)}
    done = sum(n for name, n in sizes.items() if part_of(name) == "head") + (table if tied else 0)
    if waiting:
        done = waiting
    moments["backward"] = moments["embedding"] = 0
    used = tied  # whether a gradient of the table waits already, for this one to be added to
    for stack, (run, n_blocks) in reversed(runs.items()):
        if config.placement != "post" and isinstance(config.norm, RMSNorm):
            # rms_norm is made of single operations: the gradients of x/rms, of x through both, and their sum, widened
            rms = 4 * run.tokens * config.d_model * run.exact - run.stream  # the output, read by the head, is gone
            moments["backward"] = max(moments["backward"], left + done + rms)
        left -= saved_by_exit(run)
        for layer in reversed(range(n_blocks)):
            grads = dict.fromkeys(PARTS, 0)
            for name, n in sizes.items():
                if name.startswith(f"{stack}.blocks.{layer}."):
                    grads[part_of(name)] += n
            here = _block_backward(run, grads)
            moments["backward"] = max(moments["backward"], left + done + here)
            left -= saved_by_block(run, layer)
            left -= sum(n for name, n in cast.items() if name.startswith(f"{stack}.blocks.{layer}."))
            done += 0 if waiting else sum(grads.values())
        left -= saved_by_entry(run)
        if not waiting:
            done += sum(n for name, n in sizes.items() if name.startswith(stack) and ".blocks." not in name)
        coming = 2 * table if used else table  # this use's gradient; and, when another waits, their sum
        moments["embedding"] = max(moments["embedding"], left + done + run.stream + coming)
        done += 0 if used or waiting else table
        used = True
    return moments


def _block_backward(run: Pass, grads: dict[str, int]) -> int:
    """The most that one block's backward pass adds to everything saved up to and including that block.

    Branches come in reverse: feed-forward, cross-attention, attention. Each frees what it saved and leaves gradients of
    its parameters.
    """
    cfg = run.config
    norm = saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    stream = run.residual * (1 + run.drops)  # the gradient coming down; on a dropped branch once more, times the noise
    if run.memory:
        stream += run.batch * run.memory * cfg.d_model * run.width  # the gradient of the encoder's output
    stages, change = [], 0
    if run.feeds:
        stages.append(_feedforward_backward(run))
        change = grads["feedforward"] - saved_by_feedforward(run)
        change -= norm if cfg.placement != "parallel" else -run.stream
    if run.memory:
        stages.append(change + _attention_backward(run, cross=True))
        change += grads["cross"] - saved_by_attention(run, cross=True) - norm
    stages.append(change + _attention_backward(run, cross=False))
    return stream + max(stages)


def _feedforward_backward(run: Pass) -> int:
    """Gradients alive at once inside a feed-forward's backward pass, beyond what it saved."""
    ff = run.config.feedforward
    assert not isinstance(ff, NoFeedForward)
    expert = ff.expert if isinstance(ff, MoE) else ff
    rows = -(-run.tokens * ff.n_active // ff.n_experts) if isinstance(ff, MoE) else run.tokens
    hidden = rows * expert.d_ff * run.width
    # Of the hidden numbers: down's gradient takes the place of its freed input; then the activation's comes on top,
    # and, when gated, one of each factor. relu and tanh still hold the input of down, which is their output.
    # A square's gradient 2·x·dy takes two steps.
    alive = 2 if isinstance(expert, Gated) or expert.activation in ("relu", "tanh") else 1
    if isinstance(expert, Dense) and expert.activation == "relu2":
        alive = 3
    total = alive * hidden + run.config.d_model * expert.d_ff * run.width  # and the gradient of down.weight
    return total + 3 * run.stream if isinstance(ff, MoE) else total  # gathering from and scattering to all tokens


def _attention_backward(run: Pass, cross: bool) -> int:
    """Gradients alive at once inside an attention's backward pass, beyond what it saved."""
    cfg, B, T = run.config, run.batch, run.length
    S = run.memory if cross else T
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    heads = B * T * H * U * run.width  # the gradient of the heads side by side
    if run.written_out(cross):
        squares = 1 if run.drops else 2  # of the pattern, and of the scores; dropout's saved tensors make room for one
        return heads + (B * H * S * U + squares * B * H * T * S) * run.exact  # and of v
    return heads + (B * T * H * K + B * S * G * (K + U)) * run.width  # of q, k and v


# Inference


def _prefill(config: ModelConfig, runs: dict[str, tuple[Pass, int]], cache: int, cross: int, loss: int = 0) -> int:
    """Bytes beyond the weights at the peak of a forward pass without gradients; `loss`: bytes next to the logits."""
    peak = held = 0
    for stack, (run, n_blocks) in runs.items():
        kept = (cache + cross) if stack == "decoder" else 0
        block = max(_block_forward(run, layer) for layer in range(n_blocks))
        peak = max(peak, held + kept + block)
        if len(runs) == 2:
            held += run.stream  # the encoder's output, until the decoder is through
    last = next(reversed(runs.values()))[0]
    logits = last.tokens * config.vocab_size * last.width if config.head is not None else 0
    held += last.stream  # what the head was given
    if config.head is not None and config.head.transform is not None:
        held += last.stream  # and made of it
    return max(peak, cache + cross + held + logits + loss)


def _block_forward(run: Pass, layer: int) -> int:
    """The most alive inside one block without gradients, keys and values of a decoder excepted: the cache has them."""
    cfg = run.config
    entry = 2 * run.stream  # the embedding, held by the model's own call, and the stream, held by the stack
    if cfg.placement != "post":
        entry += run.stream  # its norm
    square = run.length**2
    if cfg.position.biases_scores:
        entry += cfg.n_heads * square * run.width  # the bias, held by the stack
    if run.infuses(cross=False):
        entry += run.length * cfg.d_model * run.width  # the position vectors, likewise
    entry += square * run.masked(layer)  # the window's mask, likewise
    inner = run.stream  # the stream after attention; side by side, attention's output
    return entry + max(_attention_forward(run, layer), inner + _feedforward_forward(run))


def _attention_forward(run: Pass, layer: int) -> int:
    cfg, B, T, w = run.config, run.batch, run.length, run.width
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    q, heads = B * T * H * K * w, B * T * H * U * w
    kv = 0 if run.causal else B * T * G * (K + U) * w
    kv += run.stream * run.infuses(cross=False)  # and what queries and keys read
    if run.written_out(cross=False):
        copies = (B * H * T * (2 * K + U) + 2 * B * H * T * T) * run.exact  # q, k, v for the products; scores, pattern
        return q + kv + copies + heads + B * H * T * T  # and which scores are masked, a byte each
    copy = heads if run.rotates(cross=False) or cfg.attention.qk_norm is not None else 0
    turning = 3 * q if run.rotates(cross=False) else 0  # before, both halves turned, after
    mask = 0  # the additive mask the kernel reads
    if run.masked(layer) or (run.causal and cfg.position.biases_scores):
        mask = (cfg.n_heads if cfg.position.biases_scores else 1) * T * T * w
    return kv + max(turning, q + heads + max(mask, copy + run.stream))


def _feedforward_forward(run: Pass) -> int:
    ff = run.config.feedforward
    if isinstance(ff, NoFeedForward):
        return 0
    expert = ff.expert if isinstance(ff, MoE) else ff
    rows = -(-run.tokens * ff.n_active // ff.n_experts) if isinstance(ff, MoE) else run.tokens
    hidden = rows * expert.d_ff * run.width
    alive = 3 if isinstance(expert, Gated) or expert.activation == "relu2" else 2
    total = alive * hidden  # before and after the activation; gate, up and product
    if isinstance(ff, MoE):  # evenly loaded experts: one's rows, gathered, and the sum before and after it
        total += rows * run.config.d_model * run.width + 2 * run.stream
    return total


def _decode(config: ModelConfig, batch: int, seen: int, w: int) -> int:
    """Bytes of one token's activations beside the cache: its logits, its widest hidden layer, its scores."""
    run = Pass(config, batch, 1, w, causal=True, training=False)
    logits = batch * config.vocab_size * w if config.head is not None else 0
    copies = 0
    if run.written_out(cross=False):  # k scaled; before that, of grouped heads, k and v spread over all of them
        spread = config.d_head + config.d_value if config.n_kv_heads != config.n_heads else 0
        copies = batch * config.n_heads * seen * (config.d_head + spread) * run.exact
    return max(logits + run.stream, 3 * run.stream + max(_feedforward_forward(run), copies))
