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
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    met = 0
    d = tl.arange(0, DP)
    real = d < D
    j = tl.arange(0, MP)
    f = tl.arange(0, FP)
    N_QKV: tl.constexpr = (H + G) * K + G * U
    token = tl.load(tokens + place)
    for _ in range(count):
        x = tl.load(table + token * D + d, real, other=0.0).to(tl.float32) * embed_scale
        if PLACED:
            x += tl.load(places + place * D + d, real, other=0.0)
        for layer in range(L):
            first = pid * R_QKV
            tile = _tile(w_qkv + layer * N_QKV * D, first, N_QKV, d, real, D, R_QKV)
            if layer > 0:
                met += 1
                _meet(counter, met * programs)
                x += tl.load(fed + d, real, other=0.0, cache_modifier=".cg")
            y = _normalised(x, d, real, norm_a + layer * D, norm_a_bias + layer * D, eps, D, CENTRED, SHIFTED)
            while first < N_QKV:
                _put(tile, y, b_qkv + layer * N_QKV, qkv, first, N_QKV, R_QKV, BIASED)
                first += programs * R_QKV
                tile = _tile(w_qkv + layer * N_QKV * D, first, N_QKV, d, real, D, R_QKV)
            met += 1
            _meet(counter, met * programs)
            window = tl.load(windows + layer)
            for unit in range(pid, H * SPLITS, programs):
                _attend(
                    unit, place, window, scale, qkv, keys + layer * G * CAPACITY * K, values + layer * G * CAPACITY * U,
                    peaks, sums, parts, cosines, sines, H, G, K, KP, U, UP, CAPACITY, SPLITS, KEYS, ROTATED, HALVES,
                )  # fmt: skip
            first = pid * R_OUT
            mixing = _tile(w_out + layer * D * H * U, first, D, j, j < H * U, H * U, R_OUT)
            met += 1
            _meet(counter, met * programs)
            heads = _mixed(j, j < H * U, peaks, sums, parts, H, U, SPLITS)
            while first < D:
                _put(mixing, heads, b_out + layer * D, mix, first, D, R_OUT, BIASED)
                first += programs * R_OUT
                mixing = _tile(w_out + layer * D * H * U, first, D, j, j < H * U, H * U, R_OUT)
            first = pid * R_UP
            tile = _tile(w_up + layer * F * D * (1 + GATED), first, F, d, real, D, R_UP)
            met += 1
            _meet(counter, met * programs)
            x += tl.load(mix + d, real, other=0.0, cache_modifier=".cg")
            y = _normalised(x, d, real, norm_f + layer * D, norm_f_bias + layer * D, eps, D, CENTRED, SHIFTED)
            while first < F:
                r = first + tl.arange(0, R_UP)
                up = tl.sum(tile.to(tl.float32) * y[None, :], 1)
                if BIASED:
                    up += tl.load(b_up + layer * F + r, r < F, other=0.0)
                if GATED:  # the gate's rows come after up's
                    gate = _tile(w_up + layer * F * D * 2 + F * D, first, F, d, real, D, R_UP)
                    up *= _activated(tl.sum(gate.to(tl.float32) * y[None, :], 1), ACTIVATION)
                else:
                    up = _activated(up, ACTIVATION)
                tl.store(hidden + r, up, r < F, cache_modifier=".cg")
                first += programs * R_UP
                tile = _tile(w_up + layer * F * D * (1 + GATED), first, F, d, real, D, R_UP)
            first = pid * R_DOWN
            wide = _tile(w_down + layer * D * F, first, D, f, f < F, F, R_DOWN)
            met += 1
            _meet(counter, met * programs)
            inner = tl.load(hidden + f, f < F, other=0.0, cache_modifier=".cg")
            while first < D:
                _put(wide, inner, b_down + layer * D, fed, first, D, R_DOWN, BIASED)
                first += programs * R_DOWN
                wide = _tile(w_down + layer * D * F, first, D, f, f < F, F, R_DOWN)
        first = pid * R_HEAD
        tile = _tile(head, first, V, d, real, D, R_HEAD)
        met += 1
        _meet(counter, met * programs)
        x += tl.load(fed + d, real, other=0.0, cache_modifier=".cg")
        y = _normalised(x, d, real, last_norm, last_norm_bias, eps, D, CENTRED, SHIFTED) * head_scale
        highest = float("-inf")
        at = V
        while first < V:
            r = first + tl.arange(0, R_HEAD)
            z = tl.sum(tile.to(tl.float32) * y[None, :], 1)
            if HEAD_BIASED:
                z += tl.load(head_bias + r, r < V, other=0.0)
            tl.store(logits + r, z, r < V)
            z = tl.where(r < V, z, float("-inf"))
            peak = tl.max(z, 0)
            here = tl.min(tl.where(z == peak, r, V), 0)
            at = tl.where(peak > highest, here, at)
            highest = tl.maximum(highest, peak)
            first += programs * R_HEAD
            tile = _tile(head, first, V, d, real, D, R_HEAD)
        tl.store(best + pid, highest, cache_modifier=".cg")
        tl.store(best_at + pid, at, cache_modifier=".cg")
        met += 1
        _meet(counter, met * programs)
        p = tl.arange(0, PP)
        peaks_of = tl.load(best + p, p < programs, other=float("-inf"), cache_modifier=".cg")
        ids = tl.load(best_at + p, p < programs, other=V, cache_modifier=".cg")
        token = tl.min(tl.where(peaks_of == tl.max(peaks_of, 0), ids, V), 0)
        place += 1
        tl.store(tokens + place, token)
