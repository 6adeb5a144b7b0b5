"""One token of a layer from its projection to what it reads, for decoding, in one kernel.

It is the short convolution with its SiLU and state, or SiLU alone; RoPE and unit norms of queries and keys; the sigmoid
of writing strengths; the law of log-decays with the map of low rank to its activations, and PoST's spectrum; GateRank's
gate; the factor of values; the step of the states (`step.py`); and Mamba-2's skip. Programs that share a query, a key
or a decay compute it again.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import SHAPES, law, limit, positions, sigmoid, softplus
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.step import COLUMNS, updated

EPS = 1e-6  # of unit norms, as in `ops.fused.l2_normalize`
RANK = 16  # columns at once of the map to activations
FORMS = SHAPES | {"constant": len(SHAPES)}


@triton.jit
@no_type_check
def _convolved(x, weight, bias, conv, new_conv, n, at, inside, first, D, x_n, W: tl.constexpr):
    """The convolution at channels `at` of sequence n. The `first` program stores its next state."""
    y = tl.zeros([at.shape[0]], tl.float32)
    if bias is not None:
        y += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    place = (n * D + at) * (W - 1)
    for i in tl.static_range(W - 1):
        old = tl.load(conv + place + i, mask=inside, other=0.0)
        y += tl.load(weight + at * W + i, mask=inside, other=0.0).to(tl.float32) * old.to(tl.float32)
        if i > 0:
            tl.store(new_conv + place + i - 1, old.to(new_conv.dtype.element_ty), mask=first)
    now = tl.load(x + n * x_n + at, mask=inside, other=0.0)
    tl.store(new_conv + place + W - 2, now.to(new_conv.dtype.element_ty), mask=first)
    return y + tl.load(weight + at * W + W - 1, mask=inside, other=0.0).to(tl.float32) * now.to(tl.float32)


@triton.jit
@no_type_check
def _channels(
    x, weight, bias, conv, new_conv, n, at, inside, first, D, x_n, W: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """Queries, keys or values at channels `at` of sequence n; 0 outside."""
    if W > 0:
        y = _convolved(x, weight, bias, conv, new_conv, n, at, inside, first, D, x_n, W)
    else:
        y = tl.load(x + n * x_n + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y *= sigmoid(y)
    return tl.where(inside, y, 0.0)


@triton.jit
@no_type_check
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x) + EPS)


@triton.jit
@no_type_check
def _turned(y, other, cos, sin, rows, inside, half):
    """y rotated by the angles of its pairs (i, i + half), of which `other` has the other halves."""
    c = tl.load(cos + rows % half, mask=inside, other=0.0)
    s = tl.load(sin + rows % half, mask=inside, other=0.0)
    return y * c + tl.where(rows < half, -other, other) * s


@triton.jit
@no_type_check
def _product(f, up, up_bias, at, inside, RANK: tl.constexpr, BR: tl.constexpr):
    """The activations `at` of a map of f `[RANK]`."""
    y = tl.zeros([at.shape[0]], tl.float32)
    if up_bias is not None:
        y += tl.load(up_bias + at, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, RANK, BR):
        r = start + tl.arange(0, BR)
        numbers = tl.load(f + r, mask=r < RANK, other=0.0).to(tl.float32)
        there = inside[:, None] & (r < RANK)[None, :]
        w = tl.load(up + at.to(tl.int64)[:, None] * RANK + r[None, :], mask=there, other=0.0)
        y += tl.sum(w.to(tl.float32) * numbers[None, :], 1)
    return y


@triton.jit
@no_type_check
def _of_spectrum(theta, delta, h, H, log_length, BLOCK: tl.constexpr):
    """PoST's p and α of one head, as in `post.spectrum`."""
    k = tl.arange(0, BLOCK)
    steps = tl.where(k < H - 1, softplus(tl.load(delta + k, mask=k < H - 1, other=0.0)), 0.0)
    below = tl.sum(tl.where(k < h, steps, 0.0))
    taper = 1 - h / (H - 1) + (below - h * tl.sum(steps) / (H - 1)) / log_length
    return tl.load(theta) + below, tl.minimum(tl.maximum(taper, 0.0), 1.0)


