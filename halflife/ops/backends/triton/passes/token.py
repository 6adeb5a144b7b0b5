"""One token of a layer from its projection to what it reads, for decoding, in one kernel.

It is the short convolution with its SiLU and state, unit norms of queries and keys, the sigmoid of writing strengths,
the law of log-decays, the factor of values, the step of the states (`step.py`), and Mamba-2's skip. Programs that share
a query and a key compute them again.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.laws import SHAPES, law, limit, positions, sigmoid
from halflife.ops.backends.triton.op import declare
from halflife.ops.backends.triton.step import COLUMNS, updated

EPS = 1e-6  # of unit norms, as in `ops.fused.l2_normalize`


@triton.jit
@no_type_check
def _convolved(x, weight, bias, conv, new_conv, n, at, inside, first, D, x_n, W: tl.constexpr):
    """The convolution and SiLU at channels `at` of sequence n. The `first` program stores its next state."""
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
    y += tl.load(weight + at * W + W - 1, mask=inside, other=0.0).to(tl.float32) * now.to(tl.float32)
    return y * sigmoid(y)


@triton.jit
@no_type_check
def _unit(x, EPS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x) + EPS)


@triton.jit
@no_type_check
def _decay(f, shift, rate, taper, position, n, h, p_n, factor, least, limit, SHAPE: tl.constexpr):
    """The log-decay and the step size of one head, as in `laws._tile`."""
    growth = factor
    if shift is not None:
        f += tl.load(shift + h)
    if rate is not None:
        growth *= tl.exp(tl.load(rate + h))
    if taper is not None:
        stretch = -tl.log(tl.load(position + n * p_n).to(tl.float32)) * tl.load(taper + h)
        if SHAPE == 2:
            f += stretch
        else:
            growth *= tl.exp(stretch)
    step, _ = law(f, SHAPE, least, limit)
    return (-growth * step).to(tl.float32), step.to(tl.float32)  # numbers are float64 in the interpreter


@triton.jit
@no_type_check
def _token_kernel(
    x, weight, bias, conv, g, g_slow, logits, gain, skip, state, slow, shift, rate, taper, position, o, new_conv, new,
    new_slow, scale, most, factor, least, limit, H, S, K, V, D, q_at, k_at, v_at, x_n, g_n, g_h, slow_n, slow_h,
    beta_n, beta_h, gain_n, gain_h, p_n, s_n, s_h, s_k, W: tl.constexpr, UNIT: tl.constexpr, EPS: tl.constexpr,
    SHAPE: tl.constexpr, GAIN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64) // H
    h = tl.program_id(0) % H
    rows = tl.arange(0, BK)
    cols = tl.program_id(1) * BV + tl.arange(0, BV)
    first = (rows < K) & (rows * 0 + tl.program_id(1) + h % S == 0)  # of the programs that share a key
    at = h // S * K + rows
    value = _convolved(x, weight, bias, conv, new_conv, n, v_at + h * V + cols, cols < V, cols < V, D, x_n, W)
    query = _convolved(x, weight, bias, conv, new_conv, n, q_at + at, rows < K, first, D, x_n, W)
    key = _convolved(x, weight, bias, conv, new_conv, n, k_at + at, rows < K, first, D, x_n, W)
    query = tl.where(rows < K, query, 0.0)
    key = tl.where(rows < K, key, 0.0)
    if UNIT:
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
        number = tl.load(g + n * g_n + h * g_h).to(tl.float32)
        if SHAPE is not None:
            number, step = _decay(number, shift, rate, taper, position, n, h, p_n, factor, least, limit, SHAPE)
            if GAIN:
                written *= step
        decay = tl.zeros([BK], tl.float32) + number
    out = scale * updated(
        query, key, written, strength, decay, None, None, g_slow, state, slow, new, new_slow, n, h, rows, cols, K, V,
        0, 0, 0, 0, slow_n, slow_h, s_n, s_h, s_k, logits is not None,
    )  # fmt: skip
    if skip is not None:
        out += tl.load(skip + h).to(tl.float32) * value
    tl.store(o + tl.program_id(0).to(tl.int64) * V + cols, out.to(o.dtype.element_ty), mask=cols < V)


def _token(
    x: Tensor, weight: Tensor, bias: Tensor | None, conv: Tensor, g: Tensor | None, g_slow: Tensor | None,
    logits: Tensor | None, gain: Tensor | None, skip: Tensor | None, state: Tensor, slow: Tensor | None,
    places: list[int], groups: int, unit: bool, most: float, scale: float, dtype: torch.dtype,
    shift: Tensor | None = None, rate: Tensor | None = None, taper: Tensor | None = None,
    position: Tensor | None = None, shape: str | None = None, factor: float = 1.0, least: float = 0.0,
    limit_of_step: float | None = None, gains: bool = False,
) -> list[Tensor]:  # fmt: skip
    """The outputs `[B, 1, H, V]`, and the next states of the convolution and of the memory, fast and slow.

    `places` are the first channels of queries, keys and values in `x [B, 1, D]`, whose last axis has stride 1, as that
    of all tensors. The strides of both states are equal. With a `shape`, g are activations, and the arguments from
    `shift` on are those of the law of log-decays; its step size is also the factor of values if it `gains`.
    """
    (batch, heads, rows, columns), channels = state.shape, x.shape[2]
    o, new_conv = x.new_empty(batch, 1, heads, columns, dtype=dtype), torch.empty_like(conv, dtype=x.dtype)
    states = [
        torch.empty(state.shape, dtype=state.dtype, device=state.device) for part in (state, slow) if part is not None
    ]
    strides = [(0, 0) if part is None else (part.stride(0), part.stride(2)) for part in (g, g_slow, logits, gain)]
    launch(_token_kernel, (batch * heads, triton.cdiv(columns, COLUMNS)))(
        x, weight, bias, conv, g, g_slow, logits, gain, skip, state, slow, shift, rate, taper, position, o, new_conv,
        states[0], None if slow is None else states[1], scale, most, factor, least, limit(limit_of_step), heads,
        heads // groups, rows, columns, channels, *places, x.stride(0),
        *[number for pair in strides for number in pair], positions(position)[0], *state.stride()[:3],
        W=weight.shape[1], UNIT=unit, EPS=EPS, SHAPE=None if shape is None else SHAPES[shape], GAIN=gains,
        BK=max(16, triton.next_power_of_2(rows)), BV=COLUMNS,
    )  # fmt: skip
    return [o, new_conv, *states]


declare("triton_token", _token)
