"""Tokens of one sequence, one after another, in a single kernel that stays on the GPU: nothing is launched per layer.

At batch 1 a step reads every weight once and computes almost nothing; launching some hundred kernels takes longer than
reading. So as many programs as fit at once walk through the layers together. Each keeps the whole residual stream in
registers and computes its share of the rows of each matrix; shares are exchanged through memory and a barrier of all
programs, five times a layer: projections, attention over a part of the keys, its output, up, down. Weights do not
depend on what the barrier waits for, so the first rows of the next matrix are asked for before it.

The definition is glassformer.model; tests/generate/cuda holds the two together, in Triton's interpreter too (where one
program does all the work, and the barrier is one of one).
"""

import triton
import triton.language as tl


@triton.jit
def _meet(counter, target):
    """No program goes on before all have arrived `target` times together."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _normalised(x, at, real, weight, bias, eps, D: tl.constexpr, CENTRED: tl.constexpr, SHIFTED: tl.constexpr):
    if CENTRED:
        x = tl.where(real, x - tl.sum(x, 0) / D, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / D + eps) * tl.load(weight + at, real, other=0.0)
    if SHIFTED:
        y += tl.load(bias + at, real, other=0.0)
    return y


@triton.jit
def _tile(weights, first, rows, at, real, K: tl.constexpr, R: tl.constexpr):
    """Rows first..first+R of a matrix (rows, K)."""
    r = first + tl.arange(0, R)
    return tl.load(weights + r[:, None] * K + at[None, :], (r < rows)[:, None] & real[None, :], other=0.0)


@triton.jit
def _put(tile, x, bias, out, first, rows, R: tl.constexpr, BIASED: tl.constexpr):
    r = first + tl.arange(0, R)
    y = tl.sum(tile.to(tl.float32) * x[None, :], 1)
    if BIASED:
        y += tl.load(bias + r, r < rows, other=0.0)
    tl.store(out + r, y, r < rows, cache_modifier=".cg")


@triton.jit
def _multiply(
    tile, weights, x, bias, out, rows, at, real, K: tl.constexpr, R: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """This program's rows of weights x + bias; `tile` holds the first R of them already."""
    first = tl.program_id(0) * R
    while first < rows:
        _put(tile, x, bias, out, first, rows, R, BIASED)
        first += tl.num_programs(0) * R
        tile = _tile(weights, first, rows, at, real, K, R)


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "relu2":
        y = tl.maximum(y, 0.0) * tl.maximum(y, 0.0)
    else:
        y = 2 * tl.sigmoid(2 * y) - 1
    return y


