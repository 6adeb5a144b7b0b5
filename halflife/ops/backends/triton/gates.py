"""The tokens of a chunk in a kernel, and the weights that its log-decays give to all products.

A chunk is a row of a table made on the host, for batches and packed sequences alike. Tokens are rows of `[B·T, H, D]`.
A and B are the inclusive sums of the slow and of the fast log-decay in the chunk. A *reset* is a token whose slow
log-decay is not 0. n(j) is the first reset after token j, and f is the first reset of the chunk. The weights are:

    D_ij = e^{B_i − B_j}                          no reset after j and up to i
         = e^{A_i − A_j + (B_n(j) − B_j)}         otherwise
    query i reads the entering fast state with e^{A_i + B_min(f, i)}, and the slow state with e^{A_i}
    key j is written into the outgoing fast state with e^{B_C − B_j} if no reset follows, else into the slow one with
    e^{A_C − A_j + (B_n(j) − B_j)}

For float32 inputs the sums are float64 vectors. Their C×C differences are formed from (high, low) pairs of float32, so
a slow decay beside a full reset stays exact. For 16-bit inputs they are float32. At worst, at 64 full resets, the sum
−7,040 is off by 1e-3, less than one rounding of such an input. `B_n(j) − B_j` is a masked sum of log-decays, in which
nothing cancels. All exponents are ≤ 0.

SQ and SK are how many heads share a row of the queries and of the keys, which have `[B·T, H / SQ]` and `[B·T, H / SK]`
rows. Kernels compute gradients of such rows head by head, and `sum_of_heads` adds them.

No kernel uses the transposed result of a product as an operand of the next product, because Triton has compiled that to
wrong numbers on Hopper. Where the transpose is needed, a second product (and a second D) computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton import interpreted
from halflife.ops.backends.triton.launch import is_traced

# MODE of a kernel, the kind of decay. GATE_RANK has two states, rows 0 … K−1 (fast) and K … 2K−1 (slow) of one tensor.
NONE, SCALAR, GATE_RANK = 0, 1, 2

Gates = tuple[Tensor | None, Tensor | None]  # the log-decays (slow, fast), each [B, T, H]

# exp(-110) is 0 in float32. Clamping log-decays here changes no result, and it replaces −inf by a finite number.
FLOOR = tl.constexpr(-110.0)

_INTERPRETED = tl.constexpr(interpreted())


@dataclass(frozen=True)
class Chunks:
    """The table of chunks."""

    size: int  # tokens per chunk, C, a power of two from 16 to 64
    chunks: Tensor  # `[n, 3]` int64: first token (a row of `[B·T, …]`), number of tokens (0 to C), and sequence
    sequences: Tensor  # `[N, 2]` int64: first chunk of a sequence and the number of its chunks


def make_chunks(q: Tensor, chunk_size: int, cu_seqlens: Tensor | None) -> Chunks:
    """Return the chunks of `q [B, T, H, K]`, or of sequences packed with boundaries `cu_seqlens [N + 1]`.

    The table is made on the device, and the host does not wait for it. For packed sequences it therefore has as many
    chunks as they might need, and the last ones may be without tokens.
    """
    batch, length, _, key = q.shape
    # Products of float32 do not use tensor cores, so longer chunks cost more, and they need too many registers.
    size = 64 if key <= 128 and q.element_size() == 2 else 32
    while size > 16 and (size > chunk_size or size >= 2 * length):
        size //= 2
    if cu_seqlens is None:
        table = _batch_chunks if is_traced(q) else _kept_chunks  # what a compiler traces may not be kept
        return table(batch, length, size, q.device)
    return _chunks(cu_seqlens.to(q.device, torch.int64), length // size + cu_seqlens.shape[0] - 1, size)


def _batch_chunks(batch: int, length: int, size: int, device: torch.device) -> Chunks:
    return _chunks(torch.arange(batch + 1, device=device) * length, batch * -(-length // size), size)


_kept_chunks = lru_cache(maxsize=64)(_batch_chunks)


def _chunks(bounds: Tensor, count: int, size: int) -> Chunks:
    """`count` chunks of sequences with boundaries `bounds [N + 1]`; `count` is at least the number that they need."""
    lengths = bounds[1:] - bounds[:-1]
    counts = (lengths + size - 1) // size
    ends = counts.cumsum(0)
    index = torch.arange(count if lengths.shape[0] else 0, device=bounds.device)
    sequence = torch.searchsorted(ends, index, right=True).clamp(max=max(lengths.shape[0] - 1, 0))
    done = (index - (ends - counts)[sequence]) * size
    tokens = (lengths[sequence] - done).clamp(min=0, max=size)
    chunks = torch.stack((bounds[sequence] + done, tokens, sequence), 1)
    return Chunks(size, chunks, torch.stack((ends - counts, counts), 1))


def mode_of(g_slow: Tensor | None, g_fast: Tensor | None) -> int:
    """Return the MODE of a kernel with these log-decays."""
    return NONE if g_fast is None else SCALAR if g_slow is None else GATE_RANK


def precision_of(x: Tensor) -> str:
    """Return the precision of products that have a float32 operand.

    It is exact float32 for float32 inputs. For bfloat16 and float16 inputs it is TF32, which has at least as many bits
    as they have, and the range of float32.
    """
    return "ieee" if x.dtype == torch.float32 else "tf32"


def tuned(*key: str):
    """Tune the warps and stages of the decorated kernel for each value of `key`, except in the interpreter."""
    if interpreted():
        return lambda kernel: kernel
    configs = [triton.Config({}, num_warps=warps, num_stages=stages) for warps in (4, 8) for stages in (1, 2, 3)]
    return triton.autotune(configs, key=list(key))


@triton.jit
@no_type_check
def chunk_rows(chunks, n, h, H, C: tl.constexpr):
    """Return the rows of the tokens of chunk n, head h, in `[B·T·H, D]` (int64 `[C]`), and which of them exist."""
    first = tl.load(chunks + 3 * n)
    size = tl.load(chunks + 3 * n + 1)
    rows = tl.arange(0, C)
    return (first + rows) * H + h, rows < size


@triton.jit
@no_type_check
def shared_rows(chunks, n, h, H, S, C: tl.constexpr):
    """Return the rows of the tokens of chunk n, head h, in `[B·T·H/S, D]`, where S heads share a row (int64 `[C]`)."""
    return (tl.load(chunks + 3 * n) + tl.arange(0, C)) * (H // S) + h // S


@triton.jit
@no_type_check
def tile(x, rows, cols, inside, size):
    """Load rows `[C]` (where `inside`) and columns `[D]` (below `size`) of `x [rows, size]`: `[C, D]`, else 0."""
    mask = inside[:, None] & (cols < size)[None, :]
    return tl.load(x + rows[:, None] * size + cols[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def put(x, value, rows, cols, inside, size):
    """Store `value [C, D]` at the places that `tile` loads."""
    mask = inside[:, None] & (cols < size)[None, :]
    tl.store(x + rows[:, None] * size + cols[None, :], value.to(x.dtype.element_ty), mask=mask)


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
def last(x, C: tl.constexpr):
    """Return the last entry of `x [C]`."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
