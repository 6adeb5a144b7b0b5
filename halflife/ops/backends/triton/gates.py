"""The weights that the log-decays of a chunk give to all products, and the gradients of log-decays.

A and B are the inclusive sums of the slow and of the fast log-decay in the chunk. A *reset* is a token whose slow
log-decay is not 0. n(j) is the first reset after token j, and f is the first reset of the chunk. The weights are:

    D_ij = e^{B_i − B_j}                          no reset after j and up to i
         = e^{A_i − A_j + (B_n(j) − B_j)}         otherwise
    query i reads the entering fast state with e^{A_i + B_min(f, i)}, and the slow state with e^{A_i}
    key j is written into the outgoing fast state with e^{B_C − B_j} if no reset follows, else into the slow one with
    e^{A_C − A_j + (B_n(j) − B_j)}

For float32 inputs the sums are float64, so a slow decay beside a full reset stays exact. For 16-bit inputs they are
float32. At worst, at 64 full resets, the sum
−7,040 is off by 1e-3, less than one rounding of such an input. `B_n(j) − B_j` is a masked sum of log-decays, in which
nothing cancels. All exponents are ≤ 0.

SQ and SK are how many heads share a row of the queries and of the keys, which have `[B·T, H / SQ]` and `[B·T, H / SK]`
rows. Kernels compute gradients of such rows head by head, and `sum_of_heads` adds them.

No product of wgmma, which has 64 rows or more, has the transposed result of a product as an operand, because Triton has
compiled that to wrong numbers on Hopper. Where the transpose is needed, a second product computes it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import make_backend

from halflife.ops.backends.triton import interpreted
from halflife.ops.backends.triton.launch import target_of

# MODE of a kernel, the kind of decay. GATE_RANK has two states, rows 0 … K−1 (fast) and K … 2K−1 (slow) of one tensor.
NONE, SCALAR, GATE_RANK = 0, 1, 2

Gates = tuple[Tensor | None, Tensor | None]  # the log-decays (slow, fast), each [B, T, H]

# exp(-110) is 0 in float32. Clamping log-decays here changes no result, and it replaces −inf by a finite number.
FLOOR = tl.constexpr(-110.0)

_INTERPRETED = tl.constexpr(interpreted())


def mode_of(g_slow: Tensor | None, g_fast: Tensor | None) -> int:
    """Return the MODE of a kernel with these log-decays."""
    return NONE if g_fast is None else SCALAR if g_slow is None else GATE_RANK


def precision_of(x: Tensor) -> str:
    """Return the precision of products that have a float32 operand.

    It is exact float32 for float32 inputs. For bfloat16 and float16 inputs it is TF32, which has at least as many bits
    as they have, and the range of float32. Of AMD's cards the MI300 alone has TF32. Others multiply three pairs of
    bfloat16 numbers, or are exact before Triton has that.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32" if interpreted() else _narrow_precision(target_of(x))


@cache
def _narrow_precision(target: Any) -> str:
    """What a kind of GPU has of the precisions that are enough for 16-bit inputs, the fastest first."""
    options: Any = make_backend(target).parse_options({"enable_fp_fusion": True})  # Triton 3.9 warns without it
    return next(name for name in ("tf32", "bf16x3", "ieee") if name in options.allowed_dot_input_precisions)


@triton.jit
@no_type_check
def dot(x, y, out, PRECISION: tl.constexpr):
    """Compute `x y + out` in float32. The interpreter treats bfloat16 as integers, so it gets float32 operands."""
    if _INTERPRETED:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, out, input_precision=PRECISION)


@triton.jit
@no_type_check
def load_gates(g_slow, g_fast, rows, inside, C: tl.constexpr, MODE: tl.constexpr, EXACT: tl.constexpr = True):
    """Load the log-decays of a chunk and return `(a, b, fast, reset, seg)`, each `[C]`.

    These are the sums A and B, the float32 fast log-decay, whether the token is a reset (int32), and the number of
    resets up to and including it. They are zeros where the MODE does not have them. The sums are float64 if EXACT, and
    else float32.
    """
    SUM: tl.constexpr = tl.float64 if EXACT else tl.float32
    fast = tl.zeros([C], tl.float32)
    slow = tl.zeros([C], tl.float32)
    reset = tl.zeros([C], tl.int32)
    if MODE != 0:
        fast = tl.load(g_fast + rows, mask=inside, other=0.0).to(tl.float32)
        fast = tl.where(fast < FLOOR, FLOOR, fast)
    if MODE == 2:
        given = tl.load(g_slow + rows, mask=inside, other=0.0)
        reset = (given != 0).to(tl.int32)
        slow = given.to(tl.float32)
        slow = tl.where(slow < FLOOR, FLOOR, slow)
    a = tl.cumsum(slow.to(SUM), 0)
    b = tl.cumsum(fast.to(SUM), 0)
    return a, b, fast, reset, tl.cumsum(reset, 0)


