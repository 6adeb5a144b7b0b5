"""PoST's ordered spectrum and its gradient, each in one program with all channels, or with the law of its log-decays.

`halflife.ops.laws` has the definitions.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import (
    SHAPES,
    blocks,
    law_kernel,
    limit,
    log_decay_backward,
    positions,
    sigmoid,
    softplus,
)
from halflife.ops.backends.triton.op import declare


@triton.jit
@no_type_check
def spectrum(theta, delta, N, log_length, BLOCK: tl.constexpr):
    """Return p and α before its limits, `[BLOCK]`; entries from N on have no meaning."""
    k = tl.arange(0, BLOCK)
    steps = softplus(tl.load(delta + k - 1, mask=(k > 0) & (k < N), other=0.0))
    p = tl.load(theta) + tl.cumsum(tl.where((k > 0) & (k < N), steps, 0.0), 0)
    first = tl.sum(tl.where(k == 0, p, 0.0), 0)
    gap = (tl.sum(tl.where(k == N - 1, p, 0.0), 0) - first) / (N - 1)
    ideal = 1 - k / (N - 1)
    return p, ideal + (p - first - k * gap) / log_length


@triton.jit
@no_type_check
def _spectrum_kernel(theta, delta, p, taper, N, log_length, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    base, alpha = spectrum(theta, delta, N, log_length, BLOCK)
    tl.store(p + k, base, mask=k < N)
    tl.store(taper + k, tl.minimum(tl.maximum(alpha, 0.0), 1.0), mask=k < N)


@triton.jit
@no_type_check
def _spectrum_back_kernel(theta, delta, dp, dtaper, dtheta, ddelta, N, log_length, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    _, alpha = spectrum(theta, delta, N, log_length, BLOCK)
    free = (alpha >= 0) & (alpha <= 1) & (k < N)
    d = tl.where(free, tl.load(dtaper + k, mask=k < N, other=0.0) / log_length, 0.0)
    of_gap = -tl.sum(d * k, 0) / (N - 1)
    grad = tl.load(dp + k, mask=k < N, other=0.0) + d
    grad += tl.where(k == 0, -tl.sum(d, 0) - of_gap, 0.0)
    grad += tl.where(k == N - 1, of_gap, 0.0)
    later = tl.cumsum(grad, 0, reverse=True)  # of p_j for all j ≥ k
    tl.store(dtheta + k, later, mask=k == 0)
    slope = sigmoid(tl.load(delta + k - 1, mask=(k > 0) & (k < N), other=0.0))
    tl.store(ddelta + k - 1, slope * later, mask=(k > 0) & (k < N))


def _spectrum(theta: Tensor, delta: Tensor, log_length: float) -> tuple[Tensor, Tensor]:
    """p and α, `[N]` each."""
    count = len(delta) + 1
    p, taper, (block, warps) = delta.new_empty(count), delta.new_empty(count), _block(count)
    launch(_spectrum_kernel, (1,))(theta, delta, p, taper, count, log_length, BLOCK=block, num_warps=warps)
    return p, taper


def _spectrum_backward(
    theta: Tensor, delta: Tensor, dp: Tensor, dtaper: Tensor, log_length: float
) -> tuple[Tensor, Tensor]:
    count = len(delta) + 1
    dtheta, ddelta, (block, warps) = torch.empty_like(theta), torch.empty_like(delta), _block(count)
    launch(_spectrum_back_kernel, (1,))(
        theta, delta, dp, dtaper, dtheta, ddelta, count, log_length, BLOCK=block, num_warps=warps
    )
    return dtheta, ddelta


@triton.jit
@no_type_check
def _decays_kernel(
    theta, delta, f, position, bias, p, taper, g, step, rows_all, T, D, f_b, f_t, p_b, p_t, log_length, factor, least,
    most, BLOCK: tl.constexpr, SHAPE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Log-decays under PoST. Each program stores the spectrum, the same numbers, and reads what it stored."""
    _spectrum_kernel(theta, delta, p, taper, D, log_length, BLOCK)
    tl.debug_barrier()
    law_kernel(
        f, position, bias, p, taper, g, step, rows_all, T, D, f_b, f_t, p_b, p_t, factor, least, most, SHAPE, BR, BC
    )


def _decays(
    f: Tensor, bias: Tensor | None, theta: Tensor, delta: Tensor, position: Tensor, log_length: float, shape: str,
    factor: float, least: float, most: float | None, with_step: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """g and φ as `triton_log_decay` returns them, with p as the rate and α as the taper, and both."""
    tokens, rows, columns = blocks(f)
    g, step = (f.new_empty(f.shape if made else 0, dtype=torch.float32) for made in (True, with_step))
    p, taper = (theta.new_empty(f.shape[2]) for _ in range(2))
    if f.numel():
        launch(_decays_kernel, (triton.cdiv(f.shape[2], columns) * triton.cdiv(tokens, rows),))(
            theta, delta, f, position, bias, p, taper, g, step if with_step else None, tokens, f.shape[1], f.shape[2],
            f.stride(0), f.stride(1), *positions(position), log_length, factor, least, limit(most),
            BLOCK=_block(f.shape[2])[0], SHAPE=SHAPES[shape], BR=rows, BC=columns,
        )  # fmt: skip
    return g, step, p, taper


def _decays_backward(
    dg: Tensor, dstep: Tensor | None, f: Tensor, bias: Tensor | None, theta: Tensor, delta: Tensor, position: Tensor,
    p: Tensor, taper: Tensor, log_length: float, shape: str, factor: float, least: float, most: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of f, of bias, p and α together, and of θ and δ."""
    df, sums = log_decay_backward(dg, dstep, f, bias, p, taper, position, shape, factor, least, most)
    return df, sums, *_spectrum_backward(theta, delta, sums[1], sums[2], log_length)


def _block(count: int) -> tuple[int, int]:
    """The entries of the program, and its warps."""
    block = max(32, triton.next_power_of_2(count))
    return block, min(max(block // 512, 1), 16)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.log_length = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, dp: Tensor, dtaper: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    return *_gradients(*ctx.saved_tensors, dp.contiguous(), dtaper.contiguous(), ctx.log_length), None


_gradients = declare("triton_spectrum_backward", _spectrum_backward)
declare("triton_spectrum", _spectrum).register_autograd(_grad, setup_context=_save)


def _decays_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.log_length = inputs[:6]
    ctx.settings, ctx.with_step = inputs[6:10], inputs[10]
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _decays_grad(ctx: Any, dg: Tensor, dstep: Tensor, *_: Any) -> tuple[Any, ...]:
    only_first_derivatives()
    tensors, of_step = ctx.saved_tensors, dstep.contiguous() if ctx.with_step else None
    df, sums, *of_spectrum = _of_decays(dg.contiguous(), of_step, *tensors, ctx.log_length, *ctx.settings)
    return df, None if tensors[1] is None else sums[0], *of_spectrum, *[None] * 7


_of_decays = declare("triton_post_decay_backward", _decays_backward)
declare("triton_post_decay", _decays).register_autograd(_decays_grad, setup_context=_decays_save)
