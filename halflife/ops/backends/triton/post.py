"""PoST's ordered spectrum and its gradient, each in one program with all channels (see `halflife.ops.laws`)."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import sigmoid, softplus
from halflife.ops.backends.triton.op import declare, declare_gradients


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
def spectrum_kernel(theta, delta, p, taper, N, log_length, BLOCK: tl.constexpr):
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
    p, taper, (block, warps) = delta.new_empty(count), delta.new_empty(count), block_of(count)
    launch(spectrum_kernel, (1,))(theta, delta, p, taper, count, log_length, BLOCK=block, num_warps=warps)
    return p, taper


def spectrum_backward(
    theta: Tensor, delta: Tensor, dp: Tensor, dtaper: Tensor, log_length: float
) -> tuple[Tensor, Tensor]:
    """The gradients of θ and δ."""
    count = len(delta) + 1
    dtheta, ddelta, (block, warps) = torch.empty_like(theta), torch.empty_like(delta), block_of(count)
    launch(_spectrum_back_kernel, (1,))(
        theta, delta, dp, dtaper, dtheta, ddelta, count, log_length, BLOCK=block, num_warps=warps
    )
    return dtheta, ddelta


def block_of(count: int) -> tuple[int, int]:
    """The entries of the program, and its warps."""
    block = max(32, triton.next_power_of_2(count))
    return block, min(max(block // 512, 1), 16)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.log_length = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, dp: Tensor, dtaper: Tensor) -> tuple[Any, ...]:
    only_first_derivatives()
    return *_gradients(*ctx.saved_tensors, dp.contiguous(), dtaper.contiguous(), ctx.log_length), None


_gradients = declare_gradients("triton_spectrum_backward", spectrum_backward)
declare("triton_spectrum", _spectrum).register_autograd(_grad, setup_context=_save)