@triton.jit
@no_type_check
def _decay(
    f, shift, rate, taper, theta, delta, position, n, h, rows, inside, H, p_n, shift_h, shift_k, rate_h, rate_k,
    taper_h, taper_k, factor, least, limit, log_length, SHAPE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The log-decays and the step sizes of one head, `[K]`, as in `laws._tile`."""
    growth = tl.zeros([rows.shape[0]], tl.float32) + factor
    if shift is not None:
        f += tl.load(shift + h * shift_h + rows * shift_k, mask=inside, other=0.0)
    if rate is not None:
        growth *= tl.exp(tl.load(rate + h * rate_h + rows * rate_k, mask=inside, other=0.0))
    exponent = tl.zeros([rows.shape[0]], tl.float32)
    if taper is not None:
        exponent += tl.load(taper + h * taper_h + rows * taper_k, mask=inside, other=0.0)
    if theta is not None:
        base, alpha = _of_spectrum(theta, delta, h, H, log_length, BN)
        growth *= tl.exp(base)
        exponent += alpha
    if position is not None:
        stretch = -tl.log(tl.load(position + n * p_n).to(tl.float32)) * exponent
        if SHAPE == 2:
            f += stretch
        else:
            growth *= tl.exp(stretch)
    step = tl.full([rows.shape[0]], 1.0, tl.float32)
    if SHAPE != 4:
        step, _ = law(f, SHAPE, least, limit)
    return (-growth * step).to(tl.float32), step.to(tl.float32)  # numbers are float64 in the interpreter


@triton.jit
@no_type_check
def _gate(f, taps, bias, rate, conv, new_conv, n, e, f_n, G, first, W: tl.constexpr):
    """GateRank's log-decay of the slow state of gate e. The `first` program stores the convolution's next state."""
    now = tl.load(f + n * f_n + e).to(tl.float32)
    y = tl.load(bias + e) + tl.load(taps + e * W + W - 1) * now
    place = (n * G + e) * (W - 1)
    for i in tl.static_range(W - 1):
        old = tl.load(conv + place + i).to(tl.float32)
        y += tl.load(taps + e * W + i) * old
        if i > 0:
            tl.store(new_conv + place + i - 1, old, mask=first)
    if W > 1:
        tl.store(new_conv + place + W - 2, now, mask=first)
    return (-tl.exp(tl.load(rate + e)) * tl.where(y < 0, 0.0, y)).to(tl.float32)  # a NaN passes through


@triton.jit
@no_type_check
def _token_kernel(
    x, weight, bias, conv, g, up, up_bias, g_slow, slow_f, taps, slow_bias, slow_rate, slow_conv, logits, gain,
    skip, state, slow, shift, rate, taper, theta, delta, position, cos, sin, o, new_conv, new, new_slow,
    new_slow_conv, scale, most, factor, least, limit, log_length, H, S, K, V, D, G, q_at, k_at, v_at, x_n, g_n, g_h,
    slow_n, slow_h, f_n, beta_n, beta_h, gain_n, gain_h, p_n, shift_h, shift_k, rate_h, rate_k, taper_h, taper_k,
    s_n, s_h, s_k, c_n, W: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr,
    VECTOR: tl.constexpr, RANK: tl.constexpr, BR: tl.constexpr, SHAPE: tl.constexpr, GAIN: tl.constexpr,
    TAPS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0) % H
    rows = tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    in_rows = rows < K
    first = in_rows & (rows * 0 + tl.program_id(1) + h % S == 0)  # of the programs that share a key
    at = h // S * K + rows
    of_values = v_at + h * V + cols
    value = _channels(x, weight, bias, conv, new_conv, n, of_values, cols < V, cols < V, D, x_n, W, SILU and W > 0)
    query = _channels(x, weight, bias, conv, new_conv, n, q_at + at, in_rows, first, D, x_n, W, SILU)
    key = _channels(x, weight, bias, conv, new_conv, n, k_at + at, in_rows, first, D, x_n, W, SILU)
    if cos is not None:
        of_other = h // S * K + (rows + K // 2) % K
        never = in_rows & (rows < 0)
        pair = _channels(x, weight, bias, conv, new_conv, n, q_at + of_other, in_rows, never, D, x_n, W, SILU)
        query = _turned(query, pair, cos + n * c_n, sin + n * c_n, rows, in_rows, K // 2)
        pair = _channels(x, weight, bias, conv, new_conv, n, k_at + of_other, in_rows, never, D, x_n, W, SILU)
        key = _turned(key, pair, cos + n * c_n, sin + n * c_n, rows, in_rows, K // 2)
    if UNIT:  # which no rotation changes
        query = _unit(query, EPS)
        key = _unit(key, EPS)
    strength = 1.0
    if logits is not None:
        strength = most * sigmoid(tl.load(logits + n * beta_n + h * beta_h).to(tl.float32))
    written = value
    if gain is not None:
        written *= tl.load(gain + n * gain_n + h * gain_h).to(tl.float32)
    decay = None
    if g is not None:
        if RANK > 0:
            decay = _product(g + n * g_n, up, up_bias, h * K + rows, in_rows, RANK, BR)
        else:
            place = n * g_n + h * g_h + (rows if VECTOR else rows * 0)
            decay = tl.load(g + place, mask=in_rows, other=0.0).to(tl.float32)
        if SHAPE is not None:
            decay, step = _decay(
                decay, shift, rate, taper, theta, delta, position, n, h, rows, in_rows, H, p_n, shift_h, shift_k,
                rate_h, rate_k, taper_h, taper_k, factor, least, limit, log_length, SHAPE, BN,
            )  # fmt: skip
            if GAIN:  # of a scalar decay
                written *= tl.sum(tl.where(rows == 0, step, 0.0))
    slow_g = None
    if g_slow is not None:
        slow_g = tl.load(g_slow + n * slow_n + h * slow_h).to(tl.float32)
    if taps is not None:
        e = h % G
        once = (tl.program_id(1) == 0) & (h < G)
        slow_g = _gate(slow_f, taps, slow_bias, slow_rate, slow_conv, new_slow_conv, n, e, f_n, G, once, TAPS)
    out = scale * updated(
        query, key, written, strength, decay, None, None, slow_g, state, slow, new, new_slow, n, h, rows, cols, K, V,
        0, 0, 0, 0, s_n, s_h, s_k, logits is not None,
    )  # fmt: skip
    if skip is not None:
        out += tl.load(skip + h).to(tl.float32) * value
    tl.store(o + tl.program_id(0).to(tl.int64) * V + cols, out.to(o.dtype.element_ty), mask=cols < V)


def _token(
    x: Tensor, taps: list[Tensor], conv: Tensor | None, g: Tensor | None, up: list[Tensor], g_slow: Tensor | None,
    gate: list[Tensor], logits: Tensor | None, gain: Tensor | None, skip: Tensor | None, state: Tensor,
    slow: Tensor | None, places: list[int], groups: int, silu: bool, unit: bool, most: float, scale: float,
    dtype: torch.dtype, spectrum: list[Tensor], log_length: float, shift: Tensor | None = None,
    rate: Tensor | None = None, taper: Tensor | None = None, position: Tensor | None = None,
    shape: str | None = None, factor: float = 1.0, least: float = 0.0, limit_of_step: float | None = None,
    gains: bool = False, cos: Tensor | None = None, sin: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """The outputs `[B, 1, H, V]`, and the next states: of the convolution, fast and slow, and of the gate's.

    `taps` are the weight of the convolution and its bias, if it has one; without them there is none. `places` are the
    first channels of queries, keys and values in `x [B, 1, D]`, whose last axis has stride 1, as that of all tensors.
    The strides of both states are equal. g are log-decays; with a `shape` activations, or what a map makes them of,
    `up` with its bias, if it has one. The arguments from `shift` on are those of their law, and a `spectrum` is PoST's
    θ and δ. The step size is also the factor of values if it `gains`. GateRank's `gate` is its input, its taps, bias
    and rate, and the state of its convolution.
    """
    (batch, heads, rows, columns), channels, count = state.shape, x.shape[2], 1 if slow is None else 2
    o = x.new_empty(batch, 1, heads, columns, dtype=dtype)
    states = [torch.empty(state.shape, dtype=state.dtype, device=state.device) for _ in range(count)]
    new = None if conv is None else torch.empty_like(conv, dtype=x.dtype)
    new_gate, (gates, gate_taps) = torch.empty_like(gate[-1]) if gate else None, gate[1].shape if gate else (1, 0)
    strides = [(0, 0) if part is None else (part.stride(0), part.stride(2)) for part in (g_slow, logits, gain)]
    vectors = [(0, 0) if part is None else (*part.stride(), 0)[:2] for part in (shift, rate, taper)]
    of_g = (0, 0) if g is None else (g.stride(0), 0 if up else g.stride(2))
    rank = up[0].shape[1] if up else 0
    launch(_token_kernel, (batch * heads, triton.cdiv(columns, COLUMNS)))(
        x, *(*taps, None, None)[:2], conv, g, *(*up, None, None)[:2], g_slow, *(gate or [None] * 5), logits,
        gain, skip, state, slow, shift, rate, taper, *(*spectrum, None, None)[:2], position, cos, sin, o, new,
        *(*states, None)[:2], new_gate, scale, most, factor, least, limit(limit_of_step), log_length, heads,
        heads // groups, rows, columns, channels, gates, *places, x.stride(0), *of_g, *strides[0],
        gate[0].stride(0) if gate else 0, *strides[1], *strides[2], positions(position)[0], *vectors[0],
        *vectors[1], *vectors[2], *state.stride()[:3], 0 if cos is None or len(cos) == 1 else cos.stride(0),
        W=taps[0].shape[1] if taps else 0, SILU=silu, UNIT=unit, EPS=EPS, VECTOR=g is not None and g.ndim == 4,
        RANK=rank, BR=max(1, min(RANK, triton.next_power_of_2(rank))), SHAPE=None if shape is None else FORMS[shape],
        GAIN=gains, TAPS=gate_taps, BN=triton.next_power_of_2(heads),
        BK=max(16, triton.next_power_of_2(rows)), BV=COLUMNS,
    )  # fmt: skip
    return [part for part in (o, new, *states, new_gate) if part is not None]


declare("triton_token", _token)
