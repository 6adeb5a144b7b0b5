"""Linear attention with no decay or a scalar one, and GateRank on it, as a Triton kernel that walks.

`walk_kernel` goes over the chunks of a segment with the state in registers, and writes outputs or the state at the end.
`segments.scan_kernel` joins segments. With other roles the same walk computes the gradients of queries (values for
keys and keys for values), and from the end those of values; `linear_grads.py` has the walk for the other gradients.
Where values have factors (`gain`), these multiply the columns of D, the weights l, and dV at the end.

Products of 16-bit inputs are computed in their dtype, with float32 sums. In products with a state bfloat16 stays
bfloat16, and float16, whose range is too small for states, becomes TF32. float32 is exact.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.sums import (
    store_sums_of_segment,
    stored_carries,
    stored_decays,
    stored_leaves,
    stored_reads,
)


@triton.jit
@no_type_check
def load(at, rows, cols, inside, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows (where `inside`) and columns (below SIZE) of a matrix at `at`, whose rows are `stride` apart."""
    mask = inside[:, None]
    if SIZE != BLOCK:
        mask = mask & (cols < SIZE)[None, :]
    return tl.load(at + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def store(at, value, rows, cols, inside, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store `value` at the places that `load` reads."""
    mask = inside[:, None]
    if SIZE != BLOCK:
        mask = mask & (cols < SIZE)[None, :]
    tl.store(at + rows[:, None] * stride + cols[None, :], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def head_of(x, token, h, H: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Where a head of a token starts among rows that are STRIDE apart. Contiguous ones need fewer registers."""
    if STRIDE == H * SIZE:
        return x + (token * H + h) * SIZE
    return x + token * STRIDE + h * SIZE


@triton.jit
@no_type_check
def load_state(at, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a state `[K, V]`."""
    return tl.load(at + rows[:, None] * V + cols[None, :], mask=(rows < K)[:, None] & (cols < V)[None, :], other=0.0)


@triton.jit
@no_type_check
def entering_state(at, rows, cols, K: tl.constexpr, V: tl.constexpr, FLIPPED: tl.constexpr):
    """Load a block of a state, or of a state `[V, K]` whose transpose it is."""
    if FLIPPED:
        return tl.trans(load_state(at, cols, rows, V, K))
    return load_state(at, rows, cols, K, V)


@triton.jit
@no_type_check
def store_state(at, value, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Store a block of a state."""
    mask = (rows < K)[:, None] & (cols < V)[None, :]
    tl.store(at + rows[:, None] * V + cols[None, :], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def beside_state(x):
    """Convert an operand of a product with a state: float16 becomes float32, for its range."""
    if x.dtype == tl.float16:
        return x.to(tl.float32)
    else:  # the compiler takes a return behind the branch too, and refuses two types
        return x


@triton.jit
@no_type_check
def weighted(x, weight):
    """Compute `weight ⊙ x` of rows, in the dtype of x."""
    return (x.to(tl.float32) * weight[:, None]).to(x.dtype)


@triton.jit
@no_type_check
def factors(gain, token, cc, inside, h, H: tl.constexpr):
    """Load the factors of values, float32 `[C]`."""
    return tl.load(gain + (token + cc) * H + h, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def walk_kernel(
    q, k, v, beside, sums, longer, g_slow, g_fast, gain, skip, entering, out, leaving, carried, states, reads, table,
    scale, T, LENGTH, PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr,
    QH: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, OT: tl.constexpr,
    SV: tl.constexpr, SB: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, EVERY: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, BACK: tl.constexpr, FLIPPED: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes `out`, the state after the segment and the factors of a state that
    passes it (`leaving`, `carried`). BACK walks from the end with the gradient of the state: k are queries and v the
    gradients of outputs. FLIPPED writes the gradients of queries: q are the gradients of outputs, k values and v keys,
    and states in memory are transposed. It also writes for each token and state what it reads times the gradient
    (`reads`), for which it needs the queries (`beside`). `states` are those entering each EVERY chunks, or of BACK the
    gradients of those after them. The first walk of a call is given log-decays, and stores their sums in chunks, and
    in EVERY chunks (`longer`).
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    h = tl.program_id(0) // PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * STATE
    if g_fast is not None:
        store_sums_of_segment(sums, g_slow, g_fast, first, tokens, h, TOKENS, H, C, MODE)
        if longer is not None:
            store_sums_of_segment(longer, g_slow, g_fast, first, tokens, h, TOKENS, H, EVERY * C, MODE)
    fast = tl.zeros([BK, BV], tl.float32)
    slow = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        fast = entering_state(entering + place, kk, vv, K, V, FLIPPED)
        if MODE == 2:
            slow = entering_state(entering + place + K * V, kk, vv, K, V, FLIPPED)
    kept_all = 1.0
    joined_all = 0.0
    stays_all = 1.0
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        keys_at = k + token * KT + (h // SK) * KH
        if PRECISION == "ieee":
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        if states is not None:
            past = index % EVERY
            stored = (past == EVERY - 1) | (step == 0) if BACK else past == 0
            here = states + (((token - past * C) // (EVERY * C) + segment) * H + h) * STATE
            rows = tl.where(stored, kk, K)  # those outside of the state are not stored
            if FLIPPED:
                store_state(here, tl.trans(fast), vv, rows, V, K)
                if MODE == 2:
                    store_state(here + K * V, tl.trans(slow), vv, rows, V, K)
            else:
                store_state(here, fast, rows, vv, K, V)
                if MODE == 2:
                    store_state(here + K * V, slow, rows, vv, K, V)
        if out is not None:
            qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
            if BACK:
                weight, weight_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            else:
                weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
                weight *= scale
                weight_slow *= scale
            wide = beside_state(qs)
            o = dot(wide, fast.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * weight[:, None]
            if reads is not None:
                queries = load(beside + token * BT + (h // SB) * BH, cc, vv, inside, BT, V, BV).to(tl.float32)
                here = reads + ((tl.program_id(0) % PARTS) * MODE * H + h) * TOKENS + token + cc
                tl.store(here, tl.sum(o * queries, 1), mask=inside)
            if MODE == 2:
                read = dot(wide, slow.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * weight_slow[:, None]
                if reads is not None:
                    tl.store(here + H * TOKENS, tl.sum(read * queries, 1), mask=inside)
                o += read
        vs = load(v + token * VT + (h // SV) * VH, cc, vv, inside, VT, V, BV)
        # Keys hold registers until they are multiplied, so they are loaded here, and by small chunks again below.
        if PRECISION != "ieee":
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
        if out is not None:
            scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, BACK) * scale
            if gain is not None and not BACK:
                scores *= factors(gain, token, cc, inside, h, H)[None, :]
            o = dot(scores.to(vs.dtype), vs, o, PRECISION)
            if gain is not None and BACK:
                o *= factors(gain, token, cc, inside, h, H)[:, None]
            if skip is not None:  # of a rounded sum, which holds fewer registers
                o = o.to(vs.dtype).to(tl.float32) + tl.load(skip + h).to(tl.float32) * vs.to(tl.float32)
            store(head_of(out, token, h, H, V, OT), o, cc, vv, inside, OT, V, BV)
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        if BACK:
            left, left_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            left *= scale
            left_slow *= scale
        else:
            left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            if gain is not None:
                factor = factors(gain, token, cc, inside, h, H)
                left *= factor
                left_slow *= factor
        if C < 64 and PRECISION != "ieee":
            ks = load(keys_at, cc, kk, inside, KT, K, BK)
        written = tl.trans(ks)
        if MODE == 2:
            if BACK:
                fast = dot(written, weighted(vs, left), kept * fast + joined * slow, PRECISION)
                slow = dot(written, weighted(vs, left_slow), stays * slow, PRECISION)
            else:
                slow = dot(written, weighted(vs, left_slow), stays * slow + joined * fast, PRECISION)
                fast = dot(written, weighted(vs, left), kept * fast, PRECISION)
            joined_all = stays * joined_all + joined * kept_all
            stays_all *= stays
            kept_all *= kept
        elif MODE == 1:
            fast = dot(written, weighted(vs, left), kept * fast, PRECISION)
            kept_all *= kept
        else:
            fast = dot(written, vs if gain is None and not BACK else weighted(vs, left), fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, fast, kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, slow, kk, vv, K, V)
    if carried is not None:  # noqa: SIM102, as None is known when compiled
        if tl.program_id(0) % PARTS == 0:
            at = carried + (segment.to(tl.int64) * H + h) * 3
            tl.store(at, kept_all)
            tl.store(at + 1, joined_all)
            tl.store(at + 2, stays_all)
