"""RWKV's mixtures of a token with the one before it: up to six outputs from one pass over both (`ops.rwkv7.token_mix`).

Each output has a tensor of its own, because products read them, and their gradients come one by one. Tokens may be
LayerNorms of sums, which are then in no memory. A program walks over some tokens, all channels of one at a time.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.rows import contiguous, gradient_of, sum_dtype
from halflife.ops.backends.triton.segments import architecture

MOST = 6  # outputs, for which the kernels have arguments
ROWS = 16  # tokens of a program
PROGRAMS = 512  # of the backward pass, at most


@triton.jit
@no_type_check
def _numbers(x, cols, D):
    """Load numbers of channels; 0 outside or without x."""
    if x is None:
        return tl.zeros([cols.shape[0]], tl.float32)
    else:
        return tl.load(x + cols, mask=cols < D, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _token(x, branch, row, cols, inside, T, D, eps, x_b, x_t, branch_b, branch_t, DTYPE: tl.constexpr):
    """A token, or the sum of two in DTYPE, and its norm without weights with 1 / √(variance + eps) (`eps` is given)."""
    a = tl.load(x + (row // T) * x_b + (row % T) * x_t + cols, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        place = (row // T) * branch_b + (row % T) * branch_t
        a += tl.load(branch + place + cols, mask=inside, other=0.0).to(tl.float32)
        a = a.to(DTYPE).to(tl.float32)
    n = a
    inverse = 1.0
    if eps is not None:
        n = tl.where(cols < D, a - tl.sum(a) / D, 0.0)
        inverse = tl.rsqrt(tl.sum(n * n) / D + eps)
        n *= inverse
    return a, n, inverse


@triton.jit
@no_type_check
def _weighted(n, weight, bias, cols, D):
    """A norm times its weight plus its bias; n without weight."""
    if weight is not None:
        n = n * _numbers(weight, cols, D) + _numbers(bias, cols, D)
    return n


@triton.jit
@no_type_check
def _first(before, row, cols, T, D, before_b, before_t, OWN: tl.constexpr):
    """The token before the first one of a row, or with OWN=False before each one; 0 where it is elsewhere."""
    if before is None:
        return tl.zeros([cols.shape[0]], tl.float32)
    else:
        place = (row // T) * before_b + (row % T) * before_t
        there = tl.where(row % T == 0, D, 0) if OWN else D
        return tl.load(before + place + cols, mask=cols < there, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _mix(out, mu, now, change, place, cols, D, i: tl.constexpr):
    """Store output i, if there is one."""
    if out is not None:
        mixed = now + change * _numbers(mu + i * D, cols, D)
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=cols < D)


@triton.jit
@no_type_check
def _mix_kernel(
    x, branch, weight, bias, before, mu, o0, o1, o2, o3, o4, o5, end, total, tokens, T, D, eps, x_b, x_t, branch_b,
    branch_t, before_b, before_t, OWN: tl.constexpr, PER: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty if total is None else total.dtype.element_ty
    cols = tl.arange(0, BC)
    mask = cols < D
    start = tl.program_id(0).to(tl.int64) * PER
    old = tl.zeros([BC], tl.float32)
    if OWN:
        there = start % T != 0
        _, n, _ = _token(
            x, branch, start - 1, cols, cols < tl.where(there, D, 0), T, D, eps, x_b, x_t, branch_b, branch_t, DTYPE
        )
        old = tl.where(there, _weighted(n, weight, bias, cols, D), 0.0)
    for row in range(start, tl.minimum(start + PER, tokens)):
        a, n, _ = _token(x, branch, row, cols, mask, T, D, eps, x_b, x_t, branch_b, branch_t, DTYPE)
        now = _weighted(n, weight, bias, cols, D)
        place = row * D + cols
        if total is not None:
            tl.store(total + place, a.to(DTYPE), mask=mask)
        change = _first(before, row, cols, T, D, before_b, before_t, OWN) - now
        if OWN:
            change += tl.where(row % T != 0, old, 0.0)
        if end is not None:
            last = cols < tl.where(row % T == T - 1, D, 0)
            tl.store(end + (row // T) * D + cols, now.to(end.dtype.element_ty), mask=last)
        _mix(o0, mu, now, change, place, cols, D, 0)
        _mix(o1, mu, now, change, place, cols, D, 1)
        _mix(o2, mu, now, change, place, cols, D, 2)
        _mix(o3, mu, now, change, place, cols, D, 3)
        _mix(o4, mu, now, change, place, cols, D, 4)
        _mix(o5, mu, now, change, place, cols, D, 5)
        old = now


@triton.jit
@no_type_check
def _add(dout, mu, all, old, total, change, place, cols, mask, D, i: tl.constexpr):
    """Add the gradient of output i to those of both tokens together, of the token before, and of μ (`total`)."""
    if dout is not None:
        d = tl.load(dout + place, mask=mask, other=0.0).to(tl.float32)
        all += d
        old += d * _numbers(mu + i * D, cols, D)
        total += d * change
    return all, old, total


@triton.jit
@no_type_check
def _mix_back_kernel(
    x, weight, bias, before, mu, d0, d1, d2, d3, d4, d5, dend, dtotal, dx, dbranch, dbefore, sums, tokens, T, D, eps,
    x_b, x_t, before_b, before_t, count, PER, OWN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """From the last token of a program to its first one. x is the sum, if there was one."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    cols = tl.arange(0, BC)
    mask = cols < D
    block = tl.program_id(0).to(tl.int64)
    start = block * PER
    end = tl.minimum(start + PER, tokens)
    none = tl.zeros([BC], tl.float32)
    s0 = none
    s1 = none
    s2 = none
    s3 = none
    s4 = none
    s5 = none
    dweight = none
    dbias = none
    later = none  # what the token after this one gives to it
    if OWN:
        follows = cols < tl.where((end < tokens) & (end % T != 0), D, 0)
        _, later, _ = _add(d0, mu, none, later, none, none, end * D + cols, cols, follows, D, 0)
        _, later, _ = _add(d1, mu, none, later, none, none, end * D + cols, cols, follows, D, 1)
        _, later, _ = _add(d2, mu, none, later, none, none, end * D + cols, cols, follows, D, 2)
        _, later, _ = _add(d3, mu, none, later, none, none, end * D + cols, cols, follows, D, 3)
        _, later, _ = _add(d4, mu, none, later, none, none, end * D + cols, cols, follows, D, 4)
        _, later, _ = _add(d5, mu, none, later, none, none, end * D + cols, cols, follows, D, 5)
    _, n, inverse = _token(x, None, end - 1, cols, mask, T, D, eps, x_b, x_t, 0, 0, DTYPE)
    for back in range(0, end - start):
        row = end - 1 - back
        place = row * D + cols
        there = row % T != 0 if OWN else row % T < 0
        given = cols < tl.where(row > 0, D, 0)
        _, earlier, inverse_of_it = _token(x, None, row - 1, cols, given, T, D, eps, x_b, x_t, 0, 0, DTYPE)
        old = tl.where(there, _weighted(earlier, weight, bias, cols, D), 0.0)
        old += _first(before, row, cols, T, D, before_b, before_t, OWN)
        change = old - _weighted(n, weight, bias, cols, D)
        all = none
        sooner = none
        all, sooner, s0 = _add(d0, mu, all, sooner, s0, change, place, cols, mask, D, 0)
        all, sooner, s1 = _add(d1, mu, all, sooner, s1, change, place, cols, mask, D, 1)
        all, sooner, s2 = _add(d2, mu, all, sooner, s2, change, place, cols, mask, D, 2)
        all, sooner, s3 = _add(d3, mu, all, sooner, s3, change, place, cols, mask, D, 3)
        all, sooner, s4 = _add(d4, mu, all, sooner, s4, change, place, cols, mask, D, 4)
        all, sooner, s5 = _add(d5, mu, all, sooner, s5, change, place, cols, mask, D, 5)
        d = all - sooner + later
        if dend is not None:
            last = cols < tl.where(row % T == T - 1, D, 0)
            d += tl.load(dend + (row // T) * D + cols, mask=last, other=0.0).to(tl.float32)
        if weight is not None:
            dweight += d * n
            dbias += d
            d *= _numbers(weight, cols, D)
            d = inverse * (d - tl.sum(d) / D - n * (tl.sum(d * n) / D))
        if dtotal is not None:
            d += tl.load(dtotal + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=mask)
        if dbranch is not None:
            tl.store(dbranch + place, d.to(dbranch.dtype.element_ty), mask=mask)
        if dbefore is not None:
            at = (row // T if OWN else row) * D + cols
            first = cols < tl.where(row % T == 0, D, 0) if OWN else mask
            tl.store(dbefore + at, sooner.to(dbefore.dtype.element_ty), mask=first)
        later = tl.where(there, sooner, 0.0)
        n = earlier
        inverse = inverse_of_it
    BASE: tl.constexpr = 0 if weight is None else 2
    sums += block * (BASE + count) * D + cols
    if weight is not None:
        tl.store(sums, dweight, mask=mask)
        tl.store(sums + D, dbias, mask=mask)
        sums += 2 * D
    tl.store(sums, s0, mask=mask)
    tl.store(sums + D, s1, mask=cols < tl.where(count > 1, D, 0))
    tl.store(sums + 2 * D, s2, mask=cols < tl.where(count > 2, D, 0))
    tl.store(sums + 3 * D, s3, mask=cols < tl.where(count > 3, D, 0))
    tl.store(sums + 4 * D, s4, mask=cols < tl.where(count > 4, D, 0))
    tl.store(sums + 5 * D, s5, mask=cols < tl.where(count > 5, D, 0))


def _mixed(
    x: Tensor, before: Tensor | None, mu: Tensor, branch: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    eps: float, dtype: torch.dtype, last: bool,
) -> list[Tensor]:  # fmt: skip
    """`n + μ_i ⊙ (n' − n)` for each row of `mu [R, D]`, in `dtype`; the last n if asked for; `x + branch` if given.

    n is `x [B, T, D]`, or with a weight the LayerNorm of x or of `x + branch`. n' is `before [B, T, D]`, or the token
    before, and for the first ones `before [B, D]` or zeros.
    """
    outs = [x.new_empty(x.shape, dtype=dtype) for _ in range(len(mu))]
    wide = sum_dtype(x, branch)
    end = x.new_empty(x.shape[0], x.shape[2], dtype=wide) if last else None
    total = None if branch is None else x.new_empty(x.shape, dtype=wide)
    if x.numel():
        (rows, before), sizes, own, tile = _given(x, before)
        strides = (0, 0) if branch is None else (branch := dense(branch)).stride()[:2]
        launch(_mix_kernel, (triton.cdiv(sizes[0], ROWS),))(
            rows, branch, *contiguous(weight, bias), before, mu.contiguous(), *outs, *[None] * (MOST - len(outs)), end,
            total, *sizes[:3], None if weight is None else eps, *sizes[3:5], *strides, *sizes[5:], OWN=own, PER=ROWS,
            **tile,
        )  # fmt: skip
    return [*outs, *[part for part in (end, total) if part is not None]]


def _mixed_backward(
    douts: list[Tensor], dtotal: Tensor | None, x: Tensor, before: Tensor | None, mu: Tensor, weight: Tensor | None,
    bias: Tensor | None, eps: float, of_x: torch.dtype, of_branch: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x in its dtype, of the branch, of before (without entries for None), and of parameters.

    x is the sum, if there was one. `douts` without entries stand for None. The rows of those of parameters are of
    weight and bias, if there are these, and of `mu`.
    """
    dx, dbefore = x.new_empty(x.shape, dtype=of_x), x.new_empty(0) if before is None else before.new_empty(before.shape)
    dbranch = x.new_empty(x.shape if of_branch not in (None, of_x) else 0, dtype=of_branch or of_x)
    (rows, earlier), sizes, own, tile = _given(x, before)
    if tile["BC"] > 2048 and len(mu) > 1 and architecture(x) != "amd":  # whose programs have at most 16 warps
        tile["num_warps"] = 32  # with 16, sums of six mixtures spill five times as often
    per = max(1, triton.cdiv(sizes[0], PROGRAMS))
    blocks = triton.cdiv(sizes[0], per)
    sums = x.new_empty(blocks, len(mu) + (0 if weight is None else 2), x.shape[2], dtype=torch.float32)
    given = [d if d.numel() else None for d in douts]
    given[len(mu) : len(mu)] = [None] * (MOST - len(mu))
    if x.numel():
        launch(_mix_back_kernel, (blocks,))(
            rows, *contiguous(weight, bias), earlier, mu.contiguous(), *given, *[None] * (MOST + 1 - len(given)),
            dtotal, dx, dbranch if dbranch.numel() else None, None if before is None else dbefore, sums, *sizes[:3],
            None if weight is None else eps, *sizes[3:], len(mu), per, OWN=own, **tile,
        )  # fmt: skip
    elif own and before is not None:
        dbefore = torch.zeros_like(before)
    return dx, dbranch, dbefore, gradient_of(sums, mu, weight, bias)


def _given(x: Tensor, before: Tensor | None) -> tuple[list[Tensor | None], list[int], bool, dict[str, int]]:
    """Both tensors, then the tokens, T, D and strides, whether x holds the tokens before, and the tile."""
    own = before is None or before.ndim == 2
    x, before = dense(x), None if before is None else dense(before)
    strides = (0, 0) if before is None else (before.stride(0), 0 if own else before.stride(1))
    columns = max(16, triton.next_power_of_2(x.shape[2]))
    sizes = [x.shape[0] * x.shape[1], *x.shape[1:], x.stride(0), x.stride(1), *strides]
    return [x, before], sizes, own, {"BC": columns, "num_warps": max(4, min(16, columns // 256))}


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, before, mu, branch, weight, bias, ctx.eps, _, ctx.last = inputs
    ctx.save_for_backward(x if branch is None else output[-1], before, mu, weight, bias)
    ctx.dtypes = x.dtype, None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)  # a training step does not use the last tokens


def _grad(ctx: Any, douts: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    x, before, mu, weight, bias = ctx.saved_tensors
    of_x, of_branch = ctx.dtypes
    dtotal = None if of_branch is None else douts[-1]
    douts = douts if of_branch is None else douts[:-1]
    given = [x.new_empty(0) if d is None else d.contiguous() for d in douts]
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx, dbranch, dbefore, sums = _gradients(given, dtotal, x, before, mu, weight, bias, ctx.eps, of_x, of_branch)
    dmu, of_norm = sums[-len(mu) :].to(mu.dtype), (None, None)
    if weight is not None:
        of_norm = sums[0].to(weight.dtype), sums[1].to(bias.dtype)
    dbranch = None if of_branch is None else dbranch if dbranch.numel() else dx
    return dx, None if before is None else dbefore, dmu, dbranch, *of_norm, None, None, None


_gradients = declare_gradients("triton_token_mix_backward", _mixed_backward)
declare("triton_token_mix", _mixed).register_autograd(_grad, setup_context=_save)