@triton.jit
def _raise(
    tile, weights, y, bias, out, at, real,
    D: tl.constexpr, F: tl.constexpr, R: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """This program's share of the hidden layer. The gate's rows come after up's."""
    first = tl.program_id(0) * R
    while first < F:
        r = first + tl.arange(0, R)
        up = tl.sum(tile.to(tl.float32) * y[None, :], 1)
        if BIASED:
            up += tl.load(bias + r, r < F, other=0.0)
        if GATED:
            gate = _tile(weights + F * D, first, F, at, real, D, R)
            up *= _activated(tl.sum(gate.to(tl.float32) * y[None, :], 1), ACTIVATION)
        else:
            up = _activated(up, ACTIVATION)
        tl.store(out + r, up, r < F, cache_modifier=".cg")
        first += tl.num_programs(0) * R
        tile = _tile(weights, first, F, at, real, D, R)


@triton.jit
def _judge(
    tile, head, y, bias, logits, best, best_at, at, real,
    D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """This program's share of the logits; the highest of them and where it stands, the first of equals."""
    first = tl.program_id(0) * R
    highest = float("-inf")
    place = V
    while first < V:
        r = first + tl.arange(0, R)
        z = tl.sum(tile.to(tl.float32) * y[None, :], 1)
        if BIASED:
            z += tl.load(bias + r, r < V, other=0.0)
        tl.store(logits + r, z, r < V)
        z = tl.where(r < V, z, float("-inf"))
        peak = tl.max(z, 0)
        here = tl.min(tl.where(z == peak, r, V), 0)
        place = tl.where(peak > highest, here, place)
        highest = tl.maximum(highest, peak)
        first += tl.num_programs(0) * R
        tile = _tile(head, first, V, at, real, D, R)
    tl.store(best + tl.program_id(0), highest, cache_modifier=".cg")
    tl.store(best_at + tl.program_id(0), place, cache_modifier=".cg")


@triton.jit
def _choose(best, best_at, V: tl.constexpr, PP: tl.constexpr):
    """The likeliest token of all programs' shares."""
    p = tl.arange(0, PP)
    there = p < tl.num_programs(0)
    peaks = tl.load(best + p, there, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(best_at + p, there, other=V, cache_modifier=".cg")
    return tl.min(tl.where(peaks == tl.max(peaks, 0), ids, V), 0)


@triton.jit
def _turned(vector, i, real, place, cosines, sines, ROTATED: tl.constexpr, HALVES: tl.constexpr):
    """A query or a key at its place: component i and its partner turned by the angle of their pair."""
    x = tl.load(vector + i, real, other=0.0, cache_modifier=".cg")
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        if HALVES:
            first = i < half
            partner = tl.where(first, i + half, i - half)
            pair = tl.where(first, i, i - half)
        else:
            first = i % 2 == 0
            partner = tl.where(first, i + 1, i - 1)
            pair = i // 2
        turns = real & (i < ROTATED)
        other = tl.load(vector + partner, turns, other=0.0, cache_modifier=".cg")
        c = tl.load(cosines + place * half + pair, turns, other=1.0)
        s = tl.load(sines + place * half + pair, turns, other=0.0)
        x = tl.where(turns, x * c + tl.where(first, -other, other) * s, x)
    return x


@triton.jit
def _attend(
    unit, place, window, scale, qkv, keys, values, peaks, sums, parts, cosines, sines,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, U: tl.constexpr, UP: tl.constexpr,
    CAPACITY: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, ROTATED: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """One head over one of SPLITS parts of its keys: highest score, sum of exponentials, weighted values."""
    h = unit % H
    split = unit // H
    g = h // (H // G)
    i = tl.arange(0, KP)
    u = tl.arange(0, UP)
    q = _turned(qkv + h * K, i, i < K, place, cosines, sines, ROTATED, HALVES) * scale
    start = tl.maximum(place + 1 - window, 0)
    each = tl.cdiv(tl.cdiv(place - start, SPLITS), KEYS) * KEYS
    first = start + split * each
    last = tl.minimum(first + each, place)
    peak = float("-inf")
    total = 0.0
    mixed = tl.zeros((UP,), tl.float32)
    base = keys + g * CAPACITY * K
    value_base = values + g * CAPACITY * U
    for s0 in range(first, last, KEYS):
        s = s0 + tl.arange(0, KEYS)
        k = tl.load(base + s[:, None] * K + i[None, :], (s < last)[:, None] & (i < K)[None, :], other=0.0)
        score = tl.where(s < last, tl.sum(k.to(tl.float32) * q[None, :], 1), float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 0))
        weight = tl.exp(score - higher)
        v = tl.load(value_base + s[:, None] * U + u[None, :], (s < last)[:, None] & (u < U)[None, :], other=0.0)
        mixed = mixed * tl.exp(peak - higher) + tl.sum(v.to(tl.float32) * weight[:, None], 0)
        total = total * tl.exp(peak - higher) + tl.sum(weight, 0)
        peak = higher
    if split == 0:  # the token itself, which is not in the cache yet
        k = _turned(qkv + H * K + g * K, i, i < K, place, cosines, sines, ROTATED, HALVES)
        v = tl.load(qkv + (H + G) * K + g * U + u, u < U, other=0.0, cache_modifier=".cg")
        score = tl.sum(q * k, 0)
        higher = tl.maximum(peak, score)
        weight = tl.exp(score - higher)
        mixed = mixed * tl.exp(peak - higher) + v * weight
        total = total * tl.exp(peak - higher) + weight
        peak = higher
        if h % (H // G) == 0:
            tl.store(base + place * K + i, k.to(keys.dtype.element_ty), i < K)
            tl.store(value_base + place * U + u, v.to(values.dtype.element_ty), u < U)
    tl.store(peaks + unit, peak, cache_modifier=".cg")
    tl.store(sums + unit, total, cache_modifier=".cg")
    tl.store(parts + unit * U + u, mixed, u < U, cache_modifier=".cg")


@triton.jit
def _mixed(j, real, peaks, sums, parts, H: tl.constexpr, U: tl.constexpr, SPLITS: tl.constexpr):
    """The heads side by side, their parts put together."""
    h = j // U
    peak = tl.full(j.shape, float("-inf"), tl.float32)
    total = tl.zeros(j.shape, tl.float32)
    value = tl.zeros(j.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        unit = split * H + h
        p = tl.load(peaks + unit, real, other=0.0, cache_modifier=".cg")
        here = tl.load(sums + unit, real, other=1.0, cache_modifier=".cg")
        part = tl.load(parts + unit * U + j % U, real, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, p)
        # a part without keys has no peak: nothing of it is added, and the first part always has the token itself
        old, new = tl.exp(peak - higher), tl.exp(p - higher)
        value = value * old + part * new
        total = total * old + here * new
        peak = higher
    return tl.where(real, value / total, 0.0)


@triton.jit(do_not_specialize=["place", "count"])
def decode(
    tokens, place, count, table, places, embed_scale, cosines, sines,
    norm_a, norm_a_bias, norm_f, norm_f_bias, last_norm, last_norm_bias, head, head_bias, head_scale, eps,
    w_qkv, b_qkv, w_out, b_out, w_up, b_up, w_down, b_down, windows, scale, keys, values,
    qkv, peaks, sums, parts, mix, hidden, fed, best, best_at, logits, counter,
    L: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, H: tl.constexpr, G: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, U: tl.constexpr, UP: tl.constexpr, MP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    V: tl.constexpr, CAPACITY: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr, PP: tl.constexpr,
    R_QKV: tl.constexpr, R_OUT: tl.constexpr, R_UP: tl.constexpr, R_DOWN: tl.constexpr, R_HEAD: tl.constexpr,
    PLACED: tl.constexpr, ROTATED: tl.constexpr, HALVES: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, CENTRED: tl.constexpr, SHIFTED: tl.constexpr, BIASED: tl.constexpr,
    HEAD_BIASED: tl.constexpr,
):  # fmt: skip
    """Read tokens[place] and write tokens[place + 1], `count` times; the logits of the last step are left."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    met = 0
    d, j, f = tl.arange(0, DP), tl.arange(0, MP), tl.arange(0, FP)
    real, mixes, inner = d < D, j < H * U, f < F
    N_QKV: tl.constexpr = (H + G) * K + G * U
    token = tl.load(tokens + place)
    for _ in range(count):
        x = tl.load(table + token * D + d, real, other=0.0).to(tl.float32) * embed_scale
        if PLACED:
            x += tl.load(places + place * D + d, real, other=0.0)
        for layer in range(L):
            w = w_qkv + layer * N_QKV * D
            tile = _tile(w, pid * R_QKV, N_QKV, d, real, D, R_QKV)
            if layer > 0:
                met += 1
                _meet(counter, met * programs)
                x += tl.load(fed + d, real, other=0.0, cache_modifier=".cg")
            y = _normalised(x, d, real, norm_a + layer * D, norm_a_bias + layer * D, eps, D, CENTRED, SHIFTED)
            _multiply(tile, w, y, b_qkv + layer * N_QKV, qkv, N_QKV, d, real, D, R_QKV, BIASED)
            met += 1
            _meet(counter, met * programs)
            for unit in range(pid, H * SPLITS, programs):
                _attend(
                    unit, place, tl.load(windows + layer), scale, qkv, keys + layer * G * CAPACITY * K,
                    values + layer * G * CAPACITY * U, peaks, sums, parts, cosines, sines, H, G, K, KP, U, UP, CAPACITY,
                    SPLITS, KEYS, ROTATED, HALVES,
                )  # fmt: skip
            w = w_out + layer * D * H * U
            mixing = _tile(w, pid * R_OUT, D, j, mixes, H * U, R_OUT)
            met += 1
            _meet(counter, met * programs)
            heads = _mixed(j, mixes, peaks, sums, parts, H, U, SPLITS)
            _multiply(mixing, w, heads, b_out + layer * D, mix, D, j, mixes, H * U, R_OUT, BIASED)
            w = w_up + layer * F * D * (1 + GATED)
            tile = _tile(w, pid * R_UP, F, d, real, D, R_UP)
            met += 1
            _meet(counter, met * programs)
            x += tl.load(mix + d, real, other=0.0, cache_modifier=".cg")
            y = _normalised(x, d, real, norm_f + layer * D, norm_f_bias + layer * D, eps, D, CENTRED, SHIFTED)
            _raise(tile, w, y, b_up + layer * F, hidden, d, real, D, F, R_UP, GATED, ACTIVATION, BIASED)
            w = w_down + layer * D * F
            wide = _tile(w, pid * R_DOWN, D, f, inner, F, R_DOWN)
            met += 1
            _meet(counter, met * programs)
            z = tl.load(hidden + f, inner, other=0.0, cache_modifier=".cg")
            _multiply(wide, w, z, b_down + layer * D, fed, D, f, inner, F, R_DOWN, BIASED)
        tile = _tile(head, pid * R_HEAD, V, d, real, D, R_HEAD)
        met += 1
        _meet(counter, met * programs)
        x += tl.load(fed + d, real, other=0.0, cache_modifier=".cg")
        y = _normalised(x, d, real, last_norm, last_norm_bias, eps, D, CENTRED, SHIFTED) * head_scale
        _judge(tile, head, y, head_bias, logits, best, best_at, d, real, D, V, R_HEAD, HEAD_BIASED)
        met += 1
        _meet(counter, met * programs)
        token = _choose(best, best_at, V, PP)
        place += 1
        tl.store(tokens + place, token)