@no_type_check
def until_joined(fast, reset, seg, C: tl.constexpr):
    """Compute `B_n(j) − B_j [C]`, or `B_C − B_j` where no reset follows."""
    index = tl.arange(0, C)
    counted = (index[None, :] > index[:, None]) & ((seg - reset)[None, :] == seg[:, None])
    return tl.sum(tl.where(counted, fast[None, :], 0.0), 1)


@triton.jit
@no_type_check
def difference(x):
    """Compute `x_i − x_j` of `[C]` in float32 `[C, C]`; of float64, exactly where the two are close."""
    if x.dtype == tl.float32:
        return x[:, None] - x[None, :]
    high = x.to(tl.float32)
    low = (x - high.to(tl.float64)).to(tl.float32)
    return (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])


@triton.jit
@no_type_check
def decay_matrix(a, b, fast, reset, seg, C: tl.constexpr, MODE: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """Compute D or Dᵀ, `[C, C]` float32. D is lower triangular with ones on its diagonal."""
    index = tl.arange(0, C)
    if TRANSPOSED:  # x_j − x_i is exactly the difference of −x
        a = -a
        b = -b
        index = -index
    causal = index[:, None] >= index[None, :]
    if MODE == 0:
        return causal.to(tl.float32)
    else:
        exponent = difference(b)
        if MODE == 2:
            until = until_joined(fast, reset, seg, C)
            through = difference(a) + (until[:, None] if TRANSPOSED else until[None, :])
            exponent = tl.where(seg[:, None] == seg[None, :], exponent, through)
        return tl.exp(tl.where(causal, exponent, float("-inf")))  # a causal exponent is above 0 by rounding only


@triton.jit
@no_type_check
def read_weights(a, fast, reset, seg):
    """Return the weights `(fast, slow)`, float32 `[C]`, with which queries read the entering states.

    The slow ones are 1 where there is no slow state.
    """
    until = tl.cumsum(tl.where(seg == reset, fast, 0.0).to(a.dtype), 0)  # B_min(f, i)
    return tl.exp((a + until).to(tl.float32)), tl.exp(a.to(tl.float32))


@triton.jit
@no_type_check
def leave_weights(a, b, fast, reset, seg, C: tl.constexpr, MODE: tl.constexpr):
    """Return the weights `(fast, slow)`, float32 `[C]`, with which keys are written into the outgoing states."""
    left = tl.exp((tl.sum(fast.to(b.dtype), 0) - b).to(tl.float32))
    slow = tl.zeros([C], tl.float32)
    if MODE == 2:
        stays = seg == tl.sum(reset, 0)
        total = last(a, C)
        slow = tl.exp((total - a).to(tl.float32) + until_joined(fast, reset, seg, C))
        slow = tl.where(stays, 0.0, slow)
        left = tl.where(stays, left, 0.0)
    return left, slow


@triton.jit
@no_type_check
def carry_weights(a, b, fast, reset, seg, C: tl.constexpr):
    """Return the factors `(fast to fast, fast to slow, slow to slow)` of states that pass the chunk, float32."""
    resets = tl.sum(reset, 0)
    until = tl.sum(tl.where(seg == reset, fast, 0.0).to(a.dtype), 0)  # B_f, or B_C without a reset
    total = last(a, C)
    passed = tl.exp((total + until).to(tl.float32))
    return tl.where(resets == 0, passed, 0.0), tl.where(resets == 0, 0.0, passed), tl.exp(total.to(tl.float32))


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
        reset, seg: results of `load_gates`.
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
