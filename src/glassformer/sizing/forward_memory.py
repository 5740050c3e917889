"""Peak memory of a forward pass without gradients: a prefill, or one decoded token.

The counts describe eager mode on the CPU, as in `memory`.
"""

from glassformer.config import Dense, Gated, ModelConfig, MoE, NoFeedForward
from glassformer.sizing.activations import Pass


def prefill(config: ModelConfig, runs: dict[str, tuple[Pass, int]], cache: int, cross: int, loss: int = 0) -> int:
    """Return the peak bytes of a forward pass without gradients, in addition to the weights.

    `loss` is the number of bytes alive together with the logits.
    """
    peak = held = 0
    for stack, (run, n_blocks) in runs.items():
        kept = (cache + cross) if stack == "decoder" else 0
        block = max(_block_forward(run.at(layer), layer) for layer in range(n_blocks))
        peak = max(peak, held + kept + block)
        if len(runs) == 2:
            held += run.hidden_states  # the encoder's output, until the decoder is done
    last = next(reversed(runs.values()))[0]
    logits = last.tokens * config.vocab_size * last.width if config.head is not None else 0
    if config.head is not None and config.head.softcap is not None:
        logits *= 3  # the logits, and the input and output of tanh
    held += last.hidden_states  # the input of the head
    if config.head is not None and config.head.has_transform:
        held += last.tokens * config.head_width * last.width  # the output of the transform
    return max(peak, cache + cross + held + logits + loss)


def _block_forward(run: Pass, layer: int) -> int:
    """Return the peak bytes inside one block without gradients. Keys and values of a decoder count as KV cache."""
    cfg = run.config
    held = 2 * run.hidden_states  # the embedding, referenced by the model's forward, and the residual stream
    if cfg.placement != "post":
        held += run.hidden_states  # the output of the norm
    square = run.length**2
    if cfg.biases_scores:
        held += cfg.n_heads * square * run.width  # the score bias, shared by all blocks
    if run.uses_qk_position(cross=False):
        held += run.length * cfg.d_model * run.width  # the query/key position embedding, shared by all blocks
    held += square * run.has_window_mask(layer)  # the mask of the window, shared by all blocks
    attended = run.hidden_states  # the residual stream after attention (parallel: the output of attention)
    return held + max(_attention_forward(run, layer), attended + _feedforward_forward(run))


def _attention_forward(run: Pass, layer: int) -> int:
    cfg, B, T, w = run.config, run.batch, run.length, run.width
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    q, heads = B * T * H * K * w, B * T * H * U * w
    kv = 0 if run.causal else B * T * G * (K + U) * w
    if (latent := cfg.attention.latent) is not None:  # the cache has low-rank vectors; keys and values are made of them
        kv = B * T * (H * (K + U) + (latent.q_rank or 0)) * w
    kv += run.hidden_states * run.uses_qk_position(cross=False)  # input of q and k: x + position
    if run.is_explicit:
        return q + kv + _explicit_forward(run) + heads
    if run.materializes_pattern(cross=False):
        return q + kv + _math_forward(run, layer)
    copy = heads if run.uses_rotary(cross=False) or cfg.attention.qk_norm is not None else 0
    rotation = 3 * q if run.uses_rotary(cross=False) else 0  # q, its two rotated halves, and the result
    mask = 0  # the additive mask of the fused kernel
    if run.has_window_mask(layer) or (run.causal and cfg.biases_scores):
        mask = (cfg.n_heads if cfg.biases_scores else 1) * T * T * w
    return kv + max(rotation, q + heads + max(mask, copy + run.hidden_states))


def _math_forward(run: Pass, layer: int) -> int:
    """Return the peak bytes inside torch's attention where it computes the pattern as a tensor (the math path)."""
    cfg, B, T, wide = run.config, run.batch, run.length, run.upcast_width
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    held = B * T * H * K * wide  # the scaled q
    if wide > run.width:
        held += B * T * (H * K + G * (K + U)) * wide  # q, k and v in float32
    if G != H:
        held += B * T * H * (K + U) * wide  # k and v of every head
    if run.causal or run.has_window_mask(layer) or cfg.biases_scores:
        held += (H if cfg.biases_scores else 1) * T * T * wide  # the additive mask
    # the matmul of the scores copies the scaled k, the softmax makes the pattern and one byte for each score, and the
    # last matmul copies v for its result
    in_scores, in_softmax, in_values = (T + 2 * K) * wide, T * (2 * wide + 1), (T + 2 * U) * wide
    return held + B * H * T * max(in_scores, in_softmax, in_values)


def _explicit_forward(run: Pass) -> int:
    """Return the peak bytes of scores and pattern where the model computes them line by line, with k and v repeated."""
    cfg, B, T, w, wide = run.config, run.batch, run.length, run.width, run.upcast_width
    copies = B * cfg.n_heads * T * (cfg.d_head + cfg.d_value) * w
    capped = 3 * w  # the scores, and the input and output of tanh or of the factor after it
    # the scores (twice with the column of the sinks), and in the softmax its upcast input and its output
    in_softmax = (1 + cfg.attention.sinks) * w + (wide if wide == w else 2 * wide)
    return copies + B * cfg.n_heads * T * T * max(capped if cfg.attention.softcap is not None else 0, in_softmax)


def _feedforward_forward(run: Pass) -> int:
    ff = run.feedforward
    if isinstance(ff, NoFeedForward):
        return 0
    if isinstance(ff, MoE) and ff.shared is not None:  # the experts are done: their sum, and the shared expert
        return max(_routed_forward(run, ff), run.hidden_states + _dense_forward(run, ff.shared))
    return _routed_forward(run, ff)


def _dense_forward(run: Pass, expert: Dense | Gated) -> int:
    alive = 3 if isinstance(expert, Gated) or expert.activation == "relu2" else 2
    return alive * run.tokens * expert.d_ff * run.width


def _routed_forward(run: Pass, ff: Dense | Gated | MoE) -> int:
    expert = ff.expert if isinstance(ff, MoE) else ff
    rows = -(-run.tokens * ff.n_active // ff.n_experts) if isinstance(ff, MoE) else run.tokens
    hidden = rows * expert.d_ff * run.width
    alive = 3 if isinstance(expert, Gated) or expert.activation == "relu2" else 2
    total = alive * hidden  # before and after the activation; if gated: gate, up and their elementwise product
    if isinstance(ff, MoE):  # with evenly loaded experts: the gathered tokens of one, and the sum before and after it
        total += rows * run.config.d_model * run.width + 2 * run.hidden_states
    return total


def decode(config: ModelConfig, batch: int, seen: int, w: int) -> int:
    """Return the bytes of the activations of one decoded token, without the KV cache: logits, hidden layer, scores."""
    run = Pass(config, batch, 1, w, causal=True, training=False)
    logits = batch * config.vocab_size * w if config.head is not None else 0
    copies = 0
    if run.materializes_pattern(cross=False):  # the scaled k; with grouped heads also k and v repeated to H heads
        repeated = config.d_head + config.d_value if config.n_kv_heads != config.n_heads else 0
        copies = batch * config.n_heads * seen * (config.d_head + repeated) * run.upcast_width
    return max(logits + run.hidden_states, 3 * run.hidden_states + max(_feedforward_forward(run), copies))
