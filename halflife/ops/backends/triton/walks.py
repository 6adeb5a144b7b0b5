"""Linear attention with no decay or a scalar one, and GateRank on it, as Triton kernels.

`walk_kernel` goes over the chunks of a segment with the state in registers, and writes outputs, the state at the end,
or the states that enter the chunks. `segments.scan_kernel` joins segments. The backward pass has one walk that keeps
the states entering the chunks, one from the end that is the adjoint in V, and `grads_kernel`, which holds the gradient
G of the state in registers and computes the other gradients of a chunk:

    dS = (dO Vᵀ) ⊙ D,   dQ = dS K + w ⊙ (dO Sᵀ),   dK = dSᵀ Q + l ⊙ (V Gᵀ),   dV = (Q Kᵀ ⊙ D)ᵀ dO + l ⊙ (K G)

with the weights w of queries and l of keys of `gates.py`. Where values have factors (`gain`), these multiply the
columns of D, the weights l, and dV at the end.

Products of 16-bit inputs are computed in their dtype, with float32 sums. In products with a state bfloat16 stays
bfloat16, and float16, whose range is too small for states, becomes TF32. float32 is exact.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot, log_grads_of_sums, pair_sums, put_log_grad
from halflife.ops.backends.triton.segments import segment_tokens
from halflife.ops.backends.triton.sums import stored_carries, stored_decays, stored_leaves, stored_reads


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
def load_state(at, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a state `[K, V]`."""
    return tl.load(at + rows[:, None] * V + cols[None, :], mask=(rows < K)[:, None] & (cols < V)[None, :], other=0.0)


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
    q, k, v, sums, gain, entering, out, leaving, carried, states, table, scale, T, LENGTH, PER, TOKENS,
    H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes `out`, the state after the segment and the factors of a state that
    passes it (`leaving`, `carried`), and the state entering each chunk (`states`). BACK walks from the end with the
    gradient of the state: k are queries and v the gradients of outputs.
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
    fast = tl.zeros([BK, BV], tl.float32)
    slow = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        fast = load_state(entering + place, kk, vv, K, V)
        if MODE == 2:
            slow = load_state(entering + place + K * V, kk, vv, K, V)
    kept_all = 1.0
    joined_all = 0.0
    stays_all = 1.0
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        if states is not None:
            here = states + ((token // C + segment) * H + h) * STATE
            store_state(here, fast, kk, vv, K, V)
            if MODE == 2:
                store_state(here + K * V, slow, kk, vv, K, V)
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
            if MODE == 2:
                read = dot(wide, slow.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION)
                o += read * weight_slow[:, None]
            scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, BACK) * scale
            if gain is not None and not BACK:
                scores *= factors(gain, token, cc, inside, h, H)[None, :]
            o = dot(scores.to(vs.dtype), vs, o, PRECISION)
            if gain is not None and BACK:
                o *= factors(gain, token, cc, inside, h, H)[:, None]
            store(out + (token * H + h) * V, o, cc, vv, inside, H * V, V, BV)
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


@triton.jit
@no_type_check
def grads_kernel(
    q, k, v, do, sums, g_slow, g_fast, gain, states, entering, leaving, dq, dk, dg_slow, dg_fast, dgain, table, scale,
    T, LENGTH, PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The walk from the end of a segment for one head and BK rows of its state: gradients of q, k, log-decays and gain.

    `entering` is the gradient of the state after the segment (None is zeros), and `leaving` becomes that of the state
    before it. The gradients of log-decays and of the gain are sums over the blocks of rows, and each program stores its
    own.
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    h = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = part * BK + tl.arange(0, BK)
    vv = tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * STATE
    fast = tl.zeros([BK, BV], tl.float32)
    slow = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        fast = load_state(entering + place, kk, vv, K, V)
        if MODE == 2:
            slow = load_state(entering + place + K * V, kk, vv, K, V)
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step
        inside = cc < tokens - index * C
        token = first + index * C
        rows = (token + cc) * H + h
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        here = states + ((token // C + segment) * H + h) * STATE
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        weight *= scale
        weight_slow *= scale
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        wide_v = beside_state(vs)
        wide_do = beside_state(dos)

        dscores = dot(dos, tl.trans(vs), tl.zeros([C, C], tl.float32), PRECISION)
        dscores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * scale
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        if MODE != 0 or gain is not None:
            scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
        if gain is not None:
            of_gain = tl.sum(scores * dscores, 0)
            dscores *= factors(gain, token, cc, inside, h, H)[None, :]
        if MODE != 0:
            seg = tl.zeros([C], tl.float32)
            if MODE == 2:
                seg = tl.load(at + 4 * H * TOKENS + cc, mask=inside, other=0.0).to(tl.float32)
            within, across, gone = pair_sums(scores * dscores, seg, C, MODE)
        dscores = dscores.to(qs.dtype)

        state = load_state(here, kk, vv, K, V)
        dqs = dot(wide_do, tl.trans(state), tl.zeros([C, BK], tl.float32), PRECISION) * weight[:, None]
        if MODE != 0:
            read_fast = tl.sum(dqs * qs.to(tl.float32), 1)
        if MODE == 2:
            state_slow = load_state(here + K * V, kk, vv, K, V)
            through = dot(wide_do, tl.trans(state_slow), tl.zeros([C, BK], tl.float32), PRECISION)
            through *= weight_slow[:, None]
            read_slowly = tl.sum(through * qs.to(tl.float32), 1)
            dqs += through
        dqs = dot(dscores, ks, dqs, PRECISION)
        store(dq + (token * H + h) * K, dqs, cc, kk, inside, H * K, K, BK)

        # dKᵀ, so that neither dS nor G, which are results of products, is an operand's transpose (see gates.py).
        dks = dot(fast.to(wide_v.dtype), tl.trans(wide_v), tl.zeros([BK, C], tl.float32), PRECISION) * left[None, :]
        if MODE != 0 or gain is not None:
            keys = tl.trans(ks).to(tl.float32)
            left_fast = tl.sum(dks * keys, 0)
        if gain is not None:
            factor = factors(gain, token, cc, inside, h, H)
            of_gain += left_fast
            left_fast *= factor
            dks *= factor[None, :]
        if MODE == 2:
            through = dot(slow.to(wide_v.dtype), tl.trans(wide_v), tl.zeros([BK, C], tl.float32), PRECISION)
            through *= left_slow[None, :]
            left_slowly = tl.sum(through * keys, 0)
            if gain is not None:
                of_gain += left_slowly
                left_slowly *= factor
                through *= factor[None, :]
            dks += through
        dks = dot(tl.trans(qs), dscores, dks, PRECISION)
        if gain is not None:
            tl.store(dgain + part * H * TOKENS + rows, of_gain, mask=inside)
        there = inside[None, :] & (kk < K)[:, None]
        column = dk + (token * H + h) * K + cc[None, :] * (H * K) + kk[:, None]
        tl.store(column, dks.to(dk.dtype.element_ty), mask=there)

        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        if MODE != 0:
            again = load_state(here, kk, vv, K, V)  # once more, so that it holds no registers until here
            passed = kept * tl.sum(again.to(tl.float32) * fast)
            met = 0.0
            stayed = 0.0
            if MODE == 2:
                met = joined * tl.sum(again.to(tl.float32) * slow)
                again = load_state(here + K * V, kk, vv, K, V)
                stayed = stays * tl.sum(again.to(tl.float32) * slow)
                reset = (tl.load(g_slow + rows, mask=inside, other=0.0) != 0).to(tl.int32)
                grad_slow, grad_fast = log_grads_of_sums(
                    within, across, gone, read_fast, read_slowly, left_fast, left_slowly, passed + met, met, stayed,
                    reset, seg, C,
                )  # fmt: skip
                put_log_grad(dg_slow + part * H * TOKENS, grad_slow, g_slow, rows, inside)
            else:
                later = cc[:, None] >= cc[None, :]  # [i, t]; sums in which nothing cancels
                grad_fast = tl.sum(tl.where(later, (within + read_fast)[:, None], left_fast[:, None]), 0) + passed
            put_log_grad(dg_fast + part * H * TOKENS, grad_fast, g_fast, rows, inside)
        queries = tl.trans(qs)
        if MODE == 2:
            fast = dot(queries, weighted(dos, weight), kept * fast + joined * slow, PRECISION)
            slow = dot(queries, weighted(dos, weight_slow), stays * slow, PRECISION)
        else:
            fast = dot(queries, weighted(dos, weight), kept * fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, fast, kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, slow, kk, vv, K, V)
