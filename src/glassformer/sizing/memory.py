"""Peak memory of live tensors in a training step, in a prefill and in decoding one token.

A training step is `F.cross_entropy(model(tokens).flatten(0, 1), targets).backward()`, then the optimizer step, then
`zero_grad(set_to_none=True)`. No variable keeps the logits alive, all tensors have the given dtype, and gradients are
freed after the step. The peak is the highest of four phases: the loss, the backward pass of the blocks from last to
first, the gradient of the embedding, and the optimizer step. `activations` counts what autograd saves; the comments in
this module name what each phase needs in addition. The counts describe eager mode on the CPU. Memory outside of torch's
allocator (the interpreter, code, oneDNN scratch buffers) is not included.
"""

import math
from dataclasses import dataclass

from glassformer.config import Dense, EncoderConfig, Gated, ModelConfig, MoE, NoFeedForward, RMSNorm
from glassformer.sizing.activations import (
    Pass,
    kept_by_block,
    saved_after_blocks,
    saved_before_blocks,
    saved_by_attention,
    saved_by_block,
    saved_by_feedforward,
    saved_by_head,
    saved_by_norm,
)
from glassformer.sizing.flops import lengths
from glassformer.sizing.forward_memory import decode, prefill
from glassformer.sizing.parameters import PARTS, count, parameters, part_of, stacks
from glassformer.sizing.step import (
    BYTES,
    NF4_TEMPORARIES,
    StepOptions,
    cast_weights,
    check_optimizer,
    head_matrix,
    state_bytes,
    temporaries,
    trained_shapes,
    weights_and_adapters,
)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes in a training step. `peak` must fit into memory."""

    weights: int
    gradients: int
    optimizer: int
    saved: int
    """Activations that autograd saves for the backward pass, including log-softmax."""
    peak: int
    moment: str
    """Phase of the step that has the peak: `loss`, `backward`, `embedding`, `step` or `evaluation`."""
    average: int = 0
    """The exponential moving average of the weights."""
    copies: int = 0
    """Weights cast to the dtype of the matmuls, which autocast keeps from the forward to the backward pass. Copies of
    frozen matrices may be kept from step to step."""

    @property
    def transient(self) -> int:
        """Peak minus weights, optimizer state and saved activations: the gradients at that time, and temporaries."""
        return self.peak - self.weights - self.optimizer - self.average - self.copies - self.saved


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes of inference, without gradients."""

    weights: int
    cache_per_token: int
    """KV cache of one more token of one sequence, before any window is full: the sum over layers of G·(K+U)."""
    cache: int
    """KV cache of all tokens. A layer with a window keeps at most W tokens."""
    cross_cache: int
    """Keys and values of the source, in an encoder-decoder."""
    prefill_peak: int
    """Peak of one forward pass over all tokens that fills the KV cache (an encoder has none)."""
    decode_peak: int
    """Peak of decoding one token with a full cache of preallocated buffers (`static`). If a window is shorter than the
    context, the cache is a `windowed` one, which holds two copies of the largest windowed layer while it moves on.
    0 for an encoder."""
    growth: int
    """Bytes that a cache growing by concatenation adds to decode_peak: a second copy of the largest layer."""


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of all parameters in a dtype."""
    return math.ceil(count(config) * BYTES[check_dtype(dtype)])


def check_dtype(dtype: str) -> str:
    """Return the dtype if it is known; raise ValueError otherwise."""
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
    """Return the memory of a training step over `batch` sequences, as defined in the module docstring.

    `options` describe how a training loop differs from that step; see `StepOptions`.
    """
    if check_dtype(dtype).startswith("int"):
        raise ValueError(f"dtype={dtype!r} cannot be trained: gradients need a floating-point dtype such as bfloat16.")
    kind = check_optimizer(optimizer)
    T, S = lengths(config, context, source)
    w, matmul = int(BYTES[dtype]), int(BYTES[options.matmuls or dtype])
    residual = int(BYTES[options.residual or dtype])
    runs = _runs(config, batch // options.accumulate, T, S, matmul, training=True, residual=residual)
    shapes = parameters(config)
    trained = trained_shapes(shapes, options)
    sizes = {name: math.prod(shape) * w for name, shape in trained.items()}
    weights, gradients = weights_and_adapters(shapes, w, options), sum(sizes.values())
    cast, kept = ({}, 0) if matmul == w else cast_weights(config, shapes, matmul, options)
    moments = _moments(config, runs, sizes, cast, options)
    if kind != "none":
        moments["step"] = gradients + temporaries(trained, w, kind, options.fused)
    if options.evaluation is not None:
        moments["evaluation"] = gradients + _evaluation(
            config, _runs(config, options.evaluation, T, S, matmul, training=False, residual=residual), options
        )
    moment = max(moments, key=lambda name: moments[name])
    saved = sum(_saved(run, n, stack, options) for stack, (run, n) in runs.items())
    if options.head_bytes is None:
        saved += saved_by_head(next(reversed(runs.values()))[0])
    held = state_bytes(sizes, kind), gradients if options.average else 0
    peak = weights + sum(held) + kept + moments[moment]
    return TrainingMemory(weights, gradients, held[0], saved, peak, moment, held[1], kept + sum(cast.values()))


def inference_memory(
    config: ModelConfig, batch: int = 1, context: int | None = None, dtype: str = "float32", source: int | None = None
) -> InferenceMemory:
    """Return the memory of a forward pass over `context` tokens, and of decoding one token with a full KV cache."""
    T, S = lengths(config, context, source)
    weights = weight_bytes(config, dtype)
    w = 2 if dtype.startswith("int") else int(BYTES[dtype])
    per_layer = cached_numbers(config) * w
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
        prefill_peak=weights + prefill(config, runs, sum(held), cross),
        decode_peak=weights + sum(held) + moving + cross + decode(config, batch, max(T, S), w) if decodes else 0,
        growth=max(held) - moving,
    )


def cached_numbers(config: ModelConfig) -> int:
    """Return the numbers in the KV cache of one token and layer: G·(K + U), or R + C with latent attention."""
    if (latent := config.attention.latent) is not None:
        return latent.d_shared + latent.kv_rank
    return config.n_kv_heads * (config.d_head + config.d_value)


def _runs(
    config: ModelConfig, batch: int, T: int, S: int, width: int, training: bool, residual: int = 0
) -> dict[str, tuple[Pass, int]]:
    """Return (pass, number of blocks) of each stack, in the order of computation."""
    runs = {}
    for stack, n_blocks in stacks(config).items():
        causal = stack == "decoder"
        length = S if S and not causal else T
        memory = S if causal else 0
        runs[stack] = (Pass(config, batch, length, width, causal, memory, training, residual), n_blocks)
    return runs


def _saved(run: Pass, n_blocks: int, stack: str, options: StepOptions) -> int:
    blocks = sum(_kept_by_block(run, i, stack, options) for i in range(n_blocks))
    return saved_before_blocks(run) + blocks + saved_after_blocks(run)


def _kept_by_block(run: Pass, layer: int, stack: str, options: StepOptions) -> int:
    """Return the bytes that one block keeps until its backward pass."""
    saved, kept = _saved_by_block(run, layer, stack, options), kept_by_block(run, layer, options.recompute)
    return saved if kept is None else min(saved, kept)


def _saved_by_block(run: Pass, layer: int, stack: str, options: StepOptions) -> int:
    """Return the bytes that one block saves, with what adapters add and what frozen matrices do not need."""
    own = f"{stack}.blocks.{run.config.block_of_layer(layer)}."
    if layer < options.without_gradient(stack):
        return 0
    total = saved_by_block(run, layer)
    if not options.adapted:
        return total
    adapted = {name.removeprefix(own) for name in options.adapted if name.startswith(own)}
    total += len(adapted) * run.tokens * options.rank * run.width  # the output of A, read by B
    expert = run.at(layer).feedforward
    if isinstance(run.config.norm, RMSNorm):  # x/rms is read by the gradient of the weight, which is frozen
        norms = 1 + (expert.kind != "none") + bool(run.memory)
        total -= norms * run.tokens * run.config.d_model * max(run.norm_width, 4)
    if not adapted & {f"attention.{name}" for name in "qkv"}:
        total -= run.hidden_states  # the input of q, k and v, which only the gradient of a matrix reads
    if isinstance(expert, Dense | Gated):
        hidden = run.tokens * expert.d_ff * run.width
        total -= 0 if adapted & {"feedforward.up", "feedforward.gate"} else run.hidden_states
        total -= 0 if "feedforward.down" in adapted else hidden
        if options.dora:  # the product with the magnitudes saves its other factor
            total += sum(hidden for name in ("up", "gate") if f"feedforward.{name}" in adapted)
            total += sum(run.hidden_states for name in adapted if name.endswith((".q", ".k", ".v", ".o", ".down")))
    return total


# Training


def _loss(config: ModelConfig, last: Pass, table: int, options: StepOptions) -> int:
    """Return the peak bytes of head and loss, in addition to everything saved before them."""
    if config.head is None:
        return 0
    numbers = last.tokens * config.vocab_size
    if options.head_bytes is None:
        # either log-softmax, its gradient and the gradient of the logits,
        # or the gradients of the logits, of the head and of the input of the head
        logits = numbers * (last.width if options.matmuls is None else last.upcast_width)
        more = logits * (options.smoothing + 2 * options.z_loss)
        return more + max(3 * logits, numbers * last.width + table + last.tokens * config.head_width * last.width)
    rows = min(last.tokens, 2 ** int(math.log2(max(1, options.head_bytes // (4 * config.vocab_size)))))
    accumulated = table if last.tokens > rows else 0  # the gradient of the head, summed over several chunks
    is_cast = options.matmuls is not None and not options.keeps(head_matrix(config))
    cast = config.vocab_size * config.d_model * last.width if is_cast else 0
    # the gradient of the head's weight from one chunk
    chunk_gradient = config.vocab_size * config.d_model * last.width if table else 0
    chunk = rows * config.vocab_size
    first = cast + accumulated + last.hidden_states + int(chunk * options.chunk_copies)
    second = cast + accumulated + last.hidden_states + chunk * last.width + chunk_gradient + table
    return max(first, second, 2 * last.hidden_states + 3 * table)


def _evaluation(config: ModelConfig, runs: dict[str, tuple[Pass, int]], options: StepOptions) -> int:
    """Return the bytes of an evaluation batch, without weights and optimizer state. Its logits are one chunk."""
    last = next(reversed(runs.values()))[0]
    numbers = last.tokens * config.vocab_size if config.head is not None else 0
    upcast_logits = numbers * last.upcast_width if last.upcast_width != last.width else 0
    if upcast_logits and options.head_bytes is not None:
        upcast_logits -= numbers * last.width  # nothing else holds the logits of a chunk
    log_softmax = numbers * last.upcast_width
    return prefill(config, runs, 0, 0, loss=upcast_logits + log_softmax)


def _moments(
    config: ModelConfig,
    runs: dict[str, tuple[Pass, int]],
    sizes: dict[str, int],
    cast: dict[str, int],
    options: StepOptions,
) -> dict[str, int]:
    """Return the peak bytes of each phase of forward and backward pass, without weights and optimizer state.

    The variables of the loop over blocks, from last to first: `left` counts activations and cast weights that are still
    saved, `done` the gradients that exist already.
    """
    last = next(reversed(runs.values()))[0]
    table = sizes.get("embed.tokens.weight", 0)  # 0 if it is frozen: it then has no gradient
    tied = config.head is not None and config.head.tied
    left = sum(_saved(run, n, stack, options) for stack, (run, n) in runs.items()) + sum(cast.values())
    head = 0
    if config.head is not None and options.head_bytes is None:
        logits = last.tokens * config.vocab_size * last.width
        head = saved_by_head(last) - logits  # without the log-softmax, counted with the loss
    # gradients of earlier micro-batches, to which the new ones are added
    accumulated = sum(sizes.values()) if options.accumulate > 1 else 0
    moments = {"loss": left + head + accumulated + _loss(config, last, table, options)}
    done = sum(n for name, n in sizes.items() if part_of(name) == "head") + (table if tied else 0)
    if accumulated:
        done = accumulated
    moments["backward"] = moments["embedding"] = 0
    table_has_gradient = tied  # True if the token table has a gradient already, to which another one is added
    for stack, (run, n_blocks) in reversed(runs.items()):
        if config.placement != "post" and isinstance(config.norm, RMSNorm):
            # rms_norm is not one fused operation: it needs the gradient of x/rms, two gradients of x and their sum,
            # all upcast; its output, which the head read, is freed by then
            rms = 4 * run.tokens * config.d_model * run.upcast_width - run.hidden_states
            moments["backward"] = max(moments["backward"], left + done + rms)
        left -= saved_after_blocks(run)
        blocks = [config.block_of_layer(layer) for layer in range(n_blocks)]
        for layer in reversed(range(n_blocks)):
            own = f"{stack}.blocks.{blocks[layer]}."
            grads = dict.fromkeys(PARTS, 0)
            if blocks[layer] not in blocks[layer + 1 :]:  # otherwise a later layer has made these gradients already
                for name, n in sizes.items():
                    if name.startswith(own):
                        grads[part_of(name)] += n
            here = _block_backward(run.at(layer), grads) + _adapter_backward(run.at(layer), options)
            kept = _kept_by_block(run, layer, stack, options)
            again = _saved_by_block(run, layer, stack, options) - kept  # what is computed again
            moments["backward"] = max(moments["backward"], left + done + here + again)
            left -= kept
            if blocks[layer] not in blocks[:layer]:  # no earlier layer needs the cast weights
                left -= sum(n for name, n in cast.items() if name.startswith(own))
            done += 0 if accumulated else sum(grads.values())
        left -= saved_before_blocks(run)
        if not accumulated:
            done += sum(n for name, n in sizes.items() if name.startswith(stack) and ".blocks." not in name)
        new = 2 * table if table_has_gradient else table  # the new gradient, and the sum if there was one already
        embedded = run.tokens * config.embedding_width * run.width
        moments["embedding"] = max(moments["embedding"], left + done + embedded + new)
        done += 0 if table_has_gradient or accumulated else table
        table_has_gradient = True
    return moments


def _adapter_backward(run: Pass, options: StepOptions) -> int:
    """Return the additional bytes of the backward pass of a block with adapters.

    A matrix has no gradient, but the input of a layer has two, through the matrix and through the adapter; plain LoRA
    in one dtype adds the second one in place. A matrix in NF4 is dequantized.
    """
    expert = run.feedforward
    if not options.adapted or not isinstance(expert, Dense | Gated):
        return 0
    matrix, in_place = run.config.d_model * expert.d_ff, not options.dora
    inputs = 0 if in_place and not options.quantized else run.tokens * expert.d_ff * run.width
    return max(inputs, NF4_TEMPORARIES * matrix if options.quantized else 0) - matrix * run.width


def _block_backward(run: Pass, grads: dict[str, int]) -> int:
    """Return the peak bytes of the backward pass of one block, in addition to everything saved up to that block.

    The branches come in reverse order: feed-forward, cross-attention, attention. Each frees what it saved and adds the
    gradients of its parameters.
    """
    cfg = run.config
    norm = saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    # the gradient of the residual stream; with dropout also that gradient times the dropout mask
    residual_gradient = run.residual * (1 + run.has_dropout)
    if run.memory:
        residual_gradient += run.batch * run.memory * cfg.d_model * run.width  # gradient of the encoder's output
    stages, change = [], 0
    if run.has_feedforward:
        stages.append(_feedforward_backward(run))
        change = grads["feedforward"] - saved_by_feedforward(run)
        change -= norm if cfg.placement != "parallel" else -run.hidden_states
    if run.memory:
        stages.append(change + _attention_backward(run, cross=True))
        change += grads["cross"] - saved_by_attention(run, cross=True) - norm
    stages.append(change + _attention_backward(run, cross=False))
    return residual_gradient + max(stages)


def _feedforward_backward(run: Pass) -> int:
    """Return the peak bytes of gradients in the backward pass of a feed-forward, in addition to what it saved."""
    ff = run.feedforward
    assert not isinstance(ff, NoFeedForward)
    expert = ff.expert if isinstance(ff, MoE) else ff
    rows = -(-run.tokens * ff.n_active // ff.n_experts) if isinstance(ff, MoE) else run.tokens
    hidden = rows * expert.d_ff * run.width
    # Hidden tensors: the gradient of down's input replaces that input, which is freed. In addition there is the
    # gradient of the activation and, if gated, one of each factor. relu and tanh keep the input of down, which is their
    # output. The gradient of a square, 2·x·dy, needs two operations.
    alive = 2 if isinstance(expert, Gated) or expert.activation in ("relu", "tanh") else 1
    if isinstance(expert, Dense) and expert.activation == "relu2":
        alive = 3
    total = alive * hidden + run.config.d_model * expert.d_ff * run.width  # and the gradient of down.weight
    return total + 3 * run.hidden_states if isinstance(ff, MoE) else total  # gather and scatter over all tokens


def _attention_backward(run: Pass, cross: bool) -> int:
    """Return the peak bytes of gradients in the backward pass of attention, in addition to what it saved."""
    cfg, B, T = run.config, run.batch, run.length
    S = run.memory if cross else T
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    heads = B * T * H * U * run.width  # gradient of the joined heads
    if run.materializes_pattern(cross):
        # gradients of pattern and scores; with dropout the tensors it saved are freed, which makes room for one of them
        squares = 1 if run.has_dropout else 2
        return heads + (B * H * S * U + squares * B * H * T * S) * run.upcast_width  # and gradient of v
    return heads + (B * T * H * K + B * S * G * (K + U)) * run.width  # gradients of q, k and v
