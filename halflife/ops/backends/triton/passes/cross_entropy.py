"""The cross-entropy of tokens, and its gradient, which may take the place of the logits (`halflife.ops.cross_entropy`).

The first kernel reads a row of logits once. It keeps the largest logit m and log Σ e^{x − m} apart, because their sum
has fewer digits where logits are large. The second kernel has no loop: `e^{(x − m) − log Σ}` of a block of a row.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.rows import as_rows

BLOCK = 4096  # logits of a program at once


@triton.jit
@no_type_check
def _finite(x):
    """0 in the place of −∞, which is the largest of no logits."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
@no_type_check
def _losses_kernel(logits, labels, losses, tops, sums, V, x_t, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * x_t
    top = tl.full([BLOCK], float("-inf"), tl.float32)  # the largest logit of each lane
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        x = tl.load(at + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        shift = _finite(higher)
        total = total * tl.exp(top - shift) + tl.exp(x - shift)
        top = higher
    most = tl.max(top, 0)
    log_sum = tl.log(tl.sum(total * tl.exp(top - _finite(most)), 0))
    tl.store(tops + row, most)
    tl.store(sums + row, log_sum)
    label = tl.load(labels + row)
    inside = (label >= 0) & (label < V)
    own = tl.load(at + label, mask=inside, other=float("nan")).to(tl.float32)
    tl.store(losses + row, tl.where(label == ignored, 0.0, log_sum - (own - most)))


@triton.jit
@no_type_check
def _errors_kernel(logits, labels, tops, sums, factors, errors, V, blocks, x_t, f_t, ignored, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    x = tl.load(logits + row * x_t + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
    d = tl.exp((x - tl.load(tops + row)) - tl.load(sums + row)) - tl.where(cols == label, 1.0, 0.0)
    d = tl.where(label == ignored, 0.0, d * tl.load(factors + row * f_t))
    tl.store(errors + row * V + cols, d.to(errors.dtype.element_ty), mask=cols < V)


def _cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """The losses `[...]` of `logits [..., V]`; and of each row the largest logit, and log Σ of e^{logit − largest}."""
    found = [logits.new_empty(labels.shape, dtype=torch.float32) for _ in range(3)]
    rows, stride = as_rows(logits, logits.shape[-1])
    if labels.numel():
        launch(_losses_kernel, (labels.numel(),))(
            rows, labels.contiguous(), *found, rows.shape[1], stride, ignored, **_block(rows.shape[1])
        )
    return found[0], found[1], found[2]


def _errors(logits: Tensor, labels: Tensor, tops: Tensor, sums: Tensor, factor: Tensor, ignored: int) -> None:
    """Write the gradients of the losses times a number to where the logits are, which are contiguous."""
    _write(logits, labels, tops, sums, factor, ignored, logits)


def _backward(dlosses: Tensor, logits: Tensor, labels: Tensor, tops: Tensor, sums: Tensor, ignored: int) -> Tensor:
    out = logits.new_empty(logits.shape)
    _write(logits, labels, tops, sums, dlosses, ignored, out)
    return out


def _write(
    logits: Tensor, labels: Tensor, tops: Tensor, sums: Tensor, factors: Tensor, ignored: int, out: Tensor
) -> None:
    rows, stride = as_rows(logits, logits.shape[-1])
    size = rows.shape[1]
    block = _block(size)
    blocks = triton.cdiv(size, block["BLOCK"])
    if labels.numel():
        launch(_errors_kernel, (labels.numel() * blocks,))(
            rows,
            labels.contiguous(),
            tops,
            sums,
            factors,
            out,
            size,
            blocks,
            stride,
            int(factors.ndim > 0),
            ignored,
            **block,
        )


def _block(size: int) -> dict[str, int]:
    """The logits and the warps of a program."""
    block = max(16, min(BLOCK, triton.next_power_of_2(size)))
    return {"BLOCK": block, "num_warps": max(1, block // 512)}


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, labels, ctx.ignored = inputs
    ctx.save_for_backward(logits, labels, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _grad(ctx: Any, dlosses: Tensor, *_: Any) -> tuple[Tensor, None, None]:
    only_first_derivatives()
    return _gradient(dlosses.contiguous(), *ctx.saved_tensors, ctx.ignored), None, None


_gradient = declare_gradients("triton_cross_entropy_backward", _backward)
declare("triton_cross_entropy_errors", _errors, mutates_args=("logits",))
declare("triton_cross_entropy", _cross_entropy).register_autograd(_grad, setup_context=_save)