@triton.jit
@no_type_check
def until_joined(fast, reset, seg, C: tl.constexpr):
    """Compute `B_n(j) − B_j [C]`, or `B_C − B_j` where no reset follows."""
    index = tl.arange(0, C)
    counted = (index[None, :] > index[:, None]) & ((seg - reset)[None, :] == seg[:, None])
    return tl.sum(tl.where(counted, fast[None, :], 0.0), 1)


@triton.jit
@no_type_check
def store_sums(sums, stride, cc, inside, a, b, fast, reset, seg, C: tl.constexpr, MODE: tl.constexpr):
    """Store the results of `gates.load_gates` for the tokens from `sums` on. The numbers are `stride` apart."""
    if MODE != 0:
        tl.store(sums + cc, b, mask=inside)
    if MODE == 2:
        before = tl.cumsum(tl.where(seg == reset, fast, 0.0).to(a.dtype), 0)
        tl.store(sums + stride + cc, a, mask=inside)
        tl.store(sums + 2 * stride + cc, b + until_joined(fast, reset, seg, C), mask=inside)
        tl.store(sums + 3 * stride + cc, a + before, mask=inside)
        tl.store(sums + 4 * stride + cc, seg.to(a.dtype), mask=inside)


@triton.jit
@no_type_check
def pair_sums(pairs, seg, C: tl.constexpr, MODE: tl.constexpr):
    """Return sums `(within, across, gone)` of the pairs `[C, C]` (scores times their gradient), each `[C]`.

    `within` is row sums minus column sums of the pairs without a reset between them. `across` is the same for the pairs
    with a reset between them, and `gone` is the column sums of those. The diagonal is left out, because its weight is 1
    under any decay.
    """
    index = tl.arange(0, C)
    pairs = tl.where(index[:, None] > index[None, :], pairs, 0.0)
    through = tl.zeros([C], tl.float32)
    gone = tl.zeros([C], tl.float32)
    if MODE == 2:
        across = tl.where(seg[:, None] == seg[None, :], 0.0, pairs)
        pairs -= across
        gone = tl.sum(across, 0)
        through = tl.sum(across, 1) - gone
    return tl.sum(pairs, 1) - tl.sum(pairs, 0), through, gone


@triton.jit
@no_type_check
def log_grads_of_sums(
    within, across, gone, read_fast, read_slow, left_fast, left_slow, kept, joined, slow, reset, seg, C: tl.constexpr
):
    """Return the gradients `(slow, fast)` of the log-decays, each `[C]`, from those of everything that they weigh.

    The log-decay of t weighs what tokens i ≥ t read from before t, and what keys i < t write into the outgoing state.
    With these sums apart, no large terms cancel, and the gradients of strong decays are exact.

    Args:
        within, across, gone: the results of `pair_sums`.
        read_fast, read_slow: for each token, what it reads from an entering state times its gradient `[C]`.
        left_fast, left_slow: for each key, what it writes into an outgoing state times its gradient `[C]`.
        kept: the part of the entering fast state that passes the chunk into either state, times its gradient, a scalar.
        joined: the part of it that passes into the slow state, times its gradient, a scalar.
        slow: the part of the entering slow state that passes the chunk, times its gradient, a scalar.
        reset, seg: whether a token is a reset, and the number of resets up to it.
    """
    index = tl.arange(0, C)
    later = index[:, None] >= index[None, :]  # [i, t]
    before = seg - reset  # resets before t
    untouched = before == 0
    same = seg[:, None] == before[None, :]
    after = within[:, None] + tl.where(untouched[None, :], read_fast[:, None], 0.0)
    earlier = left_fast[:, None] + tl.where(same, (gone + left_slow)[:, None], 0.0)
    fast_grad = tl.sum(tl.where(later, after, earlier), 0) + tl.where(untouched, kept, 0.0)
    after_slow = across + read_fast + read_slow
    slow_grad = tl.sum(tl.where(later, after_slow[:, None], left_slow[:, None]), 0) + joined + slow
    return tl.where(reset != 0, slow_grad, 0.0), fast_grad


@triton.jit
@no_type_check
def put_log_grad(dg, grad, g, rows, inside):
    """Store the gradient of a log-decay `[C]`, exactly 0 where the decay is 0."""
    given = tl.load(g + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(dg + rows, tl.where(given < FLOOR, 0.0, grad).to(dg.dtype.element_ty), mask=inside)
